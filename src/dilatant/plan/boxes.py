"""Boxes (shard intervals): the part of a weight that a rank holds, as index intervals of the whole weight.

Gradient sync, sharded optimizer state, checkpoints and resharding only intersect boxes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
"""First index, and the index after the last."""

BoxIntervals = tuple[tuple[Interval, ...], ...]
"""Ascending intervals for each dimension; fused weights have several per dimension."""

_KEY = re.compile(r"(?P<name>.+)@(?P<intervals>\d+:\d+(?:[+,]\d+:\d+)*)")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the weight `name`, whose full shape is `whole`.

    The box's tensor holds the elements of all intervals, concatenated in each dimension. Intervals of one dimension
    neither overlap nor touch. Raises ValueError if they do, or if they exceed the weight.
    """

    name: str
    whole: tuple[int, ...]
    intervals: BoxIntervals

    def __post_init__(self) -> None:
        if len(self.intervals) != len(self.whole):
            raise ValueError(f"{self.key}: {len(self.intervals)} dimensions of a weight with {len(self.whole)}")
        for length, spans in zip(self.whole, self.intervals):
            borders = [border for span in spans for border in span]
            ascending = all(first < second for first, second in itertools.pairwise(borders))
            if not ascending or (borders and not 0 <= borders[0] <= borders[-1] <= length):
                raise ValueError(f"{self.key} is no part of a weight of shape {list(self.whole)}")

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Box:
        """Return the box that covers a whole weight."""
        return cls(name, tuple(shape), tuple(((0, length),) if length else () for length in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box's tensor."""
        return tuple(sum(end - start for start, end in spans) for spans in self.intervals)

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole

    @property
    def has_origin(self) -> bool:
        """True if the box holds the weight's first element; of the boxes that divide a weight, exactly one does."""
        return all(spans and spans[0][0] == 0 for spans in self.intervals)

    @property
    def key(self) -> str:
        """The logical name, followed by `@0:4,8:16` for a part; `+` joins several intervals of one dimension."""
        if self.is_whole:
            return self.name
        return f"{self.name}@{intervals_text(self.intervals)}"

    def meet(self, other: Box) -> Box | None:
        """Return the intersection with another box, None if empty. Raises ValueError if the weights differ."""
        if (self.name, self.whole) != (other.name, other.whole):
            raise ValueError(f"{self.key} and {other.key} are of unlike weights")
        if self.intervals == other.intervals:
            return self
        both = tuple(_meet(own, others) for own, others in zip(self.intervals, other.intervals))
        return Box(self.name, self.whole, both) if all(both) else None

    def cells(self) -> Iterator[Box]:
        """Yield the box's cells: boxes with exactly one interval per dimension."""
        if all(len(spans) == 1 for spans in self.intervals):
            yield self
            return
        for chosen in itertools.product(*self.intervals):
            yield Box(self.name, self.whole, tuple((span,) for span in chosen))

    def place(self, cell: Box) -> tuple[slice, ...]:
        """Return the slices of a cell in this box's tensor. Raises ValueError if the box lacks the cell."""
        places = []
        for spans, (inner,) in zip(self.intervals, cell.intervals):
            before = 0
            for start, end in spans:
                if start <= inner[0] and inner[1] <= end:
                    places.append(slice(before + inner[0] - start, before + inner[1] - start))
                    break
                before += end - start
            else:
                raise ValueError(f"{cell.key} is no part of {self.key}")
        return tuple(places)

    def rows(self, first: int, end: int) -> Box:
        """Return rows `first <= row < end` of a cell, counted within the cell; a scalar weight is one row."""
        if not self.whole:
            return self
        ((start, _),), *rest = self.intervals
        return Box(self.name, self.whole, (((start + first, start + end),), *rest))


def parse_key(key: str) -> tuple[str, BoxIntervals | None]:
    """Split a box's key into the weight's name and the intervals, which are None for a whole weight."""
    match = _KEY.fullmatch(key)
    if match is None:
        return key, None
    dimensions = []
    for text in match["intervals"].split(","):
        spans = [span.split(":") for span in text.split("+")]
        dimensions.append(tuple((int(start), int(end)) for start, end in spans))
    return match["name"], tuple(dimensions)


def intervals_text(intervals: BoxIntervals) -> str:
    return ",".join("+".join(f"{start}:{end}" for start, end in spans) for spans in intervals)


@dataclass(frozen=True, slots=True)
class Atom:
    """A cell of a weight all of whose elements are held by the same ranks (ascending)."""

    box: Box
    ranks: tuple[int, ...]


def atoms(boxes: Mapping[int, Box]) -> tuple[Atom, ...]:
    """Cut a weight at every border of its holders' boxes; return the resulting cells in row order with their holders.

    boxes: rank → its box of this weight. Every element that some rank holds is in exactly one atom.
    """
    holders: dict[Box, list[int]] = {}
    for rank in sorted(boxes):
        holders.setdefault(boxes[rank], []).append(rank)
    if not holders:
        return ()
    (first, ranks), *others = holders.items()
    if not others:
        return tuple(Atom(cell, tuple(ranks)) for cell in first.cells())
    borders = [
        sorted({border for box in holders for span in box.intervals[dim] for border in span})
        for dim in range(len(first.whole))
    ]
    found = []
    for cell in itertools.product(*(itertools.pairwise(cuts) for cuts in borders)):
        held = [rank for box, own in holders.items() if _covers(box, cell) for rank in own]
        if held:
            box = Box(first.name, first.whole, tuple((span,) for span in cell))
            found.append(Atom(box, tuple(sorted(held))))
    return tuple(found)


def _covers(box: Box, cell: tuple[Interval, ...]) -> bool:
    return all(
        any(start <= first and end <= last for start, last in spans) for spans, (first, end) in zip(box.intervals, cell)
    )


def _meet(own: tuple[Interval, ...], others: tuple[Interval, ...]) -> tuple[Interval, ...]:
    found = []
    i = j = 0
    while i < len(own) and j < len(others):
        start, end = max(own[i][0], others[j][0]), min(own[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if own[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)
