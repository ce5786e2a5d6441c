"""What a planner needs to know of a model: its units and layers, by name, kind, size and freezing."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.config.recompute import Recompute


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its logical name, its type in the cost model, its parameters, whether it trains, and whether
    tensor-parallel ranks divide it. `tied` of its parameters are also the unit's first layer's: who holds both layers
    holds them once. `experts` it has, with `expert_parameters` of its parameters: expert-parallel ranks divide them.
    `fixed` of all do not train though the layer does, as beside adapters. `largest` are those of its largest weight
    that trains. `four_bit` are held in four bits.
    """

    name: str
    kind: str
    parameters: int
    trainable: bool = True
    divided: bool = True
    tied: int = 0
    experts: int = 0
    expert_parameters: int = 0
    largest: int = 0
    fixed: int = 0
    four_bit: int = 0

    @property
    def trained(self) -> int:
        """Parameters that train."""
        return self.parameters - self.fixed if self.trainable else 0

    @property
    def trained_share(self) -> float:
        """Of its parameters; taken to be the same on all ranks that divide them."""
        return self.trained / max(1, self.parameters)

    def held_trained(self, tp: int, ep: int = 1) -> float:
        """As `held`, of those that train."""
        return self.held(tp, ep) * self.trained_share

    def held(self, tp: int, ep: int = 1) -> float:
        """Parameters that one of `tp` ranks holds, where `ep` divide the experts."""
        return self.held_beside_experts(tp) + self.held_of_experts(tp, ep)

    def held_beside_experts(self, tp: int) -> float:
        """Those of them that are not of experts."""
        return (self.parameters - self.expert_parameters) / (tp if self.divided else 1)

    def held_in_four_bits(self, tp: int) -> float:
        """Those of them that are in four bits."""
        return self.four_bit / (tp if self.divided else 1)

    def held_of_experts(self, tp: int, ep: int = 1) -> float:
        """Those of them that are of experts: whole ones, or without expert parallelism a part of each."""
        return self.expert_parameters / (ep if ep > 1 else tp if self.divided else 1)

    def held_before(self, tp: int) -> float:
        """Those of them that a rank which holds the first layer has already."""
        return self.tied / tp if self.divided else self.tied


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit's layers in order, and the units that consume its output.

    `recompute` says what of its blocks is recomputed in the backward, as `train.recompute` does; None leaves it to the
    plan. `items_per_token`: what context-parallel ranks share is indivisible items (images, clips), so many for each of
    their tokens: 1 where they share tokens, 0 where whole samples. `is_cut`: it may be cut into stages.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    feeds: tuple[str, ...] = ()
    recompute: Recompute | None = "none"
    items_per_token: float = 1.0
    is_cut: bool = True

    @property
    def most_stages(self) -> int:
        """Into how many stages it can be cut."""
        return len(self.layers) if self.is_cut else 1

    @property
    def trainable(self) -> tuple[bool, ...]:
        return tuple(layer.trainable for layer in self.layers)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All units, in topological order."""

    units: tuple[UnitSpec, ...]

    def unit(self, name: str) -> UnitSpec:
        """The unit called `name`; KeyError names the units there are."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(f"no unit {name!r} in this model; it has {[unit.name for unit in self.units]}")

    @property
    def trainable(self) -> dict[str, tuple[bool, ...]]:
        """`trainable[unit][layer]`."""
        return {unit.name: unit.trainable for unit in self.units}

    def upstream_trainable(self, name: str) -> bool:
        """Does any parameter of the units before `name`, directly or not, train?"""
        feeding = [unit for unit in self.units if name in unit.feeds]
        return any(any(unit.trainable) or self.upstream_trainable(unit.name) for unit in feeding)
