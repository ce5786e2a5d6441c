"""A trainer that takes over the part of the one before continues as if nothing had been tried in between."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.tiny_project import tiny_config, write_images
from dilatant.comm.comm import Comm
from dilatant.comm.launch import local_worker
from dilatant.config import Config
from dilatant.config.config import parse_config
from dilatant.plan.boxes import Box
from dilatant.report.metrics import StepMetrics
from dilatant.resilience.partial_step.exchange import inherit_state
from dilatant.training import trainer
from dilatant.training.callbacks import CallbackList, RunControl
from dilatant.training.checkpoints.checkpoint import list_checkpoints
from dilatant.training.commit import FIXED_MEMBERSHIP, RunMembership
from dilatant.training.evaluation.evaluation import Evaluation
from dilatant.training.prepare import prepare
from dilatant.training.run_state import RunState
from dilatant.training.trainer import Trainer
from harness.refusing_gate import Gate, Refused
from oracles.live_storages import LiveStorages


def test_gradients_of_an_uncommitted_step_are_not_accumulated(tmp_path: Path) -> None:
    """All of them are there, and summed, when somebody else is lost before the vote; weights are shared."""
    write_images(tmp_path, 12)
    config = parse_config(tiny_config(steps=4, save_steps=None, max_grad_norm=None, logging_steps=1), base=tmp_path)
    prepared = prepare(config)
    losses: list[float] = []

    def trainer(membership: RunMembership, before: Trainer | None = None) -> Trainer:
        model = prepare(config).model if before is None else before.runtime.model
        checkpoints = tmp_path / "checkpoints"
        return Trainer(
            config, prepared.samples, model, prepared.planned, local_worker(), checkpoints, membership, before
        )

    def trained(one: Trainer) -> list[float]:
        losses.clear()
        try:
            one.run(lambda metrics: losses.append(metrics.loss))
        finally:
            one.close()
        return [*losses]

    undisturbed = trained(trainer(FIXED_MEMBERSHIP))
    first = trainer(RunMembership(generation=1, gate=Gate(refuses=2)))
    with pytest.raises(Refused):
        trained(first)
    begun = [*losses]
    again = trainer(RunMembership(generation=2, weights_follow=True, gate=Gate(refuses=9)), first)
    assert again.state.stays
    again.state.go_on_from(first.state.values(), stays=True)
    again.runtime.clear_gradients()
    assert [*begun, *trained(again)] == undisturbed


class Generations:
    """A run of one rank, whose every generation takes over from the one before."""

    def __init__(self, folder: Path, **changes: dict[str, Any]) -> None:
        tree = tiny_config(steps=6, save_steps=None, keep_checkpoints=9, logging_steps=1)
        data = write_images(folder, 12)
        tree["data"] |= {"train": [{"path": str(data)}], "val_size": 4}
        for section, values in changes.items():
            tree[section] = {**tree.get(section, {}), **values}
        self.config: Config = parse_config(tree, base=folder)
        self.folder = folder / "checkpoints"
        self.callbacks: CallbackList | None = None
        self.history: dict[int, float] = {}
        self.last: Trainer | None = None
        self.begun = 0

    def next(self, refuses: int = 99) -> Trainer:
        """Open the next generation, which does not commit step number `refuses`."""
        prepared, before = prepare(self.config), self.last
        if self.callbacks is not None:
            self.config = self.config.with_own_parts({"callbacks": self.callbacks})
        self.begun += 1
        one = Trainer(
            self.config,
            prepared.samples,
            prepared.model if before is None else before.runtime.model,
            prepared.planned,
            local_worker(),
            self.folder,
            RunMembership(self.begun, weights_follow=before is not None, gate=Gate(refuses)),
            before,
        )
        if before is not None:
            inherit_state(one, before, self.folder)
            one.runtime.clear_gradients()
        self.last = one
        return one

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.history[step] = evaluation.figures["loss"]

    @property
    def saved(self) -> list[int]:
        return sorted(each.step for each in list_checkpoints(self.folder))


def ended(one: Trainer, *observers: Any) -> bool:
    """Train to the end, or until something refuses; return True in the first case."""
    try:
        one.run(lambda metrics: None, lambda: False, *observers)
    except Refused:
        return False
    finally:
        one.close()
    return True


KEEPS_BEST = {"steps": 2, "keep_best": "loss", "patience": 2, "min_delta": 100.0}
"""Nothing is ever better than the first evaluation, so that the second one after it ends the run."""


def test_evaluations_that_a_loss_interrupts_count_as_if_undisturbed(tmp_path: Path) -> None:
    alone = Generations(tmp_path / "alone", evaluation=KEEPS_BEST, train={"steps": 9})
    assert ended(alone.next(), alone.evaluated)
    assert alone.last is not None
    assert list(alone.history) == [2, 4, 6]
    run = Generations(tmp_path / "run", evaluation=KEEPS_BEST, train={"steps": 9})

    tried = set[int]()

    def interrupted(step: int, evaluation: Evaluation) -> None:
        is_first = step not in tried
        tried.add(step)
        if not is_first or step == 4:  # interrupted before its record, and once behind it
            run.evaluated(step, evaluation)
        if is_first:
            raise Refused

    while not ended(run.next(), interrupted):
        assert run.begun < 9
    assert run.begun == 4
    assert run.history == alone.history
    assert run.last is not None
    assert run.last.state.best == alone.last.state.best
    assert 2 in run.saved


@pytest.mark.parametrize("event", ["on_step", "on_evaluation"])
def test_a_stop_that_a_loss_cut_off_takes_effect_at_the_same_step(tmp_path: Path, event: str) -> None:
    run = Generations(tmp_path, evaluation={"steps": 2})
    callbacks = CallbackList([SimpleNamespace(**{event: lambda control, value: control.stop()})])
    run.callbacks, control, losses = callbacks, callbacks.control, 0

    def evaluated(step: int, evaluation: Evaluation) -> None:
        nonlocal losses
        losses += 1
        if event == "on_evaluation" and losses == 1:
            raise Refused
        callbacks.call("on_evaluation", evaluation)

    def decide(metrics: StepMetrics | None) -> RunControl:
        nonlocal losses
        if metrics is not None:
            control.step = metrics.step
            if metrics.step == 2:
                callbacks.call("on_step", metrics)
        if control.is_stopping and not losses:
            losses += 1
            raise Refused
        return control

    assert not ended(run.next(), evaluated, decide)
    assert ended(run.next(), evaluated, decide)
    assert run.last is not None
    assert run.last.step == 2


def test_a_step_is_reported_though_a_loss_cut_off_its_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decided and logged is lost on the way to other ranks, once, after step 3."""
    run, gather, cut = Generations(tmp_path), trainer.all_gather_object, 0

    def on_step(control: RunControl, metrics: StepMetrics) -> None:
        control.log({"seen": metrics.step})
        control.learning_rate_factor = 0.5 if metrics.step == 3 else control.learning_rate_factor

    callbacks = CallbackList([SimpleNamespace(on_step=on_step)])
    run.callbacks, control = callbacks, callbacks.control

    def decide(metrics: StepMetrics | None) -> RunControl:
        if metrics is not None:
            control.step = metrics.step
            callbacks.call("on_step", metrics)
        return control

    def cut_once(comm: Comm, own: Any) -> list[Any]:
        nonlocal cut
        if control.step == 3 and isinstance(own, tuple) and not cut:
            cut += 1
            raise Refused
        return gather(comm, own)

    monkeypatch.setattr(trainer, "all_gather_object", cut_once)
    first = run.next()
    assert not ended(first, lambda step, evaluation: None, decide)
    assert [(metrics.step, metrics.figures) for metrics in first.done.recent] == [(2, {"seen": 2}), (3, {})]
    assert first.done.last is first.done.recent[-1]
    assert control.figures == {"seen": 3}, "for a line of its own"
    again = run.next()
    again.done.recent, again.done.last = first.done.recent, first.done.last
    assert ended(again, lambda step, evaluation: None, decide)
    assert again.state.rate_factor == 0.5
    assert [(metrics.step, metrics.figures) for metrics in again.done.recent] == [(5, {"seen": 5}), (6, {"seen": 6})]


