"""A measured step of two units on two ranks."""

from __future__ import annotations

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.schedule import Action, ActionKind, MeasuredAction

PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 6, (1,)),)),)),
    )
)


def measured(rank: int, unit: str, kind: str, start: float, waited: float, other: int | None, seconds: float):
    action = Action(ActionKind(kind), PLAN.stages()[rank].index, 0)
    return MeasuredAction(rank, unit, action, (0, 1), start, waited, other, seconds)


STEP = [
    measured(0, "vision", "F", 100.0, 0.0, None, 1.0),
    measured(0, "vision", "B", 101.0, 5.0, 1, 2.0),
    measured(1, "language", "F", 101.0, 0.0, 0, 2.0),
    measured(1, "language", "B", 103.0, 0.0, None, 3.0),
]
