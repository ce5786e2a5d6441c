"""Actions as arrays, so that schedules of a hundred thousand actions are built and timed in milliseconds.

A *piece* is what an action works on: a microbatch of a unit replica, or a named part of one. Pieces are numbered
through the whole step; the pieces of a chain (a unit replica) are consecutive, in execution order.

An encoder microbatch is split into parts when its samples go to several consumer microbatches. Each part is its own
autograd graph, so its backward runs as soon as its own gradients are back; a backward over a slice of one graph would
cost the whole graph again. A unit replica is not split if it has no backward or if each of its microbatches is consumed
whole.

A plan is read as arrays, too: the order of stages, their ranks and their unit replicas (`PlanArrays`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import list_problems
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Microbatch, Schedule
from dilatant.schedule.trainability import Trainability


@dataclass(frozen=True, slots=True, eq=False)
class PlanArrays:
    """A plan's stages and chains: stages are numbered by `PlacedStage.index`, chains (unit replicas) in plan order.

    `unit_of[chain]` indexes `units`; `stages_of[chain]` is the half-open range of its stages. `before[stage]` and
    `after[stage]` are the neighbours in the same chain, -1 at its ends. `feeds` lists pairs of unit indices.
    `lead[stage]` is the position, in `ranks`, of the stage's first rank.
    """

    placed: tuple[PlacedStage, ...]
    units: tuple[str, ...]
    feeds: tuple[tuple[int, int], ...]
    unit_of: NDArray[np.int64]
    replica_of: NDArray[np.int64]
    stages_of: NDArray[np.int64]
    chain: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    ranks: tuple[int, ...]
    lead: NDArray[np.int64]

    @property
    def num_chains(self) -> int:
        return len(self.unit_of)

    def chains_of(self, unit: int) -> range:
        """Return the chain numbers of a unit's replicas, in replica order."""
        return range(*np.searchsorted(self.unit_of, (unit, unit + 1)).tolist())


@lru_cache(maxsize=4)  # many schedules share one plan
def plan_arrays(plan: Plan) -> PlanArrays:
    """Return the arrays of `plan`. Raises ValueError if a unit feeds one that the plan lacks or that comes earlier."""
    placed = plan.stages()
    units = tuple(unit.name for unit in plan.units)
    number = {name: index for index, name in enumerate(units)}
    feeds = []
    for source, unit in enumerate(plan.units):
        for name in unit.feeds:
            if name not in number:
                raise ValueError(f"unit {unit.name!r} feeds {name!r}, which this plan lacks; it has {list(units)}")
            if number[name] <= source:
                raise ValueError(f"unit {unit.name!r} feeds {name!r}, which must come after it in the plan")
            feeds.append((source, number[name]))
    sizes = [
        (source, number, len(replica.stages))
        for source, unit in enumerate(plan.units)
        for number, replica in enumerate(unit.replicas)
    ]
    unit_of, replica_of, lengths = np.asarray(sizes, dtype=np.int64).reshape(-1, 3).T
    ends = np.cumsum(lengths)
    ranges = np.stack([ends - lengths, ends], axis=1)
    count = len(placed)
    before = np.arange(-1, count - 1)
    after = np.arange(1, count + 1)
    before[ranges[:, 0]] = -1
    after[ranges[:, 1] - 1] = -1
    ranks = plan.ranks
    position = {rank: index for index, rank in enumerate(ranks)}
    return PlanArrays(
        placed=placed,
        units=units,
        feeds=tuple(feeds),
        unit_of=unit_of,
        replica_of=replica_of,
        stages_of=ranges,
        chain=np.repeat(np.arange(len(lengths)), lengths),
        before=before,
        after=after,
        ranks=ranks,
        lead=np.asarray([position[stage.stage.ranks[0]] for stage in placed], dtype=np.int64),
    )


FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
KINDS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """All pieces of a step: piece p is of `microbatch[p]` and has samples `samples[offsets[p]:offsets[p + 1]]`.

    `part[piece]` is the tuple of samples that an action names, or None if the piece is the whole microbatch. Chain c
    has the pieces `first[c] <= piece < first[c + 1]`.
    """

    microbatch: NDArray[np.int64]
    part: tuple[tuple[int, ...] | None, ...]
    first: NDArray[np.int64]
    offsets: NDArray[np.int64]
    samples: NDArray[np.int64]

    @property
    def chain(self) -> NDArray[np.int64]:
        """The chain of every piece."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def of_samples(self) -> NDArray[np.int64]:
        """The piece of every entry of `samples`."""
        return np.repeat(np.arange(len(self.microbatch)), np.diff(self.offsets))

    def owners(self, arrays: PlanArrays) -> NDArray[np.int64]:
        """Return the piece that holds a sample in a unit, -1 if none: `[units, samples]`."""
        owner = np.full((len(arrays.units), int(self.samples.max(initial=-1)) + 1), -1, dtype=np.int64)
        owner[arrays.unit_of[self.chain][self.of_samples], self.samples] = self.of_samples
        return owner

    def samples_of(self, piece: int) -> tuple[int, ...]:
        return tuple(self.samples[self.offsets[piece] : self.offsets[piece + 1]].tolist())


@dataclass(slots=True, eq=False, repr=False)
class PackedActions(Mapping[int, tuple[Action, ...]]):
    """`Schedule.actions` kept as arrays; the `Action` values of a rank are created on first access.

    The rows of rank `ranks[i]` are `offsets[i] <= row < offsets[i + 1]`; each row has a `kind` (a code into `KINDS`), a
    `stage` and a `piece`.
    """

    ranks: tuple[int, ...]
    offsets: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    piece: NDArray[np.int32]
    pieces: Pieces
    _decoded: dict[int, tuple[Action, ...]] = field(default_factory=dict, init=False)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        if rank not in self._decoded:
            try:
                index = self.ranks.index(rank)
            except ValueError:
                raise KeyError(rank) from None
            rows = slice(self.offsets[index], self.offsets[index + 1])
            microbatch, part = self.pieces.microbatch.tolist(), self.pieces.part
            self._decoded[rank] = tuple(
                Action(KINDS[kind], stage, microbatch[piece], part[piece])
                for kind, stage, piece in zip(
                    self.kind[rows].tolist(), self.stage[rows].tolist(), self.piece[rows].tolist(), strict=True
                )
            )
        return self._decoded[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"PackedActions({dict(self)!r})"


def pieces_of(
    arrays: PlanArrays, assignment: Assignment, parts: list[list[tuple[int, tuple[int, ...] | None]]]
) -> Pieces:
    """Number the pieces. `parts[chain]` lists (microbatch, named samples or None for all) in execution order."""
    by_chain = [batches for unit in arrays.units for batches in assignment.microbatches[unit]]
    members = [
        batches[number] if part is None else part
        for batches, own in zip(by_chain, parts, strict=True)
        for number, part in own
    ]
    offsets = np.append(0, np.cumsum([*map(len, members)], dtype=np.int64))
    return Pieces(
        np.asarray([number for own in parts for number, _ in own], dtype=np.int64),
        tuple([part for own in parts for _, part in own]),
        np.append(0, np.cumsum([*map(len, parts)], dtype=np.int64)),
        offsets,
        np.fromiter(itertools.chain.from_iterable(members), np.int64, int(offsets[-1])),
    )


@lru_cache(maxsize=8)  # a few steps under several families
def cut_pieces(arrays: PlanArrays, assignment: Assignment, trainability: Trainability) -> Pieces:
    """Return all pieces of a step. Samples of a microbatch that go to the same consumers form one piece; pieces are
    ordered by their first consumer, samples as in the microbatch. Empty microbatches have no piece, hence no actions.

    Consumers are followed transitively: a part is split further wherever its consumer is split into parts.
    """
    consumers: dict[int, list[int]] = {}
    for source, target in arrays.feeds:
        consumers.setdefault(source, []).append(target)
    batches_of = assignment.microbatches.values()
    count = 1 + max((max(batch) for replicas in batches_of for own in replicas for batch in own if batch), default=-1)
    place_of = np.full((len(arrays.units), count), -1)
    parts: list[list[tuple[int, tuple[int, ...] | None]]] = [[] for _ in range(arrays.num_chains)]
    backward = [trainability.backward[end - 1] for end in arrays.stages_of[:, 1].tolist()]
    for unit in reversed(range(len(arrays.units))):
        by_consumer = [place_of[target] for target in consumers.get(unit, ())]
        replicas, chains = assignment.microbatches[arrays.units[unit]], arrays.chains_of(unit)
        is_cut = iter(_go_to_several(replicas, by_consumer))
        for chain, batches in zip(chains, replicas):
            parts[chain] = [
                (number, part)
                for number, batch in enumerate(batches)
                if batch
                for part in (_parts(batch, by_consumer) if next(is_cut) and backward[chain] else (None,))
            ]
        if any(
            backward[chain] for source, target in arrays.feeds if target == unit for chain in arrays.chains_of(source)
        ):
            own = [
                batches[number] if part is None else part
                for chain, batches in zip(chains, replicas)
                for number, part in parts[chain]
            ]
            place_of[unit, _flat(own)] = np.repeat(np.arange(len(own)), [*map(len, own)])
    return pieces_of(arrays, assignment, parts)


def _flat(batches: Sequence[Microbatch]) -> NDArray[np.int64]:
    return np.fromiter(itertools.chain.from_iterable(batches), np.int64)


def _go_to_several(
    replicas: Sequence[Sequence[Microbatch]], by_consumer: Sequence[NDArray[np.int64]]
) -> Sequence[bool]:
    """Return for each microbatch that is not empty whether some consumer has its samples in several places.
    by_consumer: place of each sample in a consumer, -1 if it is absent: [samples]."""
    batches = [batch for own in replicas for batch in own if batch]
    several: NDArray[np.bool_] = np.zeros(len(batches), dtype=np.bool_)
    if batches and by_consumer:
        samples, first = _flat(batches), np.append(0, np.cumsum([*map(len, batches)])[:-1])
        for own in (place[samples] for place in by_consumer):
            several |= np.minimum.reduceat(own, first) != np.maximum.reduceat(own, first)
    return several.tolist()


def _parts(batch: Microbatch, by_consumer: Sequence[NDArray[np.int64]]) -> list[tuple[int, ...]]:
    """Group samples by their places in all consumers, in the order of places."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for sample, key in zip(batch, zip(*(place[[*batch]].tolist() for place in by_consumer)), strict=True):
        groups.setdefault(key, []).append(sample)
    return [tuple(groups[key]) for key in sorted(groups)]


