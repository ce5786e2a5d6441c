"""Layer costs of units for the mean microbatch, at each parallel degree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.cost.memory import BF16, ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.plan.costs.stage_costs import LayerTable, layer_table, stage_peaks
from dilatant.plan.costs.sync_time import parts_of_a_rank, ranks_together
from dilatant.plan.costs.workload import Workload
from dilatant.plan.model_spec import ModelSpec

LEVELS: tuple[Recompute, ...] = ("none", "block_keep_attention", "block", "block_offload")
"""Recomputation levels that a plan may choose, from the fastest to the most frugal; the last only with a host whose
memory is not the device's."""

WIDEST_EXPERTS = 64
"""Most ranks on several nodes that divide experts in plans that nobody asked for: the largest published groups."""


@dataclass(frozen=True, eq=False)
class MeanCosts:
    """Costs of the mean microbatch per layer of a unit at some degrees, or per stage: arrays [layers] or [stages].

    `seconds`: forward plus backward; `backward`: its backward part; `work`: lower bound of `seconds` for any grouping
    of samples, and `forward` its forward part, both without costs per call; `calls`: costs per call of any microbatch;
    `lightest`, `heaviest`: seconds of the lightest and of the heaviest sample alone; `lightest_split`,
    `heaviest_split`: the part of these that delays other stages when backwards are split; `work_host`, `lightest_host`,
    `lightest_split_host`: host seconds for these, a lower bound of a stage's time. Bytes per rank: `static` for the
    whole step (including `twice`: tied weights, needed only if the first layer is on another rank), `kept` per
    microbatch in flight, `transient` while the layer runs, `gradient` to be synced.
    """

    seconds: NDArray[np.float64]
    backward: NDArray[np.float64]
    work: NDArray[np.float64]
    forward: NDArray[np.float64]
    calls: NDArray[np.float64]
    lightest: NDArray[np.float64]
    heaviest: NDArray[np.float64]
    lightest_split: NDArray[np.float64]
    heaviest_split: NDArray[np.float64]
    work_host: NDArray[np.float64]
    lightest_host: NDArray[np.float64]
    lightest_split_host: NDArray[np.float64]
    static: NDArray[np.float64]
    twice: NDArray[np.float64]
    kept: NDArray[np.float64]
    transient: NDArray[np.float64]
    gradient: NDArray[np.float64]

    def on(self, stages: int) -> MeanCosts:
        """Return the costs for a unit cut into `stages` stages; a single stage holds tied weights once."""
        return replace(self, static=self.static - self.twice) if stages == 1 else self

    def by_stage(self, cuts: tuple[int, ...]) -> MeanCosts:
        """Sum the layers of each stage. While a layer runs, later layers keep no activations."""
        sums = np.add.reduceat(self._rows, np.array(cuts), axis=1)
        sums[_TRANSIENT] = stage_peaks(self.transient, self.kept, cuts)
        return MeanCosts(*sums)

    @cached_property
    def _rows(self) -> NDArray[np.float64]:
        """All fields: [fields, layers]."""
        return np.stack([getattr(self, one.name) for one in fields(self)])

    @cached_property
    def recomputed_rows(self) -> NDArray[np.float64]:
        """Kept bytes, seconds and backward seconds, [3, layers]: they depend on recomputation, besides the peak."""
        return np.stack([self.kept, self.seconds, self.backward])

    @cached_property
    def sums(self) -> tuple[float, float, float, float, float]:
        """All layers' `seconds`, `work`, forward part of `seconds`, `heaviest` and `heaviest_split`."""
        seconds = float(self.seconds.sum())
        others = self.work, self.heaviest, self.heaviest_split
        work, heaviest, split = (float(one.sum()) for one in others)
        return seconds, work, seconds - float(self.backward.sum()), heaviest, split

    @cached_property
    def held(self) -> tuple[float, float]:
        """The bytes of all layers: static, and kept per microbatch in flight."""
        return float(self.static.sum()), float(self.kept.sum())

    def on_groups(self, chunks: int) -> MeanCosts:
        """Raise the lower bounds of single samples to the host's seconds, and combine the `chunks` stages of each group
        of devices. `seconds`, `backward` and the seconds of single samples stay by stage."""
        names = ("lightest", "lightest_split")
        bounds = {name: np.maximum(getattr(self, name), getattr(self, f"{name}_host")) for name in names}
        bounded = replace(self, **bounds)
        if chunks == 1:
            return bounded
        summed = ("work", "forward", "calls", "work_host", "static", "kept", "gradient")
        by_group = {name: getattr(bounded, name).reshape(chunks, -1).sum(axis=0) for name in summed}
        return replace(bounded, **by_group, transient=self.transient.reshape(chunks, -1).max(axis=0))

    def beside(self, others: Sequence[MeanCosts]) -> MeanCosts:
        """Combine stages on the same ranks, which run in turn; each unit has its own lightest and heaviest sample."""
        joined = {}
        for one in fields(self):
            of_sample = one.name.startswith(("lightest", "heaviest"))
            join = np.max if one.name == "transient" else np.min if of_sample else np.sum
            joined[one.name] = join([getattr(each, one.name) for each in (self, *others)], axis=0)
        return MeanCosts(**joined)

    def ahead_of(self, others: Sequence[MeanCosts], one_ahead: bool) -> MeanCosts:
        """Add all layers of other units to the first layer.
        Their kept bytes count once per microbatch in flight in the first stage, and once more if they may run
        `one_ahead` of it. The heaviest samples are not added: those units may have other heaviest samples."""
        first = {}
        for one in fields(self):
            column, more = getattr(self, one.name).copy(), [getattr(other, one.name) for other in others]
            if one.name == "transient":
                column[0] = max(column[0], *(float(other.max()) for other in more))
            elif one.name not in ("heaviest", "heaviest_split", "twice"):
                column[0] += sum(float(other.sum()) for other in more)
            if one.name == "static" and one_ahead:
                column[0] += sum(float(other.kept.sum()) for other in others)
            first[one.name] = column
        return MeanCosts(**first)


