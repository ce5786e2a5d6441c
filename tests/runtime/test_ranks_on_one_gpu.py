"""Several ranks on one GPU, through host memory: every layout gives the losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases.engine_case import BATCHES, Case
from cases.parallel_cases import case_of, plan_of
from dilatant.plan.plan import Stage
from dilatant.schedule.families.families import zero_bubble_h1
from dilatant.schedule.schedule import Assignment
from harness.checked_steps import check_case
from harness.worker_pool import WorkerPool

VISION = (Stage(0, 5, (0,)),)
HALVES = Assignment({"vision": (BATCHES,), "language": (BATCHES[::2], BATCHES[1::2])})
REPLICAS = (Stage(0, 4, (0,)),), (Stage(0, 4, (1,)),)
LAYOUTS: dict[str, Callable[[], Case]] = {
    "pipeline": lambda: case_of(plan_of(VISION, (Stage(0, 2, (0,)), Stage(2, 4, (1,)))), zero_bubble_h1),
    "tp": lambda: case_of(plan_of(VISION, (Stage(0, 4, (0, 1), tp=2),)), recompute="block", attention="causal"),
    "cp": lambda: case_of(plan_of(VISION, (Stage(0, 4, (0, 1), cp=2),)), attention="causal"),
    "groups": lambda: case_of(
        plan_of(VISION, (Stage(0, 4, (0, 1), ep=2),)),
        language="mixtral",
        attention="causal",
        assignment=Assignment({"vision": (BATCHES,), "language": (((0, 1, 2, 3), (4,), (5,)),)}),
    ),
    "zero": lambda: case_of(plan_of(VISION, *REPLICAS), assignment=HALVES),
    "shard": lambda: case_of(plan_of(VISION, *REPLICAS), assignment=HALVES),
}
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
CPU = ("tp", "zero")
"""Layouts that are tried with copies from host to host in every run of the tests."""


@pytest.mark.parametrize(
    ("device", "layout"),
    [("cpu", name) if name in CPU else pytest.param("cpu", name, marks=pytest.mark.slow) for name in LAYOUTS]
    + [pytest.param("cuda:0", name, marks=ON_GPU) for name in LAYOUTS],
)
def test_ranks_of_one_device_match_one_process(workers: WorkerPool, device: str, layout: str) -> None:
    shard: Any = {"language": "weights"} if layout == "shard" else {}
    check_case(workers, LAYOUTS[layout](), "node", 1, shard=shard, shares=device)
