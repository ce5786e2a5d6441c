"""Ranks that share layers compute what one process computes, family by family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_numerics import check_case

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.holders import trainable_layers
from dilatant.schedule.families import one_f_one_b
from dilatant.schedule.trainability import trainability_of
from dilatant.schedule.zero_bubble import zero_bubble_h1
from drawn_steps import CASE, ENCODERS, LANGUAGE, MORE_LANGUAGES, OWN, UNDIVIDED, Case, build_model
from worker_pool import WorkerPool

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


# Vision on two ranks behind one another, the language model on two pairs.
TWO = plan_of((Stage(0, 5, (0, 1), tp=2),), (Stage(0, 2, (2, 3), tp=2), Stage(2, 4, (4, 5), tp=2)))


@pytest.mark.parametrize("language", sorted(LANGUAGE.keys() - {*UNDIVIDED} | MORE_LANGUAGES.keys()))
@pytest.mark.parametrize("tied", [False, True])
def test_families_of_language_models(workers: WorkerPool, language: str, tied: bool) -> None:
    check_case(workers, case_of(TWO, language=language, tied=tied, loss_chunk=3), "none", 1)


@pytest.mark.parametrize("encoder", sorted(ENCODERS))
def test_families_of_encoders(workers: WorkerPool, encoder: str) -> None:
    encoders = (("vision", encoder, 2, "mlp", "patch"),)
    check_case(workers, case_of(TWO, zero_bubble_h1, encoders=encoders), "none", 1)


def test_what_ranks_compute_alike_drops_what_one_process_drops(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 2, (0, 1), tp=2),), (Stage(0, 3, (0, 1), tp=2), Stage(3, 4, (2,))))
    encoders = (("vision", OWN, 1, "linear", "all"),)
    case = case_of(plan, encoders=encoders, language="phi", attention="causal", dropout=0.3)
    check_case(workers, case, "none", 1)


@pytest.mark.parametrize("language", ["llama", "qwen3", "phi3"])
def test_more_ranks_than_key_value_heads(workers: WorkerPool, language: str) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2, 3, 4), tp=4),))
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2}
    check_case(workers, case_of(plan, language=language, settings=settings), "all", 1)


@pytest.mark.parametrize("zero", ["none", "node", "all"])
def test_replicas_of_unlike_degrees(workers: WorkerPool, zero: Any) -> None:
    replicas = (
        (Stage(0, 4, (1,)),),
        (Stage(0, 3, (2, 3), tp=2), Stage(3, 4, (4, 5), tp=2)),
        (Stage(0, 4, (0,)),),
    )
    plan = plan_of((Stage(0, 5, (0,)),), *replicas)
    changes = {"language": "phi3", "tied": True, "assignment": replace(CASE.assignment, microbatches={
        "vision": (BATCHES,), "language": tuple((batch,) for batch in BATCHES)})}  # fmt: skip
    check_case(workers, case_of(plan, **changes), zero, 2)
