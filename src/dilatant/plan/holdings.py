"""Holdings: which rank holds which box of every weight, and which ranks' gradients of the weight are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dilatant.plan.boxes import Box, BoxIntervals
from dilatant.plan.plan import Plan, Stage


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
    plan: Plan,
    layers: Mapping[str, Sequence[str]],
    weights: Iterable[HeldWeight],
    split: TensorSplit = unsplit,
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
