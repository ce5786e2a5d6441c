"""Enumeration of all candidates of a search, most promising first, and combinations of pipelines of unlike groups."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.plan.layouts.option import Option, PlanCandidate
from dilatant.plan.layouts.space import Space, are_few
from dilatant.plan.limits import FEWEST, LARGE_CLUSTER, MOST_KINDS, NEAR, SMALL_CLUSTER, WORTH
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.search.closed_form import exposed_seconds
from dilatant.plan.search.separate_units import placed_candidates, separate_replica_candidates
from dilatant.plan.search.shapes import shapes, textbook_shapes


def enumerate_candidates(
    space: Space, most_seconds: float = math.inf, most_times: float = math.inf
) -> list[PlanCandidate]:
    """Return all candidates on one group of devices, lowest estimate first.
    May omit candidates that surely take more than `most_seconds` or `most_times` the best estimate and, with a finite
    `most_times` or on more than SMALL_CLUSTER devices, candidates with separate replicas per unit that are not notably
    faster."""
    return _sorted(_enumerated(space, most_seconds, most_times), space.settings.all_devices)


def _enumerated(space: Space, most_seconds: float = math.inf, most_times: float = math.inf) -> list[PlanCandidate]:
    found: list[PlanCandidate] = []
    pipelines: Iterable[int] = range(1, space.cluster.num_devices + 1)
    if most_times < math.inf:
        # Layouts that are soon made limit the others by their estimates; few pipelines rarely have the best one.
        best = min((one.estimate for one in textbook_shapes(space)), default=math.inf)
        most_seconds = min(most_seconds, most_times * best)
        pipelines = sorted(pipelines, key=lambda number: (number.bit_count() > 1, -number))
    for replicas in pipelines:
        for (count, row_tokens), groups in space.counts_by_groups(replicas).items():
            for one in shapes(space, replicas, count, row_tokens, most_seconds, groups):
                found.append(one)
                most_seconds = min(most_seconds, most_times * one.estimate)
    if most_times < math.inf or space.cluster.num_devices > SMALL_CLUSTER:
        best = min((candidate.estimate for candidate in found), default=math.inf)
        most_seconds = min(most_seconds, (WORTH if space.cluster.num_devices > LARGE_CLUSTER else NEAR) * best)
    return [*found, *separate_replica_candidates(space, most_seconds)]


def spanning_candidates(
    spaces: Sequence[Space], alone: Sequence[Sequence[PlanCandidate]], most_seconds: float = math.inf
) -> list[PlanCandidate]:
    """Return the candidates that span several device groups, best first; `alone`: those of each group alone.
    most_seconds: placements of units on other groups with larger estimates are omitted."""
    if are_few(spaces):
        spaces = [replace(space, shared=True) for space in spaces]
        alone = [_sorted(_enumerated(space), all_devices=False) for space in spaces]
    placed = list(placed_candidates(spaces, most_seconds))
    mixed = mixed_candidates(spaces, alone, placed, least_seconds(spaces))
    return _sorted([*placed, *mixed], spaces[0].settings.all_devices)


def all_candidates(spaces: Sequence[Space]) -> list[PlanCandidate]:
    """Return `enumerate_candidates` over groups of different devices, with one space per group."""
    if len(spaces) == 1:
        return enumerate_candidates(spaces[0])
    alone = [[one.in_group(group) for one in enumerate_candidates(space)] for group, space in enumerate(spaces)]
    return _sorted([*itertools.chain(*alone), *spanning_candidates(spaces, alone)], all_devices=False)


def _sorted(found: list[PlanCandidate], all_devices: bool) -> list[PlanCandidate]:
    """Sort by estimate; among equals, candidates that leave fewer devices idle come first."""
    most = max((one.gpus for one in found), default=0) if all_devices else 0
    return sorted(
        (one for one in found if one.gpus >= most), key=lambda candidate: (candidate.estimate, -candidate.gpus)
    )


def best_of_fewer(found: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return, best first, the candidates that are among the FEWEST best of those on at most as many devices.
    A search on fewer devices would simulate them, so with these included more devices never make a plan slower."""
    taken: list[int] = []
    chosen = []
    for candidate in found:
        if bisect.bisect_right(taken, candidate.gpus) < FEWEST:
            chosen.append(candidate)
        bisect.insort(taken, candidate.gpus)
    return chosen


def kinds_of(found: Sequence[PlanCandidate]) -> Iterator[Sequence[PlanCandidate]]:
    """Yield the candidates of each kind of plan. All kinds take part in the simulations, because their estimates err
    differently: those with interleaved chunks ignore the split backward that the others' count."""
    yield [one for one in found if len(set(one.counts)) > 1]
    yield [one for one in found if one.encoders_at is not EncoderPosition.IN_LANGUAGE and len(set(one.counts)) == 1]
    yield [one for one in found if any(option.chain.chunks > 1 for option in one.options)]


