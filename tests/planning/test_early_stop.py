"""What the analytic model spares a recomputation is what torch's checkpoint spares the real block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS
from dilatant.config.model import LoraConfig
from dilatant.models.adapters.lora import inject
from dilatant.models.core.recompute import recompute
from dilatant.models.core.slicing import held_blocks
from dilatant.models.multimodal import Encoder, MultimodalModel
from dilatant.planning.measuring.layer_probes import layer_probe
from dilatant.planning.measuring.layer_shapes import counted_shapes
from dilatant.planning.problem.describe_model import BLOCK, LayerType, describe_model

LLAMA = LANGUAGE_MODELS["llama"]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": LLAMA,
    "gemma2": LANGUAGE_MODELS["gemma2"],
    "olmo2": {**LLAMA, "model_type": "olmo2", **SPECIAL},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, **SPECIAL},
}
EXPECTED = {"llama": 48 * 32, "gemma2": 0, "olmo2": 0, "mixtral": 0, "siglip": 48 * 24, "lora": 2 * 32}
"""By hand: an expert's output is weighted, and a norm after the last product reads its result; an adapter's second
product is the last."""


def products(block: torch.nn.Module, layer: Any, given: Any, keywords: Any, how: Any) -> tuple[int, int]:
    """Floating-point operations of matrix products in a forward, and in its backward."""
    recompute(block, how)
    found = []
    with FlopCounterMode(display=False) as counter:
        output = layer(*given, **keywords)
        for step in (lambda: None, lambda: output.float().sum().backward()):
            step()
            by_operator = counter.get_flop_counts()["Global"]
            found.append(sum(count for name, count in by_operator.items() if "attention" not in str(name)))
    return found[0], found[1] - found[0]


def spared(entry: Any, dtype: torch.dtype, how: str) -> tuple[int, int]:
    """Multiply-adds of a forward's products that its recomputation leaves out, and the block's tokens."""
    probe = layer_probe(entry, torch.device("cpu"), dtype)
    layer: Any = probe.build()
    given, keywords = probe.inputs(min(probe.tokens or (16,)))
    given[0].requires_grad_()
    (block,) = held_blocks(layer.stage.model.get_submodule(entry.unit.structure.blocks))
    layer(*given, **keywords)  # what a tower computes once, with its first picture
    forward, plain = products(block, layer, given, keywords, "none")
    again, both = products(block, layer, given, keywords, how)
    assert again == forward > 0
    return (forward - (both - plain)) // 2, given[0].shape[:-1].numel()


def described(family: str) -> list[tuple[LayerType, int]]:
    adapted = family == "lora"
    encoders = {"vision": Encoder(ENCODERS["siglip"])} if family == "siglip" else {}
    model = MultimodalModel(encoders, FAMILIES.get(family, LLAMA), seed=0)
    if adapted:
        settings = LoraConfig(r=2, target_modules=("down_proj",), units=("language",))
        inject(model.language.model, settings, {"language": ("",)})
    found = describe_model(model)
    kind = "siglip" if family == "siglip" else ""
    shapes = counted_shapes(found)
    return [(entry, shapes[entry.kind].last) for entry in found.types if entry.role == BLOCK and kind in entry.kind]


@pytest.mark.parametrize("how", ["block", "block_keep_attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", EXPECTED)
def test_a_recomputation_leaves_out_what_is_counted(family: str, dtype: torch.dtype, how: str) -> None:
    entries = described(family)
    assert entries
    for entry, last in entries:
        left_out, tokens = spared(entry, dtype, how)
        assert left_out == last * tokens, entry.kind
        assert last == EXPECTED[family], entry.kind
