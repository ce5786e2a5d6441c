"""Model descriptions for planners have the real model's layers and weights; all layers can be measured and modelled."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cases.models.tiny_configs import LLAMA, MIXTRAL, SIGLIP, WHISPER
from dilatant.config import ClusterConfig, Config, OptimizerConfig, UserError, parse_config
from dilatant.config.degrees import ONE
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.dense import DenseRows
from dilatant.cost.hardware import load_hardware
from dilatant.cost.layer import LayerCost, frozen_work
from dilatant.cost.memory import BF16
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.models.build import build_model
from dilatant.plan.costs.workload import squares_of
from dilatant.planning.measuring.layer_costs import costs_in_use, measure_layers, measured_tokens
from dilatant.planning.measuring.layer_probes import layer_probe
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem import planned_hardware
from dilatant.planning.problem.dense_rows import dense_rows, is_assumed
from dilatant.planning.problem.describe_model import (
    BLOCK,
    HEAD,
    ModelDescription,
    build_meta_model,
    describe_model,
    describe_unfrozen,
)
from dilatant.planning.problem.planned_hardware import is_same_hardware, plan_target, rules_of
from oracles import dense_mask as oracle


def config(tmp_path: Any, language: dict[str, Any] = LLAMA, freeze: tuple[str, ...] = (), **encoders: Any) -> Config:
    encoders = encoders or {
        "vision": {"kind": "image", "config": SIGLIP, "projector": "mlp"},
        "audio": {"kind": "audio", "config": WHISPER, "projector": "linear"},
    }
    return parse_config(
        {
            "model": {
                "language_model": {"config": language, "tokenizer": "bytes"},
                "encoders": encoders,
                "freeze": freeze,
            },
            "data": {"train": [{"path": "none.jsonl"}]},
        },
        tmp_path,
    )


def described(given: Config) -> ModelDescription:
    return describe_model(build_meta_model(given, 64))


def test_ranks_share_tokens_items_or_samples(tmp_path: Any) -> None:
    units = {unit.name: unit.items_per_token for unit in described(config(tmp_path)).spec.units}
    assert units == pytest.approx({"vision": 1 / 16, "audio": 1 / 12, "language": 1.0})  # told by division
    native = {
        "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    whole = described(config(tmp_path, vision={"kind": "image", "config": native, "projector": "mlp"}))
    assert whole.spec.unit("vision").items_per_token == 0.0


def test_description_without_weights_equals_the_real_model(tmp_path):
    given = config(tmp_path, freeze=("vision.encoder", "language.layers.0.*"))
    model = build_model(given.model, vocab_size=64)
    assert describe_model(model).spec == described(given).spec
    sizes = {name: sum(p.numel() for p in unit.parameters()) for name, unit in model.units.items()}
    assert {name: whole for name, (whole, _) in described(given).parameters.items()} == sizes


def test_units_feed_the_language_model_and_freezing_is_by_layer(tmp_path):
    spec = described(config(tmp_path, freeze=("vision.encoder", "language.layers.0.*"))).spec
    assert [(unit.name, unit.feeds) for unit in spec.units] == [
        ("vision", ("language",)), ("audio", ("language",)), ("language", ()),
    ]  # fmt: skip
    assert spec.unit("vision").trainable == (False, False, False, False, True)
    assert spec.unit("language").trainable == (True, False, True, True, True)
    assert spec.upstream_trainable("language")


def test_each_of_two_alike_encoders_can_be_unfrozen(tmp_path):
    alike = {"kind": "image", "config": SIGLIP, "projector": "mlp"}
    both = {"one": alike, "two": {**alike, "placeholder": "<two>"}}
    found = described(config(tmp_path, freeze=("one.encoder", "two.encoder"), **both))
    spec = describe_unfrozen(found, "two").spec
    assert all(spec.unit("two").trainable)
    assert spec.unit("one") == found.spec.unit("one")


def test_equal_layers_share_a_type_and_unequal_ones_do_not(tmp_path):
    gemma = {
        "model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    kinds = [layer.kind for layer in described(config(tmp_path, gemma)).spec.unit("language").layers]
    assert kinds[1] == kinds[3] != kinds[2]
    assert "sliding_attention" in kinds[1]
    twins = {
        name: {"kind": "image", "placeholder": f"<{name}>", "config": {**SIGLIP, "intermediate_size": width}}
        for name, width in (("left", 32), ("right", 48), ("same", 32))
    }
    spec = described(config(tmp_path, **twins)).spec
    left, right, same = (spec.unit(name).layers[1].kind for name in twins)
    assert left == same != right


def test_a_tied_weight_counts_per_layer_but_once_in_the_total(tmp_path):
    found = described(config(tmp_path))
    layers = found.spec.unit("language").layers
    table = 64 * 32
    assert layers[0].parameters == table
    assert layers[-1].parameters == table + 32  # the final norm
    assert [layer.tied for layer in layers] == [*([0] * (len(layers) - 1)), table]
    assert sum(layer.parameters for layer in layers) - found.parameters["language"][0] == table


def test_each_layer_type_runs_alone_with_all_gradients(tmp_path):
    found = described(config(tmp_path))
    parameters = {layer.kind: layer.parameters for unit in found.spec.units for layer in unit.layers}
    for entry in found.types:
        probe = layer_probe(entry, torch.device("cpu"), torch.float32)
        layer = probe.build()
        assert sum(p.numel() for p in layer.parameters()) == parameters[entry.kind], entry.kind
        args, kwargs = probe.inputs(24)
        value = args[0]
        if value.is_floating_point():
            value.requires_grad_()
        layer(value, **kwargs).sum().backward()
        assert value.grad is None or value.grad.abs().sum() > 0, entry.kind
        trained = [name for name, p in layer.named_parameters() if p.grad is not None]
        assert trained or not parameters[entry.kind], entry.kind
        if probe.packed is not None:
            args, kwargs = probe.packed((7, 9, 8))
            assert layer(*args, **kwargs).shape == args[0].shape == (1, 24, args[0].shape[-1])


def test_layer_costs_are_measured_here_and_modelled_elsewhere(tmp_path):
    given = config(tmp_path)
    found = described(given)
    measured = measure_layers(found, plan_target(given.cluster), (8, 16), repeats=1)
    modelled = analytic_costs(layer_shapes(found), load_hardware("H100"))
    assert measured.layers.keys() == modelled.layers.keys() == {entry.kind for entry in found.types}
    parameters = {layer.kind: layer.parameters for unit in found.spec.units for layer in unit.layers}
    for costs in (measured, modelled):
        assert {kind: degrees[ONE].parameters for kind, degrees in costs.layers.items()} == parameters
    for entry in found.types:
        cost = measured.layers[entry.kind][ONE]
        assert cost.forward(16) > 0
        if entry.geometry is not None:
            assert cost.forward.a == 0  # images and clips do not attend to each other
        assert bool(modelled.layers[entry.kind][ONE].forward.a) == (entry.role == BLOCK)
    # Dilatant's attention skips the pairs between samples.
    assert not any(degrees[ONE].dense_seconds for degrees in measured.layers.values())
    assert not is_assumed(found, measured)
    assert dense_rows(found, measured) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "is_measured"), [("sdpa", True), ("eager", False)])
def test_packed_rows_are_measured_where_they_cost_extra(tmp_path, attention, is_measured):
    given = config(tmp_path, {**LLAMA, "max_position_embeddings": 64})
    language = given.model.text.model_copy(update={"attn_implementation": attention})
    given = given.model_copy(update={"model": given.model.model_copy(update={"language_model": language})})
    found = described(given)
    measured = measure_layers(found, plan_target(given.cluster), (8, 16, 32), repeats=1)
    lengths = {kind: [length for length, _ in degrees[ONE].dense_seconds] for kind, degrees in measured.layers.items()}
    blocks = [kind for kind in found.kinds(BLOCK) if "llama" in kind]
    assert {kind: own for kind, own in lengths.items() if own} == (
        {kind: [8, 16, 32, 64] for kind in blocks} if is_measured else {}
    )
    # So few tokens are fitted without a square now and then, of which nothing is left to count.
    squared = {
        kind: {
            degree: replace(cost, forward=msgspec.structs.replace(cost.forward, a=1e-9)) for degree, cost in own.items()
        }
        for kind, own in measured.layers.items()
    }
    assert not is_assumed(found, replace(measured, layers=squared))
    unmeasured = replace(
        measured,
        layers={
            kind: {degree: replace(cost, dense_seconds=()) for degree, cost in own.items()}
            for kind, own in measured.layers.items()
        },
    )
    assert is_assumed(found, unmeasured) == is_measured
    assumed = {"sdpa": {"language": DenseRows.always(2.0)}, "eager": {"language": DenseRows.always(1.0)}}
    assert dense_rows(found, unmeasured) == assumed[attention]


def test_a_dense_unit_row_costs_what_its_blocks_measured(tmp_path):
    """Rows have the measured lengths. Besides blocks of two kinds, the head's fit has a square part."""
    given = config(tmp_path, {**LLAMA, "max_position_embeddings": 64})
    language = given.model.text.model_copy(update={"attn_implementation": "sdpa"})
    found = described(given.model_copy(update={"model": given.model.model_copy(update={"language_model": language})}))
    draw = np.random.default_rng(4)
    more = {64: 0.1, 128: 0.9, 512: 40.0}

    def cost(kind: str) -> LayerCost:
        block = kind in found.kinds(BLOCK) and "llama" in kind
        return LayerCost(
            *(Quadratic(*draw.uniform(1e-6, 1e-5, 3)) for _ in range(4)),
            dense_seconds=tuple(more.items()) if block else (),
        )

    costs = CostModel("CPU", "measured", "float32", {entry.kind: {ONE: cost(entry.kind)} for entry in found.types})
    rows = dense_rows(found, costs)["language"]
    layers = found.spec.unit("language").layers
    for length, seconds in more.items():

        def taken(times: float, length: int = length) -> float:
            parts = (costs.layers[layer.kind][ONE] for layer in layers)
            return sum(
                curve.a * times * length**2 + curve.b * length + curve.c
                for part in parts
                for curve in (part.forward, part.input_gradient)
            )

        blocks = sum("block" in layer.kind for layer in layers)
        # Counts are kept to six digits.
        assert taken(float(rows.at(length))) - taken(1.0) == pytest.approx(blocks * seconds, rel=1e-4)
    slower = replace(costs, layers={
        kind: {degree: replace(own, dense_seconds=tuple((length, 2 * seconds) for length, seconds in own.dense_seconds))
               for degree, own in degrees.items()}
        for kind, degrees in costs.layers.items()
    })  # fmt: skip
    both = replace(costs, groups={"one": costs, "other": slower})
    assert dense_rows(found, both) == dense_rows(found, slower) != dense_rows(found, costs)


