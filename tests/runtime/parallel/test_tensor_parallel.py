"""Tensor-parallel ranks compute what one process computes, family by family."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cases.engine_case import (
    CASE,
    ENCODERS,
    HYBRIDS,
    LANGUAGE,
    MORE_LANGUAGES,
    OWN,
    UNDIVIDED,
    Case,
    build_model,
    build_samples,
)
from cases.parallel_cases import BATCHES, case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.config.errors import UserError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.executor import ActionFailed
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.families.families import one_f_one_b, zero_bubble_h1
from harness.checked_steps import check_case
from harness.worker_pool import Worker, WorkerPool

# Vision on a pair of ranks, the language model on two further pairs.
TWO = plan_of((Stage(0, 5, (0, 1), tp=2),), (Stage(0, 2, (2, 3), tp=2), Stage(2, 4, (4, 5), tp=2)))


# Vision on the first of two pairs of the language model.
COLOCATED = plan_of((Stage(0, 5, (0, 1), tp=2),), (Stage(0, 2, (0, 1), tp=2), Stage(2, 4, (2, 3), tp=2)))
PAIR = plan_of((Stage(0, 5, (0, 1), tp=2),), (Stage(0, 4, (0, 1), tp=2),))


FAMILIES = sorted((LANGUAGE | MORE_LANGUAGES).keys() - {*UNDIVIDED})
OFTEN = ("qwen3_next",)


@pytest.mark.parametrize(
    ("language", "tied"),
    [
        pytest.param(name, n % 2 == 0, marks=() if name in OFTEN else pytest.mark.slow)
        for n, name in enumerate(FAMILIES)
    ],
)
def test_families_of_language_models(workers: WorkerPool, language: str, tied: bool) -> None:
    attention = "causal" if language in HYBRIDS else None
    changes = {"language": language, "tied": tied, "loss_chunk": 3, "attention": attention}
    check_case(workers, case_of(COLOCATED, **changes), "none", 1)


@pytest.mark.parametrize(
    "encoder", [pytest.param(name, marks=pytest.mark.slow if n else ()) for n, name in enumerate(sorted(ENCODERS))]
)
def test_families_of_encoders(workers: WorkerPool, encoder: str) -> None:
    encoders = (("vision", encoder, 2, "mlp", "patch"),)
    check_case(workers, case_of(PAIR, zero_bubble_h1, encoders=encoders), "none", 1)


@pytest.mark.parametrize("family", [pytest.param(one_f_one_b, marks=pytest.mark.slow), zero_bubble_h1])
@pytest.mark.parametrize(
    "recompute", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("none", "block")), "block_keep_attention"]
)
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        # Rows of 10 tokens and items of 4 patches on two ranks: four pieces, and three.
        pytest.param(TWO, {"language": "phi3", "rows_of_piece": 1}, id="four", marks=pytest.mark.slow),
        pytest.param(
            PAIR,
            {"encoders": (("vision", "whisper", 2, "mlp", "patch"),), "language": "qwen3", "rows_of_piece": 3},
            id="three",
        ),
    ],
)
def test_what_travels_in_pieces_is_the_same(
    workers: WorkerPool, recompute: str, family: Any, plan: Plan, changes: dict[str, Any]
) -> None:
    check_case(workers, case_of(plan, family, recompute=recompute, **changes), "none", 1)


def _collectives(worker: Worker, how: Any, pieces: int | None) -> dict[str, int]:
    """Return kind → number of collectives that a language-model rank starts in a step of one microbatch."""
    comm = Comm(worker.store, worker.rank, worker.size)
    case = replace(CASE, recompute=how, encoders=(), texts=((9, ()),), frozen=())
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 4, (0, 1), tp=2),)),)),))
    runtime = Runtime(build_model(case, "meta"), plan, comm, seed=0)
    shards = runtime.modules[0].shards
    assert shards is not None
    shards.rows_of_piece = pieces
    counts = {"all_gather": 0, "reduce_scatter": 0}
    for name in counts:

        def counted(send: Any, name: str, *given: Any) -> Any:
            counts[name] += 1
            return send(*given)

        setattr(shards.ranks, name, partial(counted, getattr(shards.ranks, name), name))
    runtime.execute(build_samples(case))
    runtime.close()
    comm.close()
    return counts


@pytest.mark.parametrize("pieces", [None, 2])
def test_recomputation_that_keeps_attention_repeats_no_sum(workers: WorkerPool, pieces: int | None) -> None:
    (none, *_), (block, *_), (kept, *_) = (
        workers.run(_collectives, 2, how, pieces) for how in ("none", "block", "block_keep_attention")
    )
    each = 1 if pieces is None else 2  # five rows of each rank are two pieces of two or more
    # Two blocks of two regions: in and out, forward and back; out of the last block, and back out of the first.
    assert none == {"all_gather": 8 * each + 2, "reduce_scatter": 8 * each}
    # No one needs the last sum of a recomputed block; with two pieces, one is sent before that is known.
    assert block["reduce_scatter"] == none["reduce_scatter"] + 2 * (each + each - 1)
    assert kept["reduce_scatter"] == none["reduce_scatter"]
    assert kept["all_gather"] == block["all_gather"] == none["all_gather"] + 4 * each


def test_what_ranks_compute_alike_drops_what_one_process_drops(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 2, (0, 1), tp=2),), (Stage(0, 3, (0, 1), tp=2), Stage(3, 4, (2,))))
    encoders = (("vision", OWN, 1, "linear", "all"),)
    case = case_of(plan, encoders=encoders, language="phi", attention="causal", dropout=0.3)
    check_case(workers, case, "none", 1)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["llama", "qwen3", "phi3"])
def test_more_ranks_than_key_value_heads(workers: WorkerPool, language: str) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2, 3, 4), tp=4),))
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2}
    check_case(workers, case_of(plan, language=language, settings=settings), "all", 1)


@pytest.mark.parametrize("zero", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("none", "node")), "all"])
def test_replicas_of_unlike_degrees(workers: WorkerPool, zero: Any) -> None:
    replicas = ((Stage(0, 4, (1,)),), (Stage(0, 3, (2, 3), tp=2), Stage(3, 4, (4, 5), tp=2)), (Stage(0, 4, (0,)),))
    plan = plan_of((Stage(0, 5, (0,)),), *replicas)
    changes = {"language": "phi3", "tied": True, "assignment": replace(CASE.assignment, microbatches={
        "vision": (BATCHES,), "language": tuple((batch,) for batch in BATCHES)})}  # fmt: skip
    check_case(workers, case_of(plan, **changes), zero, 2)


def test_colocated_and_separate_encoder_pipelines_train_together(workers: WorkerPool) -> None:
    """Plans have such unlike pipelines if idle devices form one more (`fills_idle`)."""
    own = Replica((Stage(0, 5, (0,)),)), Replica((Stage(0, 4, (1,)),))
    leftover = Replica((Stage(0, 5, (2, 3), tp=2),)), Replica((Stage(0, 4, (2, 3), tp=2),))
    plan = Plan((UnitPlan("vision", (own[0], leftover[0]), ("language",)), UnitPlan("language", (own[1], leftover[1]))))
    shares = (BATCHES[:2], BATCHES[2:])
    assigned = replace(CASE.assignment, microbatches={"vision": shares, "language": shares})
    check_case(workers, case_of(plan, assignment=assigned), "node", 2)


def _predicted(worker: Worker, case: Case) -> dict[int, list[int]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    predicted = {number: one.tokens for number, one in runtime.predict(build_samples(case)).items()}
    runtime.close()
    comm.close()
    return predicted


def test_predictions_are_those_of_one_process_and_told_once(workers: WorkerPool) -> None:
    one = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (0,)),))
    expected = workers.run(_predicted, 1, case_of(one, language="phi"))
    shared = workers.run(_predicted, 6, case_of(TWO, language="phi"))
    told = [number for of_rank in shared for number in of_rank]
    assert sorted(told) == list(range(6))
    assert {number: found for of_rank in shared for number, found in of_rank.items()} == expected[0]


def _of_a_real_model(worker: Worker) -> tuple[float, float, bool]:
    model = build_model(CASE)
    model.freeze(["language.layers.0"])
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    apart = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1,)),))
    losses = []
    for generation, plan in enumerate((PAIR, apart)):
        comm = Comm(worker.store, worker.rank, worker.size, generation)
        runtime = Runtime(model, plan, comm)
        losses.append(runtime.execute(build_samples(CASE)).loss)
        runtime.close()
        comm.close()
    return *losses, all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_materialized_model_is_sharded_and_stays_whole(workers: WorkerPool) -> None:
    for shared, apart, is_whole in workers.run(_of_a_real_model, 2):
        assert shared == pytest.approx(apart, rel=1e-6)  # the order of sums
        assert is_whole


def _one_rank_fails(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size)
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2), tp=2),))
    runtime = Runtime(build_model(CASE, "meta"), plan, comm)
    if worker.rank == 2:
        model: Any = runtime.modules[1].model
        model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        runtime.execute(build_samples(CASE))
        return ""
    except (ActionFailed, CommAborted) as error:
        return str(error)
    finally:
        runtime.close()
        comm.close()


def test_a_rank_that_fails_ends_what_its_partners_wait_for(workers: WorkerPool) -> None:
    told = workers.run(_one_rank_fails, 3)
    assert all("rank 2" in error and "division by zero" in error for error in told), told


def refusal(plan: Plan, **changes: Any) -> str:
    case = replace(CASE, plan=plan, frozen=(), **changes)
    with pytest.raises(UserError) as raised:
        require_trainable(plan, build_model(case, "meta").units)
    return str(raised.value)


def test_what_ranks_cannot_share_is_refused_with_what_they_can() -> None:
    wide = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2, 3, 4), tp=4),))
    assert "language: 2 attention heads cannot be shared by 4 ranks; it takes tp 1, 2" in refusal(wide)
    unlike = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 24}
    assert "6 key/value heads cannot be shared by 4 ranks; it takes tp 1, 2, 3" in refusal(wide, settings=unlike)
    assert "'self_attn.q_proj' is normalised over all heads; give it tp: 1" in refusal(TWO, language="olmo2")
    assert "how ranks share the layers of 'stablelm' is not known" in refusal(TWO, language="stablelm")
    few = {"num_attention_heads": 4, "num_key_value_heads": 4}
    assert "2 key heads of linear attention cannot be shared by 4 ranks; it takes tp 1, 2" in refusal(
        wide, language="qwen3_5_text", attention="causal", settings=few
    )
    shared_rows = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2), cp=2),))
    assert "language: context parallelism needs attention over block tables" in refusal(shared_rows)
