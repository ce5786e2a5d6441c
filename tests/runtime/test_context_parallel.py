"""Ranks that share the tokens of every row compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_numerics import check_case
from test_tensor_parallel import case_of, plan_of

from dilatant.plan.plan import Stage
from dilatant.schedule.zero_bubble import zero_bubble_h1
from drawn_steps import CASE
from worker_pool import WorkerPool

TWO = plan_of((Stage(0, 5, (0,)),), (Stage(0, 2, (1, 2), cp=2), Stage(2, 4, (3, 4), cp=2)))


@pytest.mark.parametrize("attention", ["causal", "bidirectional", "embedded"])
def test_masks(workers: WorkerPool, attention: str) -> None:
    check_case(workers, case_of(TWO, attention=attention), "none", 1)


def test_tensor_parallel_ranks_share_tokens_alike(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 2, (1, 2, 3, 4), tp=2, cp=2), Stage(2, 4, (5, 6), cp=2)))
    check_case(workers, case_of(plan, attention="embedded", loss_chunk=3, recompute="block"), "none", 1)


def test_rows_pass_between_any_degrees(workers: WorkerPool) -> None:
    stages = (
        Stage(0, 1, (1, 2, 3), cp=3),
        Stage(1, 2, (4, 5), cp=2),
        Stage(2, 3, (6, 7), tp=2),
        Stage(3, 4, (0, 8), cp=2),
    )
    plan = plan_of((Stage(0, 5, (0, 8), cp=2),), stages)
    check_case(workers, case_of(plan, attention="embedded", recompute="block_keep_attention"), "none", 1)


@pytest.mark.parametrize("zero", ["none", "all"])
def test_items_of_encoders_and_tokens_are_shared_by_the_same_ranks(workers: WorkerPool, zero: Any) -> None:
    plan = plan_of((Stage(0, 2, (0, 1, 2), cp=3), Stage(2, 5, (3,))), (Stage(0, 4, (0, 1, 2), cp=3),))
    texts = ((3, (3,)), (2, (0,)), (9, (1,)), (2, (0,)), (2, (0,)), (5, (2,)))
    check_case(workers, case_of(plan, zero_bubble_h1, attention="bidirectional", texts=texts), zero, 1)


def test_rows_shorter_than_their_ranks(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 3, (1, 2, 3, 4), cp=4), Stage(3, 4, (5, 6, 7, 8), cp=4)))
    texts = ((2, (0,)), (1, (0,)), (3, (0,)), (2, (0,)), (2, (1,)), (2, (0,)))
    single = ((0, 1), (2,), (3,), (4, 5))
    assignment = replace(CASE.assignment, microbatches={"vision": (single,), "language": (single,)})
    case = case_of(plan, attention="causal", texts=texts, assignment=assignment, frozen=("language",))
    check_case(workers, case, "none", 1)
