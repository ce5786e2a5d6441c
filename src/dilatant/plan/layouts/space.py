"""Search problem and search space: what is planned, and the layouts of its units on one kind of device."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import BF16, ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stage_costs import slower_between
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.costs.workload import Workload, rows_of
from dilatant.plan.layouts.option import ChainTimes, Option, ParallelChains, side_by_side
from dilatant.plan.layouts.option_table import OptionTable
from dilatant.plan.limits import LARGE_CLUSTER, SMALL_CLUSTER
from dilatant.plan.model_spec import ModelSpec, Roles, roles_of
from dilatant.plan.rank_mapping import RankOrder


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of a search: the choices that it tries.

    `microbatch_sizes`: samples per microbatch. `num_microbatches`: the only number of microbatches, if set. `chunks`:
    stages of the language model per group of devices. `row_tokens`: token budgets of a language-model microbatch to try
    as well; any number of pipelines then shares the batch, and a step has as many microbatches as its samples need
    (without `num_microbatches`). `row_limit`: the most language-model tokens of a microbatch, if the scorer cuts
    microbatches by tokens. `splits_backward`: the scorer may split backwards (zero-bubble schedules), which lowers the
    bounds. `all_devices`: only plans on the largest number of devices that any candidate uses. `copies`: only plans
    with every layer on that many nodes of `ranks_per_node` devices (default: the cluster's). `fills_idle`: idle devices
    of promising plans may form one more pipeline, unlike the others and with fewer samples; bounds do not cover these
    plans. `fills_microbatches`: the scorer leaves no microbatch empty while there are samples, which raises the bounds.
    `orders`: of ranks, on several nodes.
    """

    microbatch_sizes: Sequence[int] = (1, 2, 4, 8)
    num_microbatches: int | None = None
    chunks: Sequence[int] = (1,)
    row_tokens: Sequence[int] = ()
    row_limit: int | None = None
    splits_backward: bool = True
    all_devices: bool = False
    copies: int = 1
    ranks_per_node: int | None = None
    fills_idle: bool = False
    fills_microbatches: bool = False
    orders: Sequence[RankOrder] = tuple(RankOrder)


@dataclass(frozen=True, slots=True, eq=False)
class SearchProblem:
    """A model, its layers' costs, the devices, and measured samples in global batches of `global_batch`."""

    model: ModelSpec
    costs: CostModel
    cluster: Cluster
    workload: Workload
    global_batch: int
    rules: ParameterBytes = BF16
    settings: SearchSettings = field(default_factory=SearchSettings)

    def spaces(self) -> list[Space]:
        """Return the search space of each group of equal devices."""
        return [open_space(self, group) for group in self.cluster.groups]


