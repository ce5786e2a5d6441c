"""Ways to lay out one unit, or several colocated ones: degrees, cuts, stage seconds, and how deep memory allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.errors import DoesNotFitError
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.partition import cuts_in_memory, partition_layers, partition_layers_in_memory
from dilatant.plan.stage_costs import LayerTable, layer_table
from dilatant.plan.workload import Workload

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Per layer of one unit under one (tp, cp), for the mean microbatch; all arrays are [layers].

    `seconds` is forward plus backward, `work` the same without what a call costs whatever its tokens. Bytes per rank:
    `static` throughout, `kept` per microbatch in flight, `transient` while the layer runs, `gradient` to be synced.
    """

    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    static: NDArray[np.float64]
    kept: NDArray[np.float64]
    transient: NDArray[np.float64]
    gradient: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A chain of stages on `tp * cp` devices each that holds all layers of one or more colocated units.

    `seconds` and `work` are [stages], see `Layers`; `room` is how many stages may follow the chain before its
    in-flight microbatches overflow memory (negative: it does not fit at all); `gradient_bytes` the most that one
    rank must sync, `least_gradient_bytes` the least.
    """

    tp: int
    cp: int
    cuts: Mapping[str, tuple[int, ...]]
    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    room: int
    gradient_bytes: float
    least_gradient_bytes: float
    gpus: int = field(init=False)
    slowest: float = field(init=False)
    total: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("gpus", self.tp * self.cp * len(self.seconds)),
            ("slowest", float(self.seconds.max())),
            ("total", float(self.seconds.sum())),
        ):
            object.__setattr__(self, name, value)

    @property
    def stages(self) -> int:
        return len(self.seconds)


class OptionTable:
    """All options of a model's units for microbatches of some number of samples, computed once each."""

    def __init__(
        self,
        model: ModelSpec,
        costs: CostModel,
        workload: Workload,
        capacity_bytes: float,
        gpus_per_node: int,
        rules: ParameterBytes = BF16,
    ) -> None:
        self._model = model
        self._costs = costs
        self._workload = workload
        self._capacity = capacity_bytes
        self._node = gpus_per_node
        self._rules = rules
        self._tables: dict[tuple[str, int, int], LayerTable] = {}
        self._layers: dict[tuple[str, int, int, float], Layers] = {}
        self._options: dict[tuple[object, ...], Option] = {}
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
            limits = self._capacity, self._node, self._rules
            table = OptionTable(self._model, self._costs, self._workload, *limits)
            table._tables, table._sharing = self._tables, count
            self._shared_by[count] = table
        return self._shared_by[count]

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

    def layers(self, unit: str, tp: int, cp: int, samples: float) -> Layers:
        """The arrays of one unit for the mean microbatch of `samples` samples."""
        key = unit, tp, cp, samples
        if key not in self._layers:
            spec = self._model.unit(unit)
            if key[:3] not in self._tables:
                upstream = self._model.upstream_trainable(unit)
                self._tables[key[:3]] = layer_table(spec, upstream, self._costs, tp, cp, self._rules)
            table = self._tables[key[:3]]
            row = self._workload.mean_row(unit, samples)
            seconds = (table.seconds[:, 0] + table.seconds[:, 1]) @ row
            self._layers[key] = Layers(
                seconds=seconds,
                work=(table.seconds[:, 0, :2] + table.seconds[:, 1, :2]) @ row[:2],
                static=table.static_shared_by(self._sharing),
                kept=table.kept_bytes @ row,
                transient=table.transient_bytes @ row,
                gradient=np.array(
                    [self._rules.gradient * layer.held(tp) * layer.trainable for layer in spec.layers]
                ),
            )
        return self._layers[key]

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
    ) -> Option | None:
        """`unit` in `stages` stages, with all of the units `extra` in its first; None if memory forbids.

        `behind` stages follow on the longest path. Cut for the fastest slowest stage, under memory only where the free
        cut does not fit. `balance` [layers] replaces the seconds that the cut balances (a planner unaware of freezing).
        """
        free = unit, tp, cp, stages, samples, microbatches, tuple(extra), balance is None
        if free not in self._options:
            layers = self._merged(unit, tp, cp, samples, extra, microbatches > stages)
            weights = layers.seconds if balance is None else balance
            if stages > len(weights):
                return None
            cuts = partition_layers(weights, stages)
            self._options[free] = self._option({unit: cuts}, layers, cuts, tp, cp, microbatches, extra)
        option = self._options[free]
        if option.room >= behind:
            return option
        bound = *free, behind
        if bound not in self._options:
            layers = self._merged(unit, tp, cp, samples, extra, microbatches > stages)
            weights = layers.seconds if balance is None else balance
            tight = cuts_in_memory(weights, *self._memory(layers, stages, microbatches, behind))
            if tight is None:
                return None
            self._options[bound] = self._option({unit: tight}, layers, tight, tp, cp, microbatches, extra)
        return self._options[bound]

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
        layers = self._merged(unit, tp, cp, samples, extra, microbatches > stages)
        if stages > len(layers.seconds):
            return math.inf
        try:
            memory = self._memory(layers, stages, microbatches, behind)
            partition_layers_in_memory(layers.seconds, *memory, unit)
        except DoesNotFitError as error:
            return error.excess_bytes
        return 0.0

    def _memory(
        self, layers: Layers, stages: int, microbatches: int, behind: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int], float]:
        """Bytes that stay, bytes per microbatch, microbatches in flight by stage, bytes there are for both."""
        in_flight = [min(stages - s + behind, microbatches) for s in range(stages)]
        return layers.static, layers.kept, in_flight, self._capacity - float(layers.transient.max())

    def colocated(
        self, units: Sequence[str], tp: int, cp: int, stages: int, samples: float, microbatches: int
    ) -> Option | None:
        """Several units in the same `stages` stages, each cut evenly for itself (Cornstarch v3 4.2)."""
        key = tuple(units), tp, cp, stages, samples, microbatches
        if key not in self._options:
            each = [self.layers(unit, tp, cp, samples) for unit in units]
            if min(len(layers.seconds) for layers in each) < stages:
                return None
            cuts = {unit: partition_layers(layers.seconds, stages) for unit, layers in zip(units, each)}
            totals = [_by_stage(layers, cuts[unit]) for unit, layers in zip(units, each)]
            self._options[key] = self._from_stages(
                cuts, [np.sum(column, axis=0) for column in zip(*totals)], tp, cp, microbatches
            )
        option = self._options[key]
        return option if option.room >= 0 else None

    def _merged(
        self, unit: str, tp: int, cp: int, samples: float, extra: Sequence[str], one_ahead: bool
    ) -> Layers:
        """The layers of `unit`, the first of which carries all layers of `extra`.

        What `extra` keeps is counted as often as the first stage has microbatches in flight, and once more where it
        may run one ahead.
        """
        own = self.layers(unit, tp, cp, samples)
        if not extra:
            return own
        columns = []
        for name in ("seconds", "work", "static", "kept", "transient", "gradient"):
            column = getattr(own, name).copy()
            others = [getattr(self.layers(other, tp, cp, samples), name) for other in extra]
            if name == "transient":
                column[0] = max(column[0], *(float(other.max()) for other in others))
            else:
                column[0] += sum(float(other.sum()) for other in others)
            if name == "static" and one_ahead:
                column[0] += sum(float(self.layers(other, tp, cp, samples).kept.sum()) for other in extra)
            columns.append(column)
        return Layers(*columns)

    def _option(
        self,
        cuts: dict[str, tuple[int, ...]],
        layers: Layers,
        at: tuple[int, ...],
        tp: int,
        cp: int,
        microbatches: int,
        extra: Sequence[str],
    ) -> Option:
        return self._from_stages(
            {**dict.fromkeys(extra, (0,)), **cuts}, _by_stage(layers, at), tp, cp, microbatches
        )

    def _from_stages(
        self,
        cuts: Mapping[str, tuple[int, ...]],
        stages: Sequence[NDArray[np.float64]],
        tp: int,
        cp: int,
        microbatches: int,
    ) -> Option:
        seconds, work, static, kept, transient, gradient = stages
        count = len(seconds)
        room = UNLIMITED
        for s in range(count):
            free = self._capacity - static[s] - transient[s]
            if free < 0.0:
                room = -1 - count
            elif kept[s] * microbatches > free:
                room = min(room, int(free / kept[s]) - (count - s))
        return Option(tp, cp, dict(cuts), seconds, work, room, float(gradient.max()), float(gradient.min()))


def _by_stage(layers: Layers, cuts: tuple[int, ...]) -> list[NDArray[np.float64]]:
    at = np.array(cuts)
    return [
        np.add.reduceat(layers.seconds, at),
        np.add.reduceat(layers.work, at),
        np.add.reduceat(layers.static, at),
        np.add.reduceat(layers.kept, at),
        np.maximum.reduceat(layers.transient, at),
        np.add.reduceat(layers.gradient, at),
    ]
