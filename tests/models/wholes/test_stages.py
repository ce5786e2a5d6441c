"""Stages chained at any cut are the whole unit, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.tiny_models import (
    ENCODER_FAMILIES,
    ENCODERS,
    LANGUAGE_FAMILIES,
    LANGUAGE_MODELS,
    gradients,
    language_only,
    positions,
    tokens,
    vision_language,
)
from dilatant.models.core.geometry import encoder_geometry
from dilatant.models.core.slicing import ShapePlaceholder, SkippedBlock, run_slice
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.multimodal import Encoder, MultimodalModel

# Chained backward adds the same products in the same order, but autograd may join branches in another one.
GRADIENT = {"rtol": 1e-5, "atol": 1e-7}

built = cache(vision_language)
"""Models that tests read, each built once."""


@st.composite
def cuts(draw: st.DrawFn, layers: int) -> list[tuple[int, int]]:
    """Draw (first, end) layers of stages: one stage per layer, or random cuts."""
    everywhere = st.just(set(range(1, layers)))
    inner = sorted(draw(everywhere | st.sets(st.integers(1, layers - 1), min_size=1)))
    return list(zip([0, *inner], [*inner, layers], strict=True))


def chain_language(unit: LanguageUnit, spans: list[tuple[int, int]], ids, rows, **arguments):
    hidden = None
    for first, end in spans:
        stage = unit.stage(first, end)
        hidden = stage(ids if first == 0 else None, rows if first == 0 else None, hidden, **arguments)
    return hidden


def chain_encoder(unit: EncoderUnit, spans: list[tuple[int, int]], inputs):
    hidden = None
    for first, end in spans:
        hidden = unit.stage(first, end)(inputs if first == 0 else None, hidden)
    return hidden


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
@settings(max_examples=2, deadline=None, print_blob=True)
@given(data=st.data())
def test_language_stages_chain_to_the_whole(family: str, data: st.DataObject) -> None:
    mllm = built(family)
    unit = mllm.language
    spans = data.draw(cuts(len(unit.layers)))
    placeholder = mllm.placeholder_ids["vision"]
    ids = torch.cat([tokens(1, 5), torch.full((1, 16), placeholder), tokens(1, 9, seed=1)], dim=1)
    labels = tokens(1, 30, seed=2)
    rows = {"vision": torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()}
    arguments = {"position_ids": positions(24, 6), "labels": labels}
    whole = unit(ids, rows, **arguments)
    whole.loss.backward()
    expected, expected_rows = gradients(unit), rows["vision"].grad.clone()
    rows["vision"].grad = None
    chained = chain_language(unit, spans, ids, rows, **arguments)
    assert torch.equal(chained.logits, whole.logits)
    assert torch.equal(chained.loss, whole.loss)
    chained.loss.backward()
    found = gradients(unit)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **GRADIENT, msg=name)
    torch.testing.assert_close(rows["vision"].grad, expected_rows, **GRADIENT)


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
@settings(max_examples=2, deadline=None, print_blob=True)
@given(data=st.data())
def test_encoder_stages_chain_to_the_whole(family: str, data: st.DataObject) -> None:
    unit = built(encoder=family)["vision"]
    geometry = encoder_geometry(unit.model.config)
    spans = data.draw(cuts(len(unit.layers)))
    inputs = {geometry.input_name: torch.randn(3, *geometry.row_shape, generator=torch.Generator().manual_seed(1))}
    weights = torch.randn(geometry.tokens_per_row, 32, generator=torch.Generator().manual_seed(2))
    whole = unit(inputs)
    (whole * weights).sum().backward()
    expected = gradients(unit)
    chained = chain_encoder(unit, spans, inputs)
    assert torch.equal(chained, whole)
    (chained * weights).sum().backward()
    found = gradients(unit)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **GRADIENT, msg=name)


def test_an_odd_cut_keeps_each_layer_s_own_attention() -> None:
    """Full and sliding layers alternate: stages that numbered their layers from 0 would swap them."""
    unit = language_only("gemma2").language
    kinds = unit.model.config.layer_types
    assert kinds[:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    ids, where = tokens(1, 20), positions(20)  # longer than the window, so the kinds differ
    hidden = unit.stage(0, 2)(ids, position_ids=where)
    hidden = unit.stage(2, 7)(hidden=hidden, position_ids=where)
    assert torch.equal(hidden.logits, unit(ids, position_ids=where).logits)


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_padded_batches_run_through_stages_too(family: str) -> None:
    unit = built(family).language
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    ids = tokens(2, 9)
    chained = chain_language(unit, [(0, 3), (3, 4), (4, 7)], ids, None, attention_mask=mask)
    assert torch.equal(chained.logits, unit(ids, attention_mask=mask).logits)


def test_a_stage_shares_weights_and_holds_no_others() -> None:
    mllm = built("llama")
    for unit in mllm.units.values():
        whole = dict(unit.named_logical_parameters())
        held: set[str] = set()
        for index in range(len(unit.layers)):
            stage = unit.stage(index, index + 1)
            named = dict(stage.named_logical_parameters())
            assert all(parameter is whole[name] for name, parameter in named.items())
            assert {id(p) for p in stage.parameters()} == {id(p) for p in named.values()}
            assert not held & named.keys()
            held |= named.keys()
        assert held == whole.keys()


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_logical_names_map_one_to_one_onto_the_state_dict(family: str) -> None:
    unit = built(family).language
    assert {weight.key for weight in unit.weights} == set(unit.model.state_dict())
    assert len({weight.name for weight in unit.weights}) == len(unit.weights)
    assert all(weight.name.startswith(weight.layer + ".") for weight in unit.weights)
    assert list(dict.fromkeys(weight.layer for weight in unit.weights)) == list(unit.layers)


@pytest.mark.parametrize("family", ENCODERS)
def test_logical_encoder_names_map_one_to_one_to_state_dicts(family: str) -> None:
    unit = built(encoder=family)["vision"]
    for part in ("model", "projector"):
        keys = [weight.key for weight in unit.weights if weight.part == part]
        assert sorted(keys) == sorted(getattr(unit, part).state_dict())
    assert len({weight.name for weight in unit.weights}) == len(unit.weights)


def test_names_say_unit_layer_and_weight() -> None:
    mllm = built("llama")
    assert mllm["vision"].layers == (
        "vision.embedding",
        *(f"vision.layers.{i}" for i in range(4)),
        "vision.norm",
        "vision.projector",
    )
    assert mllm.language.layers == ("language.embedding", *(f"language.layers.{i}" for i in range(5)), "language.head")
    keys = {weight.name: weight.key for weight in (*mllm["vision"].weights, *mllm.language.weights)}
    assert keys["vision.layers.2.mlp.fc1.weight"] == "encoder.layers.2.mlp.fc1.weight"
    assert keys["vision.projector.0.bias"] == "0.bias"
    assert keys["language.embedding.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert keys["language.head.lm_head.weight"] == "lm_head.weight"


def test_a_tied_weight_is_one_logical_weight_held_twice() -> None:
    unit = language_only("llama_tied").language
    name = "language.embedding.embed_tokens.weight"
    assert unit.tied == {"language.head.lm_head.weight": name}
    first, last = unit.stage(0, 3), unit.stage(3, 7)
    assert dict(first.named_logical_parameters())[name] is dict(last.named_logical_parameters())[name]
    assert "language.head.lm_head.weight" not in dict(unit.named_logical_parameters())
    assert language_only("llama").language.tied == {}


def test_a_stage_outside_the_unit_is_refused() -> None:
    unit = language_only().language
    for first, end in ((-1, 2), (2, 2), (0, 8)):
        with pytest.raises(ValueError, match="is not a stage"):
            unit.stage(first, end)


def test_a_weight_outside_all_modules_stays_with_the_embedding() -> None:
    model = vision_language()["vision"].model
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    unit = MultimodalModel({"vision": Encoder(model)}, LANGUAGE_MODELS["llama"], seed=0)["vision"]
    assert "scale" in dict(unit.stage(0, 2).model.named_parameters())
    assert "scale" not in dict(unit.stage(2, 7).model.named_parameters())


def run_around_a_skipped_block(forward: Callable[[SkippedBlock], None]) -> tuple[list[int], SkippedBlock]:
    """Run a forward on a slice whose only block before the stage is skipped; return its widths at each call."""
    skipped = SkippedBlock(torch.nn.Identity(), 0, "last before")
    widths: list[int] = []

    def once(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(skipped.width)
        forward(skipped)
        return hidden

    blocks = torch.nn.ModuleList([skipped, torch.nn.Identity()])
    with suppress(ValueError):
        run_slice(once, torch.ones(1, 2, 3), blocks, enters=True, ends=False)
    return widths, skipped


def test_an_error_of_a_familys_forward_is_raised_at_once() -> None:
    def fails(skipped: SkippedBlock) -> None:
        skipped(torch.ones(1, 2, 3))
        raise ValueError("an error of the family")

    widths, skipped = run_around_a_skipped_block(fails)
    assert (widths, skipped.width) == ([0], 0)


def test_a_skipped_block_returns_as_many_values_as_the_family_unpacks() -> None:
    def unpacks(skipped: SkippedBlock) -> None:
        _, two, three = skipped(torch.ones(1, 2, 3))
        assert two is three is None

    widths, skipped = run_around_a_skipped_block(unpacks)
    assert (widths, skipped.width) == ([0, 3], 3)


def test_an_error_of_a_forward_changes_nothing_about_skipped_blocks() -> None:
    def fails(skipped: SkippedBlock) -> None:
        _, _ = skipped(torch.ones(1, 2, 3))
        raise ValueError("an error of the family")

    widths, skipped = run_around_a_skipped_block(fails)
    assert (widths, skipped.width) == ([0, 2], 0)


class Reads(torch.nn.Module):
    """Repeats its input along the tokens: by a number, and by the values of a tensor."""

    def forward(self, hidden: torch.Tensor, times: int, sizes: torch.Tensor) -> torch.Tensor:
        return hidden.repeat(1, times + int(sizes.sum()), 1)


class Counts(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, times: int) -> torch.Tensor:
        return hidden.repeat(1, times, 1)


def test_a_placeholder_of_shapes_follows_all_that_decides_them() -> None:
    hidden = torch.ones(1, 2, 3)
    counts, reads = ShapePlaceholder(Counts()), ShapePlaceholder(Reads())
    assert [counts(hidden, times).shape[1] for times in (1, 2, 1)] == [2, 4, 2]
    sizes = [torch.tensor([1, value]) for value in (1, 3, 1)]
    assert [reads(hidden, 1, each).shape[1] for each in sizes] == [6, 10, 6]
