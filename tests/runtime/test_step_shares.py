"""What ranks add up tells how busy every stage was and for whom the ranks waited."""

from __future__ import annotations

import pytest

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.step.step_result import ShareCounter
from dilatant.schedule.schedule import Action, ActionKind, MeasuredAction

# Audio shares rank 2 with the language model's last stage; vision has two replicas.
PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 3, (0,)),)), Replica((Stage(0, 3, (3,)),))), ("language",)),
        UnitPlan("audio", (Replica((Stage(0, 2, (2,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 2, (1,)), Stage(2, 4, (2,)))),)),
    )
)
STAGE = {(p.unit, p.replica, p.position): p.index for p in PLAN.stages()}


def did(rank: int, stage: tuple[str, int, int], seconds: float, waited: float = 0.0, other: int | None = None):
    action = Action(ActionKind.F, STAGE[stage], 0)
    return MeasuredAction(rank, stage[0], action, (0,), 0.0, waited, other, seconds)


def test_replicas_are_one_line_and_colocated_stages_two():
    counter = ShareCounter(PLAN)
    by_rank = [
        [did(0, ("vision", 0, 0), 2.0)],
        [did(1, ("language", 0, 0), 5.0, 2.0, 0)],
        [did(2, ("audio", 0, 0), 1.0), did(2, ("language", 0, 1), 4.0, 3.0, 1)],
        [did(3, ("vision", 1, 0), 3.0, 1.0, 2)],
    ]
    by_rank.append([])  # a rank without a stage, which waits for the others
    owns = [counter.own(rank, actions, 10.0) for rank, actions in enumerate(by_rank)]
    summed = [sum(values) for values in zip(*owns)]
    shares = counter.shares(summed)
    assert shares.busy == pytest.approx({"vision 0": 0.25, "audio 0": 0.1, "language 0": 0.5, "language 1": 0.4})
    # Of 40 rank seconds: 2 for vision, 3 for language's first stage, 1 for rank 2, whose first unit is audio.
    assert shares.waited == pytest.approx({"vision": 0.05, "audio": 0.025, "language": 0.075})


def test_a_step_without_time_divides_by_nothing():
    counter = ShareCounter(PLAN)
    assert set(counter.shares([0.0] * len(counter.own(0, [], 0.0))).busy.values()) == {0.0}