def test_state_on_the_host_frees_the_device_and_is_what_the_next_generation_gets(tmp_path: Path) -> None:
    """The copies here are elsewhere in the same memory: none of the old storages but gradients' lives on."""
    run = Generations(tmp_path, train={"optimizer": {"learning_rate": 0.01, "ema": 0.9}})
    with LiveStorages() as live:
        first = run.next(refuses=2)
        assert not ended(first)
        first.runtime.clear_gradients()
    state = first.state
    values = {key: tensor.clone() for key, tensor in state.tensors()["model"].items()}
    beside = {key: {kind: own.clone() for kind, own in kinds.items()} for key, kinds in state.beside_masters().items()}
    assert {*next(iter(beside.values()))} == {"step", "exp_avg", "exp_avg_sq", "ema"}
    held = sum(each.nbytes for each in values.values()) + sum(
        each.nbytes for kinds in beside.values() for each in kinds.values()
    )
    assert live.now >= held
    state.to_host(lambda tensor: tensor.clone())
    gc.collect()
    assert live.now < 0.1 * held
    assert all(bool((tensor == values[key]).all()) for key, tensor in state.tensors()["model"].items())
    for key, kinds in state.beside_masters().items():
        assert all(bool((own == beside[key][kind]).all()) for kind, own in kinds.items())


