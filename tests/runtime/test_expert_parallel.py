"""Ranks that have different experts compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_numerics import check_case
from test_tensor_parallel import case_of, plan_of

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.plan.plan import Stage
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.families import one_f_one_b
from dilatant.schedule.zero_bubble import zero_bubble_h1
from engine_case import CASE, Case, build_model, build_samples
from worker_pool import Worker, WorkerPool

VISION = (Stage(0, 5, (0,)),)
SHAPES = [(2, 2, 2), (1, 2, 2)]
MORE_SHAPES = [pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 1, 2), (2, 2, 4), (1, 4, 2))]
"""tp, cp and ep of a stage."""
OFTEN = {("qwen2_moe", 2, "block"), ("qwen3_moe", 4, "none")}
RECOMPUTED = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
    for family in (("qwen2_moe", 2), ("qwen3_moe", 4))
    for how in ("none", "block", "block_keep_attention")
    for case in [(*family, how)]
]


def expert_case(*language: tuple[Stage, ...], family: Any = one_f_one_b, **changes: Any) -> Case:
    chosen = {"language": "mixtral", "attention": "causal", **changes}
    return case_of(plan_of(VISION, *language), family, **chosen)


def stages(tp: int, cp: int, ep: int) -> tuple[Stage, ...]:
    ranks = tuple(range(1, 1 + tp * cp))
    return (Stage(0, 2, ranks, tp, cp, ep), Stage(2, 4, ranks, tp, cp, ep))


@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
def test_in_every_group_of_ranks(workers: WorkerPool, shape: tuple[int, int, int]) -> None:
    check_case(workers, expert_case(stages(*shape)), "all", 1)


@pytest.mark.parametrize(("language", "ep", "recompute"), RECOMPUTED)
def test_with_split_backward_and_recomputation(
    workers: WorkerPool, language: str, ep: int, recompute: str
) -> None:
    tp, cp = (2, 1) if ep == 2 else (1, 4)
    stage = Stage(0, 4, tuple(range(1, 1 + tp * cp)), tp, cp, ep)
    changes = {"language": language, "settings": {}, "recompute": recompute}
    case = expert_case((stage,), family=zero_bubble_h1, **changes)
    check_case(workers, case, "none", 1)


@pytest.mark.parametrize("zero", [pytest.param("none", marks=pytest.mark.slow), "node"])
def test_replicas_that_divide_experts_unlike(workers: WorkerPool, zero: Any) -> None:
    """By the expert, by features and not at all: gradients meet where the parts overlap."""
    replicas = (
        (Stage(0, 4, (1, 2), tp=2, ep=2),),
        (Stage(0, 3, (3, 4), cp=2, ep=2), Stage(3, 4, (3, 4), cp=2)),
        (Stage(0, 2, (5, 6), tp=2), Stage(2, 4, (7,))),
    )
    batches = ((0, 1), (2, 3), (4, 5))
    assignment = replace(
        CASE.assignment, microbatches={"vision": (batches,), "language": tuple((batch,) for batch in batches)}
    )
    check_case(workers, expert_case(*replicas, assignment=assignment), zero, 2)


def test_frozen_experts_pass_gradients_on(workers: WorkerPool) -> None:
    case = expert_case(stages(1, 2, 2), frozen=("language.layers.*.mlp.experts*",))
    check_case(workers, case, "none", 1)


def _held(worker: Worker, case: Case) -> dict[str, tuple[int, ...]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    held = {name: tuple(p.shape) for name, p in runtime.parameters.items() if "experts" in name}
    runtime.predict(build_samples(case))
    runtime.close()
    comm.close()
    return held


def test_a_rank_holds_its_experts_only(workers: WorkerPool) -> None:
    for held in workers.run(_held, 5, expert_case(stages(2, 2, 4)))[1:]:
        assert {shape[0] for shape in held.values()} == {1}
        assert {shape[1:] for shape in held.values()} == {(48, 16), (16, 24)}


def refusal(shape: tuple[int, int, int], **changes: Any) -> str:
    case = replace(expert_case(stages(1, 1, 1)), **changes)
    plan = plan_of(VISION, stages(*shape))
    with pytest.raises(UserError) as raised:
        require_trainable(plan, build_model(replace(case, plan=plan), "meta").units)
    return str(raised.value)


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    assert (
        "language: 3 experts cannot be divided by ep 2 among stages of tp 2 and cp 1; it takes ep 1 "
        in refusal((2, 1, 2), settings={"num_local_experts": 3})
    )
    assert "4 experts cannot be divided by ep 2 among stages of tp 1 and cp 3; it takes ep 1 " in refusal(
        (1, 3, 2)
    )
    assert "by ep 3 among stages of tp 2 and cp 2; it takes ep 1, 2, 4 there" in refusal((2, 2, 3))
    assert "ep is 2, but it has no experts" in refusal((1, 2, 2), language="llama", settings={})
