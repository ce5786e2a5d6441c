"""The papers' models as the shipped cost model sees them: public shapes, and units that the planner takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.cost.analytic import (
    DILATANT,
    LayerShape,
    Runner,
    analytic_cost,
    analytic_costs,
    block_shape,
    embedding_shape,
    head_shape,
    linear_shape,
)
from dilatant.cost.hardware import Hardware, Link, load_hardware
from dilatant.cost.layer import ZERO, LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import LayerSpec, ModelSpec, UnitSpec

EFFICIENCY = 0.5
"""Of the peak, where only operations are counted: one number for all layers, so that it cancels in every ratio."""


def operations_only(name: str) -> Hardware:
    """A device that does nothing but multiply and add, at `EFFICIENCY`: seconds on it are counted
    operations, scaled."""
    free = Link(np.inf)
    return replace(
        load_hardware(name),
        name=f"{name}, operations only",
        bandwidth=np.inf,
        matmul_efficiency=EFFICIENCY,
        memory_efficiency=1.0,
        launch=0.0,
        host=0.0,
        processors=0,
        attention={},
        inside=free,
        between=free,
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """`count` layers that run with another layer, on `share` tokens for each of its tokens (a vision tower)."""

    shape: LayerShape
    count: int
    share: float
    trains: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """`count` equal layers. `window`: tokens that a token attends to, of rows longer than that. sent: seconds of one
    pass to send a sample's tokens to experts and back. beside: layers that run with this one. kernel: seconds forward
    and backward of what the shape leaves out. summed: weights of a layer by which its
    gradients' sums are reckoned, if not all."""

    kind: str
    shape: LayerShape
    count: int
    window: int | None = None
    sent: Quadratic = ZERO
    beside: Beside | None = None
    kernel: tuple[Quadratic, Quadratic] = (ZERO, ZERO)
    summed: int | None = None

    @property
    def as_run(self) -> LayerShape:
        """The shape on rows longer than the window: attention is then so many products more per token."""
        if self.window is None:
            return self.shape
        pairs = round(2 * self.shape.attention_width * self.shape.attended_share * self.window)
        return replace(self.shape, attention_width=0, matmul=self.shape.matmul + pairs)


def parameters(parts: Sequence[Part]) -> int:
    """All weights."""
    return sum(part.count * part.shape.parameters for part in parts)


def llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    gated: bool = True,
    fused: bool = False,
    norms: tuple[float, float] | None = None,
    head_size: int | None = None,
) -> tuple[Part, ...]:
    """Embedding, blocks with grouped queries, head."""
    block = block_shape(hidden, ffn, heads, kv_heads, head_size=head_size, gated=gated, fused=fused, norms=norms)
    return (
        Part("embedding", embedding_shape(hidden, vocabulary), 1),
        Part("block", block, layers),
        Part("head", head_shape(hidden, vocabulary), 1),
    )


def gpt(layers: int, hidden: int, heads: int, vocabulary: int) -> tuple[Part, ...]:
    """GPT-3's architecture: a feed-forward of four times the width, not gated."""
    return llama(layers, hidden, 4 * hidden, heads, heads, vocabulary, gated=False)


LLAMA_3_2_1B = llama(16, 2048, 8192, 32, 8, 128_256)
LLAMA_3_2_3B = llama(28, 3072, 8192, 24, 8, 128_256)


def qwen_vision(language_hidden: int) -> tuple[Part, ...]:
    """Qwen2.5-VL's vision encoder, in patches: 32 blocks of width 1,280 with gated MLPs of 3,420, windows of 64 patches
    in all but every eighth block, and the merger, which makes one token of four patches."""
    block = block_shape(1280, 3420, 16, causal=False)
    merger = replace(
        linear_shape(1280, language_hidden, share=0.25),
        matmul=(5120 * 5120 + 5120 * language_hidden) // 4,
        parameters=5120 * 5120 + 5120 * language_hidden,
    )
    return (Part("vision.windowed", block, 28, 64), Part("vision.full", block, 4), Part("projector", merger, 1))


def linear_part(kind: str, inputs: int, outputs: int, share: float = 1.0) -> Part:
    """A projector; `share` output tokens per input token."""
    return Part(kind, linear_shape(inputs, outputs, share=share), 1)


