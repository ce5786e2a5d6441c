"""Option table: all layouts of a model's units, with the pipeline depth that memory allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilatant.config.recompute import Recompute
from dilatant.cost.memory import Zero
from dilatant.plan.costs.partition import cuts_in_memory, partition_layers, partition_layers_in_memory
from dilatant.plan.costs.unit_layers import MeanCosts, UnitLayers
from dilatant.plan.errors import DoesNotFitError
from dilatant.plan.layouts.option import UNLIMITED, Option


class OptionTable:
    """All options of units on devices of `capacity_bytes`; each is computed once."""

    def __init__(self, units: UnitLayers, capacity_bytes: float) -> None:
        self.units = units
        self._capacity = capacity_bytes
        self._options: dict[tuple[object, ...], Option | None] = {}
        self._free_cuts: dict[tuple[object, ...], _ChainLayout] = {}
        self._cuts: dict[tuple[object, ...], _ChainLayout] = {}  # shared by tables of all ZeRO kinds
        self._joined: dict[_ChainRequest, MeanCosts] = {}
        self._shared_by: dict[int, OptionTable] = {}

    def shared_by(self, replicas: int, devices: int) -> OptionTable:
        """Return the options of `replicas` chains that shard optimizer state among each other as the rules say.
        devices: devices of one chain; inside a node only chains that fit on one node shard together. `stage_costs`
        computes the actual sharding of a plan."""
        zero, node = self.units.rules.zero, self.units.gpus_per_node
        count = 1 if zero == "none" else replicas if zero == "all" else min(replicas, node // devices)
        if count <= 1:
            return self
        if count not in self._shared_by:
            self._shared_by[count] = self._but(self.units.shared_by(count))
        return self._shared_by[count]

    def sharing(self, zero: Zero) -> OptionTable:
        """Return the options under this sharding of optimizer state."""
        return self._but(self.units.sharing(zero))

    def _but(self, units: UnitLayers) -> OptionTable:
        other = OptionTable(units, self._capacity)
        other._cuts = self._cuts
        return other

    def with_capacity(self, capacity_bytes: float) -> OptionTable:
        """Return the options on devices with this memory."""
        return OptionTable(self.units, capacity_bytes)

    def chain(
        self,
        unit: str,
        tp: int,
        cp: int,
        stages: int,
        samples: float,
        microbatches: int,
        behind: int,
        extra: Sequence[str] = (),
        balance: NDArray[np.float64] | None = None,
        chunks: int = 1,
        ep: int = 1,
        whole_items: bool = False,
    ) -> Option | None:
        """Lay out `unit` in `stages` stages; return None if memory forbids it.
        The units `extra` run in the first stage; with `whole_items` each rank runs whole items instead of a part of
        every layer. `behind` stages follow on the longest path. The cut makes the slowest stage as fast as possible,
        within memory only if the unconstrained cut does not fit; if neither fits, as few layers as possible recompute.
        `balance` [layers] replaces the seconds that the cut balances (a planner unaware of freezing). Each group of
        devices has `chunks` stages."""
        if stages > self.units.model.unit(unit).most_stages:
            return None
        found: list[Option] = []
        for level in self.units.levels([unit, *extra]):
            known = unit, tp, cp, stages, samples, microbatches, tuple(extra), chunks, level, ep
            asked = _ChainRequest(*known, whole_items, balance is None)
            option, is_free = self._chain(asked, behind, balance)
            if option is None:
                continue
            found.append(option if level == "none" else self._relaxed(asked, option, behind))
            if is_free:
                break  # the fastest cut fits: more recomputation only takes longer
        return min(found, key=lambda one: one.total + (microbatches - 1) * one.slowest, default=None)

    def _chain(
        self, asked: _ChainRequest, behind: int, balance: NDArray[np.float64] | None
    ) -> tuple[Option | None, bool]:
        """Return the chain, and True if it has the fastest cut."""
        option = self._options.get(asked)
        if option is None:
            option = self._free_cut(asked, balance).option(asked.microbatches, self._capacity)
            self._options[asked] = option
        if option.room >= behind or asked.chunks > 1:
            return (option if option.room >= behind else None), True
        bound = *asked, behind
        if bound not in self._options:
            layers = self._merged(asked)
            weights = layers.seconds if balance is None else balance
            tight = cuts_in_memory(weights, *self._memory(layers, asked, behind))
            self._options[bound] = (
                None if tight is None else self._option(asked, tight, layers.by_stage(tight))
            )
        return self._options[bound], False

    def _free_cut(self, asked: _ChainRequest, balance: NDArray[np.float64] | None) -> _ChainLayout:
        """Return the cut with the fastest slowest stage, without a memory limit. The number of microbatches matters
        only with extra units, and only if there are more microbatches than stages."""
        more = bool(asked.extra) and asked.microbatches > asked.stages
        key = *asked.but_microbatches, more
        if key not in self._free_cuts:
            layers = self._merged(asked)
            if key not in self._cuts:
                cuts = partition_layers(layers.seconds if balance is None else balance, asked.stages)
                self._cuts[key] = self._laid(asked, cuts, layers.by_stage(cuts))
            self._free_cuts[key] = self._cuts[key].holding(layers.static, asked)
        return self._free_cuts[key]

    def _relaxed(self, asked: _ChainRequest, option: Option, behind: int) -> Option:
        """Recompute fewer layers: in each stage, as many layers from the end as memory allows keep their activations.
        Memory must hold the largest number of microbatches in flight."""
        key = "relaxed", asked, tuple(option.cuts[asked.unit]), behind
        if key not in self._options:
            layers, free = self._merged(asked), self._merged(asked._replace(level="none"))
            cuts = option.cuts[asked.unit]
            more, held = free.kept - layers.kept, layers.by_stage(cuts)
            again = np.full(len(more), True)
            for s, (first, end) in enumerate(zip(cuts, (*cuts[1:], len(more)))):
                flying = min(asked.stages - s + behind, asked.microbatches)
                left = self._capacity - held.static[s] - held.transient[s] - flying * held.kept[s]
                if asked.chunks > 1:
                    left = 0.0  # several stages share the device
                gains = flying * np.cumsum(more[first:end][::-1])[::-1]
                again[first:end] = gains > left
            again[0] |= bool(asked.extra)  # the first layer includes extra units
            mixed = replace(
                layers,
                seconds=np.where(again, layers.seconds, free.seconds),
                backward=np.where(again, layers.backward, free.backward),
                kept=np.where(again, layers.kept, free.kept),
            )
            recompute = self.units.recomputed(asked.unit, asked.level, again)
            others = {other: self.units.recomputed(other, asked.level) for other in asked.extra}
            self._options[key] = replace(
                self._option(asked, cuts, mixed.by_stage(cuts)), recompute={asked.unit: recompute, **others}
            )
        found = self._options[key]
        assert found is not None
        return found

    def excess(
        self,
        unit: str,
        tp: int,
        cp: int,
        stages: int,
        samples: float,
        microbatches: int,
        behind: int,
        extra: Sequence[str] = (),
    ) -> float:
        """Return the bytes that a device lacks under the most frugal chain of this shape; 0 if it fits."""
        level = self.units.levels([unit, *extra])[-1]
        ep = self.units.expert_degrees(unit, tp, cp)[-1]
        asked = _ChainRequest(unit, tp, cp, stages, samples, microbatches, tuple(extra), 1, level, ep)
        layers = self._merged(asked)
        if stages > len(layers.seconds):
            return math.inf
        try:
            partition_layers_in_memory(layers.seconds, *self._memory(layers, asked, behind), unit)
        except DoesNotFitError as error:
            return error.excess_bytes
        return 0.0

    def _memory(
        self, layers: MeanCosts, asked: _ChainRequest, behind: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int], float]:
        """Return static bytes, bytes per microbatch, microbatches in flight per stage, and bytes available for both."""
        in_flight = [min(asked.stages - s + behind, asked.microbatches) for s in range(asked.stages)]
        return layers.static, layers.kept, in_flight, self._capacity - float(layers.transient.max())

    def colocated(
        self, units: Sequence[str], tp: int, cp: int, stages: int, samples: float, microbatches: int
    ) -> Option | None:
        """Lay out several units in the same `stages` stages, each cut evenly on its own (Cornstarch v3 4.2)."""
        for level in self.units.levels(units):
            key = tuple(units), tp, cp, stages, samples, microbatches, level
            if key not in self._options:
                each = [self.units.layers(unit, tp, cp, samples, level).on(stages) for unit in units]
                if min(len(layers.seconds) for layers in each) < stages:
                    return None
                cuts = {unit: partition_layers(layers.seconds, stages) for unit, layers in zip(units, each)}
                first, *others = [layers.by_stage(cuts[unit]) for unit, layers in zip(units, each)]
                asked = _ChainRequest(units[0], tp, cp, stages, samples, microbatches, (), 1, level)
                again = (
                    {unit: self.units.recomputed(unit, level) for unit in units} if level != "none" else {}
                )
                laid = _laid(cuts, first.beside(others), asked, again)
                self._options[key] = laid.option(microbatches, self._capacity)
            option = self._options[key]
            if option is not None and option.room >= 0:
                return option
        return None

    def _merged(self, asked: _ChainRequest) -> MeanCosts:
        """Return the layers of the unit, the first of which includes all layers of the extra units."""
        degree = asked.tp, asked.cp, asked.samples, asked.level
        own = self.units.layers(asked.unit, *degree, asked.ep).on(asked.stages)
        if not asked.extra:
            return own
        alone, more = asked.stages == 1, asked.microbatches > asked.stages
        key = asked._replace(stages=int(alone), microbatches=int(more), chunks=1)
        if key not in self._joined:
            theirs = *asked.degree_of_extra, asked.samples, asked.level
            others = [self.units.layers(other, *theirs).on(1) for other in asked.extra]
            self._joined[key] = own.ahead_of(others, more)
        return self._joined[key]

    def _option(self, asked: _ChainRequest, cuts: tuple[int, ...], stages: MeanCosts) -> Option:
        return self._laid(asked, cuts, stages).option(asked.microbatches, self._capacity)

    def _laid(self, asked: _ChainRequest, cuts: tuple[int, ...], stages: MeanCosts) -> _ChainLayout:
        units = (asked.unit, *asked.extra) if asked.level != "none" else ()
        again = {unit: self.units.recomputed(unit, asked.level) for unit in units}
        return _laid({**dict.fromkeys(asked.extra, (0,)), asked.unit: cuts}, stages, asked, again)


@dataclass(frozen=True, slots=True, eq=False)
class _ChainLayout:
    """A chain before its number of microbatches is known: `unlimited` assumes infinite memory.
    Bytes are [groups of devices], as in `MeanCosts`. Equal `room` gives the same option object."""

    unlimited: Option
    static: NDArray[np.float64]
    transient: NDArray[np.float64]
    kept: NDArray[np.float64]
    _by_room: dict[int, Option] = field(default_factory=dict)

    def holding(self, static: NDArray[np.float64], asked: _ChainRequest) -> _ChainLayout:
        """Return the same chain with `static` bytes [layers] for the unit's layers."""
        by_stage = np.add.reduceat(static, self.unlimited.cuts[asked.unit])
        held = by_stage.reshape(asked.chunks, -1).sum(axis=0)
        return _ChainLayout(self.unlimited, held, self.transient, self.kept, self._by_room)

    def option(self, microbatches: int, capacity_bytes: float) -> Option:
        """Return the chain for this number of microbatches."""
        from dilatant.plan.layouts._chain_kernel import max_following_stages

        held, chunks = (self.static, self.transient, self.kept), self.unlimited.chunks
        room = max_following_stages(float(capacity_bytes), *held, microbatches, chunks, UNLIMITED)
        if room == UNLIMITED:
            return self.unlimited
        if room not in self._by_room:
            self._by_room[room] = replace(self.unlimited, room=room)
        return self._by_room[room]