def test_modelled_products_are_the_weights_that_a_token_meets(tmp_path):
    model = described(config(tmp_path, MIXTRAL))
    layer = model.spec.unit("language").layers[1]
    assert (layer.experts, layer.expert_parameters) == (8, 8 * 3 * 32 * 64)
    assert (layer.largest, layer.largest_of_experts) == (32 * 32, 8 * 2 * 32 * 64)
    shapes = layer_shapes(model)
    assert shapes["mixtral block 32"].routed_width == 2 * 32
    block = shapes["mixtral block 32"]
    attention = 32 * 32 * 2 + 32 * 16 * 2
    assert block.matmul == attention + 32 * 8 + 2 * 3 * 32 * 64  # two of eight experts, and the router
    assert block.parameters == attention + 32 * 8 + 8 * 3 * 32 * 64 + 2 * 32
    dense = layer_shapes(described(config(tmp_path)))["llama block 32"]
    assert dense.matmul == attention + 3 * 32 * 96
    assert dense.attended_share == 0.5
    assert layer_shapes(described(config(tmp_path)))["siglip_vision_model block 16 @16"].attended_share == 1.0


def test_the_head_costs_what_its_targets_cost(tmp_path):
    found = described(config(tmp_path))
    whole = analytic_costs(layer_shapes(found), load_hardware("A100"))
    used = costs_in_use(whole, found, targets=0.25, row=2048, chunk=None)
    (head,) = found.kinds(HEAD)
    assert used.layer(head).forward.b == pytest.approx(0.25 * whole.layer(head).forward.b)
    assert used.layer(head).forward.c == whole.layer(head).forward.c
    assert used.layer(head).recompute(100) == 0.0
    (block,) = [kind for kind in found.kinds(BLOCK) if "llama" in kind]
    assert used.layer(block) == whole.layer(block)


