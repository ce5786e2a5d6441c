"""Layers of vision-language models in a corpus of measured runs: a tower of the first stage reads images, and of four
blocks of the language model one attends, where the others mix by a gated delta rule. What the program does was read in
its recipes and layers (Megatron-Bridge @067f987df, Megatron-Core @d98e8a64)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.corpus.models import Experts, routed
from benchmarks.papers.models import Beside, Part
from dilatant.cost.analytic import BYTES, MEGATRON, LayerShape, Runner, block_shape, embedding_shape, head_shape
from dilatant.cost.hardware import Hardware
from dilatant.cost.quadratic import Quadratic

DELTA_RULE = 1.8e-9, 5.6e-9
"""Seconds of the gated delta rule for each token and value head of 128, forward and backward: the Triton kernels of
flash-linear-attention 0.5, 8,192 tokens of 32 heads in 0.47 and 1.44 ms on an H200, in 0.48 and 1.52 on a GB200, by
benchmark_results_*.txt of FlashQLA @c18a4860."""

DELTA_OPERATIONS = 450
"""Operations that the host issues for a delta rule in a pass, more than for attention: kernels that Python launches one
by one. Fitted to the card's sft/H100, whose steps wait for the host."""

IMBALANCE = 1.75
"""Tokens of the busiest rank of experts as a multiple of the mean, where no rule balances them. Fitted to the two rows
on H100 that wait for the device; the card says that pretrain_performance/H100 takes 1.37 times as long as the same
recipe with experts balanced by force and images of one size."""

NATIVE_LOSS = 10
"""Elements of 16 bits that a loss in fp32, cast, exponentials, sum and quotients, moves for each logit in a forward: as
`papers.corpus.models.EAGER_LOSS`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a row's recipe says besides the row. No recipe has sequence parallelism, none overlaps sums of gradients.
    stages: blocks of each stage, if not equal. native_loss: the loss is not one kernel. graphed: attention, mixers and
    routers are CUDA graphs. packed: rows are packed, and NCCL sends each token to each of its experts. gradient: bytes
    that are summed."""

    stages: tuple[int, ...] = ()
    native_loss: bool = False
    packed: bool = False
    graphed: bool = False
    gradient: float = 2.0


_LONG = Recipe(native_loss=True, packed=True, gradient=4.0)
RECIPES = {
    ("Qwen3.6-35B-A3B", "pretrain_performance/H100"): Recipe((16, 24), graphed=True),
    ("Qwen3.6-35B-A3B", "sft/H100"): Recipe((17, 23), gradient=4.0),
    ("Qwen3.6-35B-A3B", "sft/GB200"): Recipe(),
    ("Qwen3.6-35B-A3B", "sft_long_context/H100"): _LONG,
    ("Qwen3.8-27B", "pretrain_performance/GB200"): Recipe(native_loss=True),
    ("Qwen3.8-27B", "sft_long_context/GB200"): _LONG,
}
"""Recipes by model and item of the card."""


def recipe_of(row: Mapping[str, Any]) -> Recipe:
    """Return a row's recipe. Raises ValueError for an unknown one."""
    key = row["model"]["name"].split(" ")[0], row["source"].split(", ")[-1]
    if key not in RECIPES:
        raise ValueError("multimodal: the work per sample is not told")
    return RECIPES[key]


