"""A model that fits no rank alone survives drawn losses and joins, by the very plans that its simulation predicts."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.tiny_project import tiny_config, write_images
from dilatant.config.config import parse_config
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.plan import Plan
from dilatant.plan.replay.replay import RunningPipelines
from dilatant.plan.templates.membership import MembershipPlanner, pipelines_of, ranks_of
from dilatant.plan.templates.templates import LayerMemory
from dilatant.planning.failures import from_planner
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.problem.describe_model import describe_model
from dilatant.report.run_folder import last_step
from dilatant.resilience.protocol.values import Task
from dilatant.resilience.status import read_events
from dilatant.training.checkpoints.checkpoint import list_checkpoints, load, stored_shapes
from dilatant.training.prepare import prepare
from dilatant.training.run import train
from harness.faults.ranks import Ranks

NODES, MOST, CHANGES = 5, 6, 20
SMALLEST = 2
"""Nodes of the smallest pipeline; with fewer than two such pipelines the next loss could take the last copy."""
EVERY = 5
"""Steps between checkpoints."""
TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""
DRIFT = 1e-3
"""Of a weight, a fifth of the learning rate: AdamW takes whole steps for gradients that are nearly nothing."""


@dataclass(frozen=True)
class Budget:
    """What a rank may hold: so many weights that the best two stages just fit."""

    spec: ModelSpec

    @property
    def weights(self) -> list[int]:
        return [layer.parameters for unit in self.spec.units for layer in unit.layers]

    @property
    def of_rank(self) -> int:
        cuts = range(1, len(self.weights))
        return min(max(sum(self.weights[:cut]), sum(self.weights[cut:])) for cut in cuts)

    def limits(self, planned: TrainingPlan) -> TrainingPlan:
        """Return the plan with costs for which a rank has this memory, and a move costs as much as a minute."""
        chain = planned.chain
        assert chain is not None
        memory = LayerMemory({1: [*map(float, self.weights)]}, {1: [0.0] * len(self.weights)}, float(self.of_rank))
        moving = sum(chain.layer_bytes) / 60.0
        return replace(
            planned, chain=replace(chain, keeps_layout=False, memory=memory, bytes_per_second=moving, devices=1)
        )

    def require_fit(self, plan: Plan) -> None:
        """Check the weights of every rank, counted layer by layer."""
        layers = {unit.name: [layer.parameters for layer in unit.layers] for unit in self.spec.units}
        for rank in plan.ranks:
            held = [layers[p.unit][k] for p in plan.stages_of_rank[rank] for k in range(p.stage.first, p.stage.end)]
            assert sum(held) <= self.of_rank, (rank, held)


def project(folder: Path) -> dict[str, Any]:
    """Return the config of a run in one process, with exact sums over samples."""
    train_, eval_ = write_images(folder, 24), write_images(folder, 10, "eval.jsonl")
    own = {"save_steps": EVERY, "keep_checkpoints": 10**6, "schedule": {"kind": "constant"}, "deterministic": True}
    tree = tiny_config(steps=10**9, global_batch_size=8, **own)
    tree["data"] |= {"train": [{"path": str(train_)}], "eval": [{"path": str(eval_)}]}
    return {**tree, "evaluation": {"steps": 7}}


def stays(members: Sequence[str], plan: Plan) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Return each pipeline as its nodes, and the layers of each."""
    return [
        (tuple(members[rank] for rank in ranks_of(one)), tuple(r.shape for own in one.values() for r in own))
        for one in pipelines_of(plan)
    ]


