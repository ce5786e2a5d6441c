"""Analytic layer costs from FLOPs and bytes, for hardware that is not available. A cost model from this module has the
origin "analytic": its seconds are modelled, not measured, so they serve to rank plans, not to predict a step time.

A layer's forward seconds are the sum of its multiply-adds at the speed of large matrix products, the processors that
their last tiles leave idle, attention at the speed of its kernel, the traffic of its elementwise kernels at memory
bandwidth, its kernel launches and, under tensor or context parallelism, its collectives over the links of its group, of
which those of keys and values overlap as in the runner. The input-gradient half repeats the forward's products
(attention 2.5 times, because its backward recomputes the scores) with twice the traffic, the weight-gradient half
repeats the products once more and adds the gradient to its fp32 sum. No pass takes less than its host needs to issue
its operations. The working memory of a backward is half the bytes that the layer keeps for it, as for a Llama block.

Costs of groups of ranks from the measured cost of one tensor-parallel rank's shard: context parallelism is modelled
(with balanced placement a rank has 1/cp of the linear and quadratic terms, and the whole constant term), and so are the
collectives of both, from the links of the hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dilatant.config.degrees import ONE, Degrees
from dilatant.cost.hardware import GroupLinks, Hardware, Link
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic

FP8 = "float8"
"""Dtype of runs whose blocks multiply in eight bits (`train.precision: fp8`); their activations are in bf16."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 2}
"""Bytes of an activation by dtype."""
GRADIENT_BYTES = 12
"""Bytes per weight and microbatch in which a gradient is written in bf16 and added to its fp32 sum: 2, 2, 4 and 4."""
TILE = 128 * 256
"""Elements of a product's result that a processor computes at once."""
CAST_BYTES = 6
"""Bytes in which an element becomes an operand in eight bits: read twice, for its scale and for the cast, and written
twice, as it is and transposed for the weight gradient."""
BESIDE = 0.2
"""Share of a collective's time by which it slows computation beside it: its kernels occupy 16 to 32 of a GPU's 108 to
132 processors."""
RANK_TOKENS = 8192
"""Tokens of a context-parallel rank, for which the time of messages is compared with that of the kernel beside them:
rows are divided from about twice as many on. An ASSUMPTION; it matters between nodes."""
UNFUSED = {"unfused": ((6.5, 4.0), (9.5, 8.0)), "unfused, recomputed": ((6.5, 4.0), (16.0, 12.0))}
"""Attention by one kernel after another, on all pairs: how often a forward, and a backward, moves a pair's score, and
its operations for each number of a head. The softmax, dropout with a mask of a byte and the products read and write
scores and their gradients."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A training program. attention: its kernel, a key of `UNFUSED` or of `Hardware.attention`. fused: norms, rotary
    embeddings and activations are one kernel each. whole_rows: elements, in widths of a row, that each tensor-parallel
    rank moves in a pass for the tokens of all: 0 with sequence parallelism, 10 without, 8 if it copies what collectives
    bring and take. operations: those that its host issues, as a multiple of transformers' own blocks. wait:
    seconds that a tensor-parallel collective takes longer than its messages. products: dtype of the blocks' matrix
    products, if not that of the activations. gradient_bytes: moved per weight and microbatch to sum gradients, 0 if the
    products themselves add to the sums. hidden: share of tensor-parallel messages that take no time of their own
    because products run beside them. exposed: share of context-parallel ranks' keys and values that no kernel runs
    beside: the first of our four groups of heads, and none in a ring, whose first kernel reads a rank's own. merged:
    elements, in widths of queries, that a ring moves for each of its ranks in a forward, to merge partial outputs: a
    third of those of forward and backward, which adds partial gradients. Megatron: the compiled corrections of
    Transformer Engine @d0067d0d, 2.25 and 2.25 for ranks of balanced halves; torchtitan: PyTorch 2.13's merger in fp32,
    operation by operation, 16 and 5. cast_bytes: in which an element becomes an operand in eight bits. stops_early:
    recomputation ends before a block's last product, as PyTorch's does from 2.1 on (`set_checkpoint_early_stop`).
    weight_casts: how often a microbatch casts a block's weights to eight bits: 0 if they are cast once a step, as in
    Megatron, 1 if the backward uses the forward's (Transformer Engine), 2 in torchao."""

    name: str
    attention: str = "packed"
    fused: bool = False
    whole_rows: float = 0.0
    operations: float = 1.0
    wait: float = 0.0
    products: str | None = None
    gradient_bytes: int = GRADIENT_BYTES
    hidden: float = 0.0
    exposed: float = 0.25
    merged: float = 0.0
    cast_bytes: int = CAST_BYTES
    stops_early: bool = False
    weight_casts: int = 0


