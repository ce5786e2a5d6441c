"""Layer costs, and the frozen rule: the passes that a layer needs when it, or everything before it, does not train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from msgspec import Meta

from dilatant.config.memory_modes import Recompute
from dilatant.cost.quadratic import Amount, Quadratic

ZERO = Quadratic()


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of one layer on one (tp, cp) group, as functions of a sample's tokens; bytes are per rank.

    `first_trainable`: backward of a trainable layer with nothing trainable before it: weight gradients and the
    gradients inside the layer, but no gradient of the layer's input. `recompute`: seconds of running the forward again;
    `checkpoint_bytes`: bytes kept when activations are recomputed. `weight_bytes`: the part of `activation_bytes` that
    stays from the input-gradient half to the weight-gradient half of a split backward. `output_bytes`: sent to the
    next stage. `parameters`: held by one rank.
    `attention`: the part of `recompute` that is saved if attention and its exchanged tensors are kept, which takes
    `attention_bytes` more.
    `frozen_bytes`: activations kept if the layer does not train, without those that only weight gradients need (zero:
    unknown, so all of them).
    `working_bytes`: temporary bytes of a backward besides activations, such as gradients of some of them.
    `expert_exchange`: seconds of one pass to send tokens to experts on other ranks and back, if every token left its
    rank.
    `common_bytes`: inputs that all blocks of a stage share and keep (rotary tables), added once per stage.
    `forward_bytes`: bytes of a forward without a backward, including the input; `frozen_working_bytes`:
    `working_bytes` of a frozen layer. Zero: the value of a layer that trains is used.
    `dense_seconds`: (tokens, seconds): extra seconds of forward and backward of a row of several samples over one
    sample of as many tokens, if attention computes all pairs of such a row; empty: not measured.
    `splits`: the weight gradient can be computed later. A layer `in_chunks` is always recomputed, and holds
    `activation_bytes` of at most one chunk at once; `row_bytes` and `row_working_bytes` are the parts of
    `activation_bytes` and `working_bytes` that exist for whole rows even then (a head's norm).
    `host`: seconds in which the host issues the operations of a forward, and of a backward: neither takes less. 0 if
    the other seconds include them.
    `fit_error`: largest relative error of the fits, None if nothing was measured.
    """

    forward: Quadratic
    input_gradient: Quadratic
    weight_gradient: Quadratic
    first_trainable: Quadratic
    recompute: Quadratic = ZERO
    activation_bytes: Quadratic = ZERO
    weight_bytes: Quadratic = ZERO
    checkpoint_bytes: Quadratic = ZERO
    output_bytes: Quadratic = ZERO
    attention: Quadratic = ZERO
    attention_bytes: Quadratic = ZERO
    working_bytes: Quadratic = ZERO
    frozen_bytes: Quadratic = ZERO
    expert_exchange: Quadratic = ZERO
    row_bytes: Quadratic = ZERO
    row_working_bytes: Quadratic = ZERO
    common_bytes: Quadratic = ZERO
    forward_bytes: Quadratic = ZERO
    frozen_working_bytes: Quadratic = ZERO
    parameters: Annotated[int, Meta(ge=0)] = 0
    host: Amount = 0.0
    fit_error: Amount | None = None
    dense_seconds: tuple[tuple[Annotated[int, Meta(ge=1)], Amount], ...] = ()
    splits: bool = True
    in_chunks: bool = False

    def pass_seconds(self, tokens: float) -> float:
        """Return the seconds of a forward and a backward of one sample of `tokens` tokens."""
        return self.forward(tokens) + self.input_gradient(tokens) + self.weight_gradient(tokens)

    def slower(self, factor: float) -> LayerCost:
        """Return the cost with its compute seconds multiplied by `factor`."""
        times = ("forward", "input_gradient", "weight_gradient", "first_trainable", "recompute", "attention")
        return replace(self, **{name: getattr(self, name).scaled(factor).rounded() for name in times})


def sent_at_once(near: float, far: float, slower: float) -> float:
    """Return the time of an exchange, as a multiple of a copy's to a rank of the same node: `near` copies go there and,
    at the same time, `far` ones to other nodes, where each takes `slower` times as long."""
    return max(near, far * slower)


def with_experts_on_ranks(
    cost: LayerCost, ep: int, on_node: int = 0, slower: tuple[float, float] = (1.0, 1.0)
) -> LayerCost:
    """Return the cost with expert parallelism over `ep` ranks, if tokens choose all experts equally often. on_node:
    how many of these are on a rank's node; 0: all. slower: how many times as long as inside a node the bytes, and the
    messages, of ranks of other nodes take, which travel at the same time."""
    if ep == 1:
        return cost
    exchange, near = cost.expert_exchange, min(on_node, ep) or ep
    bytes_slower, latency = slower
    left = sent_at_once((near - 1) / ep, 1 - near / ep, bytes_slower)
    sent = Quadratic(exchange.a * left, exchange.b * left, exchange.c * (latency if near < ep else 1.0))
    return replace(
        cost,
        forward=cost.forward + sent,
        recompute=cost.recompute + sent,
        input_gradient=cost.input_gradient + sent,
        first_trainable=cost.first_trainable + sent,
    )


