"""Option table: all layouts of a model's units, with the pipeline depth that memory allows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.cost.memory import Zero
from dilatant.plan.costs.partition import missing_bytes, partition_layers, partition_layers_in_memory
from dilatant.plan.costs.unit_layers import MeanCosts, UnitLayers
from dilatant.plan.layouts.option import UNLIMITED, Option
from dilatant.plan.rank_mapping import Chain

ROUNDING = 1.0 - 1e-9
"""Tolerance for sums in a different order."""


class ChainRequest(NamedTuple):
    """A chain to lay out: `unit` in `stages` stages with these degrees each, `chunks` stages per group of devices.

    `samples` is the mean of a microbatch, `microbatches` their number. The units `extra` run in the first stage; with
    `whole_items` each rank runs whole items of theirs instead of a part of every layer. `level`: recomputation, where
    the model leaves it open.
    """

    unit: str
    degrees: Degrees
    stages: int
    samples: float
    microbatches: int
    extra: tuple[str, ...] = ()
    chunks: int = 1
    whole_items: bool = False
    level: Recompute = "none"

    @property
    def degrees_of_extra(self) -> Degrees:
        return degrees_of_extra(self.degrees, self.whole_items)


def degrees_of_extra(degrees: Degrees, whole_items: bool) -> Degrees:
    """Return the degrees of units in the first stage of a chain; see `ChainRequest`."""
    return Degrees(cp=degrees.ranks) if whole_items else degrees.of_guests


class FastestChains(NamedTuple):
    """Chains of a unit for one mean of samples, each in its fastest cut, without recomputation or a limit of memory.
    first_of: degrees → index of their chain of one stage, which those of more stages follow. Arrays are [chains]:
    devices; groups of ranks among which a stage divides samples; seconds of a microbatch in the slowest stage and in
    all; least seconds of it in the busiest stage, and in the mean stage of any cut; its forwards; seconds of the
    heaviest sample, with whole backwards and with split ones."""

    unit: str
    samples: float
    degrees: list[Degrees]
    first_of: Mapping[Degrees, int]
    gpus: NDArray[np.int64]
    groups: NDArray[np.int64]
    slowest: NDArray[np.float64]
    total: NDArray[np.float64]
    busiest: NDArray[np.float64]
    mean: NDArray[np.float64]
    forwards: NDArray[np.float64]
    heaviest: NDArray[np.float64]
    heaviest_split: NDArray[np.float64]

    def request(self, at: int, microbatches: int) -> ChainRequest:
        """Return the request of one of the chains."""
        degrees = self.degrees[at]
        return ChainRequest(self.unit, degrees, at - self.first_of[degrees] + 1, self.samples, microbatches)


class OptionTable:
    """All options of units on devices of `capacity_bytes`; each is computed once. fixed: unit → first layers of stages,
    instead of the best cut into so many."""

    def __init__(
        self, units: UnitLayers, capacity_bytes: float, fixed: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.units = units
        self._capacity = capacity_bytes
        self._fixed = fixed or {}
        self._options: dict[Hashable, Option | None] = {}
        self._overflows: dict[ChainRequest, int] = {}  # the fewest stages behind with which no cut fits
        self._laid_out: dict[ChainRequest, tuple[int, Option | None]] = {}  # with so many stages behind
        self._free_cuts: dict[ChainRequest, _ChainCosts] = {}
        self._cuts: dict[ChainRequest, _ChainCosts] = {}  # shared by tables of all ZeRO kinds
        self._fastest: dict[Hashable, FastestChains] = {}  # shared as well
        self._joined: dict[ChainRequest, MeanCosts] = {}
        self._stacked: dict[ChainRequest, _ByLevel] = {}
        self._shared_by: dict[int, OptionTable] = {}

    def shared_by(self, replicas: int, devices: int) -> OptionTable:
        """Return the options of `replicas` chains that shard optimizer state among each other as the rules say.
        devices: devices of one chain; inside a node only chains that fit on one node shard together. `stage_costs`
        computes the actual sharding of a plan."""
        zero, node = self.units.rules.zero, self.units.node
        count = 1 if zero == "none" else replicas if zero == "all" else min(replicas, node // devices)
        if count <= 1:
            return self
        if count not in self._shared_by:
            self._shared_by[count] = self._with(self.units.variant(sharing=count))
        return self._shared_by[count]

    def sharing(self, zero: Zero) -> OptionTable:
        """Return the options under this sharding of optimizer state."""
        return self._with(self.units.variant(zero=zero))

    def _with(self, units: UnitLayers) -> OptionTable:
        other = OptionTable(units, self._capacity, self._fixed)
        other._cuts, other._fastest = self._cuts, self._fastest
        return other

    def varied(self, capacity_bytes: float | None, fixed: Mapping[str, tuple[int, ...]]) -> OptionTable:
        """Return the options on devices with another memory (None: with this one), with `fixed` cuts."""
        return OptionTable(self.units, self._capacity if capacity_bytes is None else capacity_bytes, fixed)

    def _best_cut(self, unit: str, seconds: NDArray[np.float64], stages: int) -> tuple[int, ...]:
        fixed = self._fixed.get(unit, ())
        return fixed if len(fixed) == stages else partition_layers(seconds, stages)

    def _fastest_sums(self, unit: str, layers: MeanCosts, most: int) -> NDArray[np.float64]:
        """Return seconds and least work of the slowest and the busiest stage of the fastest cuts into 1 to `most`
        stages: [2, most]."""
        from dilatant.plan.costs._partition_kernel import min_max_sums

        found = np.asarray(min_max_sums(layers.seconds, layers.work, most))
        if not np.isfinite(found).all():
            partition_layers(layers.seconds, 1)  # raises, naming the layers
        fixed = self._fixed.get(unit, ())
        if 0 < len(fixed) <= most:
            each = np.stack([layers.seconds, layers.work])
            found[:, len(fixed) - 1] = np.add.reduceat(each, fixed, axis=1).max(axis=1)
        return found

    def chain(self, request: ChainRequest, behind: int) -> Option | None:
        """Lay out a chain, at the fastest level of recomputation that fits; return None if memory forbids it.
        `behind` stages follow on the longest path. The cut makes the slowest stage as fast as possible, within memory
        only if the unconstrained cut does not fit; if neither fits, as few layers as possible recompute."""
        behind, asked = min(behind, request.microbatches - 1), request  # from there on, all are in flight everywhere
        ahead, option = self._laid_out.get(asked, (UNLIMITED, None))
        if ahead <= behind and (option is None or option.headroom >= behind):
            return option  # more stages behind only forbid more
        if request.stages > self.units.model.unit(request.unit).most_stages:
            return None
        found: list[Option] = []
        levels = self.units.levels([request.unit, *request.extra])
        if len(levels) > 1 and request.chunks == 1 and request.unit not in self._fixed:
            best_level = float(self._in_memory(request, np.array([request.stages]), behind)[2, 0])
            levels = (levels[int(best_level)],) if math.isfinite(best_level) else ()
        for level in levels:
            request = request._replace(level=level)
            option, is_free = self._chain(request, behind)
            if option is None:
                continue
            found.append(option if level == "none" else self._relaxed(request, option, behind))
            if is_free and level == "none":
                break  # of other levels, one that keeps less may do so in fewer layers
        best = min(found, key=lambda one: one.total + (request.microbatches - 1) * one.slowest, default=None)
        self._laid_out[asked] = behind, best
        return best

    def may_fit(self, request: ChainRequest, behind: int) -> bool:
        """Return False if the chain surely overflows memory at every level of recomputation."""
        levels = reversed(self.units.levels([request.unit, *request.extra]))
        return any(not self._surely_overflows(request._replace(level=level), behind) for level in levels)

    def fastest_in_chunks(self, request: ChainRequest) -> tuple[float, float, float]:
        """Return seconds of a chain in its fastest cut, without recomputation or a limit of memory: `Option.slowest`,
        `Option.total`, and the least work of the mean group of devices."""
        layers, chunks = self.layers(request), request.chunks
        cuts = self._best_cut(request.unit, layers.seconds, request.stages)
        seconds, work = layers.sums[:2]
        slowest = float(np.add.reduceat(layers.seconds, cuts).reshape(chunks, -1).sum(axis=0).max())
        return slowest, slowest + (seconds - slowest) / chunks, work * chunks / request.stages

    def fastest_chains(self, unit: str, samples: float, devices: int) -> FastestChains:
        """Return all chains of a unit on at most `devices` devices."""
        key = unit, samples, devices
        if key not in self._fastest:
            each, numbers, first_of = list[Degrees](), list[NDArray[np.int64]](), dict[Degrees, int]()
            times, sums = list[NDArray[np.float64]](), list[tuple[float, ...]]()
            for degrees in self.units.all_degrees([unit]):
                first_of[degrees] = len(each)
                layers = self.units.layers(unit, degrees, samples)
                stages = np.arange(1, min(self.units.model.unit(unit).most_stages, devices // degrees.ranks) + 1)
                each += [degrees] * len(stages)
                numbers.append(stages)
                times.append(self._fastest_sums(unit, layers, len(stages)))
                sums += [layers.sums] * len(stages)
            ranks, groups = (np.array([getattr(one, name) for one in each], np.int64) for name in ("ranks", "groups"))
            (slowest, busiest), stages = np.concatenate(times, axis=1), np.concatenate(numbers)
            total, work, *others = np.array(sums).reshape(-1, 5).T
            seconds = slowest, total, busiest, work / stages, *others
            self._fastest[key] = FastestChains(unit, samples, each, first_of, ranks * stages, groups, *seconds)
        return self._fastest[key]

    def in_memory(
        self, known: FastestChains, rows: NDArray[np.int64], microbatches: int, behind: int
    ) -> NDArray[np.float64]:
        """Return the seconds of some rows of `known` laid out by `chain`, all of one unit: [2, rows] of the slowest
        stage and of all stages; infinite where memory forbids the chain."""
        if known.unit in self._fixed:
            return np.stack([known.slowest[rows], known.total[rows]])
        found = np.empty((2, len(rows)))
        firsts = np.array([*known.first_of.values(), len(known.degrees)])
        each = np.searchsorted(rows, firsts)
        for first, start, end in zip(firsts.tolist(), each, each[1:]):
            if start < end:
                request, ahead = known.request(first, microbatches), min(behind, microbatches - 1)
                found[:, start:end] = self._in_memory(request, rows[start:end] - first + 1, ahead)[:2]
        return found

    def _in_memory(self, request: ChainRequest, stages: NDArray[np.int64], behind: int) -> NDArray[np.float64]:
        """Return chains like the request, in so many stages, at their best level of recomputation: [4, chains], as
        `fastest_in_memory` does."""
        from dilatant.plan.costs._partition_kernel import fastest_in_memory

        levels = self.units.levels([request.unit, *request.extra])
        for count in dict.fromkeys((1, len(levels))):
            static, twice, transient, times = self._by_level(request, levels[:count])
            held = static, twice, transient, times, float(self._capacity)
            found = fastest_in_memory(stages, *held, behind, request.microbatches, bool(request.extra))
            if found[3].all():  # no other level is faster
                break
        return np.asarray(found)

    def _by_level(self, request: ChainRequest, levels: Sequence[Recompute]) -> _ByLevel:
        """Return static bytes, the part of them that a single stage does not hold, and transient bytes [levels,
        layers], and `MeanCosts.recomputed_rows` [levels, 3, layers]."""
        more = bool(request.extra) and request.microbatches > request.stages
        key = request._replace(stages=2, microbatches=2 + more, chunks=1, level=levels[-1])
        if key not in self._stacked:
            each = [self.layers(key._replace(level=level)) for level in levels]
            self._stacked[key] = (
                np.stack([one.static for one in each]),
                np.stack([one.twice for one in each]),
                np.stack([one.transient for one in each]),
                np.stack([one.recomputed_rows for one in each]),
            )
        return self._stacked[key]

    def _chain(self, request: ChainRequest, behind: int) -> tuple[Option | None, bool]:
        """Return the chain, and True if it has the fastest cut."""
        if behind >= self._overflows.get(request, UNLIMITED):
            return None, False
        option = self._options.get(request)
        if option is None and self._surely_overflows(request, behind):
            self._overflows[request] = behind
            return None, False
        if option is None:
            option = self._free_cut(request).option(request.microbatches, self._capacity)
            self._options[request] = option
        if option.headroom >= behind or request.chunks > 1 or request.unit in self._fixed:
            return (option if option.headroom >= behind else None), True
        bound = request, behind
        if bound not in self._options:
            layers = self.layers(request)
            tight = partition_layers_in_memory(layers.seconds, *self.memory(layers, request, behind))
            self._options[bound] = None if tight is None else self.cut(request, tight)
            if tight is None:  # with more stages behind, more microbatches are in flight
                self._overflows[request] = behind
        return self._options[bound], False

    def _surely_overflows(self, request: ChainRequest, behind: int) -> bool:
        """Return True if no cut fits: the first layer alone with the microbatches of the first stage in flight, or all
        layers on all devices with those of the last stage. Each group of devices runs at least so many forwards before
        its first backward, see `schedule.families.families.interleaved`."""
        layers, groups = self.layers(request), request.stages // request.chunks
        last, first = 1.0 + behind, 1.0 * request.stages + behind
        if request.chunks > 1:
            last = first = ((request.chunks - 1) * groups + 1 + 2 * behind) / request.chunks
        last, first = min(last, request.microbatches), min(first, request.microbatches)
        alone = layers.static[0] + layers.transient[0] + first * layers.kept[0]
        static, kept = layers.held
        together = static + last * kept
        return bool(max(alone, together / groups) * ROUNDING > self._capacity)

    def _free_cut(self, request: ChainRequest) -> _ChainCosts:
        """Return the cut with the fastest slowest stage, without a memory limit. The number of microbatches matters
        only with extra units, and only if there are more microbatches than stages."""
        more = bool(request.extra) and request.microbatches > request.stages
        key = request._replace(microbatches=int(more))
        if key not in self._free_cuts:
            layers = self.layers(request)
            if key not in self._cuts:
                cuts = self._best_cut(request.unit, layers.seconds, request.stages)
                self._cuts[key] = self._costs_of(request, cuts, layers.by_stage(cuts))
            self._free_cuts[key] = self._cuts[key].holding(layers.static, request)
        return self._free_cuts[key]

    def _relaxed(self, request: ChainRequest, option: Option, behind: int) -> Option:
        """Recompute fewer layers: in each stage, as many layers from the end as memory allows keep their activations.
        Memory must hold the largest number of microbatches in flight."""
        if request.chunks > 1:
            return option  # several stages share the device
        from dilatant.plan.costs._partition_kernel import relaxed

        cuts = option.chain.cuts[request.unit]
        key = request, cuts, behind
        if key not in self._options:
            layers, free = self.layers(request), self.layers(request._replace(level="none"))
            ends, guests = np.array((*cuts, len(layers.kept))), bool(request.extra)
            times = layers.recomputed_rows, free.recomputed_rows
            room = float(self._capacity), behind, request.microbatches, guests
            again, (static, transient, kept, seconds, backward) = relaxed(
                ends, layers.static, layers.transient, *times, *room
            )
            bytes_of_stages = {"static": static, "transient": transient, "kept": kept}  # `static` of this ZeRO kind
            costs = replace(option.costs, seconds=seconds, backward=backward, **bytes_of_stages)
            own = self.units.recomputed(request.unit, request.level, again)
            chain = replace(option.chain, recompute={**option.chain.recompute, request.unit: own})
            laid_out = _ChainCosts(Option(chain, costs, UNLIMITED), static)
            self._options[key] = laid_out.option(request.microbatches, self._capacity)
        found = self._options[key]
        assert found is not None
        return found

    def excess(self, request: ChainRequest, behind: int) -> float:
        """Return the bytes that a device lacks under the most frugal chain of this shape; 0 if it fits."""
        ways = self.units.with_experts(request.unit, request.degrees)
        request = request._replace(
            level=self.units.levels([request.unit, *request.extra])[-1],
            degrees=[one for one in ways if one.ranks == request.degrees.ranks][-1],
        )
        layers = self.layers(request)
        if request.stages > len(layers.seconds):
            return math.inf
        return missing_bytes(*self.memory(layers, request, behind))

    def memory(
        self, layers: MeanCosts, request: ChainRequest, behind: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int], float]:
        """Return static bytes, bytes per microbatch, microbatches in flight per stage, and bytes available for both."""
        in_flight = [min(request.stages - s + behind, request.microbatches) for s in range(request.stages)]
        return layers.static, layers.kept, in_flight, self._capacity - float(layers.transient.max())

    def colocated(
        self, units: Sequence[str], degrees: Degrees, stages: int, samples: float, microbatches: int
    ) -> Option | None:
        """Lay out several units in the same `stages` stages, each cut evenly on its own (Cornstarch v3 4.2)."""
        for level in self.units.levels(units):
            key = tuple(units), degrees, stages, samples, microbatches, level
            if key not in self._options:
                each = [self.units.layers(unit, degrees, samples, level).on(stages) for unit in units]
                if min(len(layers.seconds) for layers in each) < stages:
                    return None
                cuts = {unit: self._best_cut(unit, layers.seconds, stages) for unit, layers in zip(units, each)}
                first, *others = [layers.by_stage(cuts[unit]) for unit, layers in zip(units, each)]
                again = {unit: self.units.recomputed(unit, level) for unit in units if level != "none"}
                again = {unit: how for unit, how in again.items() if how}
                costs = _ChainCosts.of(Chain(1, degrees, cuts, recompute=again), first.beside(others))
                self._options[key] = costs.option(microbatches, self._capacity)
            option = self._options[key]
            if option is not None and option.headroom >= 0:
                return option
        return None

    def layers(self, request: ChainRequest) -> MeanCosts:
        """Return the layers of the unit, the first of which includes all layers of the extra units."""
        mean = request.samples, request.level
        own = self.units.layers(request.unit, request.degrees, *mean).on(request.stages)
        if not request.extra:
            return own
        alone, more = request.stages == 1, request.microbatches > request.stages
        key = request._replace(stages=int(alone), microbatches=int(more), chunks=1)
        if key not in self._joined:
            theirs = request.degrees_of_extra
            others = [self.units.layers(other, theirs, *mean).on(1) for other in request.extra]
            self._joined[key] = own.ahead_of(others, more)
        return self._joined[key]

    def cut(self, request: ChainRequest, cuts: tuple[int, ...]) -> Option:
        """Return the chain with these first layers of its stages."""
        costs = self._costs_of(request, cuts, self.layers(request).by_stage(cuts))
        return costs.option(request.microbatches, self._capacity)

    def _costs_of(self, request: ChainRequest, cuts: tuple[int, ...], stages: MeanCosts) -> _ChainCosts:
        units = (request.unit, *request.extra) if request.level != "none" else ()
        again = {unit: self.units.recomputed(unit, request.level) for unit in units}
        chain = Chain(
            1,
            request.degrees,
            {**dict.fromkeys(request.extra, (0,)), request.unit: cuts},
            request.chunks,
            {unit: how for unit, how in again.items() if how},
            dict.fromkeys(request.extra, request.degrees_of_extra),
        )
        return _ChainCosts.of(chain, stages)


_ByLevel = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class _ChainCosts:
    """A chain before its number of microbatches is known: `unlimited` assumes infinite memory.
    static: bytes [groups of devices]. Equal headroom gives the same option object."""

    unlimited: Option
    static: NDArray[np.float64]
    _by_headroom: dict[int, Option] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: Chain, stages: MeanCosts) -> _ChainCosts:
        costs = stages.on_groups(chain.chunks)
        return cls(Option(chain, costs, UNLIMITED), costs.static)

    def holding(self, static: NDArray[np.float64], request: ChainRequest) -> _ChainCosts:
        """Return the same chain with `static` bytes [layers] for the unit's layers."""
        by_stage = np.add.reduceat(static, self.unlimited.chain.cuts[request.unit])
        held = by_stage.reshape(request.chunks, -1).sum(axis=0)
        return _ChainCosts(self.unlimited, held, self._by_headroom)

    def option(self, microbatches: int, capacity_bytes: float) -> Option:
        """Return the chain for this number of microbatches."""
        from dilatant.plan.layouts._chain_kernel import max_following_stages

        costs, chunks = self.unlimited.costs, self.unlimited.chain.chunks
        held = self.static, costs.transient, costs.kept
        headroom = max_following_stages(float(capacity_bytes), *held, microbatches, chunks, UNLIMITED)
        if headroom == UNLIMITED:
            return self.unlimited
        if headroom not in self._by_headroom:
            self._by_headroom[headroom] = self.unlimited.with_headroom(headroom)
        return self._by_headroom[headroom]
