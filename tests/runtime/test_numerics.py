"""For every valid plan, assignment and schedule, loss and gradients equal those of one process; and every rank needs no
more of the samples than `DecodeRequirements` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.drawn_steps import cases
from cases.engine_case import Case
from cases.generic_steps import GENERIC, GenericCase, generic_cases
from cases.parallel_cases import case_of, plan_of
from dilatant.cost.memory import Zero
from dilatant.plan.plan import Stage
from harness.checked_generic_steps import check_generic_case
from harness.checked_steps import COMMON, check_case
from harness.worker_pool import WorkerPool

NODES = st.sampled_from([1, 2, 3])
"""Ranks are dealt out in turn, so that nodes have unlike numbers of a weight's holders."""
SHARING: Any = st.sampled_from(["none", "node", "all"])


@settings(max_examples=2, **COMMON)
@given(case=cases(dtype=torch.bfloat16), zero=SHARING, nodes=NODES)
def test_any_step_in_bf16_gives_what_one_process_gives_in_bf16(
    workers: WorkerPool, case: Case, zero: Zero, nodes: int
) -> None:
    check_case(workers, case, zero, nodes)


@settings(max_examples=2, **COMMON)
@given(case=cases(), zero=SHARING, nodes=NODES)
def test_any_step_matches_loss_and_gradients_of_one_process(
    workers: WorkerPool, case: Case, zero: Zero, nodes: int
) -> None:
    check_case(workers, case, zero, nodes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, **COMMON)
@given(case=cases(dtype=torch.bfloat16), zero=SHARING, nodes=NODES)
def test_two_hundred_bf16_steps_match_one_process(workers: WorkerPool, case: Case, zero: Zero, nodes: int) -> None:
    check_case(workers, case, zero, nodes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200, **COMMON)
@given(case=cases(), zero=SHARING, nodes=NODES)
def test_two_hundred_fp32_steps_match_one_process(workers: WorkerPool, case: Case, zero: Zero, nodes: int) -> None:
    check_case(workers, case, zero, nodes)


NETS = ("sd3", "pixart", "sana", "unet", "flux")


@pytest.mark.slow  # every process of the pool first imports diffusers; test_context_parallel.py has a net of its own
@pytest.mark.timeout(900)
@settings(max_examples=1, **COMMON)
@given(case=cases(most_ranks=2, nets=("sd3", "pixart")), zero=SHARING, nodes=NODES)
def test_any_step_that_draws_gives_what_one_process_gives(
    workers: WorkerPool, case: Case, zero: Zero, nodes: int
) -> None:
    """Noise, time steps and dropped conditions are equal in every layout, and so are gradients of learned queries."""
    pytest.importorskip("diffusers")
    check_case(workers, case, zero, nodes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tenth", range(8))
@settings(max_examples=10, **COMMON)
@given(case=cases(nets=NETS), zero=SHARING, nodes=NODES)
def test_eighty_steps_that_draw_give_what_one_process_gives(
    workers: WorkerPool, tenth: int, case: Case, zero: Zero, nodes: int
) -> None:
    pytest.importorskip("diffusers")
    check_case(workers, case, zero, nodes)


def test_ranks_without_a_stage_change_nothing(workers: WorkerPool) -> None:
    """They lie below, between and above the plan's ranks, as recovery leaves them, and get no memory."""
    plan = plan_of((Stage(0, 5, (1,)),), (Stage(0, 2, (1,)), Stage(2, 4, (3,))))
    check_case(workers, case_of(plan), "node", 1, above=1)


CHEAP = ("deepseek_vl",)


@settings(max_examples=2, **COMMON)
@given(case=generic_cases(CHEAP, 3, torch.float32), zero=SHARING, nodes=NODES)
def test_any_step_of_an_undeclared_family_matches_transformers(
    workers: WorkerPool, case: GenericCase, zero: Zero, nodes: int
) -> None:
    check_generic_case(workers, case, zero, nodes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", GENERIC)
@settings(max_examples=6, **COMMON)
@given(data=st.data(), zero=SHARING, nodes=NODES)
def test_more_steps_of_undeclared_families_match_transformers(
    workers: WorkerPool, family: str, dtype: torch.dtype, data: Any, zero: Zero, nodes: int
) -> None:
    check_generic_case(workers, data.draw(generic_cases([family], 6, dtype)), zero, nodes)
