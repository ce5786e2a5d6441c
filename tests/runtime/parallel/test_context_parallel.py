"""Context-parallel ranks compute what one process computes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from cases.engine_case import CASE, Case, build_model, build_samples, frames
from cases.parallel_cases import BATCHES, case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.models.row_attention import use_row_attention
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.families.families import one_f_one_b, zero_bubble_h1
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.training.feeding.inputs import DecodeRequirements
from harness.checked_steps import check_case
from harness.worker_pool import Worker, WorkerPool

TWO = plan_of((Stage(0, 5, (0,)),), (Stage(0, 2, (0, 1), cp=2), Stage(2, 4, (2, 3), cp=2)))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["causal", "bidirectional", "embedded"])
def test_masks(workers: WorkerPool, attention: str) -> None:
    check_case(workers, case_of(TWO, attention=attention), "none", 1)


UNITS = {"vision": (Stage(0, 5, (0,)),), "audio": (Stage(0, 5, (4,)),)}
HALVES = (Stage(0, 2, (0, 1), cp=2), Stage(2, 4, (2, 3), tp=2))
WHOLE = (Stage(0, 4, (4,)),)


@pytest.mark.parametrize(
    "attention", [pytest.param({"vision": "bidirectional", "audio": "causal"}, marks=pytest.mark.slow), frames]
)
def test_masks_by_modality_and_of_one_s_own_on_any_ranks(workers: WorkerPool, attention: Any) -> None:
    """Layouts: pipeline stages, ranks that share tokens, ranks that share heads, and two language-model replicas."""
    encoders = (*CASE.encoders[:1], ("audio", "whisper", 2, "linear", "all"))
    plan = Plan(
        (
            *(UnitPlan(name, (Replica(stages),), ("language",)) for name, stages in UNITS.items()),
            UnitPlan("language", (Replica(HALVES), Replica(WHOLE))),
        )
    )
    batches = {"vision": (BATCHES,), "audio": (BATCHES,), "language": (BATCHES[:2], BATCHES[2:])}
    texts = ((3, (2, 1)), (9, (0, 2)), (4, (3, 0)), (5, (1, 1)), (2, (2, 2)), (6, (0, 0)))
    case = case_of(plan, attention=attention, encoders=encoders, texts=texts, assignment=Assignment(batches))
    check_case(workers, case, "none", 1)


@pytest.mark.slow
def test_tensor_parallel_ranks_share_tokens_alike(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 2, (1, 2, 3, 4), tp=2, cp=2), Stage(2, 4, (5, 6), cp=2)))
    check_case(workers, case_of(plan, attention="embedded", loss_chunk=3, recompute="block"), "none", 1)


@pytest.mark.slow
def test_rows_pass_between_any_degrees(workers: WorkerPool) -> None:
    stages = (
        Stage(0, 1, (1, 2, 3), cp=3),
        Stage(1, 2, (4, 5), cp=2),
        Stage(2, 3, (6, 7), tp=2),
        Stage(3, 4, (0, 8), cp=2),
    )
    plan = plan_of((Stage(0, 5, (0, 8), cp=2),), stages)
    check_case(workers, case_of(plan, attention="embedded", recompute="block_keep_attention"), "none", 1)


@pytest.mark.parametrize("zero", [pytest.param("none", marks=pytest.mark.slow), "all"])
def test_encoder_items_and_tokens_are_shared_by_the_same_ranks(workers: WorkerPool, zero: Any) -> None:
    plan = plan_of((Stage(0, 2, (0, 1, 2), cp=3), Stage(2, 5, (3,))), (Stage(0, 4, (0, 1, 2), cp=3),))
    texts = ((3, (3,)), (2, (0,)), (9, (1,)), (2, (0,)), (2, (0,)), (5, (2,)))
    check_case(workers, case_of(plan, zero_bubble_h1, attention="bidirectional", texts=texts), zero, 1)


def test_rows_shorter_than_their_ranks(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 3, (0, 1, 2, 3), cp=4), Stage(3, 4, (4, 5), cp=2)))
    texts = ((2, (0,)), (1, (0,)), (3, (0,)), (2, (0,)), (2, (1,)), (2, (0,)))
    single = ((0, 1), (2,), (3,), (4, 5))
    assignment = replace(CASE.assignment, microbatches={"vision": (single,), "language": (single,)})
    case = case_of(plan, attention="causal", texts=texts, assignment=assignment, frozen=("language",))
    check_case(workers, case, "none", 1)


def test_ranks_without_encoder_rows_join_backward_collectives(workers: WorkerPool) -> None:
    """With a frozen language model only encoder rows need gradients, and attention computes them in collectives."""
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2, 3, 4), cp=4),))
    texts = ((60, (1,)), (30, (0,)), *(((40, (0,)),) * 4))
    check_case(workers, case_of(plan, attention="causal", texts=texts, frozen=("language",)), "none", 1)


def _needed(worker: Worker, case: Case) -> dict[int, frozenset[str]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    step = runtime.prepare(build_samples(case), case.assignment, case.schedule)
    needed = DecodeRequirements(runtime.model, case.plan, comm.rank).of(step)
    runtime.close()
    comm.close()
    return needed


def test_rank_decodes_only_samples_it_encodes(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0, 1), cp=2),), (Stage(0, 4, (2,)),))
    case = case_of(plan, texts=((3, (2,)), (2, (0,)), (9, (2,)), (2, (1,)), (2, (1,)), (5, (2,))))
    first, second, _ = workers.run(_needed, 3, case)
    # The two ranks encode of samples 0 and 1: one item each; of 2 and 3: two (of 2) and one; of 4 and 5: two and one.
    assert sorted(first) == [0, 2, 4, 5]
    assert sorted(second) == [0, 3, 5]
    assert {*first.values(), *second.values()} == {frozenset({"vision"})}


def _in_parts(actions: tuple[Action, ...], stage: int) -> tuple[Action, ...]:
    """Return the actions, with those of `stage` repeated for each sample of their microbatch."""
    parts = []
    for action in actions:
        samples = BATCHES[action.microbatch] if action.stage == stage else (None,)
        parts += [action if s is None else msgspec.structs.replace(action, samples=(s,)) for s in samples]
    return tuple(parts)


def test_parts_of_a_microbatch_share_their_own_items(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0, 1), cp=2),), (Stage(0, 4, (2,)),))
    case = case_of(plan, texts=((3, (2,)), (2, (0,)), (9, (2,)), (2, (1,)), (2, (1,)), (5, (2,))))
    parts = {rank: _in_parts(actions, 0) for rank, actions in case.schedule.actions.items()}
    case = replace(case, schedule=Schedule(parts))
    first, second, _ = workers.run(_needed, 3, case)
    assert (sorted(first), sorted(second)) == ([0, 2, 3, 4, 5], [0, 2, 5])
    check_case(workers, case, "none", 1)


def test_generators_get_their_rows_from_whoever_has_them(workers: WorkerPool) -> None:
    units = (
        UnitPlan("language", (Replica((Stage(0, 2, (0, 1), cp=2), Stage(2, 4, (2, 3, 4), cp=3))),), ("height",)),
        UnitPlan("height", (Replica((Stage(0, 1, (5,)), Stage(1, 2, (0, 1), cp=2))),)),
    )
    changes = {"encoders": (), "texts": ((6, ()),) * 6, "drawn": ((1,), (0,), (2,), (0,), (0,), (3,))}
    generators = (("height", 6, "linear", 0.5),)
    assignment = Assignment({"language": (BATCHES,), "height": (BATCHES,)})
    case = case_of(Plan(units), attention="causal", generators=generators, assignment=assignment, **changes)
    check_case(workers, case, "none", 1)


@pytest.mark.slow
def test_routers_lose_by_whole_samples(workers: WorkerPool) -> None:
    check_case(workers, case_of(TWO, language="mixtral", attention="causal", recompute="block"), "none", 1)


HYBRID = {"language": "qwen3_5_text", "language_layers": 3, "attention": "causal"}


WITHIN = (Stage(0, 3, (0, 1, 2), cp=3), Stage(3, 5, (3, 4), cp=2))
HEADS = (Stage(0, 4, (1, 2, 3, 4), tp=2, cp=2), Stage(4, 5, (5, 6), tp=2))


@pytest.mark.parametrize(
    ("stages", "recompute", "family"),
    [
        (WITHIN, "none", one_f_one_b),
        pytest.param(HEADS, "block_keep_attention", zero_bubble_h1, marks=pytest.mark.slow),
        pytest.param(WITHIN, "block_keep_attention", one_f_one_b, marks=pytest.mark.slow),
        pytest.param(HEADS, "block", one_f_one_b, marks=pytest.mark.slow),
        pytest.param(HEADS, "none", one_f_one_b, marks=pytest.mark.slow),
    ],
)
def test_states_of_linear_attention_pass_between_ranks(
    workers: WorkerPool, stages: tuple[Stage, ...], recompute: str, family: Any
) -> None:
    """Samples end within a rank, continue on the next, or span three; some ranks have only some of the heads."""
    plan = plan_of((Stage(0, 5, (0,)),), stages)
    texts = ((3, (1,)), (17, (0,)), (40, (1,)), (2, (0,)), (9, (1,)), (13, (2,)))
    changes = {"texts": texts, "recompute": recompute, "rows_of_piece": 3 if recompute == "none" else None}
    check_case(workers, case_of(plan, family, **changes, **HYBRID), "none", 1)


def test_states_pass_along_rows_shorter_than_their_ranks(workers: WorkerPool) -> None:
    """Parts of rows are shorter than the convolution's kernel, and some ranks have no tokens."""
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 5, (1, 2, 3, 4), cp=4),))
    texts = ((2, (0,)), (1, (0,)), (3, (0,)), (9, (0,)), (6, (1,)), (2, (0,)))
    single = ((0, 1), (2,), (3,), (4, 5))
    assignment = replace(CASE.assignment, microbatches={"vision": (single,), "language": (single,)})
    check_case(workers, case_of(plan, texts=texts, assignment=assignment, **HYBRID), "none", 1)


