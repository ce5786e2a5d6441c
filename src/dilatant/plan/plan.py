"""The Plan: which rank holds which layers of which unit replica.

A plan is a plain value that is searched, simulated, drawn, saved as JSON and executed; only execution needs torch.
Reading order: `Plan` → `UnitPlan` → `Replica` → `Stage`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
"""Whole number from 0 on, below a limit above any number of layers or ranks."""


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """A user's layout of one unit.

    The unit has `replicas` copies, each a chain of `pp * chunks` stages that passes `chunks` times through `pp` groups
    of `tp * cp` ranks, or of `ep` if that is more; every `ep` ranks divide the experts (see `Degrees`). `cuts` lists
    the first layer of every stage, beginning with 0; without `cuts` the layers' costs decide.
    """

    replicas: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    chunks: int = 1
    cuts: tuple[int, ...] | None = None

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tp, self.cp, self.ep)

    @property
    def num_stages(self) -> int:
        """Number of stages in one replica."""
        return self.pp * self.chunks


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first <= layer < end` of one unit, sharded over `ranks` by the degrees `tp`, `cp` and `ep`."""

    first: Index
    end: Index
    ranks: tuple[Index, ...]
    tp: Index = 1
    cp: Index = 1
    ep: Index = 1

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tp, self.cp, self.ep)


@dataclass(frozen=True, slots=True)
class Replica:
    """A chain of stages, in layer order, that together hold one whole unit."""

    stages: tuple[Stage, ...]

    @property
    def shape(self) -> tuple[tuple[int, int, Degrees], ...]:
        """Layers and degrees of each stage."""
        return tuple((stage.first, stage.end, stage.degrees) for stage in self.stages)

    def renamed(self, names: Mapping[int, int]) -> Replica:
        """Return the replica on other ranks. names: rank → its new number."""
        own = [(stage, tuple([names[rank] for rank in stage.ranks])) for stage in self.stages]
        return Replica(tuple([Stage(stage.first, stage.end, ranks, *stage.degrees) for stage, ranks in own]))


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """All replicas of one unit, and the units that consume its output (`feeds`, empty for the last unit).

    `recompute` lists the recomputation mode of every layer; empty if the config decides.
    """

    name: str
    replicas: tuple[Replica, ...]
    feeds: tuple[str, ...] = ()
    recompute: tuple[Recompute, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage with its position in the plan.

    `index` is its number in `Plan.stages()`: the stage id in actions and timelines.
    """

    index: int
    unit: str
    replica: int
    position: int
    stage: Stage
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Plan:
    """Units in topological order (encoders, language model, generators).

    Stages of different units that name the same ranks are colocated: those ranks run the actions of both.
    """

    units: tuple[UnitPlan, ...]

    def unit(self, name: str) -> UnitPlan:
        """Return the unit called `name`; KeyError lists the existing units."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(f"no unit {name!r} in this plan; it has {[unit.name for unit in self.units]}")

    def stages(self) -> tuple[PlacedStage, ...]:
        """Return every stage of every replica, unit by unit, replica by replica, in layer order."""
        return self._placed

    @cached_property
    def _placed(self) -> tuple[PlacedStage, ...]:
        placed: list[PlacedStage] = []
        for unit in self.units:
            for replica_index, replica in enumerate(unit.replicas):
                for position, stage in enumerate(replica.stages):
                    ends = position == 0, position == len(replica.stages) - 1
                    placed.append(PlacedStage(len(placed), unit.name, replica_index, position, stage, *ends))
        return tuple(placed)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank the plan uses, ascending."""
        return tuple(sorted({rank for placed in self.stages() for rank in placed.stage.ranks}))

    @property
    def is_interleaved(self) -> bool:
        """True if a rank holds several stages of a replica."""
        return any(
            len({stage.ranks for stage in replica.stages}) < len(replica.stages)
            for unit in self.units
            for replica in unit.replicas
        )

    @cached_property
    def stages_of_rank(self) -> Mapping[int, tuple[PlacedStage, ...]]:
        """The stages that each rank holds, in the order of `stages`."""
        held: dict[int, tuple[PlacedStage, ...]] = dict.fromkeys(self.ranks, ())
        for placed in self.stages():
            held |= {rank: (*held[rank], placed) for rank in placed.stage.ranks}
        return held

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.units)

    def __getstate__(self) -> dict[str, Any]:
        return {"units": self.units}  # derived values are not pickled

    def shifted(self, first: int) -> Plan:
        """Return the plan with `first` added to every rank."""
        names = {rank: first + rank for rank in self.ranks}
        return Plan(
            tuple(replace(unit, replicas=tuple(one.renamed(names) for one in unit.replicas)) for unit in self.units)
        )

    def to_json(self) -> str:
        """Return a JSON document that `from_json` reads back to an equal value."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`. Raises ValueError, naming the place, when the document is not a plan."""
        return cls.from_document(parse_plan(text))

    @classmethod
    def from_document(cls, document: Any) -> Plan:
        """Read the values of a plan's JSON document. Raises ValueError, naming the place, when they are no plan."""
        try:
            return msgspec.convert(document, cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"not a Dilatant plan: {error}") from error


def parse_plan(text: str) -> Any:
    """Return the values of a plan's JSON document. Raises ValueError if the text is not JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not a Dilatant plan: {error}") from error
