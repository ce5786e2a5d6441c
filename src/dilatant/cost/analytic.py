"""Layer costs from FLOPs and bytes, for hardware that is not at hand. Modelled, not measured: a `CostModel` made here
says "analytic", and its seconds rank plans rather than promise a step time.

A layer's forward takes its multiply-adds at the speed large matrix products reach, its attention likewise, its
activation traffic and one reading of its weights at memory speed, its launches, and, under tensor or context
parallelism, its collectives over the links of its group, none of them overlapped. The input-gradient half repeats the
forward's products (attention's 2.5 times: its backward recomputes the scores), the weight-gradient half once more.
A backward works with half as many bytes as the layer kept, as a block of Llama does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dilatant.cost.hardware import GroupLinks, Hardware, Link
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import CostModel, Degree
from dilatant.cost.quadratic import Quadratic

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the analytic model needs to know of a layer, all for tp = cp = 1 and per token unless it says otherwise.

    `matmul` multiply-adds (the parameters of its matrix products), `leading` those of products that read the layer's
    input directly (not differentiated with respect to it if nothing before trains). `attention_width` is heads times
    head size, `attended_share` the share of pairs of tokens that attend (1/2 if causal), `key_value_width` that of
    keys plus values. `kept` and `weight_kept` are activation elements kept for the backward and for its weight half,
    `weight_only` those of the first that nothing but weight gradients needs, `traffic` elements read and written by
    elementwise kernels. `output_width` elements go to the next layer for each of `output_share` tokens per input token
    (less than 1 where a projector merges patches). `row_kept` of the kept elements are of whole rows also where the
    rest runs in chunks. `routed_width` numbers of a token travel to experts elsewhere: its width, once for each of its
    experts. `parameters` and `launches` are per layer, `collectives` are regions that tensor-parallel ranks share, each
    with an all-gather before it and a reduce-scatter behind it. `trained_share` of its products have weights that
    train, where the layer does. `forward_only` are multiply-adds of what has no backward, whatever trains (an
    autoencoder that makes targets). Not `divided` is what every tensor-parallel rank computes whole.
    """

    matmul: int
    leading: int
    parameters: int
    kept: float
    weight_kept: float
    traffic: float
    output_width: int
    attention_width: int = 0
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


def block_shape(
    hidden: int,
    intermediate: int,
    heads: int,
    key_value_heads: int | None = None,
    *,
    head_size: int | None = None,
    gated: bool = True,
    causal: bool = True,
) -> LayerShape:
    """A transformer block with a fused attention kernel; encoders are usually neither gated nor causal."""
    size = head_size or hidden // heads
    query, key_value = heads * size, 2 * (key_value_heads or heads) * size
    attention = hidden * query + hidden * key_value + query * hidden
    feed_forward = (3 if gated else 2) * hidden * intermediate
    # Two norm inputs and outputs, the residual, queries, keys and values, attention's output; then the feed-forward's.
    inner = (4 if gated else 2) * intermediate
    return LayerShape(
        matmul=attention + feed_forward,
        leading=hidden * query + hidden * key_value,
        parameters=attention + feed_forward + 2 * hidden,
        kept=4 * hidden + 2 * query + key_value + inner,
        weight_kept=4 * hidden + 2 * query + key_value + (4 if gated else 2) * intermediate,
        traffic=8 * hidden + 2 * query + key_value + inner,
        output_width=hidden,
        attention_width=query,
        attended_share=0.5 if causal else 1.0,
        key_value_width=key_value,
        weight_only=2 * hidden + intermediate,  # what the norms give, and what the last product takes
        launches=16,
        collectives=2,
    )


def embedding_shape(hidden: int, vocabulary: int) -> LayerShape:
    """A table of token vectors: a gather forward, a scatter backward."""
    return LayerShape(0, 0, hidden * vocabulary, 0, 0, 2 * hidden, hidden, launches=1)