def test_only_weight_gradients_of_linear_layers_are_put_off(tmp_path):
    """Gradients that the runtime computes in the first half of a split backward must not be planned for the second."""
    for language in (LLAMA, MIXTRAL):
        found = described(config(tmp_path, language))
        used = costs_in_use(analytic_costs(layer_shapes(found), load_hardware("A100")), found, 1.0, 2048, None)
        splits = {entry.kind: used.layer(entry.kind).splits for entry in found.types}
        assert {entry.role for entry in found.types if splits[entry.kind]} == {BLOCK, "projector"}


def test_a_head_runs_in_chunks_for_more_targets_than_one_chunk(tmp_path):
    """The number of targets counts, not of tokens: tokens without a target never reach the head."""
    found = described(config(tmp_path))
    whole = analytic_costs(layer_shapes(found), load_hardware("A100"))
    (head,) = found.kinds(HEAD)
    for share, row, chunked in ((0.25, 2048, False), (0.5, 2048, False), (0.5, 2049, True), (1.0, 512, False)):
        assert costs_in_use(whole, found, share, row, chunk=1024).layer(head).in_chunks == chunked


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({}, 12.0),
        ({"ema": 0.999}, 16.0),  # an average in fp32 beside master and moments
        ({"name": "adamw_8bit"}, 12.0 - 8.0 + 2.0 + 8 / 256),
        ({"name": "adamw_8bit", "ema": 0.9}, 16.0 - 8.0 + 2.0 + 8 / 256),
        ({"offload": True, "ema": 0.9}, 0.0),
    ],
)
def test_a_weight_takes_what_its_optimizer_keeps_of_it(settings, state):
    assert rules_of(BF16, OptimizerConfig(**settings)) == replace(BF16, optimizer=pytest.approx(state))


