"""Ways to lay out one unit, or several colocated ones: degrees, cuts, stage seconds, and how deep memory allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config.recompute import Recompute
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.errors import DoesNotFitError
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.partition import cuts_in_memory, partition_layers, partition_layers_in_memory
from dilatant.plan.stage_costs import LayerTable, layer_table
from dilatant.plan.state_sharing import parts_of_a_rank, ranks_together
from dilatant.plan.workload import Workload

UNLIMITED = 1 << 30
LEVELS: tuple[Recompute, ...] = ("none", "block_keep_attention", "block")
"""What a plan may recompute, from the fastest to the most frugal."""


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Per layer of one unit under one (tp, cp), for the mean microbatch; all arrays are [layers].

    `seconds` is forward plus backward, `work` the least of it, however samples are grouped; `light` and `heavy` those
    of the lightest and of the heaviest sample alone, of which only what others wait for where backwards are split.
    Bytes per rank: `static` throughout (`twice` of them where the first layer is not held too), `kept` per microbatch
    in flight, `transient` while the layer runs, `gradient` to be synced.
    """

    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    light: NDArray[np.float64]
    heavy: NDArray[np.float64]
    static: NDArray[np.float64]
    twice: NDArray[np.float64]
    kept: NDArray[np.float64]
    transient: NDArray[np.float64]
    gradient: NDArray[np.float64]

    def on(self, stages: int) -> Layers:
        """The same where the unit is cut into so many stages: a single one holds all."""
        return replace(self, static=self.static - self.twice) if stages == 1 else self


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A chain of stages on `tp * cp` devices each that holds all layers of one or more colocated units.

    `seconds` is [stages], `work` [groups of devices], see `Layers`: with `chunks` a group has so many stages. `room` is
    how many stages may follow the chain before its in-flight microbatches overflow memory (negative: it does not fit at
    all); `gradient_bytes` the most that one rank must sync, `least_gradient_bytes` the least. `light` [stages] and
    `heavy` are the seconds of the lightest sample in each stage and of the heaviest in all. `recompute`: as in `Chain`;
    `ep` that of the unit that is cut.
    `total` are the seconds until the chain has seen its first microbatch, of which `slowest` count as the first step of
    a steady state.
    """

    tp: int
    cp: int
    cuts: Mapping[str, tuple[int, ...]]
    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    room: int
    gradient_bytes: float
    least_gradient_bytes: float
    light: NDArray[np.float64]
    heavy: float
    chunks: int = 1
    recompute: Mapping[str, tuple[Recompute, ...]] = field(default_factory=dict)
    ep: int = 1
    gpus: int = field(init=False)
    slowest: float = field(init=False)
    total: float = field(init=False)

    def __post_init__(self) -> None:
        groups = len(self.seconds) // self.chunks
        slowest = float(self.seconds.reshape(self.chunks, groups).sum(axis=0).max())
        total = float(self.seconds.sum())
        for name, value in (
            ("gpus", self.tp * self.cp * groups),
            ("slowest", slowest),
            ("total", total if self.chunks == 1 else slowest + (total - slowest) / self.chunks),
        ):
            object.__setattr__(self, name, value)

    @property
    def stages(self) -> int:
        return len(self.seconds)


class OptionTable:
    """All options of a model's units for microbatches of some number of samples, computed once each. halves: backwards
    may be split, so bounds count on less."""

    def __init__(
        self,
        model: ModelSpec,
        costs: CostModel,
        workload: Workload,
        capacity_bytes: float,
        gpus_per_node: int,
        rules: ParameterBytes = BF16,
        global_batch: int = 1,
        halves: bool = False,
    ) -> None:
        self._model = model
        self._costs = costs
        self._workload = workload
        self._capacity = capacity_bytes
        self._node = gpus_per_node
        self._rules = rules
        self._batch = global_batch
        self._halves = halves
        self._tables: dict[tuple[str, int, int, Recompute, int], LayerTable] = {}
        self._layers: dict[tuple[str, int, int, float, Recompute, int], Layers] = {}
        self._options: dict[tuple[object, ...], Option | None] = {}
        self._experts = {
            unit.name: {layer.experts for layer in unit.layers if layer.experts} for unit in model.units
        }
        self._sharing = 1
        self._shared_by: dict[int, OptionTable] = {}

    def shared_by(self, replicas: int, devices: int) -> OptionTable:
        """The options of each of `replicas` chains that share optimizer state as the rules say, if each takes so many
        devices: on one node those that fit there whole beside each other. `stage_costs` counts what a plan
        really shares."""
        zero = self._rules.zero
        count = 1 if zero == "none" else replicas if zero == "all" else min(replicas, self._node // devices)
        if count <= 1:
            return self
        if count not in self._shared_by:
            table = self.with_capacity(self._capacity)
            table._sharing = count
            self._shared_by[count] = table
        return self._shared_by[count]

    def with_capacity(self, capacity_bytes: float) -> OptionTable:
        """The options where a device has so much memory."""
        limits = self._node, self._rules, self._batch, self._halves
        table = OptionTable(self._model, self._costs, self._workload, capacity_bytes, *limits)
        table._tables = self._tables
        return table

    def degrees(self, units: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """The (tp, cp) that all layer types of `units` have costs for, with tensor groups inside a node."""
        shared: set[tuple[int, int]] | None = None
        for unit in units:
            for kind in {layer.kind for layer in self._model.unit(unit).layers}:
                own = set(self._costs.layers.get(kind, {}))
                shared = own if shared is None else shared & own
        if not shared:
            for unit in units:
                for layer in self._model.unit(unit).layers:
                    self._costs.layer(layer.kind)  # raises, naming what is missing
        return tuple(sorted((tp, cp) for tp, cp in shared or () if tp <= self._node))

    def is_free(self, unit: str) -> bool:
        """Does the model leave to the plan what is recomputed?"""
        return self._model.unit(unit).recompute is None

    def levels(self, units: Sequence[str]) -> tuple[Recompute, ...]:
        """What may be tried for `units`, the fastest first; the one level "none" where the model says it for all."""
        free = any(self.is_free(unit) for unit in units)
        return LEVELS if free else LEVELS[:1]

    def expert_degrees(self, unit: str, tp: int, cp: int) -> tuple[int, ...]:
        """What `ep` may pay for a unit on tp * cp ranks: 1, and what leaves a rank fewer experts than its share of
        features does; only inside nodes, where costs know the links."""
        counts = self._experts[unit]
        if not counts or tp * cp > self._node:
            return (1,)
        wide = range(2 * tp, tp * cp + 1, tp)
        return (1, *(ep for ep in wide if tp * cp % ep == 0 and not any(count % ep for count in counts)))

    def layers(
        self, unit: str, tp: int, cp: int, samples: float, level: Recompute = "none", ep: int = 1
    ) -> Layers:
        """The arrays of one unit for the mean microbatch of `samples` samples; `level` counts where the model leaves
        open what is recomputed."""
        spec = self._model.unit(unit)
        level = spec.recompute or level
        key = unit, tp, cp, samples, level, ep
        if key not in self._layers:
            table = self._table(unit, tp, cp, level, ep)
            free = self._table(unit, tp, cp, spec.recompute or "none", ep)
            ranks = self._ranks_sharing(unit, tp, cp, ep)
            row, least = self._workload.mean_row(unit, samples), self._workload.least_row(unit, samples)
            light, heavy = self._workload.lightest(unit), self._workload.heaviest(unit, self._batch)
            fastest = free.seconds[:, 0] + free.seconds[:, 1]
            # Halves that make weight gradients hold nobody up: a stage may end with them, a sample need not wait.
            there = free.seconds[:, 0] if self._halves else fastest
            back = free.seconds[:, 0] + free.seconds[:, 2] if self._halves else fastest
            self._layers[key] = Layers(
                seconds=(table.seconds[:, 0] + table.seconds[:, 1]) @ row,
                work=fastest @ least,
                light=there @ light,
                heavy=back @ heavy,
                static=table.static_shared_by(ranks),
                twice=table.twice(ranks),
                kept=table.kept_bytes @ row,
                transient=table.transient_bytes @ row,
                gradient=np.array(
                    [self._rules.gradient * layer.held_trained(tp, ep) for layer in spec.layers]
                ),
            )
        return self._layers[key]

    def of_samples(self, unit: str, tp: int, cp: int) -> NDArray[np.float64]:
        """Seconds of each sample in all layers of a unit, without what calls cost: [samples]."""
        square, linear, _ = self._table(unit, tp, cp, "none").seconds[:, :2].sum(axis=(0, 1))
        squares, tokens = self._workload.of_samples(unit)
        return np.asarray(square * squares + linear * tokens)

    def dense(self, unit: str) -> float:
        """What the square of a row costs more than attention that skips, see `Workload.dense`; 1 where it does skip."""
        return self._workload.dense.get(unit, 1.0)

    def _ranks_sharing(self, unit: str, tp: int, cp: int, ep: int) -> NDArray[np.float64]:
        """[layers]: the ranks that divide the optimizer's state of what one holds, see `shared_by`; those of a stage
        that hold the same are among them."""
        layers = self._model.unit(unit).layers
        if self._rules.zero == "none":
            return np.ones(len(layers))
        beside = tp * cp if self._rules.zero == "all" else min(tp * cp, self._node)
        parts = self._sharing * beside * parts_of_a_rank(layers, tp, ep)
        return ranks_together(layers, tp, ep, *np.maximum(1.0, parts))

    def _table(self, unit: str, tp: int, cp: int, level: Recompute, ep: int = 1) -> LayerTable:
        key = unit, tp, cp, level, ep
        if key not in self._tables:
            spec, upstream = self._model.unit(unit), self._model.upstream_trainable(unit)
            again = (level,) * len(spec.layers)
            self._tables[key] = layer_table(spec, upstream, self._costs, tp, cp, self._rules, again, ep)
        return self._tables[key]

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
    ) -> Option | None:
        """`unit` in `stages` stages, with all of the units `extra` in its first; None if memory forbids.

        `behind` stages follow on the longest path. Cut for the fastest slowest stage, under memory only where the free
        cut does not fit; what does not fit either way recomputes as little as it can. `balance` [layers] replaces the
        seconds that the cut balances (a planner unaware of freezing). `chunks` stages are on each group of devices.
        """
        if stages > len(self._model.unit(unit).layers):
            return None
        found: list[Option] = []
        for level in self.levels([unit, *extra]):
            asked = _Asked(unit, tp, cp, stages, samples, microbatches, tuple(extra), chunks, level, ep)
            option = self._chain(asked, behind, balance)
            if option is None:
                continue
            found.append(option if level == "none" else self._relaxed(asked, option, behind))
            if option is self._options.get((asked, balance is None)):
                break  # cut as is best for time: more recomputation only takes longer
        return min(found, key=lambda one: one.total + (microbatches - 1) * one.slowest, default=None)

    def _chain(self, asked: _Asked, behind: int, balance: NDArray[np.float64] | None) -> Option | None:
        free = asked, balance is None
        if free not in self._options:
            layers = self._merged(asked)
            cuts = partition_layers(layers.seconds if balance is None else balance, asked.stages)
            self._options[free] = self._option(asked, layers, cuts)
        option = self._options[free]
        assert option is not None, "cut without memory"
        if option.room >= behind or asked.chunks > 1:
            return option if option.room >= behind else None
        bound = *free, behind
        if bound not in self._options:
            layers = self._merged(asked)
            weights = layers.seconds if balance is None else balance
            tight = cuts_in_memory(weights, *self._memory(layers, asked, behind))
            self._options[bound] = None if tight is None else self._option(asked, layers, tight)
        return self._options[bound]

    def _relaxed(self, asked: _Asked, option: Option, behind: int) -> Option:
        """The option with as many layers of each stage, from its last one on, not recomputed as fit beside the
        microbatches that are in flight at most."""
        key = "relaxed", asked, tuple(option.cuts[asked.unit]), behind
        if key not in self._options:
            layers, free = self._merged(asked), self._merged(replace(asked, level="none"))
            cuts = option.cuts[asked.unit]
            more, held = free.kept - layers.kept, dict(zip(_COLUMNS, _by_stage(layers, cuts), strict=True))
            again = np.full(len(more), True)
            for s, (first, end) in enumerate(zip(cuts, (*cuts[1:], len(more)))):
                flying = min(asked.stages - s + behind, asked.microbatches)
                left = self._capacity - held["static"][s] - held["transient"][s] - flying * held["kept"][s]
                if asked.chunks > 1:
                    left = 0.0  # several stages share the device
                gains = flying * np.cumsum(more[first:end][::-1])[::-1]
                again[first:end] = gains > left
            again[0] |= bool(asked.extra)  # which are as a whole, and counted in the first layer
            mixed = replace(
                layers,
                seconds=np.where(again, layers.seconds, free.seconds),
                kept=np.where(again, layers.kept, free.kept),
            )
            recompute = self._everywhere(asked.unit, asked.level, again)
            others = {other: self._everywhere(other, asked.level) for other in asked.extra}
            self._options[key] = replace(
                self._option(asked, mixed, cuts), recompute={asked.unit: recompute, **others}
            )
        found = self._options[key]
        assert found is not None
        return found

    def _everywhere(
        self, unit: str, level: Recompute, where: NDArray[np.bool_] | bool = True
    ) -> tuple[Recompute, ...]:
        """`level` for all layers `where` it leaves less to keep; nothing where the model says what is recomputed."""
        if not self.is_free(unit):
            return ()
        return tuple(level if there else "none" for there in self.recomputable(unit) & where)

    def recomputable(self, unit: str) -> NDArray[np.bool_]:
        """By layer: does recomputation leave less to keep, by the smallest degrees that there are costs for?"""
        tp, cp = self.degrees([unit])[0]
        none, block = (self._table(unit, tp, cp, level).kept_bytes for level in ("none", "block"))
        return np.asarray((none - block)[:, :2].sum(axis=1) > 0.0)

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
        """The bytes that a device lacks under the most frugal such chain; 0 if it fits."""
        level = self.levels([unit, *extra])[-1]
        ep = self.expert_degrees(unit, tp, cp)[-1]
        asked = _Asked(unit, tp, cp, stages, samples, microbatches, tuple(extra), 1, level, ep)
        layers = self._merged(asked)
        if stages > len(layers.seconds):
            return math.inf
        try:
            partition_layers_in_memory(layers.seconds, *self._memory(layers, asked, behind), unit)
        except DoesNotFitError as error:
            return error.excess_bytes
        return 0.0

    def _memory(
        self, layers: Layers, asked: _Asked, behind: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int], float]:
        """Bytes that stay, bytes per microbatch, microbatches in flight by stage, bytes there are for both."""
        in_flight = [min(asked.stages - s + behind, asked.microbatches) for s in range(asked.stages)]
        return layers.static, layers.kept, in_flight, self._capacity - float(layers.transient.max())

    def colocated(
        self, units: Sequence[str], tp: int, cp: int, stages: int, samples: float, microbatches: int
    ) -> Option | None:
        """Several units in the same `stages` stages, each cut evenly for itself (Cornstarch v3 4.2)."""
        for level in self.levels(units):
            key = tuple(units), tp, cp, stages, samples, microbatches, level
            if key not in self._options:
                each = [self.layers(unit, tp, cp, samples, level).on(stages) for unit in units]
                if min(len(layers.seconds) for layers in each) < stages:
                    return None
                cuts = {unit: partition_layers(layers.seconds, stages) for unit, layers in zip(units, each)}
                totals = [_by_stage(layers, cuts[unit]) for unit, layers in zip(units, each)]
                columns = [_TOGETHER.get(name, np.sum)(column, axis=0)
                           for name, column in zip(_COLUMNS, zip(*totals))]  # fmt: skip
                asked = _Asked(units[0], tp, cp, stages, samples, microbatches, (), 1, level)
                again = {unit: self._everywhere(unit, level) for unit in units} if level != "none" else {}
                self._options[key] = self._from_stages(cuts, columns, asked, again)
            option = self._options[key]
            if option is not None and option.room >= 0:
                return option
        return None

    def _merged(self, asked: _Asked) -> Layers:
        """The layers of the unit, the first of which carries all layers of the extra ones.

        What the extra ones keep is counted as often as the first stage has microbatches in flight, and once more where
        it may run one ahead.
        """
        degree = asked.tp, asked.cp, asked.samples, asked.level
        own = self.layers(asked.unit, *degree, asked.ep).on(asked.stages)
        if not asked.extra:
            return own
        columns: dict[str, NDArray[np.float64]] = {"twice": own.twice}
        for name in _COLUMNS:
            column = getattr(own, name).copy()
            others = [getattr(self.layers(other, *degree).on(1), name) for other in asked.extra]
            if name == "heavy":
                pass  # another sample may be the heaviest there
            elif name == "transient":
                column[0] = max(column[0], *(float(other.max()) for other in others))
            else:
                column[0] += sum(float(other.sum()) for other in others)
            if name == "static" and asked.microbatches > asked.stages:
                column[0] += sum(float(self.layers(other, *degree).kept.sum()) for other in asked.extra)
            columns[name] = column
        return Layers(**columns)

    def _option(self, asked: _Asked, layers: Layers, cuts: tuple[int, ...]) -> Option:
        again = {unit: self._everywhere(unit, asked.level) for unit in (asked.unit, *asked.extra)}
        return self._from_stages(
            {**dict.fromkeys(asked.extra, (0,)), asked.unit: cuts},
            _by_stage(layers, cuts),
            asked,
            again if asked.level != "none" else {},
        )

    def _from_stages(
        self,
        cuts: Mapping[str, tuple[int, ...]],
        stages: Sequence[NDArray[np.float64]],
        asked: _Asked,
        recompute: Mapping[str, tuple[Recompute, ...]],
    ) -> Option:
        seconds, light, heavy = stages[0], stages[2], float(stages[3].sum())
        rest = stages[1], *stages[4:]
        shape = asked.chunks, len(seconds) // asked.chunks
        work, static, kept, transient, gradient = (
            column.reshape(shape).max(axis=0) if name == "transient" else column.reshape(shape).sum(axis=0)
            for name, column in zip(("work", *_COLUMNS[4:]), rest)
        )
        groups, room = shape[1], UNLIMITED
        for s in range(groups):
            free = self._capacity - static[s] - transient[s]
            if free < 0.0:
                room = -1 - len(seconds)
            elif asked.chunks == 1:
                if kept[s] * asked.microbatches > free:
                    room = min(room, int(free / kept[s]) - (groups - s))
            elif kept[s] * asked.microbatches > free:
                # Forwards of chunks that run before the first backward, see `schedule.families.interleaved`.
                most = int(free / (kept[s] / asked.chunks))
                room = min(room, (most - (asked.chunks - 1) * groups - 1) // 2 - (groups - s - 1))
        return Option(
            asked.tp, asked.cp, dict(cuts), seconds, work, room, float(gradient.max()),
            float(gradient.min()) if asked.ep == 1 else 0.0,  # of experts there may be no other holder
            light, heavy, asked.chunks, {unit: how for unit, how in recompute.items() if how}, asked.ep,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a chain is to be like: its key among those known."""

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


_TOGETHER = {"transient": np.max, "light": np.min, "heavy": np.min}
"""How columns of colocated units join that do not add up: they run in turn, and each has its own lightest and heaviest
sample."""
_COLUMNS = ("seconds", "work", "light", "heavy", "static", "kept", "transient", "gradient")


def _by_stage(layers: Layers, cuts: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """The columns of `layers` by stage."""
    at = np.array(cuts)
    kept = np.cumsum(layers.kept)  # behind a layer that runs, nothing is kept yet or any more
    return [
        np.maximum.reduceat(layers.transient + kept, at) - kept[[*at[1:] - 1, -1]]
        if name == "transient"
        else np.add.reduceat(getattr(layers, name), at)
        for name in _COLUMNS
    ]
