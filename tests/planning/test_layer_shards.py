"""Shards of layers that one tensor-parallel rank holds, and costs measured at several degrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.generic_steps import pretrained
from cases.tiny_wholes import WHOLES, whole_config
from dilatant.config import UserError, parse_config
from dilatant.config.degrees import Degrees
from dilatant.cost.model import CostModel
from dilatant.models.families.families import FAMILIES
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_plan import tensor_plan
from dilatant.planning.measuring.layer_costs import degrees_of, layer_costs, measure_layers
from dilatant.planning.measuring.layer_probes import layer_probe
from dilatant.planning.problem.describe_model import ModelDescription, build_meta_model, describe_model
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.planning.problem.searched_settings import degrees_by_kind, planned_degrees, tensor_shard
from dilatant.runtime.rank_trial import divide_where_proven

WIDTH = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **WIDTH, "num_key_value_heads": 2, "vocab_size": 65}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, **WIDTH}
WHISPER = {
    "model_type": "whisper", "d_model": 32, "encoder_ffn_dim": 96, "encoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 1, "decoder_ffn_dim": 96,
    "num_mel_bins": 8, "max_source_positions": 12,
}  # fmt: skip
GATED = 3 * 32 * 48
LINEAR = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention"], "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
}  # fmt: skip
BLOCKS = {
    # queries, keys and values, output; feed-forward; norms. Two of four heads of size 8 are 16 wide.
    "llama block 32": 32 * 16 + 2 * 32 * 8 + 16 * 32 + GATED + 2 * 32,
    "siglip_vision_model block 32 @16": 3 * 33 * 16 + 16 * 32 + 32 + 33 * 48 + 48 * 32 + 32 + 4 * 32,
    "whisper block 32 @12": (3 * 32 + 2) * 16 + 16 * 32 + 32 + 33 * 48 + 48 * 32 + 32 + 4 * 32,
}
"""Parameters of one of two ranks, counted from the configs."""


def configured(tmp_path: Any, language: dict[str, Any] = LLAMA, vision: dict[str, Any] = SIGLIP, **rest: Any) -> Any:
    return parse_config(
        {
            "model": {
                "language_model": {"config": language, "tokenizer": "bytes"},
                "encoders": {
                    "vision": {"kind": "image", "config": vision, "projector": "mlp"},
                    "audio": {"kind": "audio", "config": WHISPER, "projector": "linear"},
                },
            },
            "data": {"train": [{"path": "none.jsonl"}], "max_length": 16},
            **rest,
        },
        tmp_path,
    )


def described(tmp_path: Any, language: dict[str, Any] = LLAMA, vision: dict[str, Any] = SIGLIP) -> ModelDescription:
    return describe_model(build_meta_model(configured(tmp_path, language, vision), 65))


def parameters_of(entry: Any, degree: int) -> int:
    shard = replace(entry, unit=tensor_shard(entry.unit, degree))
    return sum(p.numel() for p in layer_probe(shard, torch.device("cpu"), torch.float32).build().parameters())


def test_a_rank_holds_its_share_of_heads_mlp_and_vocabulary(tmp_path):
    found = {entry.kind: entry for entry in described(tmp_path).types}
    assert {kind: parameters_of(found[kind], 2) for kind in BLOCKS} == BLOCKS
    assert parameters_of(found["llama embedding 32"], 2) == 33 * 32  # the larger share of 65
    assert parameters_of(found["llama head 32"], 2) == 33 * 32 + 32


@pytest.mark.parametrize(
    ("language", "products"),
    [
        # Heads of a size of their own, one matrix for queries, keys and values, experts.
        ({**LLAMA, "model_type": "qwen3", "head_dim": 16}, 2 * 32 * 32 + 2 * 32 * 16 + GATED),
        ({**LLAMA, "model_type": "phi3", "pad_token_id": 64}, 2 * 32 * 16 + 2 * 32 * 8 + GATED),
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            2 * 32 * 16 + 2 * 32 * 8 + 4 * GATED + 4 * 32,
        ),
        # Queries and keys of one head of size 6, values of two heads of size 8: projected, and mixed over 4 tokens;
        # two gates, and one of all features; output.
        ({**LLAMA, **LINEAR}, (32 + 4) * (2 * 6 + 16) + 2 * 32 * 2 + 2 * 32 * 16 + GATED),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_families_with_other_heads_and_experts_run_as_shards(tmp_path, language, products):
    (block,) = (
        entry for entry in described(tmp_path, language).types if entry.role == "block" and entry.geometry is None
    )
    shard = replace(block, unit=tensor_shard(block.unit, 2))
    probe = layer_probe(shard, torch.device("cpu"), torch.float32)
    layer = probe.build()
    assert sum(p.numel() for p in layer.parameters() if p.dim() > 1) == products
    args, given = probe.inputs(8)
    assert layer(*args, **given).shape == (1, 8, 32)


@pytest.mark.slow
@pytest.mark.parametrize("family", WHOLES)
def test_layers_of_whole_models_run_as_shards(family: str) -> None:
    model = MultimodalModel({}, PretrainedModel.of(whole_config(family), "model"), seed=0, device="meta")
    assert narrower_units(model) == model_units(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral3", "deepseek_vl"])
def test_layers_of_families_that_are_not_listed_run_as_shards(family: str) -> None:
    model = MultimodalModel({}, pretrained(family), seed=0, device="meta")
    assert narrower_units(model) == {"language"}
    divide_where_proven(model)
    assert narrower_units(model) == {"vision", "language"}


def narrower_units(model: MultimodalModel) -> set[str]:
    """Return the units with layers of which one of two ranks holds a part, and which run as such."""
    narrower = set()
    for entry in describe_model(model).types:
        if not entry.is_divided or tensor_plan(entry.unit).problems:
            continue
        probes = [
            layer_probe(replace(entry, unit=tensor_shard(entry.unit, tp)), torch.device("cpu"), torch.float32)
            for tp in (1, 2)
        ]
        layers = [probe.build() for probe in probes]
        args, given = probes[1].inputs(16)
        shapes = [layer(*args, **given).shape for layer in layers]
        assert shapes[0] == shapes[1], entry.kind
        whole, shard = (sum(p.numel() for p in layer.parameters()) for layer in layers)
        if shard < whole:
            narrower.add(entry.unit.unit)
    return narrower


def model_units(family: str) -> set[str]:
    """Return the units that ranks can shard: all but Mllama's encoder, a single layer, and Gemma 4's audio encoder."""
    return {"language", *FAMILIES[family].towers} - {{"mllama": "vision", "gemma4": "audio"}.get(family, "")}


@pytest.mark.slow
def test_all_degrees_are_measured_saved_and_note_modelled_parts(tmp_path):
    settings = {"plan": {"tensor_parallel": [1, 2], "context_parallel": [1, 2], "measure_seconds": 600}}
    config = configured(tmp_path, **settings)
    model, target = described(tmp_path), plan_target(config.cluster)
    degrees = planned_degrees(config.plan, model, target)
    costs = measure_layers(model, target, (8, 16), repeats=1, degrees=degrees)
    assert degrees_of(costs) == [Degrees(tp, cp) for tp in (1, 2) for cp in (1, 2)]
    assert CostModel.from_yaml(costs.to_yaml()) == costs
    assert costs.origin == "measured"
    assert "collectives" in costs.note
    for kind, parameters in BLOCKS.items():
        degrees = costs.layers[kind]
        assert degrees[Degrees(2, 1)].parameters == degrees[Degrees(2, 2)].parameters == parameters
        assert degrees[Degrees(2, 1)].activation_bytes(48) < degrees[Degrees(1, 1)].activation_bytes(48)
        assert degrees[Degrees(2, 1)].output_bytes == degrees[Degrees(1, 1)].output_bytes  # all-reduced: whole
        assert degrees[Degrees(1, 2)].weight_gradient.b == pytest.approx(
            degrees[Degrees(1, 1)].weight_gradient.b / 2, rel=1e-5
        )  # rounded
        # Two all-reduces, which wait for at least their latency.
        assert degrees[Degrees(2, 1)].forward.c >= 2 * target.hardware.inside.latency
    for entry in model.types:
        if not entry.is_divided:
            assert costs.layers[entry.kind][Degrees(2)] == costs.layers[entry.kind][Degrees()], entry.kind


def test_an_indivisible_degree_names_the_unit_and_valid_degrees(tmp_path):
    model, config = described(tmp_path), configured(tmp_path)
    target = plan_target(config.cluster)
    with pytest.raises(UserError, match=r"language: 4 attention heads .* 3 ranks; it takes tp 1, 2"):
        measure_layers(model, target, (8,), degrees=[Degrees(3)])
    elsewhere = configured(
        tmp_path, cluster={"hardware": "H100"}, plan={"tensor_parallel": [3], "context_parallel": [1]}
    )
    with pytest.raises(UserError, match=r"vision: 4 attention heads .*3 ranks"):
        layer_costs(elsewhere, model, plan_target(elsewhere.cluster))


def test_a_family_whose_shares_are_not_known_is_refused(tmp_path):
    neox = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"model_type": "gpt_neox"}
    model = described(tmp_path, neox)
    (block,) = (entry for entry in model.types if entry.kind.startswith("gpt_neox block"))
    with pytest.raises(UserError, match=r"(?s)tp = 1 only.*'attention.query_key_value' holds queries, keys"):
        tensor_shard(block.unit, 2)


def test_a_unit_that_cannot_be_sharded_stays_whole_beside_others(tmp_path):
    """The encoder has three heads and the language model four, so the encoder has costs only for tp 1, with any cp."""
    three = described(tmp_path, vision={**SIGLIP, "hidden_size": 24, "num_attention_heads": 3})
    wide = [Degrees(), Degrees(cp=2), Degrees(2), Degrees(4)]
    found = degrees_by_kind(three, wide)
    for unit in three.spec.units:
        expected = wide[:2] if unit.name == "vision" else wide
        assert all(found[layer.kind] == expected for layer in unit.layers)
    assert degrees_by_kind(three, [Degrees(2)])[three.spec.unit("vision").layers[1].kind] == [Degrees()]
