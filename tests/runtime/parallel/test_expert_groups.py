"""Experts divided among groups of ranks that run whole samples, as data-parallel replicas do (ep above tp x cp)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cases.engine_case import CASE, NET_WIDTH, Case, build_model, build_samples
from cases.parallel_cases import case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
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


UNLIKE = ((6, (1,)), (15, (0,)), (3, (2,)), (9, (0,)), (11, (1,)), (4, (0,)))
"""Text tokens and pictures of samples: some groups have no picture in a microbatch, and unlike numbers of tokens."""


@pytest.mark.parametrize("recompute", ["none", "block", pytest.param("block_keep_attention", marks=pytest.mark.slow)])
def test_with_split_backward_and_recomputation(workers: WorkerPool, recompute: str) -> None:
    """The family has shared experts and a router loss, on two stages of two groups."""
    stages = (Stage(0, 2, (1, 2), ep=2), Stage(2, 4, (3, 4), ep=2))
    changes = {"language": "qwen2_moe", "settings": {}, "recompute": recompute, "texts": UNLIKE}
    check_case(workers, case(stages, family=zero_bubble_h1, **changes), "node", 1)


@pytest.mark.parametrize("frozen", ["language", "language.layers.*.mlp.experts*"])
def test_frozen_weights_pass_gradients_of_other_groups(workers: WorkerPool, frozen: str) -> None:
    """With the language model frozen, rows without pictures need no gradient, but experts of other ranks' rows do."""
    check_case(workers, case(PAIR, texts=UNLIKE, frozen=(frozen,)), "none", 1)


def test_replicas_with_and_without_groups(workers: WorkerPool) -> None:
    """Gradients of an expert are summed over all that hold a part of it; encoders run on the ranks of two groups."""
    replicas = ((Stage(0, 4, (0, 1), ep=2),), (Stage(0, 3, (2, 3), tp=2), Stage(3, 4, (2, 3), tp=2)))
    vision = (Stage(0, 5, (0, 1), cp=2),)
    assignment = batches(((0, 1, 2), (3,)), ((4,), (5,)))
    check_case(workers, case(*replicas, vision=vision, texts=UNLIKE, assignment=assignment), "all", 2)


@pytest.mark.slow
def test_groups_without_learned_queries_pass_gradients_of_others(workers: WorkerPool) -> None:
    """Nothing but the queries of a generator, which half of the samples have, asks for gradients of the experts."""
    pytest.importorskip("diffusers")
    drawing = {
        "generators": (("height", NET_WIDTH, "linear", 1.0),),
        "nets": {"height": ("sd3", "flow", True)},
        "drawn": ((1,), (0,)) * 3,
        "frozen": ("vision", "language.model"),
    }
    layers = len(build_model(replace(CASE, **drawing), "meta").units["height"].layers)
    vision, language = plan_of(VISION, PAIR).units
    height = UnitPlan("height", (Replica((Stage(0, layers, (0,)),)),))
    assignment = replace(CASE.assignment, microbatches={**CASE.assignment.microbatches, "height": (((0, 2, 4),),)})
    made = case_of(
        Plan((vision, replace(language, feeds=("height",)), height)),
        language="mixtral",
        attention="causal",
        assignment=assignment,
        **drawing,
    )
    check_case(workers, made, "none", 1)


def _predicted(worker: Worker, case: Case) -> dict[int, tuple[list[int], list[float]]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    held = {tuple(p.shape) for name, p in runtime.parameters.items() if "experts" in name}
    assert case.plan.ranks == (0,) or {shape[0] for shape in held} == {2}
    found = runtime.predict(build_samples(case))
    runtime.close()
    comm.close()
    return {number: (each.tokens, each.losses) for number, each in found.items()}


def test_each_sample_is_predicted_by_its_group(workers: WorkerPool) -> None:
    alone, groups = case((Stage(0, 4, (0,)),), texts=UNLIKE), case(PAIR, texts=UNLIKE)
    (expected,) = workers.run(_predicted, 1, alone)
    first, second = workers.run(_predicted, 2, groups)
    assert first
    assert second
    assert first.keys().isdisjoint(second)
    for number, (tokens, losses) in (first | second).items():
        assert tokens == expected[number][0]
        assert losses == pytest.approx(expected[number][1], rel=1e-5)  # fp32


def test_what_groups_cannot_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"3 experts cannot be divided by ep 2 .* it takes ep 1, 3 there"):
        require_trainable(case(PAIR).plan, build_model(case(PAIR, settings={"num_local_experts": 3}), "meta").units)
    with pytest.raises(UserError, match="vision: ep above tp x cp divides samples among ranks"):
        require_trainable(
            case(PAIR, vision=(replace(VISION[0], ranks=(0, 1), ep=2),)).plan, build_model(case(PAIR), "meta").units
        )
