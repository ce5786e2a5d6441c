"""Whole vision-language models as units compute what transformers computes for each sample alone: packed in one row,
cut between all layers, logits' loss and every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from cases.cut_wholes import LOSS_TOLERANCE, TOLERANCE, differences, losses_of, opened
from cases.tiny_wholes import WHOLES, whole_config
from cases.whole_samples import sample_of, samples_of
from dilatant.config.errors import UserError
from dilatant.models.core.cross_attention import visible_tiles
from dilatant.models.families.families import FAMILIES
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.runtime.layouts import context_problems

DEFAULT = ("gemma3", "gemma4", "mllama", "qwen2_5_vl", "qwen2_5_omni_thinker")
WHOLE = ("qwen2_5_vl",)


@pytest.mark.parametrize(
    ("cut", "family"),
    [
        pytest.param(cut, family, id=f"{how}-{family}", marks=() if family in kept else pytest.mark.slow)
        for cut, how, kept in ((False, "whole", WHOLE), (True, "cut", DEFAULT))
        for family in WHOLES
    ],
)
def test_packed_mixed_layouts_train_like_transformers_alone(family, cut):
    found = differences(family, cut)
    assert found.loss <= LOSS_TOLERANCE
    assert found.gradient <= TOLERANCE, found.weight


def test_another_sample_changes_nothing_of_one_beside_it():
    """Images of neighbours that touch are not one image."""
    ours = opened("gemma3")
    first, second = (sample_of(ours, number, [("image", 2, 2), ("text", 5)]) for number in (0, 1))
    alone = losses_of(ours, [first], cut=False) * first.target_tokens
    other = losses_of(ours, [second], cut=False) * second.target_tokens
    both = losses_of(ours, [first, second], cut=False) * (first.target_tokens + second.target_tokens)
    torch.testing.assert_close(both, alone + other, rtol=1e-5, atol=1e-5)


def test_a_family_that_is_not_known_says_what_is_missing():
    config = whole_config("llava").text_config
    with pytest.raises(UserError, match=r"'llama' is not a family that opens whole.*under model.language_model"):
        PretrainedModel.of(config, "model.id")


def test_every_family_has_a_tiny_model_that_is_tested():
    assert set(FAMILIES) == set(WHOLES)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("effective", {"use_bidirectional_attention": None, "use_double_wide_mlp": True}),
        ("dense", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}),
        (
            "experts",
            {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
            },
        ),
    ],
)
@pytest.mark.slow
def test_every_kind_of_gemma_4_is_exact(monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict) -> None:
    text = {**WHOLES["gemma4"]["text_config"], **changes}
    monkeypatch.setitem(WHOLES, "gemma4", {**WHOLES["gemma4"], "text_config": text})
    found = differences("gemma4", cut=True)
    assert found.loss <= LOSS_TOLERANCE
    # Softmaxes without a scale make more of rounding: in float64 all of them agree to 4e-6.
    assert found.gradient <= 10 * TOLERANCE, found.weight


def test_ranks_sharing_tokens_share_vision_rows_evenly() -> None:
    whole = opened("mllama")
    unit, sample = whole.language, samples_of(whole)[0]
    assert context_problems(unit) == []
    tokens, rows = len(sample.input_ids), sample.sizes["vision"]
    at = unit.element_of_row("vision", sample, rows)
    each = np.bincount(at, minlength=tokens)
    assert (len(at), len(each)) == (rows, tokens)
    assert each.max() - each.min() <= 1
    passing = unit.element_of_row("language", sample, tokens + rows)
    np.testing.assert_array_equal(passing, [*range(tokens), *at])


def test_tokens_see_the_same_tiles_as_in_the_family_processor() -> None:
    for ids in ([9, 1, 2, 9, 9, 3], [1, 9, 9, 9], [9], [1, 9, 2, 9], [9, 9, 1, 2, 9, 3, 3]):
        tiles = np.arange(4) < 1 + np.arange(ids.count(9))[:, None] % 4
        spans = get_cross_attention_token_mask(ids, 9)
        counts = [tiles.sum(1).tolist()]
        expected = convert_sparse_cross_attention_mask_to_dense([spans], counts, 4, len(ids))[0]
        np.testing.assert_array_equal(visible_tiles(np.array(ids), 9, tiles.astype(np.int64)), expected)


def test_layers_are_named_as_those_of_other_models():
    model = opened("llava")
    assert model["vision"].layers == (
        "vision.embedding",
        "vision.layers.0",
        "vision.layers.1",
        "vision.layers.2",
        "vision.projector",
    )  # the fourth block is behind the layer that LLaVA looks at
    model.freeze(["vision.encoder", "language.layers.0"])
    trains = {name for unit in model.units.values() for name, p in unit.named_logical_parameters() if p.requires_grad}
    assert not any(name.startswith(("vision.layers", "language.layers.0")) for name in trains)
    assert any(name.startswith("vision.projector") for name in trains)
    assert np.all([name.count("language_model") == 0 for name in trains])
