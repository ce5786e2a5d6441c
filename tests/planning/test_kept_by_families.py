"""Modelled activations of the blocks of every listed family equal what autograd keeps of them in bf16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.often import often
from cases.tiny_wholes import WHOLES, whole_config
from dilatant.models.core.slicing import held_blocks
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import choose_attention
from dilatant.planning.measuring.layer_probes import layer_probe
from dilatant.planning.measuring.layer_shapes import counted_shapes
from dilatant.planning.problem.describe_model import BLOCK, LayerType, describe_model

TIMES = 8
"""Tiny widths are multiplied by this, so that rows of a number per token do not count."""
WIDTHS = {
    "hidden_size", "intermediate_size", "embed_dim", "d_model", "encoder_ffn_dim", "out_hidden_size", "output_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "global_head_dim", "linear_key_head_dim",
    "linear_value_head_dim", "mrope_section", "vision_output_dim", "projection_dim", "output_proj_dims",
    "hidden_size_per_layer_input",
}  # fmt: skip


def wide(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: wide(own, name) for name, own in value.items()}
    if key not in WIDTHS:
        return value
    return [TIMES * one for one in value] if isinstance(value, list) else TIMES * value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def kept_by_block(entry: LayerType) -> tuple[float, int]:
    """Bytes that autograd keeps of one block in bf16, besides weights and what all blocks share, and its tokens."""
    probe = layer_probe(entry, torch.device("cpu"), torch.bfloat16)
    layer: Any = probe.build()
    given, keywords = probe.packed((128, 128)) if probe.packed else probe.inputs(max(probe.tokens or (256,)))
    tokens = given[0].shape[1] if probe.packed else max(probe.tokens or (256,))
    (block,) = held_blocks(layer.stage.model.get_submodule(entry.unit.structure.blocks))
    held: dict[int, Any] = {}
    known: set[int] = set()
    inside = [False]

    def knows(found: Iterable[torch.Tensor]) -> None:
        known.update(one.untyped_storage().data_ptr() for one in found)

    def begin(module: Any, arguments: Any, named: Any) -> None:
        knows([*tensors_in(arguments[1:]), *tensors_in({k: v for k, v in named.items() if k != "hidden_states"})])
        inside[0] = True

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    knows([*layer.parameters(), *layer.buffers()])
    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    given[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(*given, **keywords)
    return sum(storage.nbytes() for storage in held.values()), tokens


@pytest.mark.parametrize("family", often(WHOLES, "llava", "qwen2_5_vl"))
def test_activations_of_a_listed_family_are_those_kept(family: str) -> None:
    whole_config(family)  # skips families that this version of transformers lacks
    settings = wide(WHOLES[family])
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    model = MultimodalModel({}, PretrainedModel.of(config, "model"), seed=0)
    choose_attention(model)
    described = describe_model(model)
    shapes, ratios = counted_shapes(described), {}
    for entry in described.types:
        kept, tokens = kept_by_block(entry) if entry.role == BLOCK else (0.0, 0)
        if kept:  # blocks of cross-attention do not run without media
            ratios[entry.kind] = round(2 * shapes[entry.kind].kept * tokens / kept, 3)
    print(family, ratios)
    assert len(ratios) > 0
    assert all(abs(ratio - 1.0) <= 0.03 for ratio in ratios.values()), ratios
