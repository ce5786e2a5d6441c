"""Losses of pairs have the values and gradients of transformers' models that run on each answer, under every layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.engine_case import CASE, VOCABULARY, Case, build_model
from dilatant import ParallelSpec, parallelize
from dilatant.comm import launch
from dilatant.config import UserError
from dilatant.config.train import PreferencesConfig
from dilatant.data.sample import EncodedSample
from dilatant.models.language.pair_loss import with_margins
from dilatant.training.feeding.feed import StepInput
from dilatant.training.references import complete_samples, score_pairs
from harness.checked_steps import COMMON, Allowed, assert_close, part_of
from harness.worker_pool import Worker, WorkerPool
from oracles.engine_step import _seen_in
from oracles.one_process import losses_of_batch

LAYOUTS = {
    "one process": ParallelSpec(),
    "pipeline": ParallelSpec(pp=2),
    "replicas": ParallelSpec(replicas=2),
    "tensor": ParallelSpec(tp=2),
    "context": ParallelSpec(cp=2),
}
MERGED = 4
"""Tokens of a picture in the encoder, and in the text."""
PAIRS = ((5, 1, 4, 2), (3, 0, 1, 6), (9, 2, 3, 3), (2, 1, 7, 5))
"""For each pair: text tokens of the prompt, its pictures, and tokens of the chosen and of the rejected answer."""


def documents(seed: int, number: int) -> list[Any]:
    """Return both answers of a pair, each behind its prompt, as a model alone would read them."""
    text, pictures, *answers = PAIRS[number]
    random = np.random.default_rng((seed, number))
    prompt = random.integers(3, VOCABULARY, text).tolist()
    for _ in range(pictures):
        prompt[1:1] = [VOCABULARY] * MERGED
    pixels = random.standard_normal((pictures, 3, 8, 8)).astype(np.float32)
    media = {"vision": {"pixel_values": pixels}} if pictures else {}
    found = []
    for length in answers:
        answer = random.integers(3, VOCABULARY, length).tolist()
        labels = [-100] * len(prompt) + answer
        found.append(SimpleNamespace(input_ids=np.array(prompt + answer), labels=np.array(labels), media=media))
    return found


MARKS = (True, False, False, True)
"""For KTO, whether each pair's first answer is desired; the second one tells the divergence."""
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}


def references(number: int, method: str) -> tuple[float, float]:
    # Random models give every token about 1 / 30, so that answers have -7 to -20: the divergence of KTO is above 0.
    return -2.0 - number, -20.0 if method == "kto" else -3.5 + number