@lru_cache(maxsize=8)  # a few steps under several families
def unit_pairs(arrays: PlanArrays, pieces: Pieces) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the (producer, consumer) pieces of every pair that shares a sample, ascending within each unit edge.

    A sample that only the consumer has (text without an image) makes no pair: no rows travel for it.
    """
    sources, targets = [], []
    num_pieces = max(len(pieces.microbatch), 1)
    owner = pieces.owners(arrays)
    for source, target in arrays.feeds:
        both = (owner[source] >= 0) & (owner[target] >= 0)
        code = np.unique(owner[source][both] * num_pieces + owner[target][both])
        sources.append(code // num_pieces)
        targets.append(code % num_pieces)
    if not sources:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    return np.concatenate(sources).astype(np.int32), np.concatenate(targets).astype(np.int32)


def pack(arrays: PlanArrays, assignment: Assignment, schedule: Schedule) -> PackedActions:
    """Return `schedule` as arrays, whichever representation it has. Raises UserError listing the actions on a stage
    that the plan lacks or a microbatch that the assignment lacks."""
    actions = schedule.actions
    if isinstance(actions, PackedActions):
        return actions
    order: list[dict[tuple[int, tuple[int, ...] | None], int]] = [{} for _ in range(arrays.num_chains)]
    chain_of = arrays.chain.tolist()
    counts = [
        len(assignment.microbatches[arrays.units[unit]][replica])
        for unit, replica in zip(arrays.unit_of.tolist(), arrays.replica_of.tolist(), strict=True)
    ]
    ranks = tuple(actions)
    rows: list[tuple[int, int, int, int]] = []
    offsets = [0]
    unknown: list[str] = []
    for rank in ranks:
        for action in actions[rank]:
            if not 0 <= action.stage < len(chain_of):
                unknown.append(f"rank {rank}: {action} is on a stage that the plan lacks")
                continue
            replica = chain_of[action.stage]
            if not 0 <= action.microbatch < counts[replica]:
                unknown.append(f"rank {rank}: {action} is on a microbatch that the assignment lacks")
                continue
            number = order[replica].setdefault((action.microbatch, action.samples), len(order[replica]))
            rows.append((KIND_CODE[action.kind], action.stage, replica, number))
        offsets.append(len(rows))
    if unknown:
        raise list_problems("this schedule is not one of this plan and assignment:", unknown)
    parts, renumber, first = [], [], 0
    for entries in order:
        keys = sorted(entries, key=lambda key: (key[0], entries[key]))
        new = np.empty(len(keys), dtype=np.int64)
        new[[entries[key] for key in keys]] = np.arange(first, first + len(keys))
        renumber.append(new)
        parts.append(keys)
        first += len(keys)
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
    base = np.cumsum([0] + [len(new) for new in renumber])
    flat = np.concatenate(renumber) if renumber else np.empty(0, dtype=np.int64)
    piece = flat[base[table[:, 2]] + table[:, 3]] if len(table) else np.empty(0, dtype=np.int64)
    return PackedActions(
        ranks,
        np.asarray(offsets, dtype=np.int64),
        table[:, 0].astype(np.int8),
        table[:, 1].astype(np.int32),
        piece.astype(np.int32),
        pieces_of(arrays, assignment, parts),
    )