def _laid(
    cuts: Mapping[str, tuple[int, ...]],
    stages: MeanCosts,
    asked: _ChainRequest,
    recompute: Mapping[str, tuple[Recompute, ...]],
) -> _ChainLayout:
    groups = len(stages.seconds) // asked.chunks
    sums = stages.work, stages.forward, stages.static, stages.kept, stages.gradient
    transient = stages.transient
    if asked.chunks > 1:  # several stages are on the same devices
        sums = tuple(column.reshape(asked.chunks, groups).sum(axis=0) for column in sums)
        transient = transient.reshape(asked.chunks, groups).max(axis=0)
    work, forward, static, kept, gradient = sums
    option = Option(
        asked.tp,
        asked.cp,
        dict(cuts),
        seconds=stages.seconds,
        backward=stages.backward,
        work=work,
        forward=forward,
        room=UNLIMITED,
        gradient_bytes=gradient,
        light=stages.light,
        heavy=float(stages.heavy.sum()),
        light_split=stages.light_split,
        heavy_split=float(stages.heavy_split.sum()),
        chunks=asked.chunks,
        recompute={unit: how for unit, how in recompute.items() if how},
        ep=asked.ep,
        degrees=dict.fromkeys(asked.extra, asked.degree_of_extra) if asked.whole_items else {},
    )
    return _ChainLayout(option, static, transient, kept)


class _ChainRequest(NamedTuple):
    """Parameters of a chain, which are its key in the tables."""

    unit: str
    tp: int
    cp: int
    stages: int
    samples: float
    microbatches: int
    extra: tuple[str, ...]
    chunks: int
    level: Recompute
    ep: int = 1
    whole_items: bool = False
    by_seconds: bool = True  # cut by its layers' seconds, not by `balance`

    @property
    def degree_of_extra(self) -> tuple[int, int]:
        """(tp, cp) of the extra units."""
        return (1, self.tp * self.cp) if self.whole_items else (self.tp, self.cp)

    @property
    def but_microbatches(self) -> tuple[object, ...]:
        """All fields except the number of microbatches."""
        return (
            self.unit, self.tp, self.cp, self.stages, self.samples, self.extra, self.chunks, self.level, self.ep,
            self.whole_items, self.by_seconds,
        )  # fmt: skip