def pairs(seed: int, shares: bool, method: str = "dpo") -> list[EncodedSample]:
    """Return the pairs as rows of a step have them."""
    found = []
    for number, (text, pictures, *_) in enumerate(PAIRS):
        chosen, rejected = documents(seed, number)
        shared = text + MERGED * pictures - 1 if shares else 0
        copies = pictures if shares else 2 * pictures
        media = {
            name: {key: np.concatenate([each] * (copies // pictures)) for key, each in inputs.items()}
            for name, inputs in chosen.media.items()
        }
        ids = np.concatenate([chosen.input_ids, rejected.input_ids[shared:]])
        labels = np.concatenate([chosen.labels, rejected.labels[shared:]])
        sizes = {"language": len(ids), **({"vision": MERGED * copies} if pictures else {})}
        found.append(
            EncodedSample(
                f"pair-{number}",
                ids,
                labels,
                media,
                sizes,
                number + 1,
                branch=(shared, len(chosen.input_ids)),
                reference=references(number, method),
                desired=MARKS[number] if method == "kto" else None,
            )
        )
    return found


def loss_by_hand(method: str, chosen: Tensor, rejected: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return a pair's loss and the difference of its rewards, as the papers write them, with the default settings.
    chosen, rejected: log-probabilities."""
    first, second = references(number, method)
    many, few = PAIRS[number][2:]
    if method == "dpo":
        margin = 0.1 * ((chosen - first) - (rejected - second))
        return -torch.log(1 / (1 + torch.exp(-margin))), margin
    if method == "ipo":
        margin = (chosen - first) / many - (rejected - second) / few
        return (margin - 1 / 0.2) ** 2, 0.1 * ((chosen - first) - (rejected - second))
    if method == "simpo":
        margin = 2 * chosen / many - 2 * rejected / few
        return -torch.log(1 / (1 + torch.exp(1 - margin))), margin
    likely = torch.exp(chosen / many), torch.exp(rejected / few)
    odds = [each / (1 - each) for each in likely]
    ratio = torch.log(odds[0] / odds[1])
    return -0.1 * torch.log(1 / (1 + torch.exp(-ratio))) - chosen / many, 0.1 * (chosen / many - rejected / few)


def kto_by_hand(sums: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return each answer's loss, and what its reward adds to the difference of the mean rewards, as the paper writes
    them (equations 7 and 8), with the divergence of the whole batch."""
    known = [references(number, "kto") for number in range(len(sums))]
    apart = [float(both[1].detach()) - own[1] for both, own in zip(sums, known, strict=True)]
    divergence = max(0.0, sum(apart) / len(apart))
    assert divergence > 0.5
    found = []
    for both, own, mark in zip(sums, known, MARKS, strict=True):
        moved = both[0] - own[0] - divergence
        value = 1 / (1 + torch.exp(-0.1 * (moved if mark else -moved)))
        weight = WEIGHTS["desirable_weight" if mark else "undesirable_weight"]
        found.append((weight * (1 - value), (2 if mark else -2) * 0.1 * (both[0] - own[0])))
    return found


def expected(case: Case, method: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return the mean loss and margin, each pair's log-probabilities, and the gradients."""
    model = build_model(case, plain=True)
    units: Any = model.units
    encoders = {"vision": (units["vision"].model, units["vision"].projector, units["vision"].skip_tokens)}
    seen_in = None if case.attention in (None, "causal") else lambda sample: _seen_in(case, sample)
    sums = []
    for number in range(len(PAIRS)):
        both = [
            -len(document.labels[document.labels != -100])
            * losses_of_batch(units["language"].model, encoders, model.placeholder_ids, [document], seen_in)["language"]
            for document in documents(case.seed, number)
        ]
        sums.append(both)
    judged = [loss_by_hand(method, *both, number) for number, both in enumerate(sums) if method != "kto"]
    judged = judged or kto_by_hand(sums)
    loss, margin = (torch.stack(each).mean() for each in zip(*judged, strict=True))
    loss.backward()
    parameters = {name: p for unit in units.values() for name, p in unit.named_logical_parameters()}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    known = torch.tensor([[each.item() for each in both] for both in sums])
    return loss.detach(), margin.detach(), known, gradients


def _step(
    pooled: Worker | None, case: Case, language: ParallelSpec, method: str, shares: bool, microbatches: int = 2
) -> Any:
    worker = None
    if pooled is not None:
        worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    model = build_model(case, "meta")
    weights: Any = WEIGHTS if method == "kto" else {}
    model.use_preferences(PreferencesConfig(method=method, share_prompt=shares, **weights))  # type: ignore[arg-type]
    runtime = parallelize(
        model,
        {"language": language, "vision": ParallelSpec()},
        colocated={"vision": "language"} if language == ParallelSpec() else None,
        worker=worker,
        num_microbatches=microbatches,
        seed=case.seed,
    )
    samples = pairs(case.seed, shares, method)
    batch: Any = SimpleNamespace(samples=samples)
    scores = score_pairs(runtime, StepInput(batch, runtime.plan_step(samples, forwards=True)))
    step = StepInput(batch, runtime.plan_step(samples))
    losses = with_margins(runtime.execute(complete_samples(runtime, step), step.step).losses)
    found = {key: p.grad.clone() for key, p in runtime.owned.parameters.items() if p.grad is not None}
    runtime.close()
    return losses, found, [scores[number][0] for number in range(len(samples))]


def check(case: Case, method: str, results: list[Any]) -> None:
    loss, margin, sums, gradients = expected(case, method)
    allowed = Allowed.of_case(case)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for losses, own, scores in results:
        assert losses["language"] == pytest.approx(loss.item(), rel=allowed.loss)
        # A difference of sums that are an order larger.
        assert losses["rewards/margins"] == pytest.approx(margin.item(), abs=10 * allowed.loss)
        assert losses["rewards/chosen"] - losses["rewards/rejected"] == pytest.approx(
            losses["rewards/margins"], abs=1e-5  # rounding of fp32 numbers of order 10
        )  # fmt: skip
        assert 0 <= losses["rewards/accuracies"] <= 1
        torch.testing.assert_close(torch.tensor(scores), sums, rtol=allowed.relative, atol=0)
        assert set(gradients) >= {key.partition("@")[0] for key in own}
        for key, gradient in own.items():
            theirs = part_of(gradients, key)
            assert_close(gradient, theirs, allowed.of(theirs, largest), f"gradient of {key}")


@pytest.mark.parametrize(
    ("layout", "method", "shares"),
    [
        ("pipeline", "dpo", True),
        ("tensor", "dpo", True),
        ("context", "simpo", False),
        ("pipeline", "kto", True),
        ("replicas", "kto", True),
        pytest.param("tensor", "kto", True, marks=pytest.mark.slow),
        pytest.param("context", "kto", False, marks=pytest.mark.slow),
        pytest.param("replicas", "dpo", True, marks=pytest.mark.slow),
        pytest.param("context", "dpo", True, marks=pytest.mark.slow),
    ],
)
def test_pairs_are_the_same_under_every_layout(workers: WorkerPool, layout: str, method: str, shares: bool) -> None:
    case = replace(CASE, loss_chunk=3, attention="causal")
    check(case, method, workers.run(_step, 3, case, LAYOUTS[layout], method, shares))


@pytest.mark.slow
@settings(max_examples=24, **COMMON)
@given(st.data())
def test_pairs_are_the_same_under_drawn_layouts(workers: WorkerPool, data: Any) -> None:
    divided = data.draw(st.lists(st.sampled_from(["replicas", "pp", "tp", "cp"]), min_size=1, max_size=2, unique=True))
    language = ParallelSpec(**dict.fromkeys(divided, 2))
    case = replace(
        CASE,
        attention="causal",
        loss_chunk=data.draw(st.sampled_from([None, 1, 3])),
        seed=data.draw(st.integers(0, 10**6)),
        tied=data.draw(st.booleans()),
    )
    method = data.draw(st.sampled_from(["dpo", "ipo", "simpo", "orpo", "kto"]))
    microbatches = data.draw(st.integers(1, len(PAIRS) // language.replicas))
    ranks = 2 ** len(divided) + 1  # vision has one of its own
    check(case, method, workers.run(_step, ranks, case, language, method, data.draw(st.booleans()), microbatches))


@pytest.mark.parametrize("method", ["ipo", "simpo", "orpo", "kto"])
def test_methods_have_the_losses_of_their_papers(method: str) -> None:
    case = replace(CASE, attention="causal")
    check(case, method, [_step(None, case, ParallelSpec(), method, shares=True)])


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        pytest.param({"attention": "bidirectional"}, True, marks=pytest.mark.slow),
        ({"attention": "embedded"}, True),
        ({"attention": "causal", "language": "gemma3_text", "settings": {"sliding_window": 5}}, True),
        ({"attention": None}, False),
        ({"attention": "causal", "language": "qwen3_5_text"}, False),
    ],
)
def test_pairs_train_under_every_kind_of_attention(changes: dict[str, Any], shares: bool) -> None:
    case = replace(CASE, **changes)
    check(case, "dpo", [_step(None, case, ParallelSpec(), "dpo", shares)])


@pytest.mark.parametrize("changes", [{"attention": None}, {"attention": "causal", "language": "qwen3_5_text"}])
def test_models_whose_answers_cannot_share_a_prompt_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"set train\.preferences\.share_prompt: false"):
        build_model(replace(CASE, **changes), "meta").use_preferences(PreferencesConfig())


@pytest.mark.parametrize(
    ("change", "problem", "method"),
    [
        ({"branch": None}, "pair-0: has one answer", "dpo"),
        ({"reference": None}, "pair-0: its log-probabilities by", "dpo"),
        ({"divergence": 1.0}, "pair-0: its mark or divergence is unknown", "kto"),
        ({"desired": True}, "pair-0: its mark or divergence is unknown", "kto"),
    ],
)
def test_a_sample_that_is_no_pair_is_named(change: dict[str, Any], problem: str, method: Any) -> None:
    model = build_model(replace(CASE, attention="causal"), "meta")
    model.use_preferences(PreferencesConfig(method=method))
    specs = {"language": ParallelSpec(), "vision": ParallelSpec()}
    runtime = parallelize(model, specs, colocated={"vision": "language"}, seed=CASE.seed)
    first, *others = pairs(CASE.seed, True)
    with pytest.raises(Exception, match=problem):
        runtime.execute([replace(first, **change), *others])
    runtime.close()