DILATANT = Runner("dilatant", stops_early=True)
MEGATRON = Runner("megatron", "library", fused=True, operations=0.4, gradient_bytes=0, exposed=0.0, merged=1.5)
TORCHTITAN = Runner(
    "torchtitan", "flash", operations=0.8, whole_rows=8.0, exposed=0.0, merged=7.0, stops_early=True, weight_casts=2
)
AUTOMODEL = Runner("automodel", "library", operations=0.8, stops_early=True)
FSDP = Runner("fsdp", "flash", operations=0.8, stops_early=True)
"""Other programs, with which `benchmarks/planning/published.py` compares their published steps; FSDP: torchtitan's on
one tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Size of a layer for the analytic model, for tp = cp = 1 and per token unless stated otherwise.

    `matmul`: multiply-adds (parameters of the matrix products); `leading`: those of products that read the layer's
    input directly (without an input gradient if nothing before the layer trains). `attention_width`: heads of queries
    times head size; `attended_share`: fraction of token pairs that attend (1/2 if causal); `key_value_width`: width of
    keys plus values. `kept` and `weight_kept`: activation elements kept for the backward and for its weight half;
    `weight_only`: the part of `kept` that only weight gradients need; `traffic`: elements read and written by
    elementwise kernels, each operation by itself, and `fused_traffic` if norms, rotary embeddings and activations are
    one kernel each (0: as `traffic`). `output_width`: elements sent to the next layer for each of `output_share` tokens
    per input token (less than 1 if a projector merges patches). `row_kept`: the part of `kept` that exists for whole
    rows even if the rest runs in chunks. `routed_width`: elements per token that are sent to experts on other ranks:
    hidden width times the experts per token. `parameters`, `launches` and `operations`, which the host issues in a
    forward, are per layer. `collectives`: tensor-parallel regions, each with an all-gather before and a reduce-scatter
    after it. `trained_share`: fraction of the products whose weights train when the layer trains. `forward_only`:
    multiply-adds that never have a backward (an autoencoder that makes targets). `divided`: False if every
    tensor-parallel rank computes the whole layer. `last`: multiply-adds after the last tensor that a backward needs.
    """

    matmul: int
    leading: int
    parameters: int
    kept: float
    weight_kept: float
    traffic: float
    output_width: int
    attention_width: int = 0
    heads: int = 0
    attended_share: float = 0.5
    key_value_width: int = 0
    weight_only: float = 0.0
    output_share: float = 1.0
    launches: int = 1
    collectives: int = 0
    trained_share: float = 1.0
    routed_width: int = 0
    row_kept: float = 0.0
    forward_only: int = 0
    divided: bool = True
    fused_traffic: float = 0.0
    operations: int = 0
    inputs: float = 0.0
    outputs: float = 0.0
    last: int = 0


