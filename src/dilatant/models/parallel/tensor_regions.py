"""What tensor-parallel ranks divide of a weight, and where within a block they have shares of its features: values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Intervals = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension of a weight, what of it is held."""


@dataclass(frozen=True, slots=True)
class Part:
    """`count` pieces of `size` numbers each that ranks divide: heads, or single features."""

    count: int
    size: int = 1

    def interval(self, tp: int, index: int) -> tuple[int, int]:
        """Rank `index` of `tp` holds these numbers. Fewer pieces than ranks: several ranks hold the same one."""
        if self.count < tp:
            first = self.count * index // tp
            return first * self.size, (first + 1) * self.size
        return (self.count * index // tp) * self.size, (self.count * (index + 1) // tp) * self.size


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension that ranks divide. parts: one after the other along it; a fused weight has several."""

    dim: int
    parts: tuple[Part, ...]

    def intervals(self, shape: tuple[int, ...], tp: int, index: int) -> Intervals:
        """What rank `index` of `tp` holds of a weight of `shape`."""
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
    """Linear layers of a block that ranks share; all paths are within the block.

    path: the module at whose entry all ranks have the same hidden states; "" where the block calls the layers itself.
    columns: layers whose outputs are divided. rows: those whose inputs are. heads, kv_heads: of attention. key_heads:
    of linear attention. others: further modules and parameters whose first dimension is divided. exits: whether what
    rows make is summed over ranks where it leaves the module, instead of where each of them makes it. whole: whether
    all ranks have all tokens in the block around it.
    """

    path: str
    columns: Mapping[str, tuple[Part, ...]]
    rows: Mapping[str, Part]
    heads: int | None = None
    kv_heads: int | None = None
    key_heads: int | None = None
    others: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    exits: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in a block. path: of its module within the block. count: of experts. inner: features of each."""

    path: str
    count: int
    inner: int

    @property
    def mixture(self) -> str:
        """Path of the module that chooses among them."""
        return self.path.rpartition(".")[0]
