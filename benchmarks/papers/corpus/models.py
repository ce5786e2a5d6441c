"""Layers of the models in a corpus of measured runs (`papers.corpus.rows`), dense or with experts.

Experts lie on groups of `ep` ranks that are data-parallel elsewhere, as in Megatron and DeepSpeed. A rank computes as
many expert rows as it has tokens times visited experts, whatever `ep` is; it holds the weights of its own experts, and
sends each token to its experts and back (`sent`), once to each rank and, between nodes, once to each node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.models import Part, llama
from dilatant.cost.analytic import BYTES, UNFUSED, LayerShape, Runner, block_shape, embedding_shape, head_shape
from dilatant.cost.hardware import Hardware
from dilatant.cost.layer import sent_at_once
from dilatant.cost.quadratic import Quadratic

NVLINK_DOMAIN = {"GB200": 72, "GB300": 72}
"""GPUs that NVLink joins, if more than a node."""


ALIGNED = 8
"""Heads of a multiple of so many 16-bit numbers let batched products load 16 bytes at once, which tensor cores need."""

FUSED_NORMS = ("llm-foundry", "nanotron-ultrascale")
"""Sources of whose blocks norms are one kernel each in 16 bits, but not rotary embeddings and activations. MPT's do not
leave autocast's precision (`low_precision_layernorm`, its default @b2a43a147)."""

EAGER_LOSS = ("bloom-prequel", "nanotron-ultrascale")
"""Sources whose loss over a divided vocabulary is computed in fp32, operation by operation: a cast, the largest, a
difference, exponentials, their sum and quotients, about 60 bytes a logit with the backward, 24 in one kernel."""


BIASED = 14
"""Elements in widths of an expert that experts with biases and clamped activations move for each visited row and pass,
besides: Megatron-Core @d98e8a64 adds and weights the second product's bias operation by operation (`_apply_bias`: 6
forward, 8 backward), and clamps halves of the first product and joins them before the activation
(`weighted_bias_quick_geglu_impl`: 8 forward, 10 backward, 11 more as activations are recomputed): 43 in all, a third
of them forward."""


BIAS_GRADIENTS = 1.27
"""Time by which a product that makes a gradient of weights, and sums that of a bias as well (`BGRADB` of cuBLAS, which
Transformer Engine uses in 16 bits), takes longer, as a share of its own: the backward of a model of 10B took 6,600 ms
where products alone took 4,042 (eight A100, NVIDIA/CUDALibrarySamples issue 90), half of which are gradients of
weights. The same on later GPUs: an ASSUMPTION."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` experts of width `width`, of which a token visits `visited`, and `shared` more."""

    count: int
    visited: int
    shared: int
    width: int

    @classmethod
    def of(cls, moe: Mapping[str, Any]) -> Experts:
        return cls(moe["experts"], moe["top_k"], moe.get("shared") or 0, moe["ffn"])


def parts_of(row: Mapping[str, Any], hardware: Hardware, runner: Runner, gated: bool) -> tuple[Part, ...]:
    """Return the layers of a row's model. Raises ValueError if the row does not tell enough."""
    model = row["model"]
    hidden = model["hidden"]
    heads = model.get("heads") or hidden // 128
    if not model.get("moe"):
        # Under autocast norms alone are in fp32: 20 bytes a number, casts included.
        norms = (6.0 * hidden, 20.0 * hidden) if row["precision"].startswith("amp") else None
        norms = (2.0 * hidden, 4.0 * hidden) if row.get("source_id") in FUSED_NORMS else norms
        embedding, block, head = llama(
            model["layers"], hidden, model["ffn"], heads, model.get("kv_heads") or heads, model["vocab"],
            gated=gated, fused=runner.fused, norms=norms, head_size=model.get("head_dim"),
        )  # fmt: skip
        if runner.attention in UNFUSED and hidden % heads == 0 and hidden // heads % ALIGNED:
            times = hardware.flops("bfloat16") / (0.5 * hardware.peak_flops["float32"])  # without tensor cores
            block = replace(block, shape=replace(block.shape, attention_width=round(times * hidden)))
        if row.get("source_id") in EAGER_LOSS:
            head = replace(head, shape=replace(head.shape, traffic=10 * model["vocab"]))
        return embedding, block, head
    experts, first = Experts.of(model["moe"]), model["moe"].get("dense_layers") or 0
    visited = (experts.visited + experts.shared) * experts.width
    size = model.get("head_dim")

    def block(width: int) -> LayerShape:
        shape = block_shape(hidden, width, heads, model.get("kv_heads") or heads, head_size=size, fused=runner.fused)
        if "MLA" in f"{model.get('note')} {model.get('config_from')}":
            shape = _latent(shape, hidden, heads, 1536 if "q_lora" in str(model.get("note")) else 0)
        if "window of 128" in str(model.get("note")):  # in every other layer
            share = shape.attended_share * (0.5 + 128 / model["seq"])
            shape = replace(shape, attended_share=share)
        return shape

    biased = "GPT OSS" in model["name"]
    hybrid = "B300" in row["hardware"].replace("GB300", "") and row["ep"] == 8  # in one node, not by NCCL
    alltoall = biased and runner.operations > 0 and not hybrid
    alltoall |= "tokendrop" in model["name"]  # Megatron drops with this dispatcher alone
    blocks, sent = routed(block(visited), hidden, experts, row, hardware, alltoall)
    if biased and runner.operations:
        moved = BIASED * experts.visited * experts.width
        blocks = replace(blocks, traffic=blocks.traffic + moved, fused_traffic=blocks.fused_traffic + moved)
    longer = 0.0
    if biased and not runner.products:
        sums = blocks.leading + hidden * (blocks.attention_width + 2 * experts.visited * experts.width)
        longer = BIAS_GRADIENTS * 2 * sums / hardware.flops("bfloat16") / row["tp"]
    extra = 1 if "MTP unless" in str(model.get("note")) and "w/o MTP" not in model["name"] else 0
    dense = [Part("dense block", block(model.get("ffn") or visited), first)] if first else []
    return (
        Part("embedding", embedding_shape(hidden, model["vocab"]), 1),
        *dense,
        # Multi-token prediction is one more block and head.
        Part(
            "block",
            blocks,
            model["layers"] - first + extra,
            sent=sent,
            kernel=(Quadratic(), Quadratic(b=longer)),
            summed=summed_weights(blocks, experts, hidden, row, hardware),
        ),
        Part("head", head_shape(hidden, model["vocab"]), 1 + extra),
    )