def test_states_begin_anew_with_each_sample_of_a_row(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 5, (0,)),))
    check_case(workers, case_of(plan, zero_bubble_h1, **HYBRID), "none", 1)


@pytest.mark.parametrize(
    "frozen", [("language",), pytest.param(("language.layers.*.linear_attn.*", "vision"), marks=pytest.mark.slow)]
)
def test_ranks_with_frozen_layer_still_send_state_gradients(workers: WorkerPool, frozen: tuple[str, ...]) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 5, (0, 1), cp=2),))
    check_case(workers, case_of(plan, frozen=frozen, **HYBRID), "none", 1)


def test_dropout_is_drawn_by_token(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 2, (0, 1), cp=2), Stage(2, 5, (2,))), (Stage(0, 4, (0, 1), cp=2),))
    changes = {"language": "phi", "attention": "causal", "dropout": 0.3, "recompute": "block"}
    check_case(workers, case_of(plan, **changes), "none", 1)


def _predicts(worker: Worker, case: Case, diverged: bool = False) -> dict[int, tuple[list[int], list[float]]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    if diverged:
        with torch.no_grad():
            for parameter in runtime.parameters.values():
                parameter.fill_(float("nan"))
    said = {number: (one.tokens, one.losses) for number, one in runtime.predict(build_samples(case)).items()}
    runtime.close()
    comm.close()
    return said


PREDICTED = case_of(TWO, attention="embedded", texts=((30, (1,)),) * 6)


def test_predictions_are_told_once_and_in_the_order_of_the_row(workers: WorkerPool) -> None:
    one = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (0,)),))
    (expected,) = workers.run(_predicts, 1, case_of(one, attention="embedded", texts=PREDICTED.texts))
    (said,) = filter(None, workers.run(_predicts, len(TWO.ranks), PREDICTED))
    assert {number: tokens for number, (tokens, _) in said.items()} == {
        number: tokens for number, (tokens, _) in expected.items()
    }
    for number, (_, losses) in said.items():
        assert losses == pytest.approx(expected[number][1], rel=1e-4)  # fp32 sums in another order


def test_a_diverged_model_predicts_nan_for_every_target(workers: WorkerPool) -> None:
    (said,) = filter(None, workers.run(_predicts, len(TWO.ranks), PREDICTED, True))
    targets = [int((sample.labels[1:] >= 0).sum()) for sample in build_samples(PREDICTED)]
    assert [len(said[number][1]) for number in range(len(targets))] == targets
    assert all(map(math.isnan, (loss for _, losses in said.values() for loss in losses)))


def test_what_ranks_cannot_share_is_refused_in_a_line() -> None:
    case = case_of(TWO)  # transformers' own attention
    model = build_model(case, "meta")
    with pytest.raises(UserError, match=r"language: context parallelism needs attention over block tables.*cp: 1"):
        require_trainable(TWO, model.units)
    use_row_attention(model)
    require_trainable(TWO, model.units)
    model.language.before_language_model = lambda rows, inputs: inputs
    with pytest.raises(UserError, match="before_language_model is given whole rows"):
        require_trainable(TWO, model.units)
