"""Rows of a corpus are predicted as recipes of their programs say: images, experts, and who sums their gradients."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.papers.corpus.models import Experts, routed, summed_weights
from benchmarks.papers.corpus.vision import DELTA_RULE, with_vision
from benchmarks.papers.models import PaperUnit, cost_model
from dilatant.config.degrees import ONE, Degrees
from dilatant.cost.analytic import MEGATRON, block_shape
from dilatant.cost.hardware import load_hardware

EXPERTS, HIDDEN = Experts(128, 4, 0, 2880), 2880
EACH = 3 * HIDDEN * 2880


def expert_row(ep: int, dp: int, hardware: str = "DGX-B200") -> dict[str, Any]:
    return {"tp": 1, "cp": 1, "dp": dp, "ep": ep, "hardware": hardware}


def hybrid_row(item: str = "sft_long_context/H100", cp: int = 1) -> dict[str, Any]:
    language = {
        "layers": 40, "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256, "vocab": 248_320,
        "moe": {"experts": 256, "top_k": 8, "shared": 1, "ffn": 512}, "full_attention_every": 4,
        "linear_key_heads": 16, "linear_value_heads": 32, "linear_head_dim": 128,
    }  # fmt: skip
    vision = {"layers": 27, "hidden": 1152, "heads": 16, "ffn": 4304}
    model = {"name": "Qwen3.6-35B-A3B (x)", "seq": 8192, "images": "one", "vision": vision, "language": language}
    places = {"tp": 1, "cp": cp, "dp": 8, "pp": 1, "ep": 8, "mbs": 1, "hardware": "H100 80GB"}
    return {"model": model, "source": f"a card, {item}", "frozen": [], **places}


def test_sums_of_experts_go_through_one_port_where_a_node_has_each_expert_once():
    """64 GPUs in nodes of eight, eight ranks divide the experts: the eight ranks with equal ones are a node apart."""
    hardware, row = load_hardware("B200"), expert_row(8, 64)
    block, _ = routed(block_shape(HIDDEN, 4 * 2880, 64, 8, head_size=64), HIDDEN, EXPERTS, row, hardware)
    assert block.parameters > 16 * EACH
    beside = block.parameters - 16 * EACH
    port = hardware.between.bandwidth / 8
    seconds = beside * 63 / 64 / (8 * port) + 16 * EACH * 7 / 8 / port  # of a byte for each weight
    summed = summed_weights(block, EXPERTS, HIDDEN, row, hardware)
    assert summed * 63 / 64 / (8 * port) == pytest.approx(seconds, rel=1e-6)  # a whole number of weights


def test_experts_that_no_other_rank_holds_are_not_summed():
    hardware, row = load_hardware("GB200"), expert_row(64, 64, "DGX-GB200")
    block, _ = routed(block_shape(HIDDEN, 4 * 2880, 64, 8, head_size=64), HIDDEN, EXPERTS, row, hardware)
    assert summed_weights(block, EXPERTS, HIDDEN, row, hardware) == block.parameters - 2 * EACH


def test_a_copy_for_each_expert_is_more_than_a_copy_for_each_rank():
    hardware, row = load_hardware("H100"), expert_row(8, 8, "H100")
    shape = block_shape(HIDDEN, 4 * 2880, 64, 8, head_size=64)
    each, once = (routed(shape, HIDDEN, EXPERTS, row, hardware, one)[1] for one in (True, False))
    assert each.b * hardware.inside.bandwidth == pytest.approx(2 * HIDDEN * 2 * 4 * 7 / 8)  # there and back, 2 bytes
    assert once.b < each.b


def test_a_hybrid_model_predicts_a_further_token():
    embedding, blocks, prediction, head = with_vision(hybrid_row(), load_hardware("H100"), MEGATRON)
    assert (embedding.beside.count, blocks.count, prediction.count, head.count) == (27, 40, 1, 2)
    # Public size: 35 billion without the tower, the second head and the further block; of experts an eighth is held.
    held = 40 * blocks.shape.parameters + 40 * 7 * 32 * 3 * 2048 * 512
    assert held + embedding.shape.parameters + head.shape.parameters == pytest.approx(34.7e9, rel=0.02)  # gates, norms


def test_three_of_four_blocks_run_the_delta_rule_and_exchange_heads():
    hardware = load_hardware("H100")
    alone, shared = (with_vision(hybrid_row(cp=cp), hardware, MEGATRON)[1] for cp in (1, 2))
    assert alone.kernel[1].b == pytest.approx(0.75 * 32 * DELTA_RULE[1])
    assert shared.kernel[1].b == pytest.approx(alone.kernel[1].b / 2)
    # Half of a rank's keys, queries, values, gates and outputs go to the other: as many as tokens over two.
    exchanged = (2 * 16 + 3 * 32) * 128 * 2 / 2 / 2 / hardware.inside.bandwidth
    assert shared.sent.b - alone.sent.b / 2 == pytest.approx(0.75 * exchanged)


def test_layers_beside_another_one_keep_the_host_busy():
    hardware, parts = load_hardware("H100"), with_vision(hybrid_row(), load_hardware("H100"), MEGATRON)
    costs = cost_model([PaperUnit("language", parts, runner=MEGATRON)], hardware).layers["language embedding"]
    assert costs[Degrees(1)].host == pytest.approx(27 * 140 * 0.4 * hardware.host)
    assert ONE in costs


def test_a_recipe_that_was_not_read_is_refused():
    with pytest.raises(ValueError, match="not told"):
        with_vision(hybrid_row("another/H100"), load_hardware("H100"), MEGATRON)