@dataclass(eq=False)
class Space:
    """The search space of plans of one model on one cluster. by_tokens: the options of plans whose microbatches are cut
    by tokens. tokens: language-model tokens of each sample. shared: other pipelines may use idle devices, so slower
    layouts on fewer devices are kept. omitted: least bound, in seconds, of what was omitted as too slow. times:
    cache by chain, pipelines and microbatches."""

    model: ModelSpec
    roles: Roles
    table: OptionTable
    by_tokens: OptionTable
    cluster: Cluster
    global_batch: int
    tokens: NDArray[np.float64]
    settings: SearchSettings = field(default_factory=SearchSettings)
    shared: bool = False
    omitted: float = field(init=False, default=math.inf)
    times: dict[tuple[Option, int, int], ChainTimes] = field(init=False, default_factory=dict)
    _chains: dict[tuple[int, int, int | None, bool], dict[tuple[object, ...], list[Option]]] = field(
        init=False, default_factory=dict
    )
    _joined: dict[tuple[int, tuple[tuple[Option, ...], ...]], list[list[ParallelChains]]] = field(
        init=False, default_factory=dict
    )
    _heaviest: dict[int, float] = field(init=False, default_factory=dict)
    _rows: dict[int, float] = field(init=False, default_factory=dict)
    _fullest: dict[tuple[str, int, int], float] = field(init=False, default_factory=dict)
    _device_seconds: dict[str, NDArray[np.float64]] = field(init=False, default_factory=dict)

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
        other._joined, other._heaviest, other._rows = self._joined, self._heaviest, self._rows
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

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Numbers of groups of ranks among which stages of the language model may divide samples."""
        return self.table.units.groups([self.roles.language])

    def counts_by_groups(self, replicas: int) -> Mapping[tuple[int, int | None], frozenset[int]]:
        """Map the results of `microbatch_counts` to the numbers of groups for which they are tried."""
        found: dict[tuple[int, int | None], frozenset[int]] = {}
        for groups in self.groups:
            for key in self.microbatch_counts(replicas, groups).items():
                found[key] = found.get(key, frozenset()) | {groups}
        return found

    def microbatch_counts(self, replicas: int, groups: int = 1) -> Mapping[int, int | None]:
        """Map the microbatches per pipeline to try to the most language-model tokens in one, None for microbatches cut
        by samples. Each of the `groups` of a stage may have as many samples as a microbatch of a stage of one."""
        settings, counts = self.settings, dict[int, int | None]()
        sizes = settings.microbatch_sizes
        for size in dict.fromkeys([*sizes, *(size * groups for size in sizes)]):
            count, rest = divmod(self.global_batch, replicas * size)
            if rest == 0 and settings.num_microbatches in (None, count):
                counts[count] = None
        devices = self.cluster.num_devices
        # On many devices, only if no size divides the batch and one more pipeline would leave each fewer devices.
        if settings.num_microbatches is None and (
            devices <= LARGE_CLUSTER or (not counts and devices // replicas > devices // (replicas + 1))
        ):
            by_tokens = {self.microbatches_of(most, replicas): most for most in settings.row_tokens}
            counts.update((count, most) for count, most in by_tokens.items() if count and count not in counts)
        return counts

    def microbatches_of(self, row_tokens: int, pipelines: int) -> int:
        """Return the mean global batch's microbatches per pipeline under a token budget; 0 if some would be empty."""
        if row_tokens not in self._rows:
            batches = np.minimum(self.tokens, row_tokens).reshape(-1, self.global_batch)
            self._rows[row_tokens] = float(np.mean([rows_of(batch, row_tokens).max() + 1 for batch in batches]))
        count = max(1, math.ceil(self._rows[row_tokens] / pipelines - 1e-9))
        return count if count * pipelines <= self.global_batch else 0

    def heaviest(self, microbatches: int) -> float:
        """Return the language model's heaviest microbatch load in the mean global batch, as a multiple of the mean.

        `microbatches` counts those of all pipelines; samples are spread evenly over them.
        """
        if microbatches not in self._heaviest:
            ratios = []
            for batch in self._loads(self.roles.language):
                fullest = _fullest_bin(sorted(batch.tolist(), reverse=True), microbatches)
                mean = float(batch.sum()) / microbatches
                ratios.append(fullest / mean if fullest else 1.0)
            self._heaviest[microbatches] = float(np.mean(ratios))
        return self._heaviest[microbatches]

    @cached_property
    def heaviest_sample(self) -> float:
        """Load of the language model's heaviest sample as a fraction of the mean global batch's load."""
        loads = self._loads(self.roles.language)
        return float(np.mean(loads.max(axis=1) / np.maximum(loads.sum(axis=1), 1e-300)))

    def device_seconds(self, unit: str) -> NDArray[np.float64]:
        """Return the least device seconds of each sample in a unit, over all degrees: [samples]. A row of several dense
        samples costs at least the sum of their squares, times the minimum weight of a dense square."""
        if unit not in self._device_seconds:
            units = self.table.units
            each = [one.ranks * units.of_samples(unit, one) for one in units.degrees([unit])]
            self._device_seconds[unit] = min(1.0, units.least_dense(unit)) * np.min(each, axis=0)
        return self._device_seconds[unit]

    def fullest_part(self, unit: str, samples: int, parts: int) -> float:
        """Return the load of the fullest of `parts` replicas of a unit, as a multiple of the mean replica's.

        The replicas share each microbatch of `samples` samples; loads are summed over all microbatches.
        """
        key = unit, samples, parts
        if key not in self._fullest:
            loads = self._loads(unit).ravel()
            groups = loads[: len(loads) // samples * samples].reshape(-1, samples)
            fullest = sum(_fullest_bin(group, parts) for group in np.sort(groups)[:, ::-1].tolist())
            whole = float(groups.sum())
            self._fullest[key] = fullest * parts / whole if whole else 1.0
        return self._fullest[key]

    def _loads(self, unit: str) -> NDArray[np.float64]:
        """Return the loads of all samples in a unit: [steps, samples]."""
        least = self.table.units.degrees([unit])[0]
        return self.table.units.of_samples(unit, least).reshape(-1, self.global_batch)

    def joined(self, each: Sequence[Sequence[Option]], budget: int) -> list[list[ParallelChains]]:
        """Return [devices]: the Pareto-optimal combinations of one option of each list on at most that many devices."""
        key = budget, tuple(tuple(options) for options in each)
        if key not in self._joined:
            self._joined[key] = side_by_side(each, budget)
        return self._joined[key]


def open_space(problem: SearchProblem, group: Cluster) -> Space:
    """Build the space of plans on `group`, one of the problem's groups of equal devices."""
    model, settings, batch = problem.model, problem.settings, problem.global_batch
    roles = roles_of(model)
    tokens = np.asarray(problem.workload.tokens[roles.language], dtype=np.float64)
    # A limit that no batch exceeds cuts nothing.
    most = float(tokens.reshape(-1, batch).sum(axis=1).max())
    limited = settings.row_limit is not None and most > settings.row_limit
    known = model, problem.costs.on(group.name), problem.workload
    slower = slower_between(group) if group.num_devices > group.reach else None
    units = UnitLayers(*known, group.reach, problem.rules, batch, 1, limited, settings.fills_microbatches, slower)
    table = OptionTable(units, group.bytes_per_device)
    dense = bool(problem.workload.dense)
    by_tokens = OptionTable(units.variant(by_tokens=True), group.bytes_per_device) if dense else table
    return Space(model, roles, table, by_tokens, group, batch, tokens, settings)


def are_few(spaces: Sequence[Space]) -> bool:
    """Return True if the device groups, one space each, are small enough for a search without omissions."""
    return sum(space.cluster.num_devices for space in spaces) <= SMALL_CLUSTER


def _fullest_bin(loads: Sequence[float], number: int) -> float:
    """Return the fullest of `number` bins, each load put into the emptiest; `loads` are in descending order."""
    bins = [0.0] * number
    for load in loads:
        heapq.heapreplace(bins, bins[0] + load)
    return max(bins)
