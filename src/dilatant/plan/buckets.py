"""Holdings and gradient buckets. Holdings say which rank holds which box of every weight, and which ranks' gradients of
it are summed. A bucket has the atoms that are reduced together, divided among ranks that shard optimizer state.

A bucket is one flat vector of elements, atom after atom. Where its holders shard the state (ZeRO stage 1), the bucket
is cut at the row borders nearest to equal shards, so that every shard consists of boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from dilatant.cost.memory import Zero
from dilatant.plan.boxes import Box, BoxIntervals, atoms
from dilatant.plan.plan import Plan, Stage

BUCKET_BYTES = 25 << 20
"""Maximum bytes of gradients in one bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Cells in backward order, and the ranks (ascending) that each hold all of them. uncut: no shard has a part of a
    cell."""

    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    uncut: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights with a cell in this bucket, without repetition, in backward order."""
        return tuple(dict.fromkeys(box.name for box in self.boxes))


@dataclass(frozen=True, slots=True)
class Format:
    """Element format of a weight. Weights of different formats share no bucket."""

    dtype: str
    item_bytes: int


_Key = tuple[tuple[int, ...], Format, str, bool]
"""What all cells of a bucket have in common: holders, format, group, and whether shards may cut them."""


def make_buckets(
    holdings: Holdings,
    formats: Mapping[str, Format],
    trainable: Iterable[str],
    bucket_bytes: int,
    apart: Mapping[str, str] = MappingProxyType({}),
    uncut: Set[str] = frozenset(),
) -> tuple[Bucket, ...]:
    """Group trainable weights into buckets of one rank set and format and of at most `bucket_bytes` (or one cell).

    Buckets are in reduction order: that of their last weight in the backward pass. holdings: in layer order. apart:
    weight → group; weights of different groups share no bucket. uncut: weights that no shard may hold in part; their
    buckets are as large as their largest cell times their holders, so that every holder can get one. All arguments are
    known to every rank, so all ranks cut the same buckets.
    """
    chosen = set(trainable)
    filling: dict[_Key, tuple[list[Box], int, int]] = {}
    full: list[tuple[int, list[Box], _Key]] = []
    last: dict[_Key, int] = {}
    for position, name in enumerate(name for name in reversed(holdings) if name in chosen):
        form = formats[name]
        for atom in atoms(holdings[name].boxes):
            key = atom.ranks, form, apart.get(name, ""), name in uncut
            boxes, total, largest = filling.get(key, ([], 0, 0))
            size = atom.box.size * form.item_bytes
            largest = max(largest, size)
            if boxes and total + size > max(bucket_bytes, len(atom.ranks) * largest * (name in uncut)):
                full.append((last[key], boxes, key))
                boxes, total, largest = [], 0, size
            boxes.append(atom.box)
            filling[key] = boxes, total + size, largest
            last[key] = position
    full += [(last[key], boxes, key) for key, (boxes, *_) in filling.items()]
    full.sort(key=lambda entry: (entry[0], entry[2][0]))
    return tuple(Bucket(tuple(boxes), key[0], key[3]) for _, boxes, key in full)


def cut_shards(bucket: Bucket, count: int) -> tuple[tuple[Box, ...], ...]:
    """Cut a bucket's cells into `count` consecutive shards, at the row borders nearest to equal shards.

    Each end of a shard is less than a row (of uncut weights: a weight) away from the equal cut; a shard may be empty.
    """
    return _cut(bucket, _borders(bucket, count))


