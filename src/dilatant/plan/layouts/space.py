"""Search space: a model, the layouts of its units, and a cluster."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import BF16, ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.bin_packing import pack_rows
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.costs.workload import Workload
from dilatant.plan.layouts.option import ChainTimes, Option
from dilatant.plan.layouts.options import OptionTable
from dilatant.plan.layouts.sides import ParallelChains, side_by_side
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.roles import Roles, roles_of

SMALL_CLUSTER = 16
"""Up to this many devices in all groups, no candidate is omitted, so that more devices never make a plan slower."""


@dataclass(eq=False)
class Space:
    """The search space of plans of one model on one cluster. chunks: possible stages of the language model per group of
    devices. row_tokens: token budgets of plans whose microbatches are cut by tokens; `by_tokens` has their options.
    halves: backwards may be split. shared: other pipelines may use idle devices, so slower layouts on fewer devices are
    kept. times: cache by chain, pipelines and microbatches."""

    model: ModelSpec
    roles: Roles
    table: OptionTable
    unaware: OptionTable
    by_tokens: OptionTable
    cluster: Cluster
    global_batch: int
    tokens: NDArray[np.float64]
    chunks: tuple[int, ...] = (1,)
    row_tokens: tuple[int, ...] = ()
    halves: bool = True
    shared: bool = False
    times: dict[tuple[Option, int, int], ChainTimes] = field(init=False, default_factory=dict)
    _chains: dict[tuple[int, int, int | None, bool], dict[tuple[object, ...], list[Option]]] = field(
        init=False, default_factory=dict
    )
    _sides: dict[tuple[int, tuple[tuple[Option, ...], ...]], list[list[ParallelChains]]] = field(
        init=False, default_factory=dict
    )
    _heaviest: dict[int, float] = field(init=False, default_factory=dict)
    _rows: dict[int, float] = field(init=False, default_factory=dict)
    _fullest: dict[tuple[str, int, int], float] = field(init=False, default_factory=dict)

    def with_roles(self, roles: Roles) -> Space:
        """Return the space of only these units of the model, with this space's caches of chains."""
        other = replace(self, roles=roles)
        other.times, other._chains, other._heaviest = self.times, self._chains, self._heaviest
        other._rows = self._rows
        return other

    def sharing(self, zero: Zero) -> Space:
        """Return the space under this sharding of optimizer state; caches that do not depend on it are reused."""
        rules = self.table.units.rules
        if rules.zero == zero:
            return self
        table = self.table.sharing(zero)
        by_tokens = table if self.by_tokens is self.table else self.by_tokens.sharing(zero)
        other = replace(self, table=table, by_tokens=by_tokens)
        other._sides, other._heaviest, other._rows = self._sides, self._heaviest, self._rows
        other._fullest = self._fullest
        if "none" not in (rules.zero, zero):  # both have the same bounds of gradient sync
            other.times = self.times
        return other

    def chains(
        self, replicas: int, microbatches: int, row_tokens: int | None, without_slow: bool
    ) -> dict[tuple[object, ...], list[Option]]:
        """Return the mutable cache of chains for this number of pipelines and microbatches, by request.
        without_slow: chains that take too long are omitted from it."""
        return self._chains.setdefault((replicas, microbatches, row_tokens, without_slow), {})

    def microbatches_of(self, row_tokens: int, pipelines: int) -> int:
        """Return the mean global batch's microbatches per pipeline under a token budget; 0 if some would be empty."""
        if row_tokens not in self._rows:
            batches = np.minimum(self.tokens, row_tokens).reshape(-1, self.global_batch).tolist()
            self._rows[row_tokens] = float(np.mean([len(pack_rows(batch, row_tokens)) for batch in batches]))
        count = max(1, math.ceil(self._rows[row_tokens] / pipelines - 1e-9))
        return count if count * pipelines <= self.global_batch else 0

    def heaviest(self, microbatches: int) -> float:
        """Return the language model's heaviest microbatch load in the mean global batch, as a multiple of the mean.

        `microbatches` counts those of all pipelines; samples are spread evenly over them.
        """
        if microbatches not in self._heaviest:
            ratios = []
            for batch in self._loads(self.roles.language):
                bins = [0.0] * microbatches
                for load in sorted(batch.tolist(), reverse=True):
                    heapq.heapreplace(bins, bins[0] + load)
                ratios.append(max(bins) / (sum(bins) / len(bins)) if any(bins) else 1.0)
            self._heaviest[microbatches] = float(np.mean(ratios))
        return self._heaviest[microbatches]

    @cached_property
    def heaviest_sample(self) -> float:
        """Load of the language model's heaviest sample as a fraction of the mean global batch's load."""
        loads = self._loads(self.roles.language)
        return float(np.mean(loads.max(axis=1) / np.maximum(loads.sum(axis=1), 1e-300)))

    def fullest_part(self, unit: str, samples: int, parts: int) -> float:
        """Return the load of the fullest of `parts` replicas of a unit, as a multiple of the mean replica's.

        The replicas share each microbatch of `samples` samples; loads are summed over all microbatches.
        """
        key = unit, samples, parts
        if key not in self._fullest:
            loads = self._loads(unit).ravel()
            groups = loads[: len(loads) // samples * samples].reshape(-1, samples)
            fullest = 0.0
            for group in np.sort(groups)[:, ::-1].tolist():
                bins = [0.0] * parts
                for load in group:
                    heapq.heapreplace(bins, bins[0] + load)
                fullest += max(bins)
            whole = float(groups.sum())
            self._fullest[key] = fullest * parts / whole if whole else 1.0
        return self._fullest[key]

    def _loads(self, unit: str) -> NDArray[np.float64]:
        """Return the loads of all samples in a unit: [steps, samples]."""
        tp, cp = self.table.units.degrees([unit])[0]
        return self.table.units.of_samples(unit, tp, cp).reshape(-1, self.global_batch)

    def joined(self, each: Sequence[Sequence[Option]], budget: int) -> list[list[ParallelChains]]:
        """Return [devices]: the Pareto-optimal combinations of one option of each list on at most that many devices."""
        key = budget, tuple(tuple(options) for options in each)
        if key not in self._sides:
            self._sides[key] = side_by_side(each, budget)
        return self._sides[key]


def open_space(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    workload: Workload,
    global_batch: int,
    rules: ParameterBytes = BF16,
    chunks: Sequence[int] = (1,),
    halves: bool = True,
    row_tokens: Sequence[int] = (),
    row_limit: int | None = None,
) -> Space:
    """Build the space that `search` explores on devices of one kind; arguments are those of `search`."""
    limits = cluster.gpus_per_node, rules, global_batch
    roles = roles_of(model)
    tokens = np.asarray(workload.tokens[roles.language], dtype=np.float64)
    # A limit that no batch exceeds cuts nothing.
    limited = row_limit is not None and float(tokens.reshape(-1, global_batch).sum(axis=1).max()) > row_limit
    units = UnitLayers(model, costs, workload, *limits, by_tokens=limited)
    table = OptionTable(units, cluster.bytes_per_device)
    unaware = OptionTable(UnitLayers(_all_trainable(model), costs, workload, *limits), math.inf)
    by_tokens = OptionTable(units.cut_by_tokens(), cluster.bytes_per_device) if workload.dense else table
    return Space(
        model,
        roles,
        table,
        unaware,
        by_tokens,
        cluster,
        global_batch,
        tokens,
        tuple(chunks),
        tuple(row_tokens),
        halves,
    )


def _all_trainable(model: ModelSpec) -> ModelSpec:
    return ModelSpec(
        tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
            for unit in model.units
        )
    )


def are_few(spaces: Sequence[Space]) -> bool:
    """Return True if the device groups, one space each, are small enough for a search without omissions."""
    return sum(space.cluster.num_devices for space in spaces) <= SMALL_CLUSTER
