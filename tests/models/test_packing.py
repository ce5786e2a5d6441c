"""Samples packed in one row see nothing of each other, in every family, sliding windows included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.tiny_models import (
    LANGUAGE_FAMILIES,
    LANGUAGE_MODELS,
    images,
    language_only,
    positions,
    tokens,
    vision_language,
)
from dilatant.models.language.packed_row import PackedRow

# fp32 sums over other padding of the same keys: a few roundings of logits of order 0.1.
TOLERANCE = {"rtol": 0, "atol": 1e-6}
OFTEN = (("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gemma3_text", "sdpa"))


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, attention, marks=() if (family, attention) in OFTEN else pytest.mark.slow)
        for family in LANGUAGE_MODELS
        for attention in ("sdpa", "eager")
    ],
)
def test_packed_logits_equal_transformers_sample_by_sample(family: str, attention: str) -> None:
    mllm = language_only(family)
    model = mllm.language.model
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{family} has no sdpa attention in transformers")
    model.set_attn_implementation(attention)
    lengths = (13, 1, 9, 7)  # longer and shorter than the window of 6
    samples = [tokens(1, length, seed=index) for index, length in enumerate(lengths)]
    packed = mllm(torch.cat(samples, dim=1), position_ids=positions(*lengths)).logits
    for sample, logits in zip(samples, packed.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(logits, model(input_ids=sample).logits, **TOLERANCE)


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_packed_gradients_equal_the_sum_over_samples_alone(family: str) -> None:
    mllm = vision_language(family)
    placeholder = torch.full((1, 16), mllm.placeholder_ids["vision"])
    samples = [
        torch.cat([tokens(1, 2), placeholder, tokens(1, 4, seed=1)], dim=1),
        tokens(1, 8, seed=2),
        torch.cat([placeholder, tokens(1, 1, seed=3), placeholder, tokens(1, 3, seed=4)], dim=1),
    ]
    pictures = [images(1), images(0), images(2, seed=1)]
    targets = sum(int((sample[:, 1:] < 64).sum()) for sample in samples)
    labels = [sample.where(sample < 64, -100) for sample in samples]
    total = 0.0
    for sample, label, picture in zip(samples, labels, pictures, strict=True):
        inputs = {"vision": {"pixel_values": picture}}
        loss = mllm(sample, encoder_inputs=inputs, labels=label, loss_denominator=targets).loss
        loss.backward()
        total += loss.item()
    alone = {name: p.grad.clone() for name, p in mllm.named_parameters() if p.grad is not None}
    mllm.zero_grad()
    loss = mllm(
        torch.cat(samples, dim=1),
        encoder_inputs={"vision": {"pixel_values": torch.cat(pictures)}},
        position_ids=positions(*(sample.shape[1] for sample in samples)),
        labels=torch.cat(labels, dim=1),
        loss_denominator=targets,
    ).loss
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-6)  # sums of fp32 terms in another order
    for name, parameter in mllm.named_parameters():
        # Gradients are sums over tokens in another order; the largest are of order 0.1.
        torch.testing.assert_close(parameter.grad, alone[name], rtol=1e-4, atol=1e-6, msg=name)


def test_attention_keywords_reach_the_attention_function() -> None:
    """A registered attention function gets the keywords of the caller, as other attention kernels need."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, kwargs["sample_of_token"].tolist()))
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("recording", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("recording", lambda *args, **kwargs: None)
    mllm = language_only()
    mllm.language.model.set_attn_implementation("recording")
    mllm(tokens(1, 4), position_ids=positions(3, 1), attention_kwargs={"sample_of_token": torch.tensor([0, 0, 0, 1])})
    assert seen == [(None, [0, 0, 0, 1])] * 5


class _TwoAlike:
    """Stand-in for a row that two ranks share, in which the other rank has the same values."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, own])


def test_values_of_all_ranks_are_put_together_whatever_they_are() -> None:
    share: Any = _TwoAlike()
    ids = torch.zeros(4, dtype=torch.int64)
    row = PackedRow(ids, ids, ids, ids, outputs={}, lengths=(8,), share=share)
    values = torch.tensor([float("nan"), 0.0, -3.0])
    whole = row.whole_row(values, torch.tensor([0, 2, 3]))
    torch.testing.assert_close(whole, values.repeat(2), equal_nan=True, rtol=0, atol=0)
