"""What a step of the trainer does in which order, seen with a runtime and an optimizer that only keep book."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dilatant.config import UserError
from dilatant.data.order.sampler import SamplerState
from dilatant.plan.boxes import Box
from dilatant.training import run_state
from dilatant.training import trainer as room
from dilatant.training.feeding.step_data import count_steps, seed_step
from dilatant.training.run_state import BestEvaluation, RunState
from dilatant.training.trainer import Trainer


class _Book:
    """Of the calls, and the trainer that makes them."""

    def __init__(self, limit: float | None = 0.5, on_nonfinite: str = "skip") -> None:
        self.calls: list[Any] = []
        train = SimpleNamespace(max_grad_norm=limit, on_nonfinite=on_nonfinite, learns_from="single answers")
        runtime = SimpleNamespace(
            clip_grad_norm_=lambda *given: self.calls.append(("clip", *given)),
            execute=self.execute,
            unfinished=SimpleNamespace(forget=lambda: None),
            model=SimpleNamespace(language=SimpleNamespace(pair_loss=None)),
            owned=SimpleNamespace(gather=lambda: self.calls.append("gather")),
        )
        config = SimpleNamespace(train=train, seed=3, data=SimpleNamespace(template_date="2026-11-26"))
        self.state = RunState.__new__(RunState)
        self.state.__dict__.update(
            step=4,
            total_steps=9,
            position="before",
            rate_factor=1.0,
            runtime=runtime,
            optimizer=SimpleNamespace(
                step=lambda: self.calls.append("step"), zero_grad=lambda **_: self.calls.append("zero")
            ),
            averages=None,
            _config=config,
        )
        self.trainer = Trainer.__new__(Trainer)
        self.trainer.__dict__.update(
            rank=0,
            runtime=runtime,
            state=self.state,
            _config=config,
            _skipped_updates=0,
            _half_updated=False,
            is_torn=False,
            _schedule="its schedule",
            _gate=None,
            _voted=None,
            _began=0.0,
            _rate=0.0,
            _longest_step=0.0,
            _metrics=lambda *_: "metrics",
        )

    def execute(self, samples: Any, step: Any, **options: Any) -> Any:
        self.calls.append(("execute", samples, step, options["step_number"]))
        return SimpleNamespace(loss=1.0, grad_norm=0.1, nonfinite_samples=(), found=(), should_stop=False)

    def apply(self, loss: float, norm: float) -> None:
        result: Any = SimpleNamespace(loss=loss, grad_norm=norm, nonfinite_samples=())
        self.trainer._apply(result, SimpleNamespace(position="after", samples=()))  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0.5, 2.0, None])
def test_gradients_are_clipped_before_update_and_cleared_after(limit: float | None) -> None:
    book = _Book(limit)
    book.apply(1.0, 7.0)
    assert book.calls == [*([] if limit is None else [("clip", limit, 7.0)]), "step", "zero", "gather"]
    trainer = book.trainer
    assert (trainer.step, trainer.state.position, trainer._skipped_updates) == (5, "after", 0)


def test_a_state_in_which_an_update_was_interrupted_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an out-of-memory error where the optimizer allocates its moments: some weights are updated by then."""
    book = _Book()

    def fails() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(book.state.optimizer, "step", fails)
    assert not book.trainer.is_torn
    with pytest.raises(torch.OutOfMemoryError):
        book.apply(1.0, 0.1)
    assert (book.trainer.is_torn, book.trainer.step) == (True, 4)
    monkeypatch.setattr(book.state.optimizer, "step", lambda: None)
    book.apply(1.0, 0.1)
    assert (book.trainer.is_torn, book.trainer.step) == (False, 5)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_nonfinite_update_is_skipped_and_the_step_counted(loss: float, norm: float) -> None:
    book = _Book()
    book.apply(loss, norm)
    trainer = book.trainer
    assert book.calls == ["zero"]
    assert (trainer.step, trainer.state.position, trainer._skipped_updates) == (5, "after", 1)
    book = _Book(on_nonfinite="stop")
    with pytest.raises(UserError, match=r"step 5: .*nothing was updated"):
        book.apply(loss, norm)
    assert (book.calls, book.trainer.step, book.trainer.state.position) == ([], 4, "before")


