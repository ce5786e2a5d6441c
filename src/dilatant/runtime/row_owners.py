"""Row owners: which rank of a stage has which of a microbatch's rows, in one step.

Without context parallelism every rank of a stage has all of them. With it, a rank has the rows of its own tokens or
items (see `Stage.owners`), whoever makes or takes them; both ends of an edge derive the same from the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dilatant.models.stage import Boundary, StepData
from dilatant.models.unit import Unit
from dilatant.plan.plan import PlacedStage
from dilatant.runtime.routes import Link, Routes, boundary_of
from dilatant.schedule.dependencies import Message

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What of a message goes from one rank to another: `rows` rows of `width` numbers. at_source, at_target: which of
    the message's rows there these are; None for all of them."""

    rows: int
    width: int
    dtype: torch.dtype
    at_source: Rows | None = None
    at_target: Rows | None = None


class RowOwners:
    """Of the stages of a plan, in one step. boundaries: by stage, then by the unit that takes its rows."""

    def __init__(
        self,
        units: Mapping[str, Unit],
        placed: Sequence[PlacedStage],
        boundaries: Sequence[Mapping[str, Boundary]],
        routes: Routes,
        data: StepData,
    ) -> None:
        self._units = units
        self._placed = placed
        self._boundaries = boundaries
        self._routes = routes
        self._data = data
        self._of_elements: dict[tuple[str, int, tuple[int, ...]], list[NDArray[np.integer]]] = {}
        self._parcels: dict[tuple[Message, Link], Parcel] = {}

    def counts(
        self, stage: int, rank: int, samples: tuple[int, ...], other: str, boundary: Boundary
    ) -> list[int]:
        """How many rows a rank of a stage, which runs these samples together, has of each: of those that pass between
        it and the unit `other`."""
        own = self._placed[stage].stage
        if own.cp == 1:
            return [boundary.rows_of(self._data.samples[sample]) for sample in samples]
        place = own.ranks.index(rank) // own.tp
        return [int((owners == place).sum()) for owners in self._owners(stage, samples, samples, other)]

    def parcel(self, message: Message, link: Link) -> Parcel:
        """What of a message goes along a link."""
        if (message, link) not in self._parcels:
            self._parcels[message, link] = self._parcel(message, link)
        return self._parcels[message, link]

    def _parcel(self, message: Message, link: Link) -> Parcel:
        boundary = self.boundary(message)
        source = self._is_at(message, message.producer.stage, message.consumer.stage, link[2])
        target = self._is_at(message, message.consumer.stage, message.producer.stage, link[3])
        if source is None and target is None:
            count = sum(boundary.rows_of(self._data.samples[sample]) for sample in message.samples)
            return Parcel(count, boundary.width, boundary.dtype)
        if source is None or target is None:
            both = source if target is None else target
        else:
            both = source & target
        assert both is not None
        return Parcel(
            int(both.sum()),
            boundary.width,
            boundary.dtype,
            _among(both, source),
            _among(both, target),
        )

    def boundary(self, message: Message) -> Boundary:
        """The boundary that the rows of a message, or the rows that its gradients belong to, pass."""
        made = boundary_of(message)
        taken = message.consumer.stage if message.producer.stage == made else message.producer.stage
        return self._boundaries[made][self._placed[taken].unit]

    def _is_at(self, message: Message, stage: int, other: int, rank: int) -> NDArray[np.bool_] | None:
        """Which rows of a message a rank of one of its stages has; None for all."""
        own = self._placed[stage].stage
        if own.cp == 1:
            return None
        action = message.producer if message.producer.stage == stage else message.consumer
        row = self._routes.samples[action]
        owners = self._owners(stage, row, message.samples, self._placed[other].unit)
        return np.concatenate([np.empty(0, np.int64), *owners]) == own.ranks.index(rank) // own.tp

    def _owners(
        self, stage: int, row: tuple[int, ...], samples: Sequence[int], other: str
    ) -> list[NDArray[np.integer]]:
        placed = self._placed[stage]
        unit = self._units[placed.unit]
        key = placed.unit, placed.stage.cp, row
        if key not in self._of_elements:
            self._of_elements[key] = unit.owners(self._data, row, placed.stage.cp)
        of_row = dict(zip(row, self._of_elements[key], strict=True))
        return [of_row[s][unit.element_of_row(other, self._data.samples[s])] for s in samples]


def _among(both: NDArray[np.bool_], own: NDArray[np.bool_] | None) -> Rows | None:
    """Where the rows of both ends are among those of one; None for all of these."""
    of_own = both if own is None else both[own]
    return None if of_own.all() else np.flatnonzero(of_own)