def block_shape(
    hidden: int,
    intermediate: int,
    heads: int,
    key_value_heads: int | None = None,
    *,
    head_size: int | None = None,
    gated: bool = True,
    causal: bool = True,
    norms: tuple[float, float] | None = None,
    fused: bool = False,
) -> LayerShape:
    """Return the shape of a transformer block with a fused attention kernel; encoders are rarely gated or causal.

    norms: elements per token that norms keep for the backward besides their outputs, and that they read and write;
    None: two norms, computed in fp32 operation by operation (RMSNorm of transformers) if the block is gated, else one
    kernel each (LayerNorm). fused: as a runner does whose norms, rotary embeddings and activations are one kernel each.
    """
    size = head_size or hidden // heads
    query, key_value = heads * size, 2 * (key_value_heads or heads) * size
    attention = hidden * query + hidden * key_value + query * hidden
    feed_forward = (3 if gated else 2) * hidden * intermediate
    if fused or not (norms or gated):
        norms = 2.0 * hidden, 4.0 * hidden
    # In fp32 the input is kept so, and the result before the weight; read or written are casts, square, mean, products.
    kept_by_norms, moved_by_norms = norms or (6.0 * hidden, 36.0 * hidden)
    around = 2 * hidden + kept_by_norms
    inner = (4 if gated else 2) * intermediate
    turned = query + key_value // 2 if gated or causal else 0  # by rotary embeddings
    # Residual sums, norms, rotary embeddings, activations.
    apart = 6 * hidden + moved_by_norms + 9 * turned + (5 if gated else 2) * intermediate
    together = 10 * hidden + 2 * turned + (3 if gated else 2) * intermediate
    return LayerShape(
        matmul=attention + feed_forward,
        leading=hidden * query + hidden * key_value,
        parameters=attention + feed_forward + 2 * hidden,
        kept=around + 2 * query + key_value + inner,
        weight_kept=around + 2 * query + key_value + inner,
        traffic=together if fused else apart,
        fused_traffic=together,
        output_width=hidden,
        attention_width=query,
        heads=heads,
        attended_share=0.5 if causal else 1.0,
        key_value_width=key_value,
        weight_only=2 * hidden + intermediate,  # the norms' outputs, and the last product's input
        launches=16,
        operations=140,
        collectives=2,
        inputs=2 * hidden + query + intermediate,
        outputs=2 * hidden + query + key_value + (2 if gated else 1) * intermediate,
        last=hidden * intermediate,
    )


def embedding_shape(hidden: int, vocabulary: int) -> LayerShape:
    """Return the shape of an embedding table: a gather in forward, a scatter in backward."""
    return LayerShape(0, 0, hidden * vocabulary, 0, 0, 2 * hidden, hidden, launches=1)


def linear_shape(inputs: int, outputs: int, *, share: float = 1.0, count: int = 1) -> LayerShape:
    """Return the shape of a projector of `count` linear layers. The first goes from `inputs` to `outputs`, the others
    from `outputs` to `outputs`; `share` is output tokens per input token."""
    rest = (count - 1) * outputs * outputs
    first = int(inputs * outputs * share)
    return LayerShape(
        matmul=first + int(rest * share),
        leading=first,
        parameters=inputs * outputs + rest,
        kept=inputs + 2 * (count - 1) * outputs * share,
        weight_kept=inputs + count * outputs * share,
        traffic=inputs + 2 * count * outputs * share,
        weight_only=inputs + (count - 1) * outputs * share,
        output_width=outputs,
        output_share=share,
        launches=2 * count,
    )


def head_shape(hidden: int, vocabulary: int) -> LayerShape:
    """Return the shape of final norm, output projection and loss over the vocabulary, with logits kept in fp32."""
    return LayerShape(
        matmul=hidden * vocabulary,
        leading=0,
        parameters=hidden * vocabulary + hidden,
        kept=2 * hidden + 2 * vocabulary,
        row_kept=2 * hidden,
        weight_kept=hidden + vocabulary,
        traffic=4 * vocabulary,
        weight_only=hidden,
        output_width=0,
        launches=6,
    )