def test_rate_and_random_numbers_are_those_of_the_step_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    book = _Book()
    monkeypatch.setattr(room, "rate_factor", lambda *given: book.calls.append(("factor", *given)) or 0.5)
    monkeypatch.setattr(room, "set_rate_factor", lambda optimizer, rate: book.calls.append(("rate", rate)))
    monkeypatch.setattr(room, "seed_step", lambda *given: book.calls.append(("seed", *given)))

    class OneStep:
        left_out: ClassVar[dict[int, str]] = {}
        found, leave_out, waited_seconds = list, lambda self, found: None, 0.0

        def __next__(self) -> Any:
            return SimpleNamespace(batch=SimpleNamespace(samples="samples", position="after", slowest={}), step="step")

    assert book.trainer._train_step(OneStep(), lambda: False) == ("metrics", False)
    rate = [("factor", "its schedule", 4, 9), ("rate", 0.5)]
    assert book.calls[:4] == [*rate, ("seed", 3, 4), ("execute", "samples", "step", 4)]


def test_resume_restores_moments_position_and_bad_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that no step has used has no moments there, and must not be asked for any."""
    done: dict[str, Any] = {}
    place = SamplerState((1,), (2,), 3)
    values = {"step": 7, "position": place.to_json(), "left_out": {"12": "is cut off"}, "costs": "corrected"}
    values["data"] = "those of then"
    boxes = {name: Box.of(name, (2,)) for name in ("used", "unused")}
    state: Any = _Book().state
    state.optimizer.masters = "masters"
    state.optimizer.loaded = lambda: done.update(rounded=True)
    state.__dict__.update(
        runtime=SimpleNamespace(
            model=SimpleNamespace(units={}),
            owned=SimpleNamespace(boxes=boxes, gather=lambda: done.update(gathered=True)),
            require_equal=lambda masters, moments: done.update(compared=(masters, moments)),
            costs=SimpleNamespace(from_json=lambda costs: done.update(costs=costs)),
        ),
        sampler=SimpleNamespace(resume=lambda place: place),
        shapes={},
        tensors=lambda: {"optimizer": {}},
        beside_masters=lambda: "moments",
        _samples="samples",
        _data=SimpleNamespace(require=lambda before: done.update(data=before), by_source="those of then"),
    )
    monkeypatch.setattr(run_state, "stored_shapes", lambda *_: dict.fromkeys(["used.exp_avg", "elsewhere.exp_avg"]))
    monkeypatch.setattr(run_state, "allocate_moments", lambda _, names: done.update(moments=names))
    monkeypatch.setattr(run_state, "load", lambda *_, **__: values)
    monkeypatch.setattr(run_state, "count_steps", lambda *given: done.update(steps=given[1:]))
    state.restore(Path("somewhere"))
    assert done == {
        "moments": {"used"},
        "rounded": True,
        "gathered": True,
        "compared": ("masters", "moments"),
        "costs": "corrected",
        "data": "those of then",
        "steps": ("samples", 7, place.samples),
    }
    assert (state.step, state.position) == (7, place)
    assert state.left_out == {12: "is cut off"}
    # What it would save now is where it goes on from: as JSON the same.
    state.runtime.costs.to_json = lambda: "corrected"
    assert json.loads(json.dumps(state.values())) == {
        **values,
        "best": BestEvaluation().to_json(),
        "rate_factor": 1.0,
        "stopped": False,
        "template_date": "2026-11-26",
        "learns_from": "single answers",
    }


@pytest.mark.parametrize(
    ("epochs", "batch", "done", "drawn", "steps"),
    [
        (None, 4, 0, 0, 2),
        (2, 4, 2, 8, 4),
        (2, 2, 2, 8, 6),  # 8 samples are left, in batches of 2
        (2, 16, 2, 8, 3),
        (3, 3, 0, 0, 8),
        (1, 2, 2, 8, 2),
        (1, 4, 3, 12, 3),
        (0.5, 8, 0, 0, 1),
    ],
)
def test_epochs_are_passes_over_the_data_at_any_batch_size(
    epochs: float | None, batch: int, done: int, drawn: int, steps: int
) -> None:
    config: Any = SimpleNamespace(train=SimpleNamespace(steps=None, epochs=epochs, global_batch_size=batch))
    samples: Any = SimpleNamespace(train=range(8))
    assert count_steps(config, samples, done, drawn) == steps


def test_every_step_of_every_seed_has_random_numbers_of_its_own() -> None:
    drawn = set()
    for seed in range(3):
        for step in range(3):
            seed_step(seed, step)
            drawn.add((random.random(), float(torch.rand(()))))
    assert len(drawn) == 9
    seed_step(2, 2)
    assert (random.random(), float(torch.rand(()))) in drawn
