"""Tensor-parallel cuts and regions: shards of weights, and the layers of a block that are divided together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ShardIntervals = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension of a weight, the index intervals that are held."""


@dataclass(frozen=True, slots=True)
class SplitPart:
    """`count` indivisible pieces of `size` numbers each: heads, or single features."""

    count: int
    size: int = 1

    def interval(self, tp: int, index: int) -> tuple[int, int]:
        """Return the index interval of rank `index` of `tp`. With fewer pieces than ranks, several ranks hold the same
        piece."""
        if self.count < tp:
            first = self.count * index // tp
            return first * self.size, (first + 1) * self.size
        return (self.count * index // tp) * self.size, (self.count * (index + 1) // tp) * self.size


@dataclass(frozen=True, slots=True)
class SplitDimension:
    """A sharded dimension `dim` of a weight. parts: consecutive sections, each sharded separately (fused weights)."""

    dim: int
    parts: tuple[SplitPart, ...]

    def intervals(self, shape: tuple[int, ...], tp: int, index: int) -> ShardIntervals:
        """Return the intervals of a weight of `shape` that rank `index` of `tp` holds."""
        spans: list[tuple[int, int]] = []
        start = 0
        for part in self.parts:
            first, end = part.interval(tp, index)
            if spans and spans[-1][1] == start + first:
                spans[-1] = spans[-1][0], start + end
            else:
                spans.append((start + first, start + end))
            start += part.count * part.size
        whole = tuple(((0, length),) for length in shape)
        return (*whole[: self.dim], tuple(spans), *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Region:
    """Linear layers of a block that are tensor parallel together; all paths are relative to the block.

    path: the module whose input hidden states are replicated; "" if the block calls the layers itself. columns:
    column-parallel layers (outputs divided). rows: row-parallel layers (inputs divided). heads, kv_heads: head counts
    of attention; key_heads: that of linear attention. others: further modules and parameters whose first dimension is
    divided. exits: True to sum over ranks at the module's exit instead of after each row-parallel layer. whole: True if
    all tokens are replicated in the surrounding block.
    """

    path: str
    columns: Mapping[str, tuple[SplitPart, ...]]
    rows: Mapping[str, SplitPart]
    heads: int | None = None
    kv_heads: int | None = None
    key_heads: int | None = None
    others: Mapping[str, tuple[SplitPart, ...]] = field(default_factory=dict)
    exits: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in a block. path: the experts module's path in the block. count: number of experts. inner:
    inner features of each expert. mixture: path of the module that contains the routers and all experts of the
    block."""

    path: str
    count: int
    inner: int
    mixture: str
