"""Experts divided among groups of ranks that run whole samples, as data-parallel replicas do (ep above tp x cp)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cases.engine_case import CASE, Case, build_model, build_samples
from cases.parallel_cases import case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.plan.plan import Stage
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.families.families import one_f_one_b, zero_bubble_h1
from harness.checked_steps import check_case
from harness.worker_pool import Worker, WorkerPool

VISION = (Stage(0, 5, (0,)),)
PAIR = (Stage(0, 4, (0, 1), ep=2),)
SHAPES = [
    PAIR,
    pytest.param((Stage(0, 2, (0, 1), ep=2), Stage(2, 4, (2, 3), ep=2)), id="pp 2"),
    pytest.param((Stage(0, 4, (0, 1, 2, 3), tp=2, ep=4),), id="tp 2"),
    pytest.param((Stage(0, 4, (0, 1, 2, 3), cp=2, ep=4),), id="cp 2", marks=pytest.mark.slow),
    pytest.param((Stage(0, 4, (0, 1, 2, 3), ep=4),), id="ep 4", marks=pytest.mark.slow),
]


def case(*language: tuple[Stage, ...], family: Any = one_f_one_b, vision: Any = VISION, **changes: Any) -> Case:
    return case_of(plan_of(vision, *language), family, **{"language": "mixtral", "attention": "causal", **changes})


def batches(*language: tuple[tuple[int, ...], ...]) -> Any:
    """The samples of the microbatches of each replica of the language model; those of the encoder are its own."""
    every = tuple(batch for replica in language for batch in replica)
    return replace(CASE.assignment, microbatches={"vision": (every,), "language": language})


@pytest.mark.parametrize("stages", SHAPES)
def test_groups_compute_what_one_process_does(workers: WorkerPool, stages: tuple[Stage, ...]) -> None:
    check_case(workers, case(stages), "all", 1)


def test_groups_without_samples_compute_for_others(workers: WorkerPool) -> None:
    """One, two and three samples in a microbatch of two groups."""
    check_case(workers, case(PAIR, assignment=batches(((0,), (1, 2), (3, 4, 5)))), "none", 1)
