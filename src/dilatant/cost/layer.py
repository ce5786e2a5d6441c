"""What one layer takes, and what of it a frozen model saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dilatant.config.recompute import Recompute
from dilatant.cost.quadratic import Quadratic

ZERO = Quadratic()


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of one layer on one (tp, cp) group, as functions of a sample's tokens; bytes are per rank.

    `first_trainable` is the backward of a trainable layer with nothing trainable before it: the weight gradients
    with the input gradients inside the layer but not the one it would send on. `recompute` is what running the
    forward again costs, and `checkpoint_bytes` what is kept when activations are recomputed. `weight_bytes` is the
    part of `activation_bytes` that stays from the input-gradient half to the weight-gradient half of a split
    backward. `output_bytes` is what goes to the next stage, `parameters` are those that one rank holds.
    `attention` is the part of `recompute` that is saved where attention, and what ranks exchange for it, is kept, at
    `attention_bytes` more.
    `frozen_bytes` are the activations that are kept where the layer does not train: without what only weight gradients
    need (zero: not known, so all of them).
    `working_bytes` are what a backward holds for a while besides activations: gradients of some of them.
    `expert_exchange` is what tokens take in one pass on their way to experts on other ranks and back, if every one
    left its rank.
    `common_bytes` are what all blocks of a stage are handed and keep together (rotary tables): of the stage once.
    `forward_bytes` are what a forward without a backward takes, input included; `frozen_working_bytes` are
    `working_bytes` where the layer is frozen. Zero: as where it trains.
    `dense_seconds` are (tokens, seconds): what forward and backward of a row of several samples take more than those of
    one sample of as many tokens, where attention computes all pairs of such a row; empty: not measured.
    `splits` says whether the weight gradient can be put off. A layer `in_chunks` is always recomputed, and holds
    `activation_bytes` of no more than a chunk at once. `row_bytes` and `row_working_bytes` are the parts of
    `activation_bytes` and `working_bytes` that are of whole rows even then (a head's norm).
    `fit_error` is the largest relative error of the fits, None where nothing was measured.
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
    parameters: int = 0
    fit_error: float | None = None
    dense_seconds: tuple[tuple[int, float], ...] = ()
    splits: bool = True
    in_chunks: bool = False

    def pass_seconds(self, tokens: float) -> float:
        """Seconds of a forward and a backward of one sample of `tokens` tokens."""
        return self.forward(tokens) + self.input_gradient(tokens) + self.weight_gradient(tokens)

    def slower(self, factor: float) -> LayerCost:
        """The same layer where computing takes `factor` times as long."""
        times = ("forward", "input_gradient", "weight_gradient", "first_trainable", "recompute", "attention")
        return replace(self, **{name: getattr(self, name).scaled(factor).rounded() for name in times})


def with_experts_on_ranks(cost: LayerCost, ep: int) -> LayerCost:
    """The cost where `ep` ranks have different experts, and tokens choose all of these equally often."""
    if ep == 1:
        return cost
    exchange = cost.expert_exchange
    sent = Quadratic(exchange.a * (1 - 1 / ep), exchange.b * (1 - 1 / ep), exchange.c)
    return replace(
        cost,
        forward=cost.forward + sent,
        recompute=cost.recompute + sent,
        input_gradient=cost.input_gradient + sent,
        first_trainable=cost.first_trainable + sent,
    )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the frozen rule leaves of one layer. `transient_bytes` are held only while the layer runs: what
    its backward works with, and all its activations where they are not kept (no backward, or recomputed in it).
    `common_bytes` are the part of `kept_bytes` that the blocks of a stage keep together."""

    forward: Quadratic
    input_gradient: Quadratic
    weight_gradient: Quadratic
    kept_bytes: Quadratic
    weight_bytes: Quadratic
    transient_bytes: Quadratic
    common_bytes: Quadratic = ZERO

    @property
    def backward(self) -> Quadratic:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> Quadratic:
        """Forward and backward together: what a partitioner balances."""
        return self.forward + self.backward


def trainable_before(trainable: Sequence[bool], upstream: bool = False) -> tuple[bool, ...]:
    """For every layer of a unit: does anything before it train?

    `upstream` says whether any parameter of the units that feed this one trains (encoders and projectors for a
    language model). The layer itself does not count: the thesis' eq. 3.3 would charge the first trainable layer for
    an input gradient that nobody needs (planning notes C5, C7).
    """
    result, seen = [], upstream
    for flag in trainable:
        result.append(seen)
        seen = seen or flag
    return tuple(result)


def frozen_work(cost: LayerCost, trainable: bool, before: bool, recompute: Recompute = "none") -> LayerWork:
    """The work of a layer that trains or not, with something trainable before it or not.

    Weight gradient only if it trains, input gradient only if something before it does, and recomputation only where
    there is a backward at all (planning notes C6: a frozen encoder is never recomputed). A layer without a backward
    keeps nothing. Recomputation is charged to the input-gradient half, which runs first.
    """
    if not trainable and not before:
        held = cost.activation_bytes if cost.forward_bytes == ZERO else cost.forward_bytes
        return LayerWork(cost.forward, ZERO, ZERO, ZERO, ZERO, held)
    if before:
        input_gradient = cost.input_gradient
        weight_gradient = cost.weight_gradient if trainable else ZERO
    else:
        # Only gradients inside the layer: the input-gradient half is what the leading variant takes beyond weights.
        input_gradient = _positive(cost.first_trainable, cost.weight_gradient)
        weight_gradient = _positive(cost.first_trainable, input_gradient)
    kept = whole = cost.activation_bytes if trainable or cost.frozen_bytes == ZERO else cost.frozen_bytes
    working = cost.working_bytes
    if not trainable and cost.frozen_working_bytes != ZERO:
        working = cost.frozen_working_bytes
    # What keeps no less where it is recomputed (a head, an embedding) is not.
    recomputed = cost.in_chunks or (recompute != "none" and cost.checkpoint_bytes != cost.activation_bytes)
    if recomputed:
        input_gradient = input_gradient + cost.recompute
        kept = cost.checkpoint_bytes + cost.common_bytes
    if recompute == "block_keep_attention":
        input_gradient = _positive(input_gradient, cost.attention)
        kept = kept + cost.attention_bytes
    if not cost.splits:
        input_gradient, weight_gradient = input_gradient + weight_gradient, ZERO
    return LayerWork(
        cost.forward,
        input_gradient,
        weight_gradient,
        kept_bytes=kept,
        weight_bytes=cost.weight_bytes if trainable and cost.splits else ZERO,
        transient_bytes=working + whole if recomputed else working,
        common_bytes=cost.common_bytes,
    )


def _positive(value: Quadratic, less: Quadratic) -> Quadratic:
    return Quadratic(max(0.0, value.a - less.a), max(0.0, value.b - less.b), max(0.0, value.c - less.c))