def with_vision(row: Mapping[str, Any], hardware: Hardware, runner: Runner) -> tuple[Part, ...]:
    """Return the layers of a row's model. Raises ValueError if the row does not tell enough."""
    recipe, vision, language = recipe_of(row), row["model"]["vision"], row["model"]["language"]
    patches = 256 if "mock" in row["model"]["images"] else 784  # of 256 x 256 and of 448 x 448 pixels
    hidden, moe = language["hidden"], language.get("moe")
    experts = replace(Experts.of(moe), visited=round(IMBALANCE * moe["top_k"])) if moe else None
    width = (experts.visited + experts.shared) * experts.width if experts else language["ffn"]
    heads, size = language["heads"], language["head_dim"]
    full = block_shape(hidden, width, heads, language["kv_heads"], head_size=size, fused=runner.fused)
    gate = hidden * heads * size  # of the attention's output
    full = replace(full, matmul=full.matmul + gate, parameters=full.parameters + gate)
    linear, exchange = _delta_block(full, language, row, hardware, hidden * heads * size)
    sent = Quadratic()
    if experts:
        full, sent = routed(full, hidden, experts, row, hardware, alltoall=recipe.packed)
        linear, _ = routed(linear, hidden, experts, row, hardware)
    if recipe.graphed:  # what is left to the host are experts and their exchanges
        full, linear = (replace(one, operations=full.operations // 2) for one in (full, linear))
    elif runner.operations:
        linear = replace(linear, operations=linear.operations + round(DELTA_OPERATIONS / runner.operations))
    layers, tokens = language["layers"], row["mbs"] * row["model"]["seq"]
    share = 1 - 1 / language["full_attention_every"]
    ranks = row["tp"] * (row["cp"] or 1)
    forth, back = (language["linear_value_heads"] * seconds / ranks for seconds in DELTA_RULE)
    mixer = tokens * (2 * linear.leading / hardware.flops("bfloat16") / ranks + forth)
    # Lengths of packed rows are read back from the device (`_resolve_cu_seqlens`), so the host is never ahead.
    late = max(0.0, DELTA_OPERATIONS * hardware.host - mixer) if recipe.packed else 0.0
    kernel = Quadratic(b=share * forth, c=share * late), Quadratic(b=share * back)
    shape = _mean((full, linear), 1 - share)
    blocks = Part("block", shape, layers, sent=sent + exchange.scaled(share), kernel=kernel)
    # Multi-token prediction: a block like the last one, behind a projection of two rows to one, and a head.
    again = replace(full, matmul=full.matmul + 2 * hidden**2, parameters=full.parameters + 2 * hidden**2)
    tower = block_shape(vision["hidden"], vision["ffn"], vision["heads"], gated=False, causal=False, fused=runner.fused)
    if runner.operations > MEGATRON.operations:  # that is a block's with experts
        tower = replace(tower, operations=round(tower.operations * MEGATRON.operations / runner.operations))
    beside = Beside(
        tower, vision["layers"], patches / row["model"]["seq"], "vision" not in " ".join(row.get("frozen") or ())
    )
    head = head_shape(hidden, language["vocab"])
    if recipe.native_loss:
        head = replace(head, traffic=NATIVE_LOSS * language["vocab"])
    return (
        Part("embedding", embedding_shape(hidden, language["vocab"]), 1, beside=beside),
        blocks,
        Part("prediction", again, 1, sent=sent),
        Part("head", head, 2),
    )


def _delta_block(
    full: LayerShape, language: Mapping[str, Any], row: Mapping[str, Any], hardware: Hardware, gate: int
) -> tuple[LayerShape, Quadratic]:
    """Return the block with a gated delta rule in place of gated attention, without the rule's own kernels, and the
    seconds of one pass in which context-parallel ranks exchange tokens for heads and back."""
    hidden, cp = language["hidden"], row["cp"] or 1
    keys, values = (language[f"linear_{kind}_heads"] * language["linear_head_dim"] for kind in ("key", "value"))
    mixer = hidden * (2 * keys + 3 * values)
    attention = full.leading + hidden * full.attention_width + gate
    # Convolution and its copy, norms of keys and queries, which are then repeated for each value head, copies of values
    # and gates, the gated norm in two kernels.
    moved = 14 * keys + 13 * values
    exchanged = 2 * keys + 3 * values
    if cp > 1:  # permuted by head, packed, unpacked and permuted by place
        moved += 8 * exchanged
    bytes_sent = BYTES["bfloat16"] * exchanged * (cp - 1) / cp / cp / row["tp"]
    shape = replace(
        full,
        matmul=full.matmul - attention + mixer,
        leading=mixer,
        parameters=full.parameters - attention + mixer,
        attention_width=0,
        traffic=full.traffic + moved,
        fused_traffic=full.fused_traffic + moved,
    )
    return shape, Quadratic(b=bytes_sent / hardware.inside.bandwidth, c=2 * hardware.inside.latency if cp > 1 else 0.0)


def _mean(shapes: tuple[LayerShape, LayerShape], share: float) -> LayerShape:
    """Return the mean of layers of which this share has the first shape, the others the second one."""
    whole, other = shapes
    names = ("matmul", "leading", "parameters", "kept", "weight_kept", "traffic", "fused_traffic", "operations")
    mixed: dict[str, Any] = {
        name: round(getattr(whole, name) * share + getattr(other, name) * (1 - share)) for name in names
    }
    return replace(whole, attention_width=round(whole.attention_width * share), **mixed)