def require_kept(before: tuple[TrainingPlan, Sequence[str]], after: tuple[TrainingPlan, Sequence[str]]) -> int:
    """Check that pipelines that lost nobody are as they were, where the others' nodes are enough for as many copies
    as there can be; return their number."""
    old, new = (stays(members, planned.plan) for planned, members in (before, after))
    intact = [one for one in old if {*one[0]} <= {*after[1]}]
    loose = len(after[1]) - sum(len(nodes) for nodes, _ in intact)
    fills = loose == 0 or loose >= SMALLEST
    if not fills or len(intact) + (loose >= SMALLEST) < min(2, len(after[1]) // SMALLEST):
        return 0
    assert [one for one in intact if one in new] == intact
    return len(intact)


def losses(run: Path) -> list[tuple[int, float]]:
    """Return step and loss of each step; other lines of metrics.jsonl are evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def history(run: Path, until: int) -> list[dict[str, float]]:
    return [each for each in json.loads((run / "eval.json").read_text())["history"] if each["step"] <= until]


def saved(run: Path, until: int) -> dict[int, Path]:
    return {each.step: each.path for each in list_checkpoints(run / "checkpoints") if each.step <= until}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, whatever layout wrote it."""
    found = {name: torch.empty(shape) for name, shape in stored_shapes(checkpoint, "model").items()}
    load(checkpoint, {"model": found})
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_drawn_losses_and_joins_of_a_model_that_fits_no_rank(tmp_path: Path) -> None:
    """Every plan fits and is the one that `simulate --failures` predicts, no step is lost, weights, losses,
    evaluations and checkpoints are those of the undisturbed run, and intact pipelines keep their nodes."""
    config = project(tmp_path)
    alone = {**config, "output_dir": str(tmp_path / "alone")}
    budget = Budget(describe_model(prepare(parse_config(alone, base=tmp_path)).model).spec)
    assert budget.of_rank < sum(budget.weights) - max(budget.weights)  # of tied weights, one counts
    draw = random.Random(0)
    ranks = Ranks(tmp_path, config, NODES, adapted=budget.limits, budget=budget.of_rank)
    try:
        members, committed = [f"node{number}" for number in range(NODES)], ranks.await_commit(0)
        for _ in range(CHANGES):
            time.sleep(draw.uniform(0.0, 0.5))
            joins = len(members) < 2 * SMALLEST or (len(members) < MOST and draw.random() < 0.5)
            if joins:
                members.append(ranks.add())
            else:
                committed = ranks.lose(members.pop(draw.randrange(len(members))))
            committed = ranks.await_commit(committed)
        begun = {event.step for event in read_events(tmp_path / "run") if event.task == Task.RUN}
        last = last_step(tmp_path / "run" / "metrics.jsonl")
        ranks.await_steps(last + 20)
        plans, reasons, initial = ranks.plans(), ranks.reasons(), TrainingPlan.from_json(ranks.plan)
    finally:
        ranks.close()
    assert not [reason for reason in reasons if "Error" in reason or "memory" in reason]
    assert len(plans) > CHANGES
    assert {*plans[max(plans)][1]} == {*members}

    # The plans: those of the simulation, within memory, unlike from the start; intact pipelines stay.
    assert initial.chain is not None
    reaction = from_planner(MembershipPlanner(initial.chain))
    predicted: RunningPipelines | None = None
    for adopted, names in plans.values():
        numbers = [int(name.removeprefix("node")) for name in names]
        predicted = reaction(predicted, frozenset(numbers))
        assert (predicted.plan, list(predicted.members)) == (adopted.plan, numbers)
        assert predicted.step_seconds == adopted.predicted_seconds
        assert predicted.kept  # no layer was lost
        budget.require_fit(adopted.plan)
    first, *_ = plans.values()
    assert sorted(len(ranks_of(one)) for one in pipelines_of(first[0].plan)) == [2, 3]
    assert sum(itertools.starmap(require_kept, itertools.pairwise(plans.values()))) > 0

    # The steps: those of one process.
    found = losses(tmp_path / "run")
    assert [step for step, _ in found] == [*range(1, len(found) + 1)]
    train(parse_config({**alone, "train": {**config["train"], "steps": len(found)}}, base=tmp_path))
    expected = losses(tmp_path / "alone")
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=TOLERANCE)
    judged, undisturbed = history(tmp_path / "run", last), history(tmp_path / "alone", last)
    assert [each["step"] for each in judged] == [*range(7, last + 1, 7)]
    assert [each["loss"] for each in judged] == pytest.approx([each["loss"] for each in undisturbed], rel=TOLERANCE)
    one, other = saved(tmp_path / "run", last), saved(tmp_path / "alone", last)
    for step in other:  # one that a loss cut off is written at the first step of the next generation
        assert step in one or {each for each in one if step < each < step + EVERY} & begun
    for step in one.keys() & other.keys():
        torch.testing.assert_close(weights(one[step]), weights(other[step]), rtol=0.0, atol=DRIFT)