def linear_shape(inputs: int, outputs: int, *, share: float = 1.0, count: int = 1) -> LayerShape:
    """`count` linear layers from `inputs` over `outputs` to `outputs` (a projector); `share` output tokens per input
    token."""
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
    """Final norm, output projection and loss over the vocabulary, whose logits are kept in fp32."""
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
    tp: int = 1,
    cp: int = 1,
    gpus_per_node: int | None = None,
) -> LayerCost:
    """The modelled cost of one layer on a group of tp * cp devices, in a sample's tokens (before cp splits them).
    gpus_per_node: None where all are on one."""
    if not shape.divided:
        tp = 1
    links = hardware.group_links(tp, cp, gpus_per_node)
    flops, width = hardware.flops(dtype), BYTES[dtype]
    memory = hardware.bandwidth * hardware.memory_efficiency
    group = tp * cp
    product = Quadratic(b=2 * shape.matmul / flops / group)
    leading = Quadratic(b=2 * shape.leading / flops / group)
    attention = Quadratic(a=4 * shape.attention_width * shape.attended_share / flops / group)
    traffic = Quadratic(b=width * shape.traffic / memory / group)
    once = Quadratic(c=width * shape.parameters / tp / memory + shape.launches * hardware.launch)
    forth, back = (collective_seconds(shape, links, dtype, tp, cp, way) for way in (False, True))
    targets = Quadratic(b=2 * shape.forward_only / flops / group)
    forward = product + attention + traffic + once + forth + targets
    input_gradient = product + attention.scaled(2.5) + traffic + once + back
    weight_gradient = product.scaled(shape.trained_share) + once
    kept = Quadratic(b=width * shape.kept / group)
    return LayerCost(
        forward=forward.rounded(),
        input_gradient=input_gradient.rounded(),
        weight_gradient=weight_gradient.rounded(),
        first_trainable=(input_gradient + weight_gradient + leading.scaled(-1.0)).rounded(),
        recompute=forward.rounded(),
        activation_bytes=kept.rounded(),
        frozen_bytes=Quadratic(b=width * (shape.kept - shape.weight_only) / group).rounded(),
        weight_bytes=Quadratic(b=width * min(shape.weight_kept, shape.kept) / group).rounded(),
        checkpoint_bytes=Quadratic(
            b=width * shape.output_width / (group if shape.collectives else cp)
        ).rounded(),
        output_bytes=Quadratic(b=width * shape.output_width * shape.output_share / cp).rounded(),
        attention=(attention + kept_seconds(shape, links, dtype, tp, cp)).rounded(),
        working_bytes=(kept.scaled(0.5) + gathered_bytes(shape, dtype, tp, cp)).rounded(),
        attention_bytes=(
            Quadratic(b=width * shape.attention_width / group) + kept_bytes(shape, dtype, tp, cp)
        ).rounded(),
        expert_exchange=exchange_seconds(shape, links, dtype, tp, cp).rounded(),
        row_bytes=Quadratic(b=width * shape.row_kept / cp).rounded(),
        row_working_bytes=Quadratic(b=0.5 * width * shape.row_kept / cp).rounded(),
        parameters=-(-shape.parameters // tp),
    )


def analytic_costs(
    shapes: Mapping[str, LayerShape],
    hardware: Hardware,
    degrees: Iterable[Degree] | Mapping[str, Iterable[Degree]] = ((1, 1),),
    dtype: str = "bfloat16",
    gpus_per_node: int | None = None,
) -> CostModel:
    """A cost model of these layer types at these (tp, cp), or each at its own, said to be analytic. gpus_per_node: as
    in `analytic_cost`. UserError for an unknown dtype."""
    by_kind = degrees if isinstance(degrees, Mapping) else dict.fromkeys(shapes, tuple(degrees))
    return CostModel(
        hardware=hardware.name,
        origin="analytic",
        dtype=dtype,
        layers={
            kind: {
                (tp, cp): analytic_cost(shape, hardware, dtype, tp, cp, gpus_per_node)
                for tp, cp in sorted(set(by_kind[kind]))
            }
            for kind, shape in shapes.items()
        },
        note=f"from FLOPs and bytes, not measured; {hardware.source}",
    )


def collective_seconds(
    shape: LayerShape, links: GroupLinks, dtype: str, tp: int, cp: int, backward: bool = False
) -> Quadratic:
    """What a pass of one layer waits for its group, by a sample's tokens, over `links`: all-gathers and
    reduce-scatters of hidden states (tensor parallel), and the all-gather of keys and values (context parallel), behind
    which the backward sends their gradients to their ranks in fp32."""
    result = _exchanged(shape, links.tensor, dtype, tp, cp).scaled(2.0)
    if cp > 1 and shape.key_value_width:
        moved = (cp - 1) / cp * shape.key_value_width * (BYTES[dtype] + 4 * backward) / tp
        result += Quadratic(b=moved / links.context.bandwidth, c=(1 + backward) * links.context.latency)
    return result


def exchange_seconds(shape: LayerShape, links: GroupLinks, dtype: str, tp: int, cp: int) -> Quadratic:
    """What one pass takes to send all of a rank's share of tokens to experts on other ranks of its group and back:
    counts first, then rows there, then rows back."""
    if tp * cp == 1 or not shape.routed_width:
        return ZERO
    moved = 2 * shape.routed_width * BYTES[dtype] / (tp * cp)
    return Quadratic(b=moved / links.context.bandwidth, c=3 * links.context.latency)


def kept_seconds(shape: LayerShape, links: GroupLinks, dtype: str, tp: int, cp: int) -> Quadratic:
    """What of that need not be waited for again where attention is kept: all but the all-gathers of hidden states."""
    exchanged = _exchanged(shape, links.tensor, dtype, tp, cp)
    return collective_seconds(shape, links, dtype, tp, cp) + exchanged.scaled(-1.0)


def kept_bytes(shape: LayerShape, dtype: str, tp: int, cp: int) -> Quadratic:
    """A rank's rows of what its reduce-scatters made, kept with attention."""
    return Quadratic(b=BYTES[dtype] * shape.collectives * shape.output_width / (tp * cp)) if tp > 1 else ZERO


def _exchanged(shape: LayerShape, link: Link, dtype: str, tp: int, cp: int) -> Quadratic:
    """Seconds of the all-gathers of hidden states, or of the reduce-scatters."""
    if tp == 1:
        return ZERO
    moved = (tp - 1) / tp * shape.output_width * BYTES[dtype] / cp
    return Quadratic(b=shape.collectives * moved / link.bandwidth, c=shape.collectives * link.latency)


def gathered_bytes(shape: LayerShape, dtype: str, tp: int, cp: int) -> Quadratic:
    """What attention holds of the keys and values of a row's other ranks, and of their gradients in fp32, while it
    runs: two of four groups of heads (see `attention.context_parallel`)."""
    if cp == 1:
        return ZERO
    return Quadratic(b=shape.key_value_width / tp * (BYTES[dtype] + 4) / 2)