REMAINING_DELAY = 1 / 3
"""Fraction of the delay by the heaviest samples that remains in simulations: most of these samples go to faster
pipelines. Mean error of estimates: 12 % on 1,296 devices of two kinds, 5 % on 32; without this delay 31 % and 8 %."""


def mixed_candidates(
    spaces: Sequence[Space], found: Sequence[Sequence[PlanCandidate]], placed: Sequence[PlanCandidate], bound: float
) -> Iterator[PlanCandidate]:
    """Yield combinations of promising pipelines on one group (`found`, by group) or spanning groups (`placed`).

    Each combination adds the best pipelines that fit on the remaining devices. All have equally many microbatches; each
    kind gets samples in proportion to its speed. On few devices, pipelines of equal degrees and stages are combined,
    too, whose gradients are summed faster than those of unlike ones: what is best on each group alone may be worse
    together. bound: lower bound in seconds for all of them.
    """
    devices = [space.cluster.num_devices for space in spaces]
    most_kinds, few = (None, True) if are_few(spaces) else (MOST_KINDS, False)
    kinds = [_kinds(own, len(spaces), most_kinds, _count, group) for group, own in enumerate(found)]
    both = _kinds(placed, len(spaces), most_kinds, _count)
    alike = [_kinds(own, len(spaces), most_kinds, _shape, group) for group, own in enumerate(found) if few]
    seen = set[tuple[object, ...]]()
    for beside, across in ((kinds, both), (alike, _NO_KINDS)):
        for key in sorted(dict.fromkeys(itertools.chain(*beside, across)), key=lambda key: key[0]):
            each: list[list[PlanCandidate | None]] = [[None, *own.get(key, ())] for own in beside]
            for members in itertools.product([None, *across.get(key, ())], *each):
                there = [one for one in members if one is not None]
                fit = all(sum(one.gpus_in(group) for one in there) <= most for group, most in enumerate(devices))
                if len(there) > 1 and fit and _all_have_samples(there, spaces[0].global_batch):
                    same = tuple((one.options, one.counts, one.groups) for one in there)
                    if same not in seen:
                        seen.add(same)
                        yield _side_by_side(there, spaces, bound)


_Key = tuple[int, tuple[tuple[Degrees, int], ...]]
_NO_KINDS: Mapping[_Key, list[PlanCandidate]] = MappingProxyType({})


def _count(one: PlanCandidate) -> _Key:
    return one.num_microbatches, ()


def _shape(one: PlanCandidate) -> _Key:
    return one.num_microbatches, tuple((option.chain.degrees, option.stages) for option in one.options)


def _all_have_samples(members: Sequence[PlanCandidate], batch: int) -> bool:
    """Return True if even the slowest kind has a sample for each of its pipelines."""
    together = sum(1.0 / one.estimate for one in members)
    return all(batch / one.estimate / together >= one.replicas for one in members)


def _kinds(
    candidates: Iterable[PlanCandidate],
    groups: int,
    most: int | None,
    key: Callable[[PlanCandidate], _Key],
    home: int | None = None,
) -> dict[_Key, list[PlanCandidate]]:
    """Return candidates that can be combined, by a key that has their number of microbatches: the best on at most as
    many devices per group. home: the group whose devices all candidates use."""
    found: dict[_Key, list[PlanCandidate]] = defaultdict(list)
    for one in candidates:
        if one.is_uniform and one.row_tokens is None:
            found[key(one)].append(one)
    kept: dict[_Key, list[PlanCandidate]] = {}
    for number, own in found.items():
        own.sort(key=lambda one: (one.estimate, one.gpus))
        kept[number] = []
        taken: list[list[int]] = []
        for one in own:
            devices = [one.gpus_in(group) if home is None else one.gpus * (group == home) for group in range(groups)]
            if not any(all(a <= b for a, b in zip(other, devices)) for other in taken):
                kept[number].append(one if home is None else one.in_group(home))
                taken.append(devices)
            if len(kept[number]) == most:
                break
    return kept


