"""Options (layouts of one or several colocated units, with their contribution to a step), combinations of them side by
side, and plan candidates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dilatant.plan.costs.unit_layers import MeanCosts
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.rank_mapping import Chain

UNLIMITED = 1 << 30


@dataclass(frozen=True, eq=False)
class Option:
    """A chain of stages that holds all layers of one or more colocated units, with its costs.

    `costs`: of the mean microbatch, by stage or by group of devices (see `MeanCosts.on_groups`). `headroom`: how many
    stages may follow the chain before its in-flight microbatches overflow memory (negative: it does not fit).
    """

    chain: Chain
    costs: MeanCosts
    headroom: int

    def with_headroom(self, headroom: int) -> Option:
        """Return the chain with another headroom. What was computed of this one stays known: plans have many such."""
        other = object.__new__(Option)
        other.__dict__.update(self.__dict__, headroom=headroom)
        return other

    @property
    def stages(self) -> int:
        return len(self.costs.seconds)

    @cached_property
    def gpus(self) -> int:
        return self.chain.degrees.ranks * (self.stages // self.chain.chunks)

    @cached_property
    def slowest(self) -> float:
        """Seconds per microbatch of the busiest group of devices in the steady state."""
        return float(self.costs.seconds.reshape(self.chain.chunks, -1).sum(axis=0).max())

    @cached_property
    def total(self) -> float:
        """Seconds until the first microbatch has passed the chain, of which `slowest` belong to the steady state."""
        total = float(self.costs.seconds.sum())
        chunks = self.chain.chunks
        return total if chunks == 1 else self.slowest + (total - self.slowest) / chunks

    @cached_property
    def forwards(self) -> float:
        """Forward seconds of the mean microbatch."""
        return float(self.costs.seconds.sum()) - float(self.costs.backward.sum())

    @cached_property
    def lightest(self) -> float:
        """Seconds of the lightest sample in all stages; `lightest_split` with split backwards."""
        return float(self.costs.lightest.sum())

    @cached_property
    def lightest_split(self) -> float:
        return float(self.costs.lightest_split.sum())

    @cached_property
    def heaviest(self) -> float:
        """Seconds of the heaviest sample in all stages; `heaviest_split` with split backwards."""
        return float(self.costs.heaviest.sum())

    @cached_property
    def heaviest_split(self) -> float:
        return float(self.costs.heaviest_split.sum())


class ChainTimes(NamedTuple):
    """Contribution of a chain to the step of equal pipelines, in seconds.
    stages: lower bound of its stages after the arrival of the first microbatch, with the backwards before them; synced:
    of its stages with their gradient sync, which runs beside those backwards; path: lower bound of the heaviest
    sample's time through the chain; `_split`: the same with split backwards. exposed_sync: gradient sync of a rank
    after its last backward, on rings over neighbouring replicas."""

    stages: float
    synced: float
    path: float
    stages_split: float
    path_split: float
    exposed_sync: float

    @property
    def least(self) -> float:
        """Seconds that no schedule of the chain beats."""
        return min(max(self.stages, self.synced, self.path), max(self.stages_split, self.path_split))


@dataclass(frozen=True, slots=True, eq=False)
class ParallelChains:
    """Chains that run in parallel, before or after the language model."""

    options: tuple[Option, ...] = ()
    gpus: int = 0
    slowest: float = 0.0
    fill: float = 0.0
    stages: int = 0

    def beside(self, option: Option) -> ParallelChains:
        return ParallelChains(
            (*self.options, option),
            self.gpus + option.gpus,
            max(self.slowest, option.slowest),
            max(self.fill, option.total),
            max(self.stages, option.stages),
        )


def side_by_side(each: Sequence[Sequence[Option]], budget: int) -> list[list[ParallelChains]]:
    """Return [devices up to `budget`]: the Pareto-optimal combinations of one option of each list on at most that many
    devices."""
    combinations: Mapping[int, Sequence[ParallelChains]] = {0: [ParallelChains()]}
    for options in each:
        combinations = _extended(combinations, options, budget)
    return _cumulated(combinations, budget)


def _extended(
    combinations: Mapping[int, Sequence[ParallelChains]], options: Sequence[Option], budget: int
) -> dict[int, list[ParallelChains]]:
    """Return `combinations` with one of `options` added to each, on at most `budget` devices; only Pareto-optimal
    results."""
    from dilatant.plan.layouts._chain_kernel import shorter_fills

    old = [one for group in combinations.values() for one in group]
    gpus = np.add.outer(*(np.array([one.gpus for one in own], dtype=np.int64) for own in (old, options)))
    row, column = np.nonzero(gpus <= budget)
    slowest = np.maximum(*(np.array([one.slowest for one in own])[at] for own, at in ((old, row), (options, column))))
    fill = np.maximum(np.array([one.fill for one in old])[row], np.array([one.total for one in options])[column])
    order = np.lexsort((fill, slowest))
    devices = gpus[row, column][order]
    kept = shorter_fills(devices, fill[order], budget)
    found: dict[int, list[ParallelChains]] = defaultdict(list)
    for own, at, more in zip(devices[kept].tolist(), row[order][kept].tolist(), column[order][kept].tolist()):
        found[own].append(old[at].beside(options[more]))
    return found


def _cumulated(combinations: Mapping[int, Sequence[ParallelChains]], budget: int) -> list[list[ParallelChains]]:
    """Return [devices up to `budget`]: the Pareto-optimal combinations on at most that many devices.
    Of equal combinations the one on the most devices is kept."""
    result: list[list[ParallelChains]] = []
    kept: list[ParallelChains] = []
    for devices in range(budget + 1):
        new = combinations.get(devices, ())
        if new:
            kept = [
                *(old for old in kept if not any(one.slowest <= old.slowest and one.fill <= old.fill for one in new)),
                *(
                    one
                    for one in new
                    if not any(
                        old.slowest <= one.slowest and old.fill <= one.fill
                        and (old.slowest, old.fill) != (one.slowest, one.fill)
                        for old in kept
                    )
                ),
            ]  # fmt: skip
        result.append(kept)
    return result


@dataclass(frozen=True, eq=False)
class PlanCandidate:
    """Chains of stages with their numbers of replicas; `replicas` is the language model's.

    `estimate`: seconds of a step from fill time, slowest stage and exposed gradient sync; `bound`: a lower bound for
    any schedule of this candidate, from the work of its slowest stage. `groups`: for each option, the device group it
    uses, if groups differ; several options may then hold one unit, each some of its replicas. Empty on a homogeneous
    cluster.
    `row_tokens`: maximum language-model tokens per microbatch, if microbatches are cut by tokens; `num_microbatches` is
    then the minimum of a step and `microbatch_size` the mean.
    """

    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[Option, ...]
    counts: tuple[int, ...]
    estimate: float
    bound: float
    groups: tuple[int, ...] = ()
    row_tokens: int | None = None

    @cached_property
    def gpus(self) -> int:
        return sum(count * option.gpus for count, option in zip(self.counts, self.options))

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(replace(option.chain, replicas=count) for count, option in zip(self.counts, self.options))

    def in_group(self, group: int) -> PlanCandidate:
        """Return this candidate, found for one group alone, as a candidate for the whole cluster."""
        return replace(self, groups=(group,) * len(self.options))

    @property
    def is_uniform(self) -> bool:
        """True if all units have equally many replicas, without interleaved chunks."""
        return len(set(self.counts)) == 1 and all(option.chain.chunks == 1 for option in self.options)

    def gpus_in(self, group: int) -> int:
        """Return the number of devices of one group that the candidate uses."""
        chains = zip(self.options, self.counts, self.groups)
        return sum(count * option.gpus for option, count, there in chains if there == group)