def _latent(shape: LayerShape, hidden: int, heads: int, query_rank: int) -> LayerShape:
    """Return the block with latent attention: keys and values from 512 numbers, 64 rotary ones beside 128 of a head."""
    query = hidden * query_rank + query_rank * heads * 192 if query_rank else hidden * heads * 192
    latent = hidden * (512 + 64) + 512 * heads * 256 + heads * 128 * hidden
    plain = shape.leading + hidden * shape.attention_width
    kept = heads * (192 + 192 + 128 + 128) + 2 * (query_rank + 576)
    return replace(
        shape,
        matmul=shape.matmul - plain + query + latent,
        leading=min(query + hidden * 576, shape.matmul),
        parameters=shape.parameters - plain + query + latent,
        attention_width=heads * 160,  # scores over 192, values of 128
        kept=shape.kept - 2 * shape.attention_width - shape.key_value_width + kept,
        traffic=shape.traffic + 4 * heads * 192,
        fused_traffic=shape.fused_traffic + 4 * heads * 192,
    )


def routed(
    shape: LayerShape, hidden: int, experts: Experts, row: Mapping[str, Any], hardware: Hardware, alltoall: bool = False
) -> tuple[LayerShape, Quadratic]:
    """Return the block with experts in place of a feed-forward of the visited width, and the seconds of one pass to
    send a sample's tokens to their experts and back. alltoall: NCCL sends a copy to each expert, not to each rank."""
    tp, ep = row["tp"], row.get("ep") or 1
    each = 3 * hidden * experts.width
    # Rows gathered by rank and then by expert, read and written; as much on the way back.
    moved = (6 * experts.visited + 2) * hidden
    others = shape.parameters - (experts.visited + experts.shared) * each
    held = others + experts.shared * each + hidden * experts.count + tp * -(-experts.count // ep) * each
    blocks = replace(
        shape,
        matmul=shape.matmul + hidden * experts.count,
        parameters=held,
        kept=shape.kept + 2 * experts.visited * hidden,
        traffic=shape.traffic + moved,
        fused_traffic=shape.fused_traffic + moved,
        launches=2 * shape.launches,
        operations=2 * shape.operations,
        last=0,  # weights of experts multiply its result
    )
    copy = 2 * hidden * BYTES["bfloat16"] / tp / (row.get("cp") or 1)  # there and back
    name = next((name for name in NVLINK_DOMAIN if name in row["hardware"]), None)
    nodes = -(-ep // NVLINK_DOMAIN.get(name or "", 8))
    slower = hardware.inside.bandwidth / (hardware.between.bandwidth / 8)
    copies = sent_at_once(*(_copies(places, experts.visited, alltoall) for places in (ep, nodes)), slower)
    return blocks, Quadratic(
        b=copy / hardware.inside.bandwidth * copies, c=3 * hardware.inside.latency if ep > 1 else 0.0
    )


def summed_weights(shape: LayerShape, experts: Experts, hidden: int, row: Mapping[str, Any], hardware: Hardware) -> int:
    """Return how many weights of a block with experts all replicas would sum in the time that sums take: those of
    experts are summed by the ranks that hold the same experts, `ep` ranks apart. Of these, few or one is in a node."""
    tp, ep = row["tp"], row.get("ep") or 1
    own = tp * -(-experts.count // ep) * 3 * hidden * experts.width
    ranks = row["dp"] * (row["cp"] or 1)
    if ranks == 1:
        return shape.parameters
    node = 64 if any(name in row["hardware"] for name in NVLINK_DOMAIN) else 8

    def seconds(holders: int, in_node: int) -> float:
        """Of a pass of one byte round a ring, in and out of a node through the ports of its members there."""
        ports = max(1, in_node) * hardware.between.bandwidth / hardware.ports
        crosses = tp * ranks > node
        slowest = min(hardware.inside.bandwidth, ports) if crosses else hardware.inside.bandwidth
        return (holders - 1) / holders / slowest

    same = max(1, tp * ranks // ep)
    return round(shape.parameters - own + own * seconds(same, node // ep) / seconds(ranks, node // tp))


def _copies(places: int, visited: int, alltoall: bool) -> float:
    """Return how many copies of a token go to other places (ranks, nodes): one for each of its experts there, or one
    for each place, however many of its experts are there."""
    return visited * (places - 1) / places if alltoall else (places - 1) * (1 - (1 - 1 / places) ** visited)