def _side_by_side(members: Sequence[PlanCandidate], spaces: Sequence[Space], bound: float) -> PlanCandidate:
    batch = spaces[0].global_batch
    speeds = np.array([1.0 / one.estimate for one in members])
    shares = speeds / speeds.sum()
    replicas, count = sum(one.replicas for one in members), members[0].num_microbatches
    options = tuple(_scaled(option, float(share)) for one, share in zip(members, shares) for option in one.options)
    groups = tuple(group for one in members for group in one.groups)
    positions = {one.encoders_at for one in members}
    return PlanCandidate(
        encoders_at=positions.pop() if len(positions) == 1 else EncoderPosition.MIXED,
        replicas=replicas,
        microbatch_size=max(1, round(batch / (replicas * count))),
        num_microbatches=count,
        options=options,
        counts=tuple(number for one in members for number in one.counts),
        estimate=float(1.0 / speeds.sum())
        + max(_delay(one, float(share), spaces) for one, share in zip(members, shares))
        + _sum_between_groups(options, groups, spaces),
        bound=bound,
        groups=groups,
    )


def _delay(one: PlanCandidate, share: float, spaces: Sequence[Space]) -> float:
    """Return the extra seconds by which the heaviest samples delay pipelines with a fraction of the samples.

    The fewer the samples, the larger the heaviest sample's part of a microbatch.
    """
    language = spaces[0].roles.language
    option, group = next(
        (option, group) for option, group in zip(one.options, one.groups) if language in option.chain.cuts
    )
    count = one.replicas * one.num_microbatches
    heavier = spaces[group].heaviest_sample * count / share - spaces[group].heaviest(count)
    return REMAINING_DELAY * share * max(0.0, heavier) * (option.total - option.slowest) / 2


def _scaled(option: Option, share: float) -> Option:
    """Return the chain with this fraction of the samples."""
    names = ("seconds", "backward", "work", "forward")
    times = {name: getattr(option.costs, name) * share for name in names}
    return replace(option, costs=replace(option.costs, **times))


def _sum_between_groups(options: Sequence[Option], groups: Sequence[int], spaces: Sequence[Space]) -> float:
    """Return the exposed seconds of gradient sync between groups, through the ports of the node with the most ranks."""
    slowest = 0.0
    for option, group in zip(options, groups, strict=True):
        cluster = spaces[group].cluster
        parts = min(cluster.gpus_per_node, option.chain.degrees.tp * option.stages)
        sums = 2 * parts * option.costs.gradient / cluster.between.bandwidth
        slowest = max(slowest, exposed_seconds(option, sums))
    return slowest


_ROUNDS, _THIRDS = 3, 60


def least_seconds(spaces: Sequence[Space]) -> float:
    """Return a lower bound in seconds of the mean step over all plans on these device groups, one space each.

    Each unit's work on a sample may be divided freely among groups, on all their devices at once. The heaviest sample
    of a unit also takes at least its time on the best group at the best degrees. Any prices for device seconds of the
    groups give a bound (the dual of the linear program); prices are improved by shifting between pairs of groups.
    """
    devices = np.array([space.cluster.num_devices for space in spaces], dtype=np.float64)
    work = np.stack([np.concatenate([one.device_seconds(unit) for unit in one.roles.units]) for one in spaces])
    steps = work.shape[1] // (len(spaces[0].roles.units) * spaces[0].global_batch)

    least = _Dual(work, devices, steps)
    prices = devices / devices.sum()
    for _ in range(_ROUNDS if len(spaces) > 2 else 1):
        for one, other in itertools.combinations(range(len(spaces)), 2):
            prices = least.shifted(prices, one, other)
    return max(least.at(prices), _heaviest(spaces))


def _heaviest(spaces: Sequence[Space]) -> float:
    """Return the seconds of the heaviest sample in its slowest unit, on the fastest group at the best degrees."""
    return max(
        min(
            float((layers.heaviest_split if space.settings.splits_backward else layers.heaviest).sum())
            for space in spaces
            for degrees in space.table.units.degrees([unit])
            for layers in [space.table.units.layers(unit, degrees, 1)]
        )
        for unit in spaces[0].roles.units
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Dual:
    """Dual bounds by price: `work` [groups, pieces] in device seconds, `devices` [groups]."""

    work: NDArray[np.float64]
    devices: NDArray[np.float64]
    steps: int

    def at(self, prices: NDArray[np.float64]) -> float:
        return float((self.work * (prices / self.devices)[:, None]).min(axis=0).sum()) / self.steps

    def shifted(self, prices: NDArray[np.float64], one: int, other: int) -> NDArray[np.float64]:
        """Return the best prices that differ for two groups only; the bound is concave in the split of their sum."""

        def with_share(share: float) -> NDArray[np.float64]:
            moved, both = prices.copy(), prices[one] + prices[other]
            moved[one], moved[other] = share * both, (1.0 - share) * both
            return moved

        low, high = 0.0, 1.0
        for _ in range(_THIRDS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self.at(with_share(left)) < self.at(with_share(right)):
                low = left
            else:
                high = right
        return max((prices, with_share((low + high) / 2)), key=self.at)