def analytic_cost(
    shape: LayerShape,
    hardware: Hardware,
    dtype: str = "bfloat16",
    degrees: Degrees = ONE,
    gpus_per_node: int | None = None,
    runner: Runner = DILATANT,
) -> LayerCost:
    """Model the cost of one layer on a group of devices as a function of a sample's tokens (before cp splits them).
    gpus_per_node: None if all devices are on one node. runner: the program that trains."""
    if dtype == FP8:
        return _cost_in_fp8(shape, hardware, degrees, gpus_per_node, runner)
    if not shape.divided:
        degrees = degrees._replace(tp=1)
    links, group, cp = hardware.group_links(degrees, gpus_per_node), degrees.ranks, degrees.cp
    links = replace(links, tensor=links.tensor.hidden(runner.hidden))
    low, whole = (runner.products if shape.inputs else None), shape.collectives * shape.output_width
    flops, width = hardware.flops(low or dtype), BYTES[dtype]
    memory = hardware.bandwidth * hardware.memory_efficiency
    product = Quadratic(b=2 * shape.matmul / flops / group)
    leading = Quadratic(b=2 * shape.leading / flops / group)
    attention, attention_back = (
        Quadratic(a=seconds / group) for seconds in attention_seconds(shape, hardware, dtype, runner.attention)
    )
    elements = shape.fused_traffic or shape.traffic if runner.fused else shape.traffic
    if shape.collectives:
        elements += runner.whole_rows * shape.output_width * (degrees.tp - 1)
    if cp > 1:
        elements += runner.merged * cp * shape.attention_width
    traffic = Quadratic(b=width * elements / memory / group)
    # The last tiles of a product leave on average half of the processors idle, for as long as a tile takes; the inner
    # dimension is the whole width of a row in one of two products, the rank's part of it in the other. Products that
    # are not described so read their weights first.
    half, weights = hardware.processors * TILE / flops, shape.parameters / degrees.tp / memory
    started, started_back = (
        Quadratic(
            c=(half * (whole + (size - whole) / degrees.tp) if size else width * weights)
            + shape.launches * hardware.launch
        )
        for size in (shape.inputs, shape.outputs)
    )
    summed = Quadratic(
        b=half * 2 * shape.collectives * shape.trained_share / cp,
        c=runner.gradient_bytes * weights * shape.trained_share + shape.launches * hardware.launch,
    )
    casts = runner.cast_bytes / memory / group if low else 0.0
    cast_weights = runner.cast_bytes * weights if low else 0.0
    cast, cast_back = (
        Quadratic(b=casts * operands, c=cast_weights * (runner.weight_casts > number))
        for number, operands in enumerate((shape.inputs, shape.outputs))
    )
    waits = Quadratic(c=2 * shape.collectives * runner.wait if degrees.tp > 1 else 0.0)
    messages, messages_back = (
        collective_seconds(shape, links, dtype, degrees, way, kernel.a, runner.exposed)
        for way, kernel in ((False, attention), (True, attention_back))
    )
    targets = Quadratic(b=2 * shape.forward_only / flops / group)
    forward = product + attention + traffic + started + messages + waits + targets + cast
    # Of two regions' collectives, the last reduce-scatter.
    stopped = Quadratic(b=2 * shape.last / flops / group) + _exchanged(shape, links.tensor, dtype, degrees).scaled(0.5)
    input_gradient = product + attention_back + traffic.scaled(2.0) + started_back + messages_back + waits + cast_back
    weight_gradient = product.scaled(shape.trained_share) + summed
    kept = Quadratic(b=width * shape.kept / group)
    output = width * shape.output_width
    curves = {
        "forward": forward,
        "input_gradient": input_gradient,
        "weight_gradient": weight_gradient,
        "first_trainable": input_gradient + weight_gradient + leading.scaled(-1.0),
        "recompute": forward + stopped.scaled(-1.0) if runner.stops_early and shape.last else forward,
        "activation_bytes": kept,
        "frozen_bytes": Quadratic(b=width * (shape.kept - shape.weight_only) / group),
        "weight_bytes": Quadratic(b=width * min(shape.weight_kept, shape.kept) / group),
        "checkpoint_bytes": Quadratic(b=output / (group if shape.collectives else cp)),
        "output_bytes": Quadratic(b=output * shape.output_share / cp),
        "attention": attention + _saved(messages, shape, links, dtype, degrees),
        "working_bytes": kept.scaled(0.5) + gathered_bytes(shape, dtype, degrees),
        "attention_bytes": Quadratic(b=width * shape.attention_width / group)
        + cached_collective_bytes(shape, dtype, degrees),
        "expert_exchange": exchange_seconds(shape, links, dtype, degrees),
        "row_bytes": Quadratic(b=width * shape.row_kept / cp),
        "row_working_bytes": Quadratic(b=0.5 * width * shape.row_kept / cp),
    }
    rounded: dict[str, Any] = {name: curve.rounded() for name, curve in curves.items()}
    host = float(f"{shape.operations * runner.operations * hardware.host:.6g}")
    return LayerCost(**rounded, parameters=-(-shape.parameters // degrees.tp), host=host)


def _cost_in_fp8(
    shape: LayerShape, hardware: Hardware, degrees: Degrees, gpus_per_node: int | None, runner: Runner
) -> LayerCost:
    """Return the cost of a layer under `train.precision: fp8`: weight gradients, and layers that are no blocks or have
    experts, are in bf16; the others cast their weights in each pass."""
    exact, low = (
        analytic_cost(shape, hardware, "bfloat16", degrees, gpus_per_node, replace(runner, products=products))
        for products in (None, FP8)
    )
    if not shape.inputs or shape.routed_width:
        return exact
    memory = hardware.bandwidth * hardware.memory_efficiency
    casts = Quadratic(c=float(f"{CAST_BYTES * low.parameters / memory:.6g}"))
    return replace(
        low,
        forward=low.forward + casts,
        recompute=low.recompute + casts,
        input_gradient=low.input_gradient + casts,
        weight_gradient=exact.weight_gradient,
        first_trainable=low.first_trainable + casts + exact.weight_gradient + low.weight_gradient.scaled(-1.0),
    )


def attention_seconds(shape: LayerShape, hardware: Hardware, dtype: str, kernel: str) -> tuple[float, float]:
    """Return the seconds of attention for each pair of a sample's tokens, forward and backward."""
    if kernel not in UNFUSED:
        forth, back = hardware.attention_flops(kernel, dtype)
        operations = shape.attention_width * shape.attended_share
        return 4.0 * operations / forth, 10.0 * operations / back
    memory = hardware.bandwidth * hardware.memory_efficiency
    forth, back = (
        moved * shape.heads * BYTES[dtype] / memory + times * shape.attention_width / hardware.flops(dtype)
        for moved, times in UNFUSED[kernel]
    )
    return forth, back


def analytic_costs(
    shapes: Mapping[str, LayerShape],
    hardware: Hardware,
    degrees: Iterable[Degrees] | Mapping[str, Iterable[Degrees]] = (ONE,),
    dtype: str = "bfloat16",
    gpus_per_node: int | None = None,
    runner: Runner = DILATANT,
) -> CostModel:
    """Return the analytic cost model of these layer types at these degrees, or at each type's own. gpus_per_node: see
    `analytic_cost`. Raises UserError for an unknown dtype."""
    by_kind = degrees if isinstance(degrees, Mapping) else dict.fromkeys(shapes, tuple(degrees))
    return CostModel(
        hardware=hardware.name,
        origin="analytic",
        dtype=dtype,
        layers={
            kind: {
                own: analytic_cost(shape, hardware, dtype, own, gpus_per_node, runner)
                for own in sorted({each.without_experts for each in by_kind[kind]})
            }
            for kind, shape in shapes.items()
        },
        note=f"from FLOPs and bytes, not measured; {hardware.source}",
    )


def collective_seconds(
    shape: LayerShape,
    links: GroupLinks,
    dtype: str,
    degrees: Degrees,
    backward: bool = False,
    kernel: float = 0.0,
    exposed: float = DILATANT.exposed,
) -> Quadratic:
    """Return the seconds that one pass of a layer waits for collectives, as a function of a sample's tokens. They are
    all-gathers and reduce-scatters of hidden states (tensor parallelism), and the all-gather of keys and values
    (context parallelism), whose gradients the backward sends to their ranks in fp32. kernel: seconds of a rank's
    attention for each pair of a sample's tokens; all but the `exposed` share of keys and values, and of their
    gradients, travels beside it, slows it, and is waited for if it takes longer."""
    result = _exchanged(shape, links.tensor, dtype, degrees).scaled(2.0)
    if degrees.cp > 1 and shape.key_value_width:
        moved = (degrees.cp - 1) / degrees.cp * shape.key_value_width * (BYTES[dtype] + 4 * backward) / degrees.tp
        alone = moved / links.context.bandwidth
        beside = max(BESIDE * alone, alone - kernel * RANK_TOKENS * degrees.cp)
        waited = exposed * alone + (1.0 - exposed) * beside
        result += Quadratic(b=waited, c=(1 + backward) * links.context.latency)
    return result


def _saved(messages: Quadratic, shape: LayerShape, links: GroupLinks, dtype: str, degrees: Degrees) -> Quadratic:
    """Return those of a forward's collective seconds that selective recomputation saves: all but the all-gathers of
    hidden states."""
    return messages + _exchanged(shape, links.tensor, dtype, degrees).scaled(-1.0)


def exchange_seconds(shape: LayerShape, links: GroupLinks, dtype: str, degrees: Degrees) -> Quadratic:
    """Return the seconds of one pass to send all tokens of a rank to experts on other ranks and back. It exchanges row
    counts, then sends the rows to the experts, then the rows back."""
    if not shape.routed_width:
        return ZERO
    moved = 2 * shape.routed_width * BYTES[dtype] / degrees.ranks
    return Quadratic(b=moved / links.context.bandwidth, c=3 * links.context.latency)


def cached_collective_bytes(shape: LayerShape, dtype: str, degrees: Degrees) -> Quadratic:
    """Return the bytes per rank of the reduce-scatter outputs, which selective recomputation keeps with attention."""
    if degrees.tp == 1:
        return ZERO
    return Quadratic(b=BYTES[dtype] * shape.collectives * shape.output_width / degrees.ranks)


def _exchanged(shape: LayerShape, link: Link, dtype: str, degrees: Degrees) -> Quadratic:
    """Return the seconds of the all-gathers of hidden states; the reduce-scatters take the same time."""
    if degrees.tp == 1:
        return ZERO
    moved = (degrees.tp - 1) / degrees.tp * shape.output_width * BYTES[dtype] / degrees.cp
    return Quadratic(b=shape.collectives * moved / link.bandwidth, c=shape.collectives * link.latency)


def gathered_bytes(shape: LayerShape, dtype: str, degrees: Degrees) -> Quadratic:
    """Return the bytes of other ranks' keys and values of a row, and of their fp32 gradients, that attention holds
    while it runs. These are those of two of four groups of heads (see `attention.context_parallel`)."""
    if degrees.cp == 1:
        return ZERO
    return Quadratic(b=shape.key_value_width / degrees.tp * (BYTES[dtype] + 4) / 2)


_FORTH, _BACK = ("forward", "recompute"), ("input_gradient", "first_trainable")
"""Passes that wait for collectives; weight gradients need nothing from other ranks."""
_WITHOUT = (
    "weight_gradient", "attention_bytes", "activation_bytes", "frozen_bytes", "weight_bytes", "checkpoint_bytes",
    "output_bytes", "row_bytes", "row_working_bytes", "common_bytes",
)  # fmt: skip
_WORKING = ("working_bytes", "frozen_working_bytes", "forward_bytes")
"""Measured bytes that also include the gathered tokens of all ranks."""


def group_cost(share: LayerCost, shape: LayerShape, links: GroupLinks, dtype: str, degrees: Degrees) -> LayerCost:
    """Return a layer's cost at `degrees`; `share` is the cost of its shard at the same tp and cp 1 without collectives.

    `shape`: of the whole layer. `links`: carry the group's collectives. Attention is what grows with squared tokens.
    """
    cp, gathered = degrees.cp, gathered_bytes(shape, dtype, degrees)
    messages, messages_back = (
        collective_seconds(shape, links, dtype, degrees, way, kernel.a / cp)
        for way, kernel in ((False, share.forward), (True, share.input_gradient))
    )
    added = {
        **dict.fromkeys(_FORTH, messages),
        **dict.fromkeys(_BACK, messages_back),
        **dict.fromkeys(_WITHOUT, ZERO),
        "attention": _saved(messages, shape, links, dtype, degrees),
        **{name: gathered for name in _WORKING if getattr(share, name) != ZERO},
    }
    exchange = exchange_seconds(shape, links, dtype, degrees)
    row = {name: getattr(share, name) for name in added}
    own: dict[str, Any] = {
        name: (Quadratic(row[name].a / cp, row[name].b / cp, row[name].c) + more).rounded()
        for name, more in added.items()
    }
    dense = tuple((tokens, seconds / cp) for tokens, seconds in share.dense_seconds)
    return replace(share, **own, expert_exchange=exchange.rounded(), dense_seconds=dense)