def test_sharded_weights_without_values_do_not_move_to_the_host() -> None:
    module, moved = torch.nn.Linear(3, 2), list[torch.Size]()
    module.weight.untyped_storage().resize_(0)
    owned = SimpleNamespace(parameters={}, forget_views=lambda: None)
    fixed = SimpleNamespace(parameters={"weight@0:1,0:3": torch.nn.Parameter(torch.zeros(1, 3), False)})
    state: Any = SimpleNamespace(
        runtime=SimpleNamespace(owned=owned, fixed=fixed, modules={0: module}),
        optimizer=SimpleNamespace(masters={}, state={}),
        averages=None,
    )

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.shape)
        return tensor.clone()

    RunState.to_host(state, move)
    assert moved == [(1, 3), (2,)]  # the part of the frozen weight, and the bias


def test_parts_of_frozen_weights_are_state_in_place_of_wholes() -> None:
    """A rank that joins fills them in: the whole weight has no values between actions."""
    module = torch.nn.Linear(3, 2).requires_grad_(False)
    part = torch.nn.Parameter(torch.zeros(1, 3), False)
    fixed = SimpleNamespace(parameters={"weight@0:1,0:3": part}, weights={"weight": module.weight})
    held = {"weight": module.weight, "bias": module.bias}
    boxes = {name: Box.of(name, tensor.shape) for name, tensor in held.items()}
    runtime = SimpleNamespace(owned=SimpleNamespace(weights={}), fixed=fixed, boxes=boxes, tensors=lambda: held)
    state: Any = SimpleNamespace(runtime=runtime, _masters=dict, beside_masters=dict)
    state._fixed = lambda: RunState._fixed(state)
    assert RunState.tensors(state)["model"] == {"bias": module.bias, "weight@0:1,0:3": part}


def test_losses_faster_than_saves_do_not_starve_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save of a generation is published before its loss: the next one begins with what is owed."""
    run = Generations(tmp_path, train={"save_steps": 2})
    found = []
    for refuses in (3, 4, 5):
        one = run.next(refuses)
        if run.begun == 1:
            monkeypatch.setattr(one.saving, "publish_if_written", lambda: None)
        assert not ended(one)
        found.append(run.saved)
    assert found == [[], [3], [3, 4]]
    assert ended(run.next())
    assert run.saved == [3, 4, 6]


def test_a_checkpoint_that_was_due_at_the_lost_step_is_written_for_it(tmp_path: Path) -> None:
    run = Generations(tmp_path, train={"save_steps": 2})
    first = run.next(refuses=2)
    assert not ended(first)
    assert first.step == 2
    assert run.saved == []
    assert not ended(run.next(refuses=2))
    assert run.saved == [2]
