"""Row owners: the rows of a microbatch that each rank of a stage holds, in one step.

Without context parallelism every rank of a stage holds all rows. With it, a rank holds the rows of its own tokens or
items (see `Stage.owners`), as producer and as consumer; both ends of an edge derive the same owners from the samples.
Tensor-parallel ranks, which need the same rows, are each sent a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dilatant.models.core.stage import Boundary, StepData
from dilatant.models.core.unit import Unit
from dilatant.plan.plan import PlacedStage
from dilatant.runtime.routes import RouteLink, Routes, boundary_of, divide_rows, row_part_pairs
from dilatant.schedule.dependencies import Message

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """The part of a message sent from one rank to another: `rows` rows of `width` numbers. at_source: indices among the
    sender's rows of the message; at_target: among those sent to the receiver; None for all."""

    rows: int
    width: int
    dtype: torch.dtype
    at_source: Rows | None = None
    at_target: Rows | None = None


@dataclass(eq=False)
class RowOwners:
    """Row ownership for the stages of a plan in one step. Boundaries are by stage, then by consumer unit."""

    _units: Mapping[str, Unit]
    _placed: Sequence[PlacedStage]
    _boundaries: Sequence[Mapping[str, Boundary]]
    _routes: Routes
    _data: StepData
    _of_elements: dict[tuple[str, int, int, tuple[int, ...]], list[NDArray[np.integer]]] = field(default_factory=dict)
    _parcels: dict[tuple[Message, RouteLink], MessageSlice] = field(default_factory=dict)
    _crossings: dict[tuple[Message, int], dict[tuple[int, int], Rows]] = field(default_factory=dict)

    def counts(self, stage: int, rank: int, samples: tuple[int, ...], other: str, boundary: Boundary) -> list[int]:
        """Return, for each of `samples` (one microbatch of the stage), the number of its rows on `rank` at the boundary
        to or from the unit `other`."""
        own = self._placed[stage].stage
        if own.degrees.row_parts == 1:
            return [boundary.rows_of(self._data.samples[sample]) for sample in samples]
        place = own.degrees.row_part(own.ranks.index(rank))
        return [int((owners == place).sum()) for owners in self._owners(stage, samples, samples, other, boundary)]

    def parcel(self, message: Message, link: RouteLink) -> MessageSlice:
        """Return the part of a message that is sent along a link."""
        if (message, link) not in self._parcels:
            self._parcels[message, link] = self._parcel(message, link)
        return self._parcels[message, link]

    def shares(self, message: Message, rank: int) -> tuple[Rows, ...] | None:
        """Return, by tensor-parallel rank that needs the same rows of a message as `rank`, the indices of its rows.
        None means that each of these ranks gets or already has all rows."""
        own = self._placed[message.consumer.stage].stage
        if own.tp == 1:
            return None
        place = own.degrees.row_part(own.ranks.index(rank))
        target = self._rows_at(message, message.consumer.stage, message.producer.stage, place)
        sent = [self._sent_to(message, place, taker) for taker in own.degrees.ranks_of(own.ranks, place)]
        if all(len(rows) == len(target) for rows in sent):
            return None
        return tuple(np.searchsorted(target, rows) for rows in sent)

    def _parcel(self, message: Message, link: RouteLink) -> MessageSlice:
        boundary = self.boundary(message)
        made, taken = (self._placed[stage].stage for stage in link[:2])
        if len(made.ranks) == len(taken.ranks) == 1:
            return MessageSlice(self._count(message), boundary.width, boundary.dtype)
        ends = zip((made, taken), link[2:])
        part, place = (stage.degrees.row_part(stage.ranks.index(rank)) for stage, rank in ends)
        rows = self._crossing(message, place)[link[2:]]
        source = self._rows_at(message, link[0], link[1], part)
        target = self._sent_to(message, place, link[3])
        return MessageSlice(len(rows), boundary.width, boundary.dtype, _among(rows, source), _among(rows, target))

    def _crossing(self, message: Message, place: int) -> dict[tuple[int, int], Rows]:
        """Return (sender, receiver) → the rows sent between them, for receivers at one context-parallel index."""
        if (message, place) not in self._crossings:
            giving, taking = (self._placed[end.stage] for end in (message.producer, message.consumer))
            samples = [self._routes.samples[end] for end in (message.producer, message.consumer)]
            target = self._rows_at(message, taking.index, giving.index, place)
            found = self._crossings[message, place] = {}
            for part, having, at, takers in row_part_pairs(giving, taking, samples[0] == samples[1]):
                if at != place:
                    continue
                rows = self._rows_at(message, giving.index, taking.index, part)
                rows = np.intersect1d(rows, target, assume_unique=True)
                found |= divide_rows(rows, having, takers)
        return self._crossings[message, place]

    def _sent_to(self, message: Message, place: int, rank: int) -> Rows:
        """Return the rows of a message that a rank receives or already has, ascending."""
        rows = [rows for (_, taker), rows in self._crossing(message, place).items() if taker == rank]
        return np.sort(np.concatenate([np.empty(0, np.int64), *rows]))

    def boundary(self, message: Message) -> Boundary:
        """Return the boundary of a message's rows, or of the rows that its gradients belong to."""
        made = boundary_of(message)
        taken = message.consumer.stage if message.producer.stage == made else message.producer.stage
        return self._boundaries[made][self._placed[taken].unit]

    def _count(self, message: Message) -> int:
        boundary = self.boundary(message)
        return sum(boundary.rows_of(self._data.samples[sample]) for sample in message.samples)

    def _rows_at(self, message: Message, stage: int, other: int, place: int) -> Rows:
        """Return the rows of a message that ranks at a context-parallel index of one of its stages hold."""
        if self._placed[stage].stage.degrees.row_parts == 1:
            return np.arange(self._count(message))
        action = message.producer if message.producer.stage == stage else message.consumer
        row = self._routes.samples[action]
        other_unit = self._placed[other].unit
        owners = self._owners(stage, row, message.samples, other_unit, self.boundary(message))
        return np.flatnonzero(np.concatenate([np.empty(0, np.int64), *owners]) == place)

    def _owners(
        self, stage: int, row: tuple[int, ...], samples: Sequence[int], other: str, boundary: Boundary
    ) -> list[NDArray[np.integer]]:
        placed = self._placed[stage]
        unit = self._units[placed.unit]
        parts, groups = placed.stage.degrees.row_parts, placed.stage.degrees.groups
        key = placed.unit, parts, groups, row
        if key not in self._of_elements:
            self._of_elements[key] = unit.owners(self._data, row, parts, groups)
        of_row = dict(zip(row, self._of_elements[key], strict=True))
        given = [(s, self._data.samples[s]) for s in samples]
        return [of_row[s][unit.element_of_row(other, each, boundary.rows_of(each))] for s, each in given]


def _among(rows: Rows, all_rows: Rows) -> Rows | None:
    """Return the indices of `rows` in the ascending `all_rows`; None if they are all of them."""
    return None if len(rows) == len(all_rows) else np.searchsorted(all_rows, rows)
