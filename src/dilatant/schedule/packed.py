"""Actions as arrays, so that schedules of a hundred thousand actions are built and timed in milliseconds.

A *piece* is what an action works on: a microbatch of a unit replica, or a named part of one. Pieces are numbered
through the whole step; the pieces of a chain (a unit replica) are consecutive, in execution order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import list_problems
from dilatant.schedule.plan_arrays import PlanArrays
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule

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
                    self.kind[rows].tolist(),
                    self.stage[rows].tolist(),
                    self.piece[rows].tolist(),
                    strict=True,
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
    arrays: PlanArrays,
    assignment: Assignment,
    parts: list[list[tuple[int, tuple[int, ...] | None]]],
) -> Pieces:
    """Number the pieces. `parts[chain]` lists (microbatch, named samples or None for all) in execution order."""
    microbatch: list[int] = []
    named: list[tuple[int, ...] | None] = []
    members: list[tuple[int, ...]] = []
    first = [0]
    for replica, entries in enumerate(parts):
        batches = assignment.microbatches[arrays.units[arrays.unit_of[replica]]][arrays.replica_of[replica]]
        for number, part in entries:
            microbatch.append(number)
            named.append(part)
            members.append(batches[number] if part is None else part)
        first.append(len(microbatch))
    offsets = np.zeros(len(members) + 1, dtype=np.int64)
    np.cumsum([len(member) for member in members], out=offsets[1:])
    samples = np.array(list(chain.from_iterable(members)), dtype=np.int64)
    return Pieces(
        np.asarray(microbatch, dtype=np.int64),
        tuple(named),
        np.asarray(first, dtype=np.int64),
        offsets,
        samples,
    )


@lru_cache(maxsize=8)  # a few steps under several families
def unit_pairs(arrays: PlanArrays, pieces: Pieces) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the (producer, consumer) pieces of every pair that shares a sample, ascending within each unit edge.

    A sample that only the consumer has (text without an image) makes no pair: no rows travel for it.
    """
    sources, targets = [], []
    num_samples = int(pieces.samples.max()) + 1 if len(pieces.samples) else 0
    num_pieces = len(pieces.microbatch)
    owner = np.full((len(arrays.units), num_samples), -1, dtype=np.int64)
    piece_of_entry = np.repeat(np.arange(num_pieces), np.diff(pieces.offsets))
    piece_unit = np.repeat(arrays.unit_of, np.diff(pieces.first))
    if num_pieces:
        owner[piece_unit[piece_of_entry], pieces.samples] = piece_of_entry
    for source, target in arrays.feeds:
        both = (owner[source] >= 0) & (owner[target] >= 0)
        code = np.unique(owner[source][both] * num_pieces + owner[target][both])
        sources.append(code // max(num_pieces, 1))
        targets.append(code % max(num_pieces, 1))
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