SINGLE = "lightest", "heaviest", "lightest_split", "heaviest_split", "gradient"
"""Fields of `MeanCosts` that do not depend on the samples of a microbatch."""

_TRANSIENT = [one.name for one in fields(MeanCosts)].index("transient")


@dataclass(eq=False)
class UnitLayers:
    """Layer costs of a model's units per number of samples in a microbatch; each is computed once.

    reach: as in `Cluster`. batch: the samples of a global batch. sharing: number of neighbouring chains that shard
    optimizer state together.
    by_tokens: microbatches may be cut further, which lowers the bounds. fills: no microbatch is left empty while there
    are samples, so every stage issues the operations of all microbatches, which raises the bounds.
    """

    model: ModelSpec
    _costs: CostModel
    _workload: Workload
    reach: int
    rules: ParameterBytes = BF16
    _batch: int = 1
    _sharing: int = 1
    _by_tokens: bool = False
    _fills: bool = False
    slower: tuple[float, float] | None = None
    _tables: dict[tuple[str, Degrees, Recompute], LayerTable] = field(default_factory=dict)
    _layers: dict[tuple[str, Degrees, float, Recompute], MeanCosts] = field(default_factory=dict)
    _unshared: dict[tuple[str, Degrees, float, Recompute], MeanCosts] = field(default_factory=dict)
    _sharers: dict[tuple[str, Degrees], NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = self.model.units
        self._free = {unit.name: unit.recompute is None for unit in units}
        self._recomputable: dict[str, NDArray[np.bool_]] = {}
        self._singles: dict[tuple[str, Degrees], Mapping[str, NDArray[np.float64]]] = {}
        self._degrees: dict[tuple[str, ...], tuple[Degrees, ...]] = {}
        self._experts = {unit.name: {layer.experts for layer in unit.layers if layer.experts} for unit in units}

    @property
    def node(self) -> int:
        """Devices of a node, which share optimizer state under `zero: node`."""
        return self.rules.ranks_per_node or self.reach

    def variant(
        self, sharing: int | None = None, by_tokens: bool | None = None, zero: Zero | None = None
    ) -> UnitLayers:
        """Return these costs under other settings: another number of chains that shard optimizer state together, or
        another sharding of it. With `by_tokens`, steps may have more microbatches."""
        by_tokens = self._by_tokens if by_tokens is None else by_tokens
        rules = self.rules if zero is None else replace(self.rules, zero=zero)
        return replace(
            self,
            rules=rules,
            _sharing=sharing or self._sharing,
            _by_tokens=by_tokens,
            _layers={},
            _sharers={},
            _unshared=self._unshared if by_tokens == self._by_tokens else {},
        )

    def degrees(self, units: Sequence[str]) -> tuple[Degrees, ...]:
        """Return the degrees with costs for all layer types of `units` and with tensor groups inside a node."""
        key = tuple(units)
        if key in self._degrees:
            return self._degrees[key]
        shared: set[Degrees] | None = None
        for unit in units:
            for kind in {layer.kind for layer in self.model.unit(unit).layers}:
                own = set(self._costs.layers.get(kind, {}))
                shared = own if shared is None else shared & own
        if not shared:
            for unit in units:
                for layer in self.model.unit(unit).layers:
                    self._costs.layer(layer.kind)  # raises, naming what is missing
        self._degrees[key] = tuple(sorted(one for one in shared or () if one.tp <= self.reach))
        return self._degrees[key]

    def is_free(self, unit: str) -> bool:
        """Return True if the model lets the plan choose what is recomputed."""
        return self._free[unit]

    def levels(self, units: Sequence[str]) -> tuple[Recompute, ...]:
        """Return the recomputation levels to try for `units`, fastest first; only "none" if the model fixes all."""
        count = len(LEVELS) - (not self.rules.host_link)
        return LEVELS[: count if any(map(self._free.__getitem__, units)) else 1]

    def with_experts(self, unit: str, degrees: Degrees) -> tuple[Degrees, ...]:
        """Return these degrees with each `ep` that may pay off for a unit. These are 1 and, inside a node or on whole
        nodes, those that divide experts further than tp divides features; above tp x cp without cp, for units that cp
        would divide by tokens."""
        counts, most = self._experts[unit], degrees.ranks
        if not counts or most > self.reach:
            return (degrees,)
        if degrees.cp == 1 and self.model.unit(unit).items_per_token == 1.0:
            most = self.reach if self.slower is None else max(self.reach, WIDEST_EXPERTS)
        wide = [ep for ep in degrees.expert_degrees(most) if ep <= self.reach or ep % self.reach == 0]
        wide = [ep for ep in wide if ep > degrees.tp and not any(count % ep for count in counts)]
        return (degrees, *(degrees._replace(ep=ep) for ep in wide))

    def groups(self, units: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of groups of ranks that any of `all_degrees` of these units has."""
        return tuple(sorted({degrees.groups for degrees in self.all_degrees(units)}))

    def all_degrees(self, units: Sequence[str]) -> Iterator[Degrees]:
        """Yield `degrees` of these units, with each `ep` that may pay off for the last of them, if the others have
        costs on as many ranks."""
        guests = self.degrees(units[:-1]) if units[:-1] else ()
        for degrees in self.degrees(units):
            for one in self.with_experts(units[-1], degrees):
                if not guests or one.groups == 1 or one.of_guests in guests:
                    yield one

    def layers(self, unit: str, degrees: Degrees, samples: float, level: Recompute = "none") -> MeanCosts:
        """Return the costs of one unit for the mean microbatch of `samples` samples.
        `level` applies only if the model leaves recomputation open."""
        spec = self.model.unit(unit)
        level = spec.recompute or level
        key = unit, degrees, samples, level
        if key not in self._layers:
            table = self._table(unit, degrees, level)
            ranks = self._ranks_sharing(unit, degrees)
            known = self._of_mean(unit, degrees, samples, level)
            self._layers[key] = replace(known, static=table.static_shared_by(ranks), twice=table.twice(ranks))
        return self._layers[key]

    def _of_mean(self, unit: str, degrees: Degrees, samples: float, level: Recompute) -> MeanCosts:
        """Return the costs without sharded optimizer state."""
        key = unit, degrees, samples, level
        if key not in self._unshared:
            table, single = self._table(unit, degrees, level), self._of_single(unit, degrees)
            row = self._workload.mean_row(unit, samples) * self._unevenness(unit, degrees, samples)
            square, linear, some = self._workload.least_row(unit, samples, self._by_tokens)
            forward, backward = np.maximum(table.seconds[:, :2] @ row, table.host_seconds[:, :2]).T
            present = float(self._fills and some)
            host = single["host"] * present
            self._unshared[key] = MeanCosts(
                seconds=forward + backward,
                backward=backward,
                work=square * single["square"] + linear * single["linear"],
                forward=square * single["square_forward"] + linear * single["linear_forward"],
                calls=single["call"] * present,
                **{name: single[name] for name in SINGLE},
                work_host=host,
                lightest_host=host,
                lightest_split_host=single["host_forward"] * present,
                static=table.static_bytes,
                twice=table.tied_bytes,
                kept=table.kept_bytes @ row,
                transient=np.maximum(table.transient_bytes @ row, table.forward_bytes @ row),
            )
        return self._unshared[key]

    def _of_single(self, unit: str, degrees: Degrees) -> Mapping[str, NDArray[np.float64]]:
        """Return what does not depend on the samples of a microbatch, by name, without recomputation that is left open:
        [layers]. `SINGLE` are fields of `MeanCosts`; the others are coefficients of its seconds."""
        key = unit, degrees
        if key not in self._singles:
            spec = self.model.unit(unit)
            free = self._table(unit, degrees, spec.recompute or "none")
            lightest, heaviest = self._workload.lightest(unit), self._workload.heaviest(unit, self._batch)
            forward, backward, inputs, _ = np.moveaxis(free.seconds, 1, 0)
            both = forward + backward
            # A tied weight in the first layer: who holds both ends sums it once.
            held = [one.held_trained(degrees, is_first=True) for one in spec.layers]
            self._singles[key] = {
                "lightest": both @ lightest,
                "heaviest": both @ heaviest,
                # Weight-gradient halves delay no other stage: a stage may run them last.
                "lightest_split": forward @ lightest,
                "heaviest_split": (forward + inputs) @ heaviest,
                "gradient": self.rules.summed * np.array(held),
                "square": both[:, 0],
                "linear": both[:, 1],
                "call": both[:, 2],
                "square_forward": forward[:, 0],
                "linear_forward": forward[:, 1],
                "host": free.host_seconds[:, 0] + free.host_seconds[:, 1],
                "host_forward": free.host_seconds[:, 0],
            }
        return self._singles[key]

    def _unevenness(self, unit: str, degrees: Degrees, samples: float) -> NDArray[np.float64]:
        """Return the fullest rank's row as a multiple of an even part of the mean microbatch: [3]."""
        each, parts = degrees.dealt(self.model.unit(unit).items_per_token)
        if parts == 1 or each == 1.0:
            return np.ones(3)
        _, tokens, present = self._workload.mean(unit)
        items = max(1.0, samples * (tokens * each if each else present))
        times = parts * math.ceil(items / parts) / items
        return np.array([times, times, 1.0])

    def of_samples(self, unit: str, degrees: Degrees) -> NDArray[np.float64]:
        """Return the seconds of each sample in all layers of a unit, without costs per call: [samples]."""
        square, linear, _ = self._table(unit, degrees, "none").seconds[:, :2].sum(axis=(0, 1))
        squares, tokens = self._workload.of_samples(unit)
        return np.asarray(square * squares + linear * tokens)

    def least_dense(self, unit: str) -> float:
        """Return the minimum weight of a row's square (see `Workload.dense`); 1 if attention skips between samples."""
        dense = self._workload.dense.get(unit)
        return 1.0 if dense is None else dense.least

    def recomputable(self, unit: str) -> NDArray[np.bool_]:
        """Return a mask of the layers that keep less under recomputation, at the smallest degrees with costs."""
        if unit not in self._recomputable:
            least = self.degrees([unit])[0]
            none, block = (self._table(unit, least, level).kept_bytes for level in ("none", "block"))
            self._recomputable[unit] = np.asarray((none - block)[:, :2].sum(axis=1) > 0.0)
        return self._recomputable[unit]

    def recomputed(self, unit: str, level: Recompute, where: NDArray[np.bool_] | bool = True) -> tuple[Recompute, ...]:
        """Return `level` for layers `where` it saves memory, else "none"; empty if the model fixes recomputation."""
        if not self.is_free(unit):
            return ()
        return tuple([level if there else "none" for there in (self.recomputable(unit) & where).tolist()])

    def _ranks_sharing(self, unit: str, degrees: Degrees) -> NDArray[np.float64]:
        """Return [layers]: the number of ranks that shard the optimizer state of one rank's layers (see `shared_by`),
        including the ranks of its stage with the same parameters."""
        key = unit, degrees
        if key not in self._sharers:
            layers, zero = self.model.unit(unit).layers, self.rules.zero
            beside = degrees.ranks if zero == "all" else min(degrees.ranks, self.node)
            self._sharers[key] = np.ones(len(layers))
            if zero != "none":
                parts = self._sharing * beside * parts_of_a_rank(layers, degrees)
                self._sharers[key] = ranks_together(layers, degrees, *np.maximum(1.0, parts))
        return self._sharers[key]

    def _table(self, unit: str, degrees: Degrees, level: Recompute) -> LayerTable:
        key = unit, degrees, level
        if key not in self._tables:
            spec, upstream = self.model.unit(unit), self.model.upstream_trainable(unit)
            again = (level,) * len(spec.layers)
            way = (self.reach, self.slower or (1.0, 1.0)) if degrees.groups > 1 else ()
            self._tables[key] = layer_table(spec, upstream, self._costs, degrees, self.rules, again, *way)
        return self._tables[key]
