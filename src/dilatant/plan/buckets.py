"""Buckets: atoms that are summed together, and their division among ranks that share an optimizer's state.

A bucket is one flat row of numbers, atom after atom. Where its holders share the state (ZeRO stage 1), it is cut at
the row borders nearest to equal shares, so that every share consists of boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dilatant.cost.memory import Zero
from dilatant.plan.boxes import Box, atoms
from dilatant.plan.holdings import Holdings

BUCKET_BYTES = 25 << 20
"""Most bytes of gradients that are summed together."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Cells in backward order, and the ranks that hold every one of them, ascending."""

    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that have a cell here, each once, in backward order."""
        return tuple(dict.fromkeys(box.name for box in self.boxes))


@dataclass(frozen=True, slots=True)
class Format:
    """What the numbers of a weight are. Weights of unlike formats share no bucket."""

    dtype: str
    item_bytes: int


def make_buckets(
    holdings: Holdings, formats: Mapping[str, Format], trainable: Iterable[str], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets of one rank set and format and of at most `bucket_bytes` (or one cell), in the order in which they are
    reduced: that of their last weights in the backward pass.

    holdings: in layer order. Every rank knows all of this, so all cut alike.
    """
    chosen = set(trainable)
    filling: dict[tuple[tuple[int, ...], Format], tuple[list[Box], int]] = {}
    full: list[tuple[int, list[Box], tuple[int, ...]]] = []
    last: dict[tuple[tuple[int, ...], Format], int] = {}
    for position, name in enumerate(name for name in reversed(holdings) if name in chosen):
        form = formats[name]
        for atom in atoms(holdings[name].boxes):
            key = atom.ranks, form
            boxes, total = filling.get(key, ([], 0))
            size = atom.box.size * form.item_bytes
            if boxes and total + size > bucket_bytes:
                full.append((last[key], boxes, atom.ranks))
                boxes, total = [], 0
            boxes.append(atom.box)
            filling[key] = boxes, total + size
            last[key] = position
    full += [(last[key], boxes, key[0]) for key, (boxes, _) in filling.items()]
    full.sort(key=lambda entry: (entry[0], entry[2]))
    return tuple(Bucket(tuple(boxes), ranks) for _, boxes, ranks in full)


def shares(boxes: Sequence[Box], count: int) -> tuple[tuple[Box, ...], ...]:
    """A bucket's cells cut into `count` consecutive shares, at the row borders nearest to equal ones.

    A share is off by less than a row at each of its ends; it may be empty.
    """
    total = sum(box.size for box in boxes)
    divided: list[tuple[Box, ...]] = []
    borders = (
        [0] + [_border(boxes, (2 * total * k + count) // (2 * count)) for k in range(1, count)] + [total]
    )
    for first, end in itertools.pairwise(borders):
        share = []
        start = 0
        for box in boxes:
            row = _row_size(box)
            low, high = max(first - start, 0) // row, min(end - start, box.size) // row
            if low < high:
                share.append(box.rows(low, high))
            start += box.size
        divided.append(tuple(share))
    return tuple(divided)


@dataclass(frozen=True, slots=True)
class BucketShare:
    """A bucket as its holder `rank` sees it.

    sharing: the ranks that divide the state among them, this one with them; `sizes` are the numbers in their shares, in
    that order. own: this rank's share; cells: for each of its boxes, the number of the bucket's cell that it is of.
    alike: the ranks that hold the same share as this one, itself included. speaks: whether this rank is the one that
    counts its share in norms and writes it into checkpoints. even: nodes have equally many holders, so that shares are
    alike on all of them; otherwise nobody but this node cuts so.
    """

    bucket: Bucket
    rank: int
    sharing: tuple[int, ...]
    alike: tuple[int, ...]
    sizes: tuple[int, ...]
    own: tuple[Box, ...]
    cells: tuple[int, ...]
    speaks: bool
    even: bool = True

    @property
    def is_divided(self) -> bool:
        return len(self.sharing) > 1

    @property
    def width(self) -> int:
        """Numbers in the longest share; the others are padded to it."""
        return max(self.sizes)

    @property
    def begins(self) -> int:
        """Where in the bucket this rank's share begins."""
        return sum(self.sizes[: self.sharing.index(self.rank)])


def share_of(bucket: Bucket, rank: int, zero: Zero, node_of: Sequence[int]) -> BucketShare:
    """How `rank` holds its part of `bucket`. node_of: rank → node."""
    sharing: tuple[int, ...]
    alike: tuple[int, ...]
    if zero == "none":
        sharing = (rank,)
    elif zero == "all":
        sharing = bucket.ranks
    else:
        sharing = tuple(other for other in bucket.ranks if node_of[other] == node_of[rank])
    nodes: dict[int, list[int]] = {}
    for other in bucket.ranks:
        nodes.setdefault(node_of[other], []).append(other)
    even = zero != "node" or len({len(held) for held in nodes.values()}) == 1
    place = sharing.index(rank)
    if zero == "none":
        alike = bucket.ranks
    elif zero == "all" or not even:
        alike = (rank,)
    else:
        alike = tuple(held[place] for held in nodes.values())
    speaks = bucket.ranks[0] in sharing
    divided = shares(bucket.boxes, len(sharing))
    sizes = tuple(sum(box.size for box in share) for share in divided)
    own = divided[place]
    cells = tuple(
        next(i for i, cell in enumerate(bucket.boxes) if cell.name == box.name and cell.meet(box) == box)
        for box in own
    )
    return BucketShare(bucket, rank, sharing, alike, sizes, own, cells, speaks, even)


def _border(boxes: Sequence[Box], target: int) -> int:
    """The row border nearest to `target` numbers from the start."""
    start = 0
    for box in boxes:
        if target <= start + box.size:
            row = _row_size(box)
            return start + (target - start + row // 2) // row * row
        start += box.size
    return start


def _row_size(box: Box) -> int:
    return box.size // box.shape[0] if box.whole else 1
