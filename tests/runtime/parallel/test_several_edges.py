"""Stages with several inbound and outbound edges, other rows for each consumer, and weighted losses of their own.

Unit a feeds b and c, b feeds c; b and c have losses. What they compute is made up here, so the executor cannot know it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.data.sample import EncodedSample
from dilatant.models.core.stage import Boundary, StageOutput, StepData
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.build import LocalStage
from dilatant.runtime.executor import Executor
from dilatant.runtime.routes import derive_routes, stages_before
from dilatant.runtime.state.shared_weights import StateLayout, bucket_weights
from dilatant.runtime.state.weight_gradients import WeightGradients
from dilatant.runtime.step.agreement import Agreement
from dilatant.runtime.step.recorder import Recorder
from dilatant.runtime.step.row_owners import RowOwners
from dilatant.runtime.transport import Transport
from dilatant.schedule.families.families import eager
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.simulator.graph import build
from harness.worker_pool import Worker, WorkerPool

ROWS = {"a": 3, "b": 2, "c": 1}
WIDTH = 4
PLAN = Plan(
    (
        UnitPlan("a", (Replica((Stage(0, 1, (0,)),)), Replica((Stage(0, 1, (1,)),))), ("b", "c")),
        UnitPlan("b", (Replica((Stage(0, 1, (1,)),)),), ("c",)),
        UnitPlan("c", (Replica((Stage(0, 1, (2,)),)),)),
    )
)
ASSIGNMENT = Assignment({"a": (((0, 1), (2,)), ((3, 4),)), "b": (((1, 0, 4), (3, 2)),), "c": (((2, 1), (0, 3), (4,)),)})


def _boundary(unit: str, consumer: str) -> Boundary:
    """Unit a gives b the first of its rows, and c all of them."""
    return Boundary(WIDTH, torch.float64, lambda sample: _given(unit, consumer))


def _given(unit: str, consumer: str) -> int:
    return 1 if (unit, consumer) == ("a", "b") else ROWS[unit]


def _weight(unit: str) -> nn.Parameter:
    seed = torch.Generator().manual_seed(ord(unit))
    return nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=seed))


def _compute(unit: str, sample: int, weight: Tensor, inbound: dict[str, Tensor]) -> Tensor:
    """Rows of one sample: a mixture of everything it is given."""
    own = torch.full((ROWS[unit], WIDTH), float(sample + 1), dtype=torch.float64)
    for name in sorted(inbound):
        own = own + inbound[name].sum(dim=0) * (2.0 if name == "a" else 0.5)
    return torch.tanh(own @ weight)


class MadeUp:
    def __init__(self, unit: str, weight: nn.Parameter) -> None:
        self.unit, self.weight = unit, weight

    def run(self, data: StepData, samples: tuple[int, ...], inbound: dict[str, Tensor]) -> StageOutput:
        parts = []
        for position, sample in enumerate(samples):
            given = {}
            for name, rows in inbound.items():
                count = _given(name, self.unit)
                given[name] = rows[position * count : (position + 1) * count]
            parts.append(_compute(self.unit, sample, self.weight, given))
        if self.unit == "a":
            return StageOutput({"b": torch.cat([part[:1] for part in parts]), "c": torch.cat(parts)})
        rows = torch.cat(parts)
        losses = {self.unit: rows.square().sum() / data.counts[self.unit]}
        return StageOutput(rows if self.unit == "b" else None, losses)


F, B = ActionKind.F, ActionKind.B
WHOLE = Schedule(
    {
        0: (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1), Action(B, 0, 0)),
        1: (*(Action(F, 1, 0), Action(F, 2, 0), Action(F, 2, 1)), *(Action(B, 2, 1), Action(B, 2, 0), Action(B, 1, 0))),
        2: (*(Action(F, 3, 0), Action(F, 3, 1), Action(F, 3, 2)), *(Action(B, 3, 2), Action(B, 3, 1), Action(B, 3, 0))),
    }
)
"""Without parts: one backward takes gradients of the same samples from several actions."""


COUNTS = {"b": 5.0, "c": 2.0}
WEIGHTS = {"b": 1.0, "c": 0.25}


def _step(worker: Worker, schedule: Schedule) -> tuple[dict[str, Tensor], dict[str, float]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    placed, before = PLAN.stages(), stages_before(PLAN)
    weights = {unit: _weight(unit) for unit in ROWS}
    feeds = {unit.name: unit.feeds for unit in PLAN.units}
    own = [stage for stage in placed if worker.rank in stage.stage.ranks]
    stages = {
        stage.index: LocalStage(
            stage,
            MadeUp(stage.unit, weights[stage.unit]),  # type: ignore[arg-type]
            {taker: _boundary(stage.unit, taker) for taker in feeds[stage.unit]},
            {placed[source].unit: (_boundary(placed[source].unit, stage.unit), True) for source in before[stage.index]},
            True,
            WeightGradients(),
            WEIGHTS,
        )
        for stage in own
    }
    transport = Transport(comm, [stage.stage for stage in placed], look_ahead=1, check=True)
    sync = bucket_weights(comm, {}, {}, {}, {}, StateLayout()).sync  # of no weights
    executor = Executor(
        worker.rank,
        stages,
        {stage.index: stage.unit for stage in placed},
        transport,
        sync,
        Recorder(worker.rank, comm.device),
        comm.device,
    )
    samples = tuple(EncodedSample(f"s{i}", np.zeros(1), np.zeros(1)) for i in range(5))
    routes = derive_routes(build(PLAN, ASSIGNMENT, schedule), worker.rank, range(len(placed)))

    boundaries = [{taker: _boundary(stage.unit, taker) for taker in feeds[stage.unit]} for stage in placed]
    data = StepData(samples, COUNTS)
    owners = RowOwners({}, placed, boundaries, routes, data)
    agreement = Agreement(comm, {})
    transport.begin(routes, owners, agreement.require)
    made = executor.run(schedule.actions[worker.rank], routes, data, agreement, owners)
    comm.world.barrier()
    comm.close()
    gradients = {unit: w.grad for unit, w in weights.items() if w.grad is not None}
    losses = dict.fromkeys(COUNTS, 0.0)
    for outcome in made:
        losses[outcome.name] += outcome.value.item()
    return gradients, losses


@pytest.mark.parametrize("schedule", [WHOLE, eager(PLAN, ASSIGNMENT)], ids=["whole", "parts"])
def test_gradients_of_all_consumers_and_losses_add_up(workers: WorkerPool, schedule: Schedule) -> None:
    weights = {unit: _weight(unit) for unit in ROWS}
    sums = {unit: torch.zeros((), dtype=torch.float64) for unit in COUNTS}
    for sample in range(5):
        a = _compute("a", sample, weights["a"], {})
        b = _compute("b", sample, weights["b"], {"a": a[:1]})
        c = _compute("c", sample, weights["c"], {"a": a, "b": b})
        sums["b"] = sums["b"] + b.square().sum()
        sums["c"] = sums["c"] + c.square().sum()
    (1.0 * sums["b"] / 5 + 0.25 * sums["c"] / 2).backward()
    results = workers.run(_step, 3, Schedule(dict(schedule.actions)))
    for unit, total in sums.items():
        loss = sum(losses[unit] for _, losses in results)
        assert loss == pytest.approx(total.item() / COUNTS[unit], rel=1e-12)  # roundings of fp64 sums
    for unit, weight in weights.items():
        gradient = sum(gradients[unit] for gradients, _ in results if unit in gradients)
        torch.testing.assert_close(gradient, weight.grad)
