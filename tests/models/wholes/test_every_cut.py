"""Any cut of any family gives the loss and the gradients of the whole model, and the family's proof passes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from cases.cut_wholes import opened
from cases.often import often
from cases.tiny_models import LANGUAGE_MODELS, gradients
from cases.tiny_wholes import WHOLES
from cases.whole_samples import samples_of
from dilatant.data.sample import EncodedSample
from dilatant.models.core.stage import StepData
from dilatant.models.multimodal import MultimodalModel

_TINY = {key: value for key, value in LANGUAGE_MODELS["llama"].items() if key != "model_type"}
PLAIN = {
    **LANGUAGE_MODELS,
    "gpt_neox": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    "granite": {**_TINY, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "mixtral": {**_TINY, "num_local_experts": 2},
}
HYBRID = {
    "qwen3_next": {
        **_TINY,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    },
    "falcon_mamba": {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3},
    "lfm2": {**_TINY, "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]},
}
KINDS = ("qwen3_vl", "mllama", "idefics3", "qwen2_audio")
"""Rows behind several layers, images that layers read beside the text, one block, and sounds."""
FAMILIES = {**{f"whole {name}": {} for name in WHOLES}, **PLAIN, **HYBRID}


@cache
def model_of(family: str) -> MultimodalModel:
    """Return the model with the attention that is chosen for it."""
    if family.startswith("whole "):
        return opened(family.removeprefix("whole "))
    return MultimodalModel({}, {"model_type": family, **FAMILIES[family]}, seed=0)


def texts(model: MultimodalModel) -> list[EncodedSample]:
    """Return two samples of text."""
    ids = [np.random.default_rng(length).integers(3, 60, length) for length in (9, 14)]
    return [EncodedSample(f"{len(own)}", own, np.append(-100, own[1:]), sizes={"language": len(own)}) for own in ids]


def loss_of(model: MultimodalModel, samples: list[EncodedSample], borders: dict[str, list[int]]) -> torch.Tensor:
    """Return the loss of the samples, each a microbatch, through stages between these layers of each unit."""
    data = StepData.of(samples, model.graph.losses)
    total = torch.zeros(())
    for number in range(len(samples)):
        inbound: dict[str, torch.Tensor] = {}
        for name, unit in model.units.items():
            arrived = dict(inbound)
            for first, end in zip(borders[name], borders[name][1:], strict=False):
                output = unit.stage(first, end).run(data, (number,), arrived)
                arrived = {} if (rows := output.rows_for(name)) is None else {name: rows}
            if (rows := output.rows_for("language")) is not None:
                inbound[name] = rows
        total = total + output.losses["language"]
    return total


def results_of(
    model: MultimodalModel, samples: list[EncodedSample], borders: dict[str, list[int]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and all gradients of the model cut at `borders`."""
    loss = loss_of(model, samples, borders)
    loss.backward()
    return loss.detach(), gradients(model)


def drawn_cuts(model: MultimodalModel, random: np.random.Generator) -> dict[str, list[int]]:
    """Draw borders of stages with at least one cut in every unit."""
    counts = {unit: len(each.layers) for unit, each in model.units.items()}
    return {
        unit: [0, *sorted(random.permutation(np.arange(1, count))[: random.integers(1, count)]), count]
        for unit, count in counts.items()
    }


@pytest.mark.parametrize("cuts", [1, pytest.param(6, marks=pytest.mark.slow)], ids=["one", "many"])
@pytest.mark.parametrize(
    "family",
    # test_stages.py chains the stages of the most common families, and test_whole_models_as_units.py those of others.
    often(FAMILIES, *({**PLAIN, **HYBRID}.keys() - LANGUAGE_MODELS), *(f"whole {name}" for name in KINDS)),
)
def test_any_cut_trains_like_the_whole(family: str, cuts: int) -> None:
    model = model_of(family)
    samples = samples_of(model)[:2] if family.startswith("whole ") else texts(model)
    random = np.random.default_rng([cuts, *family.encode()])
    whole, expected = results_of(model, samples, {unit: [0, len(each.layers)] for unit, each in model.units.items()})
    for borders in (drawn_cuts(model, random) for _ in range(cuts)):
        cut, found = results_of(model, samples, borders)
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=0)
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            # Products are the same and in the same order, but autograd may add branches in another order.
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=f"{key} under {borders}")
    # Without its encoder, Qwen2-Audio's forward accepts only embeddings, so the proof on a small copy cannot run.
    if family.startswith("whole ") and family != "whole qwen2_audio":
        proof = model.language.proof
        assert proof is not None
        assert (proof.packed, proof.cut, proof.alone, proof.unproven) == (None, None, None, None)