def _borders(bucket: Bucket, count: int) -> list[int]:
    total = sum(box.size for box in bucket.boxes)
    return [0] + [_border(bucket, (2 * total * k + count) // (2 * count)) for k in range(1, count)] + [total]


def _cut(bucket: Bucket, borders: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
    """Cut consecutive cells at row borders, in elements from the start."""
    divided: list[tuple[Box, ...]] = []
    for first, end in itertools.pairwise(borders):
        share = []
        start = 0
        for box in bucket.boxes:
            row = 1 if bucket.uncut else _row_size(box)
            low, high = max(first - start, 0) // row, min(end - start, box.size) // row
            if low < high:
                share.append(box if bucket.uncut else box.rows(low, high))
            start += box.size
        divided.append(tuple(share))
    return tuple(divided)


@dataclass(frozen=True, slots=True)
class BucketShard:
    """A bucket from the point of view of its holder `rank`.

    sharing: the ranks, including this one, that divide the optimizer state; `sizes` are the numbers of elements in
    their shards, in that order. own: this rank's shard; cells: for each box of `own`, the index of the bucket's cell
    that contains the box. pieces: the parts of the boxes of `own` into which the shards of all nodes together cut them,
    so that on every node one rank has the same. alike: the ranks, including this one, that hold the same shard.
    is_primary: True if this rank
    is the shard's primary owner, which adds the shard to norms and writes it into checkpoints. even: True if every node
    has equally many holders, so that all nodes cut the same shards; otherwise the shards are specific to this node.
    """

    bucket: Bucket
    rank: int
    sharing: tuple[int, ...]
    alike: tuple[int, ...]
    sizes: tuple[int, ...]
    own: tuple[Box, ...]
    cells: tuple[int, ...]
    pieces: tuple[Box, ...]
    is_primary: bool
    even: bool = True

    @property
    def is_divided(self) -> bool:
        return len(self.sharing) > 1

    @property
    def width(self) -> int:
        """Elements in the longest shard; the other shards are padded to this length."""
        return max(self.sizes)

    @property
    def begins(self) -> int:
        """Offset of this rank's shard in the bucket, in elements."""
        return sum(self.sizes[: self.sharing.index(self.rank)])


def shard_of(bucket: Bucket, rank: int, zero: Zero, node_of: Sequence[int]) -> BucketShard:
    """Return the shard of `bucket` that `rank` holds under `zero`. node_of: rank → node."""
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
    is_primary = bucket.ranks[0] in sharing
    divided = cut_shards(bucket, len(sharing))
    sizes = tuple(sum(box.size for box in share) for share in divided)
    own = divided[place]
    cells = tuple(
        next(i for i, cell in enumerate(bucket.boxes) if cell.name == box.name and cell.meet(box) == box) for box in own
    )
    pieces = own
    if not even:
        borders = {border for held in nodes.values() for border in _borders(bucket, len(held))}
        finer = itertools.chain(*_cut(bucket, sorted(borders)))
        pieces = tuple(part for part in finer if any(b.name == part.name and b.meet(part) == part for b in own))
    return BucketShard(bucket, rank, sharing, alike, sizes, own, cells, pieces, is_primary, even)


def _border(bucket: Bucket, target: int) -> int:
    """Return the border nearest to `target` elements from the start: of a row, or of an uncut weight."""
    start = 0
    for box in bucket.boxes:
        if target <= start + box.size:
            row = box.size if bucket.uncut else _row_size(box)
            return start + (target - start + row // 2) // row * row
        start += box.size
    return start


def _row_size(box: Box) -> int:
    return box.size // box.shape[0] if box.whole else 1


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A weight as plans see it. name: logical name, one for a tied weight. layers: the layers that use the weight."""

    name: str
    layers: frozenset[str]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """The holders of one weight.

    boxes: rank → its part. duplicates: non-contributing ranks, whose full gradient another rank of their stage computes
    as well; to add the gradient only once, they send zeros and receive the sum. All other ranks' gradients are summed.
    """

    boxes: Mapping[int, Box]
    duplicates: frozenset[int] = frozenset()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The holders, ascending."""
        return tuple(sorted(self.boxes))


Holdings = dict[str, Holding]
"""Logical name → holders of the weight, in layer order of the units in plan order."""

TensorSplit = Callable[[HeldWeight, Stage, int], tuple[BoxIntervals | None, bool]]
"""(weight, stage, index among its ranks) → the intervals held there, None for the whole weight; and True if gradients
are partial. Of ranks that compute the same full gradient, only that of tensor-parallel index 0 is added."""


def unsplit(weight: HeldWeight, stage: Stage, place: int) -> tuple[BoxIntervals | None, bool]:
    """Return the split in which every rank holds the whole weight and computes its full gradient."""
    return None, False


def holdings(
    plan: Plan, layers: Mapping[str, Sequence[str]], weights: Iterable[HeldWeight], split: TensorSplit = unsplit
) -> Holdings:
    """Return the holders of every weight under `plan`. layers: unit → its layers' logical names, in order.

    Raises ValueError if a rank would hold different boxes of a weight, for example of one tied between stages.
    """
    places: dict[str, dict[int, tuple[Stage, int]]] = {}
    for placed in plan.stages():
        stage = placed.stage
        for layer in layers[placed.unit][stage.first : stage.end]:
            here = places.setdefault(layer, {})
            here |= {rank: (stage, place) for place, rank in enumerate(stage.ranks)}
    found = {}
    for weight in weights:
        boxes: dict[int, Box] = {}
        made: dict[BoxIntervals | None, Box] = {}  # ranks with equal boxes share one object
        duplicates: dict[int, bool] = {}
        for layer in sorted(weight.layers):
            for rank, (stage, place) in places.get(layer, {}).items():
                intervals, partial = split(weight, stage, place)
                if intervals not in made:
                    made[intervals] = _box(weight, intervals)
                box = made[intervals]
                if boxes.setdefault(rank, box) != box:
                    raise ValueError(f"rank {rank} holds {boxes[rank].key} and {box.key}")
                duplicates[rank] = duplicates.get(rank, True) and not partial and place % stage.tp > 0
        found[weight.name] = Holding(
            boxes, frozenset(rank for rank, is_duplicate in duplicates.items() if is_duplicate)
        )
    return found


def _box(weight: HeldWeight, intervals: BoxIntervals | None) -> Box:
    if intervals is None:
        return Box.of(weight.name, weight.shape)
    return Box(weight.name, weight.shape, intervals)