def on_groups(cost: LayerCost, groups: int) -> LayerCost:
    """Return the cost, as a function of the tokens of a microbatch, on a rank of one of `groups` groups that divide its
    samples evenly."""
    if groups == 1:
        return cost
    curves = {one.name: getattr(cost, one.name) for one in fields(cost)}
    own: dict[str, Any] = {
        name: Quadratic(curve.a / groups, curve.b / groups, curve.c)
        for name, curve in curves.items()
        if isinstance(curve, Quadratic)
    }
    return replace(cost, **own)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one layer after the frozen rule. `transient_bytes` exist only while its backward runs: working
    memory, and all activations if these are recomputed; `forward_bytes` only while its forward runs, besides kept ones.
    `common_bytes`: the part of `kept_bytes` that the blocks of a stage share. `host`: seconds of the host for the
    forward, the input-gradient and the weight-gradient half, which take no less."""

    forward: Quadratic
    input_gradient: Quadratic
    weight_gradient: Quadratic
    kept_bytes: Quadratic
    weight_bytes: Quadratic
    transient_bytes: Quadratic
    forward_bytes: Quadratic = ZERO
    common_bytes: Quadratic = ZERO
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def backward(self) -> Quadratic:
        return self.input_gradient + self.weight_gradient


def trainable_before(trainable: Sequence[bool], upstream: bool = False) -> tuple[bool, ...]:
    """Return for every layer of a unit whether anything before it trains.

    `upstream`: whether any parameter of the units that feed this one trains (encoders and projectors for a language
    model). The layer itself does not count; eq. 3.3 of Cornstarch (the thesis) would charge the first trainable layer
    for an input gradient that is not needed.
    """
    result, seen = [], upstream
    for flag in trainable:
        result.append(seen)
        seen = seen or flag
    return tuple(result)


def frozen_work(
    cost: LayerCost, trainable: bool, before: bool, recompute: Recompute = "none", host_link: float = 0.0
) -> LayerWork:
    """Return the work of a layer that trains or not, with something trainable before it or not.

    The weight gradient is needed only if the layer trains, the input gradient only if something before it trains, and
    recomputation only if there is a backward: a frozen encoder is never recomputed, and a layer without a backward
    keeps nothing. Recomputation is charged to the input-gradient half, which runs first. host_link: bytes per second
    of copies to and from the host, beside which blocks compute; 0: it shares the device's memory.
    """
    if not trainable and not before:
        held = cost.activation_bytes if cost.forward_bytes == ZERO else cost.forward_bytes
        return LayerWork(cost.forward, ZERO, ZERO, ZERO, ZERO, ZERO, held, host=(cost.host, 0.0, 0.0))
    if before:
        input_gradient = cost.input_gradient
        weight_gradient = cost.weight_gradient if trainable else ZERO
    else:
        # Only gradients inside the layer: the input-gradient half is `first_trainable` minus the weight gradient.
        input_gradient = _positive(cost.first_trainable, cost.weight_gradient)
        weight_gradient = _positive(cost.first_trainable, input_gradient)
    kept = whole = cost.activation_bytes if trainable or cost.frozen_bytes == ZERO else cost.frozen_bytes
    working = cost.working_bytes
    if not trainable and cost.frozen_working_bytes != ZERO:
        working = cost.frozen_working_bytes
    # A layer for which recomputation saves nothing (a head, an embedding) is recomputed only if it runs in chunks.
    recomputed = cost.in_chunks or (recompute != "none" and cost.checkpoint_bytes != cost.activation_bytes)
    if recomputed:
        input_gradient = input_gradient + cost.recompute
        kept = cost.checkpoint_bytes + cost.common_bytes
    forward = cost.forward
    if recompute == "block_offload" and recomputed and host_link and not cost.in_chunks:
        kept, seconds = cost.common_bytes, cost.checkpoint_bytes.scaled(1.0 / host_link)
        working = working + cost.checkpoint_bytes.scaled(2.0)  # of the running block, and of the one that runs next
        forward = forward + _positive(seconds, forward)
        input_gradient = input_gradient + _positive(seconds, input_gradient)
    if recompute == "block_keep_attention":
        input_gradient = _positive(input_gradient, cost.attention)
        kept = kept + cost.attention_bytes
    if not cost.splits:
        input_gradient, weight_gradient = input_gradient + weight_gradient, ZERO
    transient = working + whole if recomputed else working
    forward_only = recomputed and cost.forward_bytes != ZERO
    return LayerWork(
        forward,
        input_gradient,
        weight_gradient,
        kept_bytes=kept,
        weight_bytes=cost.weight_bytes if trainable and cost.splits else ZERO,
        transient_bytes=transient,
        forward_bytes=cost.forward_bytes if forward_only else transient,
        common_bytes=cost.common_bytes,
        host=(cost.host, cost.host * (0.5 + recomputed), 0.5 * cost.host * trainable),
    )


def _positive(value: Quadratic, less: Quadratic) -> Quadratic:
    return Quadratic(max(0.0, value.a - less.a), max(0.0, value.b - less.b), max(0.0, value.c - less.c))
