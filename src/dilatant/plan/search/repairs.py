"""More recomputation for plans that overflow memory in simulation: of as few and as cheap layers as will do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config.memory_modes import Recompute
from dilatant.plan.costs.unit_layers import LEVELS, UnitLayers
from dilatant.plan.plan import PlacedStage, Plan, UnitPlan


def recomputing(plan: Plan, by_unit: Mapping[str, tuple[Recompute, ...]]) -> Plan:
    """Return the plan with the recomputation of `by_unit` for the layers of these units."""
    return Plan(tuple(replace(unit, recompute=by_unit.get(unit.name, unit.recompute)) for unit in plan.units))


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """Raises recomputation on overflowing ranks of plans with so many microbatches of a batch of `batch` samples."""

    units: UnitLayers
    batch: int
    microbatches: int

    def fewest(self, plan: Plan, excess: Mapping[int, float]) -> Plan | None:
        """Choose anew what these ranks recompute: what costs least and keeps `excess` bytes less on each rank (or more,
        if negative), by an estimate of what is in flight. Returns None if nothing does, or nothing else."""
        before = self._levels(plan)
        after = {name: own.copy() for name, own in before.items()}
        for one in plan.stages():
            if one.unit in before and excess.keys() & {*one.stage.ranks}:
                after[one.unit][one.stage.first : one.stage.end] = 0
        for held, most in self._holdings(plan, excess):
            free = [one for one in held if one.unit in before]
            if not free and most > 0.0:
                return None
            if not free:
                continue
            each = [self._layers(plan, one) for one in free]
            kept, seconds = (np.concatenate(own, axis=1) for own in zip(*each, strict=True))
            layers = [slice(one.stage.first, one.stage.end) for one in free]
            old, now = (
                np.concatenate([levels[one.unit][own] for one, own in zip(free, layers)]) for levels in (before, after)
            )
            at = np.arange(len(now))
            raised = cheapest(kept, seconds, now, most - float((kept[old, at] - kept[now, at]).sum()))
            if raised is None:
                return None
            ends = np.cumsum([own.stop - own.start for own in layers])[:-1]
            for one, own, levels in zip(free, layers, np.split(raised, ends)):
                after[one.unit][own] = levels
        return self._with(plan, before, after)

    def next_level(self, plan: Plan, excess: Mapping[int, float]) -> Plan | None:
        """Raise all layers on these ranks by one level. Returns None if they already recompute all they can, or the
        model fixes recomputation."""
        before = self._levels(plan)
        after = {name: own.copy() for name, own in before.items()}
        for one in plan.stages():
            if one.unit in before and excess.keys() & {*one.stage.ranks}:
                layers, most = slice(one.stage.first, one.stage.end), len(self.units.levels([one.unit])) - 1
                can = self.units.recomputable(one.unit)[layers]
                after[one.unit][layers] = np.where(can, np.minimum(before[one.unit][layers] + 1, most), 0)
        return self._with(plan, before, after)

    def _levels(self, plan: Plan) -> dict[str, NDArray[np.int64]]:
        """Return the level of each layer, as an index of `LEVELS`, of units that leave it open."""
        return {
            unit.name: np.array([LEVELS.index(one) for one in unit.recompute], dtype=np.int64)
            if unit.recompute
            else np.zeros(len(self.units.recomputable(unit.name)), dtype=np.int64)
            for unit in plan.units
            if self.units.is_free(unit.name)
        }

    def _with(
        self, plan: Plan, before: Mapping[str, NDArray[np.int64]], after: Mapping[str, NDArray[np.int64]]
    ) -> Plan | None:
        changed = {
            name: tuple(LEVELS[level] for level in own.tolist())
            for name, own in after.items()
            if (own != before[name]).any()
        }
        return recomputing(plan, changed) if changed else None

    def _holdings(self, plan: Plan, excess: Mapping[int, float]) -> list[tuple[tuple[PlacedStage, ...], float]]:
        """Return the stages of overflowing ranks, with the most bytes that a rank with such stages lacks."""
        held: dict[int, list[PlacedStage]] = defaultdict(list)
        for one in plan.stages():
            for rank in excess.keys() & {*one.stage.ranks}:
                held[rank].append(one)
        kinds: dict[tuple[object, ...], tuple[tuple[PlacedStage, ...], float]] = {}
        for rank, own in held.items():
            kind = tuple((one.unit, one.stage.first, one.stage.end, one.stage.degrees) for one in own)
            known, most = kinds.get(kind, (tuple(own), -math.inf))
            kinds[kind] = known, max(most, excess[rank])
        return [*kinds.values()]

    def _layers(self, plan: Plan, one: PlacedStage) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the bytes that each layer of a stage keeps of all microbatches in flight, and its seconds, at each
        level: [levels, layers]."""
        unit = plan.unit(one.unit)
        stages = len(unit.replicas[one.replica].stages) - one.position + _stages_behind(plan, unit)
        samples = self.batch / (len(unit.replicas) * self.microbatches)
        layers = slice(one.stage.first, one.stage.end)
        each = [
            self.units.layers(one.unit, one.stage.degrees, samples, level) for level in self.units.levels([one.unit])
        ]
        kept = np.stack([own.kept[layers] for own in each]) * min(stages, self.microbatches)
        kept = np.where(self.units.recomputable(one.unit)[layers], kept, kept[:1])
        return kept, np.stack([own.seconds[layers] for own in each])


def _stages_behind(plan: Plan, unit: UnitPlan) -> int:
    """Return the stages of other units on the longest path from a unit's last stage."""
    fed = [plan.unit(name) for name in unit.feeds]
    return max((len(one.replicas[0].stages) + _stages_behind(plan, one) for one in fed), default=0)


def cheapest(
    kept: NDArray[np.float64], seconds: NDArray[np.float64], levels: NDArray[np.int64], needed: float
) -> NDArray[np.int64] | None:
    """Return higher levels of some layers that together keep `needed` bytes less for few further seconds, or None.

    `kept` and `seconds` are [levels, layers]. Layers are raised in the order of seconds per byte; at any point the
    cheapest single layer that saves the rest may be the last.
    """
    now, spent, found, least = levels.copy(), 0.0, None, np.inf
    at, number = np.arange(len(levels)), np.arange(len(kept))[:, None]
    while needed > 0.0:
        saved, more = kept[now, at] - kept, seconds - seconds[now, at]
        saved[number <= now] = 0.0
        enough = np.where(saved >= needed, more, np.inf)
        level, layer = np.unravel_index(int(enough.argmin()), enough.shape)
        if spent + enough[level, layer] < least:
            found, least = now.copy(), spent + float(enough[level, layer])
            found[layer] = level
        worth = np.divide(more, saved, out=np.full_like(more, np.inf), where=saved > 0.0)
        level, layer = np.unravel_index(int(worth.argmin()), worth.shape)
        spent += float(more[level, layer])
        needed -= float(saved[level, layer])
        if not np.isfinite(worth[level, layer]) or spent >= least:
            return found
        now[layer] = level
    return now if found is None else found
