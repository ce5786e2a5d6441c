"""The graph of units: which unit sends rows to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dilatant.config.errors import UserError
from dilatant.models.core.stage import Loss
from dilatant.models.core.unit import Unit


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Units in topological order.

    feeds: unit → the units that take its rows. anchor: the unit whose microbatches order the step (the language model).
    losses: the losses of all units by name.
    """

    units: tuple[str, ...]
    feeds: Mapping[str, tuple[str, ...]]
    anchor: str
    losses: Mapping[str, Loss] = field(default_factory=dict)

    @classmethod
    def of(cls, units: Iterable[Unit], anchor: str) -> ModelGraph:
        """Build the graph from the units' `inputs`. Raises UserError if a unit takes rows of a unit that follows it."""
        units = tuple(units)
        names = tuple(unit.unit for unit in units)
        for index, unit in enumerate(units):
            for source in unit.inputs:
                if source not in names[:index]:
                    raise UserError(
                        f"unit {unit.unit!r} takes rows of {source!r}, which is not a unit before it; the units are "
                        + ", ".join(names)
                    )
        return cls(
            names,
            {name: tuple(unit.unit for unit in units if name in unit.inputs) for name in names},
            anchor,
            {name: loss for unit in units for name, loss in unit.losses.items()},
        )

    @property
    def behind_anchor(self) -> tuple[str, ...]:
        """The units that take rows of the anchor, directly or indirectly (generators)."""
        found: list[str] = []
        for name in self.units:
            if any(name in self.feeds[source] for source in (self.anchor, *found)):
                found.append(name)
        return tuple(found)