def transformer_of(layers: int, hidden: int, weights: float, causal: bool, kind: str) -> tuple[Part, ...]:
    """Equal blocks that hold `weights` together: all that Cornstarch's Table 3.1 tells."""
    heads = max(hidden // 128, 1)
    ffn = round((weights / layers - 4 * hidden * hidden) / (2 * hidden))
    return (Part(kind, block_shape(hidden, ffn, heads, gated=False, causal=causal), layers),)


CORNSTARCH_LLM = {
    "S": transformer_of(16, 2048, 1.2e9, True, "language"),
    "M": transformer_of(32, 4096, 8e9, True, "language"),
    "L": transformer_of(64, 5120, 32e9, True, "language"),
}
CORNSTARCH_VISION = {
    "S": transformer_of(32, 1280, 0.6e9, False, "vision"),
    "M": transformer_of(48, 2560, 3.9e9, False, "vision"),
    "L": transformer_of(64, 3840, 11.6e9, False, "vision"),
}
CORNSTARCH_AUDIO = {
    "S": transformer_of(24, 1024, 0.5e9, False, "audio"),
    "M": transformer_of(32, 3072, 3.4e9, False, "audio"),
    "L": transformer_of(48, 5120, 12.4e9, False, "audio"),
}

# DistTrain Table 1: layers, hidden, FFN, heads, groups; vocabulary of Llama 3.
DISTTRAIN_LLM = {
    "9B": llama(32, 4096, 11_008, 32, 32, 128_256),
    "15B": llama(40, 5120, 13_824, 40, 40, 128_256),
    "72B": llama(80, 8192, 28_672, 64, 8, 128_256),
}
VIT_HUGE = transformer_of(32, 1280, 0.63e9, False, "vision")


def seconds(
    parts: Sequence[Part], hardware: Hardware, tokens: ArrayLike, of: str = "forward", tp: int = 1, samples: int = 1
) -> NDArray[np.float64]:
    """Seconds of a pass over microbatches of `samples` samples of so many tokens each: `of` is "forward",
    "input_gradient" or "weight_gradient"."""
    n = np.asarray(tokens, dtype=np.float64)
    total = np.zeros_like(n)
    for part in parts:
        cost = getattr(analytic_cost(part.as_run, hardware, degrees=Degrees(tp)), of)
        total = total + part.count * ((cost.a * n + cost.b) * n * samples + cost.c * (n > 0))
    return total


def backward(parts: Sequence[Part], hardware: Hardware, tokens: ArrayLike, tp: int = 1) -> NDArray[np.float64]:
    """Seconds of a whole backward, everything trained."""
    return seconds(parts, hardware, tokens, "input_gradient", tp) + seconds(
        parts, hardware, tokens, "weight_gradient", tp
    )


@dataclass(frozen=True, slots=True)
class PaperUnit:
    """A unit of a paper's model. `trains`: kinds of layers that do (None: all). `degrees`: (tp, cp) that it
    may have."""

    name: str
    parts: tuple[Part, ...]
    feeds: tuple[str, ...] = ()
    trains: frozenset[str] | None = None
    degrees: tuple[tuple[int, int], ...] = ((1, 1),)
    recompute: Recompute | None = None
    runner: Runner = DILATANT


def model_spec(units: Sequence[PaperUnit]) -> ModelSpec:
    """What the planner plans for."""

    def layers(unit: PaperUnit) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(
                f"{part.kind}.layers.{number}" if part.shape.collectives else f"{part.kind}.{number}",
                f"{unit.name} {part.kind}",
                part.shape.parameters if part.summed is None else part.summed,
                unit.trains is None or part.kind in unit.trains,
            )
            for part in unit.parts
            for number in range(part.count)
        )

    return ModelSpec(tuple(UnitSpec(unit.name, layers(unit), unit.feeds, unit.recompute) for unit in units))


def cost_model(units: Sequence[PaperUnit], hardware: Hardware) -> CostModel:
    """The shipped analytic costs of all layers, each at its unit's degrees. Layers other than blocks are never
    recomputed, as in training."""
    layers: dict[str, Mapping[Degrees, LayerCost]] = {}
    for unit in units:
        for part in unit.parts:
            kind = f"{unit.name} {part.kind}"
            costs = analytic_costs(
                {kind: part.as_run}, hardware, [Degrees(*own) for own in unit.degrees], runner=unit.runner
            ).layers[kind]
            layers[kind] = {
                degrees: _with_more(cost if part.shape.attention_width else _kept(cost), part, hardware, unit)
                for degrees, cost in costs.items()
            }
    return CostModel(hardware.name, "analytic", "bfloat16", layers)


_PASSES = ("forward", "input_gradient", "first_trainable")


def _with_more(cost: LayerCost, part: Part, hardware: Hardware, unit: PaperUnit) -> LayerCost:
    """The cost of a layer with what its tokens take to other ranks and back, with a kernel of its own, and with the
    layers beside it."""
    forth, back = (part.sent + one for one in part.kernel)
    more = {"forward": forth, "recompute": forth, "input_gradient": back, "first_trainable": back}
    cost = replace(cost, **{name: getattr(cost, name) + added for name, added in more.items()})
    if part.beside is None:
        return cost
    each, share = analytic_cost(part.beside.shape, hardware, runner=unit.runner), part.beside.share
    found: dict[str, Any] = {}
    for name in (*_PASSES, "weight_gradient") if part.beside.trains else ("forward",):
        own: Quadratic = getattr(each, name)
        scaled = Quadratic(own.a * share**2, own.b * share, own.c).scaled(part.beside.count)
        found[name] = getattr(cost, name) + scaled
    if part.beside.trains:
        found["host"] = cost.host + part.beside.count * each.host
    return replace(cost, **found)


def _kept(cost: LayerCost) -> LayerCost:
    return replace(cost, recompute=ZERO, checkpoint_bytes=cost.activation_bytes, attention=ZERO, attention_bytes=ZERO)
