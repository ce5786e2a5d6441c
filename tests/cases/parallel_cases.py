"""Cases of a vision encoder and a language model, by the stages of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases.engine_case import CASE, Case, build_model
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.trainability import trainability_of

BATCHES = ((0, 1), (2, 3), (4, 5))


def case_of(plan: Plan, family: Any = one_f_one_b, **changes: Any) -> Case:
    case = replace(CASE, **{"plan": plan, "frozen": (), **changes})
    trainability = trainability_of(plan, trainable_layers(build_model(case, "meta").units))
    schedule = family(plan, case.assignment, trainability)
    return replace(case, schedule=type(schedule)(dict(schedule.actions)))


def plan_of(vision: tuple[Stage, ...], *language: tuple[Stage, ...]) -> Plan:
    return Plan(
        (
            UnitPlan("vision", (Replica(vision),), ("language",)),
            UnitPlan("language", tuple(Replica(stages) for stages in language)),
        )
    )
