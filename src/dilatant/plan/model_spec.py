"""Model specification: a planner's view of units (and their roles) and layers by name, kind, size and freezing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.plan.errors import PlanError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: logical name, type in the cost model, parameters, whether it trains and tensor parallelism divides it.
    `tied`: parameters shared with the unit's first layer; a rank with both layers holds them once. `experts`: number of
    experts, which own `expert_parameters` of the parameters; expert-parallel ranks divide them. `fixed`: parameters
    that are frozen although the layer trains, as with adapters. `largest`, `largest_of_experts`: parameters of its
    largest trainable weight outside experts, and of the largest that all its experts share. `four_bit`: parameters
    stored in four bits. `orthogonal`: parameters that Muon updates, with one moment."""

    name: str
    kind: str
    parameters: int
    trainable: bool = True
    divided: bool = True
    tied: int = 0
    experts: int = 0
    expert_parameters: int = 0
    largest: int = 0
    largest_of_experts: int = 0
    fixed: int = 0
    four_bit: int = 0
    orthogonal: int = 0

    @property
    def trained(self) -> int:
        """Number of trainable parameters."""
        return self.parameters - self.fixed if self.trainable else 0

    @property
    def trained_share(self) -> float:
        """Trainable fraction of the parameters; assumed equal on all ranks that divide them."""
        return self.trained / max(1, self.parameters)

    def parts(self, degrees: Degrees) -> int:
        """Number of parts into which the ranks of a stage divide the layer, without experts."""
        return degrees.tp if self.divided else 1

    def expert_parts(self, degrees: Degrees) -> int:
        """Number of parts into which they divide its experts: whole experts, or without expert parallelism a part of
        each."""
        return degrees.ep if degrees.ep > 1 else self.parts(degrees)

    def held_trained(self, degrees: Degrees, is_first: bool = False) -> float:
        """Trainable parameters on one rank. is_first: as in `held`."""
        return self.held(degrees, is_first) * self.trained_share

    def held_frozen(self, degrees: Degrees, is_first: bool = False) -> float:
        """Frozen parameters on one rank that ranks can shard: those that are not in four bits."""
        held = self.held(degrees, is_first)
        return held - held * self.trained_share - self.held_in_four_bits(degrees)

    def held(self, degrees: Degrees, is_first: bool = False) -> float:
        """Parameters on one rank. is_first: on one with the unit's first layer, without those tied to that."""
        tied = self.held_before(degrees) if is_first else 0.0
        return self.held_beside_experts(degrees) + self.held_of_experts(degrees) - tied

    def held_beside_experts(self, degrees: Degrees) -> float:
        """Parameters on one rank, without experts."""
        return (self.parameters - self.expert_parameters) / self.parts(degrees)

    def held_in_four_bits(self, degrees: Degrees) -> float:
        """Four-bit parameters on one rank."""
        return self.four_bit / self.parts(degrees)

    def held_of_experts(self, degrees: Degrees) -> float:
        """Expert parameters on one rank."""
        return self.expert_parameters / self.expert_parts(degrees)

    def held_before(self, degrees: Degrees) -> float:
        """Tied parameters that a rank with the first layer already holds."""
        return self.tied / self.parts(degrees)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit's layers in order, and the units that consume its output.

    `recompute`: which activations its blocks recompute in the backward, as in `train.recompute`; None lets the plan
    choose. `items_per_token`: number of indivisible items (images, clips) per token, which context-parallel ranks
    divide: 1 if they divide tokens, 0 if they divide whole samples. `is_cut`: True if the unit may be cut into stages.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    feeds: tuple[str, ...] = ()
    recompute: Recompute | None = "none"
    items_per_token: float = 1.0
    is_cut: bool = True

    @property
    def most_stages(self) -> int:
        """Maximum number of stages."""
        return len(self.layers) if self.is_cut else 1

    @property
    def trainable(self) -> tuple[bool, ...]:
        return tuple(layer.trainable for layer in self.layers)


@dataclass(frozen=True)
class ModelSpec:
    """All units, in topological order."""

    units: tuple[UnitSpec, ...]

    def unit(self, name: str) -> UnitSpec:
        """Return the unit called `name`; KeyError lists the existing units."""
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no unit {name!r} in this model; it has {[*self._by_name]}") from None

    @cached_property
    def _by_name(self) -> dict[str, UnitSpec]:
        return {unit.name: unit for unit in self.units}

    @property
    def trainable(self) -> dict[str, tuple[bool, ...]]:
        """`trainable[unit][layer]`."""
        return {unit.name: unit.trainable for unit in self.units}

    def upstream_trainable(self, name: str) -> bool:
        """Return True if any parameter of the units that feed `name`, directly or indirectly, trains."""
        feeding = [unit for unit in self.units if name in unit.feeds]
        return any(any(unit.trainable) or self.upstream_trainable(unit.name) for unit in feeding)


class EncoderPosition(StrEnum):
    """Placement of the encoders. mixed: different in different pipelines, on groups of different devices."""

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    IN_LANGUAGE = "in-language"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Roles:
    """Units by role: encoders feed the language model, which feeds generators."""

    encoders: tuple[str, ...]
    language: str
    generators: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        return (*self.encoders, self.language, *self.generators)


def roles_of(model: ModelSpec) -> Roles:
    """Assign roles to a model's units. Of two units, the second is the language model, unless the first is called that.

    Raises PlanError for graphs other than encoders, one language model, generators.
    """
    feeds = {unit.name: set(unit.feeds) for unit in model.units}
    for language in sorted(feeds, key=lambda name: (name != "language", bool(feeds[name]))):
        encoders = tuple(name for name in feeds if feeds[name] == {language})
        generators = tuple(name for name in feeds if name in feeds[language])
        ends = all(not feeds[name] for name in generators)
        if ends and {*encoders, language, *generators} == feeds.keys():
            return Roles(encoders, language, generators)
    raise PlanError(
        "plans are searched for encoders that feed one language model, which may feed generators; "
        f"this model is { ({name: sorted(targets) for name, targets in feeds.items()}) }"
    )