def test_a_head_in_chunks_holds_one_chunk_and_its_input(tmp_path):
    found = described(config(tmp_path))
    whole = analytic_costs(layer_shapes(found), load_hardware("A100"))
    (head,) = found.kinds(HEAD)
    plain = frozen_work(costs_in_use(whole, found, 0.5, row=2048, chunk=1024).layer(head), True, True)
    chunked = frozen_work(costs_in_use(whole, found, 0.5, row=2050, chunk=1024).layer(head), True, True)
    cost = whole.layer(head)
    norm, all_norm = cost.row_bytes(2048), cost.row_working_bytes(2048)
    logits, working = (cost.activation_bytes(1024) - norm / 2, cost.working_bytes(1024) - all_norm / 2)
    assert plain.kept_bytes(2048) == pytest.approx(logits + norm)
    assert plain.transient_bytes(2048) == pytest.approx(working + all_norm)
    assert chunked.transient_bytes(4096) == pytest.approx(logits + working)  # 2,048 targets
    assert chunked.kept_bytes(2048) == pytest.approx(norm)
    assert chunked.backward(1024) - plain.backward(1024) == pytest.approx(plain.forward(1024))


def test_token_counts_reach_the_longest_sample(tmp_path):
    assert measured_tokens(config(tmp_path)) == (256, 512, 1024, 2048)


def test_names_of_hardware():
    assert is_same_hardware("NVIDIA H100 80GB HBM3", "H100")
    assert is_same_hardware("CPU AMD EPYC, 1 thread", "CPU")
    assert not is_same_hardware("CPU AMD EPYC, 1 thread", "CPU AMD EPYC, 2 threads")
    assert not is_same_hardware("NVIDIA A100-SXM4-80GB", "A10")


def test_local_gpu_plan_reserves_memory_for_non_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(planned_hardware, "pick_precision", lambda *asked: torch.bfloat16)

    def usable(**said: Any) -> float:
        return plan_target(ClusterConfig(**said)).cluster.bytes_per_device / 2**30

    assert usable() == pytest.approx(0.96 * 140 - 2)
    assert usable(gpus_per_node=1) == pytest.approx(0.96 * 140 - 1), "nobody to talk to"
    assert usable(reserve={"context_gib": 3}) == pytest.approx(0.96 * 140 - 4)
    assert usable(reserve={"context_gib": 0, "communicators_gib": 0, "fragmentation": 0}) == 140
    assert usable(memory_gib=100) == 100
    assert usable(memory_gib=100, reserve={"fragmentation": 0.1}) == pytest.approx(90)
    assert usable(hardware="CPU") == pytest.approx(8e9 / 2**30)
    with pytest.raises(UserError, match="be left free; lower it"):
        usable(reserve={"context_gib": 200})


@pytest.mark.parametrize("mask", ["causal", "bidirectional", "embedded", "modality"])
def test_costs_count_the_pairs_that_media_masks_show(tmp_path: Any, mask: str) -> None:
    """Rows have an image of 16 tokens and a clip of 12 between every 8 text tokens; the oracle counts each pair."""
    given = config(tmp_path)
    masks = {"vision": mask, "audio": "embedded"}
    text = given.model.text.model_copy(update={"media_attention": masks})
    model = build_meta_model(
        given.model_copy(update={"model": given.model.model_copy(update={"language_model": text})}), 64
    )
    described = describe_model(model)
    half = [("text", 8), ("vision", 16), ("text", 8), ("audio", 12)] * 6
    segments = half + half[::-1]
    rules = {"causal": oracle.document_causal, "bidirectional": oracle.bidirectional_instances(True),
             "embedded": oracle.embedded(False), "modality": oracle.embedded(True)}  # fmt: skip
    tokens = oracle.tokens_of([segments])
    pairs = int(oracle.matrix(tokens, lambda q, k: rules[masks.get(q.modality, "causal")](q, k)).sum())
    sizes = {"vision": 12 * 16.0, "audio": 12 * 12.0, "language": float(len(tokens))}
    arrays = {unit: np.array([size]) for unit, size in sizes.items()}
    squares = squares_of(arrays, described.item_tokens, described.media_pairs)["language"]
    # Media are taken to be spread evenly, and the pair of a token with itself to be half a pair.
    assert squares[0] == pytest.approx(2 * pairs, rel=0.02)
