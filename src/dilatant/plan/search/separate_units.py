"""Units with their own number of replicas next to the language model's pipelines, on any device group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option import ChainTimes, Option, PlanCandidate
from dilatant.plan.layouts.option_table import ROUNDING
from dilatant.plan.layouts.space import Space, are_few
from dilatant.plan.limits import MAX_UNIT_LAYOUTS
from dilatant.plan.model_spec import EncoderPosition, Roles
from dilatant.plan.search.closed_form import chain_times, computed_seconds
from dilatant.plan.search.shapes import shapes

Counts = tuple[int, int, int | None]
"""Pipelines, microbatches of each, and maximum tokens of a microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitLayout:
    """One layout of such a unit: `count` replicas of a chain.
    `uneven`: the fullest replica's seconds as a multiple of the mean, where several replicas share a microbatch."""

    option: Option
    count: int
    times: ChainTimes
    uneven: float

    @property
    def devices(self) -> int:
        return self.option.gpus * self.count

    @property
    def slowest(self) -> float:
        return self.uneven * self.option.slowest

    @property
    def total(self) -> float:
        return self.uneven * self.option.total


@dataclass(frozen=True, slots=True, eq=False)
class JointLayout:
    """One combination of layouts of some of the units; `left`: free devices of each group."""

    options: tuple[Option, ...]
    counts: tuple[int, ...]
    slowest: float
    before: float
    after: float
    sync: float
    left: tuple[int, ...]

    def beside(self, layout: UnitLayout, place: int, is_encoder: bool) -> JointLayout:
        left = [*self.left]
        left[place] -= layout.devices
        return JointLayout(
            (*self.options, layout.option),
            (*self.counts, layout.count),
            max(self.slowest, layout.slowest),
            max(self.before, layout.total) if is_encoder else self.before,
            self.after if is_encoder else max(self.after, layout.total),
            max(self.sync, layout.times.exposed_sync),
            tuple(left),
        )


def pareto_layouts(own: Sequence[UnitLayout], alone: bool) -> list[UnitLayout]:
    """Return the Pareto-optimal layouts by slowest stage, fill and, unless the unit is alone on its group, devices.
    Of equal layouts the one on the fewest devices is kept."""
    from dilatant.plan.layouts._chain_kernel import undominated

    order = sorted(own, key=lambda one: (one.slowest, one.total, one.devices, one.times.exposed_sync))
    worth = [(one.total, 0 if alone else one.devices) for one in order]
    return [*itertools.compress(order, undominated(np.array(worth, dtype=np.float64)).tolist())]


def joined(
    rows: Sequence[JointLayout], own: Sequence[UnitLayout], place: int, is_encoder: bool, pruned: bool, last: bool
) -> list[JointLayout]:
    """Return each row with each layout of one more unit that fits on the group `place`.
    If `pruned`, only rows that are Pareto-optimal by slowest stage, fills and, unless `last`, free devices."""
    devices = np.array([one.devices for one in own])
    old, new = np.nonzero(np.array([row.left[place] for row in rows])[:, None] >= devices)
    if pruned:
        total = np.array([one.total for one in own])[new]
        before, after = (np.array([getattr(row, end) for row in rows])[old] for end in ("before", "after"))
        if is_encoder:
            before = np.maximum(before, total)
        else:
            after = np.maximum(after, total)
        slowest = np.maximum(np.array([row.slowest for row in rows])[old], np.array([one.slowest for one in own])[new])
        left = np.array([row.left for row in rows])[old]
        left[:, place] -= devices[new]
        kept = _best(slowest, before, after, left, last)
        old, new = old[kept], new[kept]
    return [rows[row].beside(own[layout], place, is_encoder) for row, layout in zip(old.tolist(), new.tolist())]


def _best(
    slowest: NDArray[np.float64],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    left: NDArray[np.int64],
    last: bool,
) -> NDArray[np.int64]:
    """Return the indices of the Pareto-optimal rows, fastest first. Arrays are [rows]; left: [rows, groups]."""
    from dilatant.plan.layouts._chain_kernel import undominated

    order = np.lexsort((*-left.T[::-1], before + after, slowest))
    worth = np.column_stack([before, after, *([] if last else -left.T)])  # less is better
    return np.asarray(order[undominated(worth[order])])


def least_by_devices(own: Sequence[UnitLayout], counts_devices: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (devices, least seconds of any layout on at most that many), ascending; devices are 0 if not counted."""
    devices = np.array([one.devices * counts_devices for one in own])
    seconds = np.array([one.times for one in own])
    least = np.minimum(seconds[:, :3].max(axis=1), seconds[:, 3:5].max(axis=1))
    order = np.lexsort((least, devices))
    return devices[order], np.minimum.accumulate(least[order])


@dataclass(frozen=True, eq=False)
class UnitLayouts:
    """Layouts of all such units together, and for each unit `least_by_devices` of all its layouts. at_home: devices
    that each uses of the language model's group: [layouts]. headroom: the least of the encoders' options."""

    joint: Sequence[JointLayout]
    by_devices: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]
    at_home: NDArray[np.int64]
    headroom: float

    @cached_property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """Slowest stage, fill of encoders (`before`) and of generators (`after`), and gradient `sync`: [layouts]."""
        names = ("slowest", "before", "after", "sync")
        return {name: np.array([getattr(one, name) for one in self.joint]) for name in names}

    def least(self, free: int) -> float:
        """Return a lower bound in seconds of layouts that use at most `free` devices of the language model's group."""
        found = 0.0
        for devices, seconds in self.by_devices:
            fitting = int(np.searchsorted(devices, free, side="right"))
            found = max(found, float(seconds[fitting - 1]) if fitting else np.inf)
        return found


def placed_candidates(spaces: Sequence[Space], most_seconds: float = math.inf) -> Iterator[PlanCandidate]:
    """Yield candidates with some units on other device groups than the language model; one space for each group.
    Each layout of the language model, and of the units on its group, is joined with the most promising chains of the
    other units, whose numbers of replicas may differ. The bound covers all these chains. Estimates above `most_seconds`
    are omitted."""
    others = _others(spaces[0])
    for home in range(len(spaces)):
        for where in itertools.product(range(len(spaces)), repeat=len(others)):
            away = {unit: group for unit, group in zip(others, where) if group != home}
            if away:
                yield from SeparateUnits(spaces, home, away, most_seconds).candidates()


def separate_replica_candidates(space: Space, most_seconds: float = math.inf) -> Iterator[PlanCandidate]:
    """Yield candidates on one group whose encoders or generators have a different number of replicas."""
    others = _others(space)
    placed = [
        SeparateUnits([space], 0, dict.fromkeys(chosen, 0), most_seconds)
        for count in range(1, len(others) + 1)
        for chosen in itertools.combinations(others, count)
    ]
    if len(placed) > 1 and math.isfinite(most_seconds):
        # Where the language model alone takes too long, it does so beside other units.
        left = min(one.least_left for one in placed)
        counts = {_counts_of(base) for base in placed[-1].bases(left)}
    else:
        counts = None
    for one in placed:
        yield from one.candidates(counts)


def _others(space: Space) -> list[str]:
    return [unit for unit in space.roles.units if unit != space.roles.language]


@dataclass(eq=False)
class SeparateUnits:
    """Adds units with separate replicas to candidates of the language model's device group, `home`.
    `away`: unit → its device group, which may be `home` for devices left there. `spaces`: the spaces of all groups.
    most_seconds: candidates with larger estimates are omitted."""

    spaces: Sequence[Space]
    home: int
    away: Mapping[str, int]
    most_seconds: float = math.inf
    _free: dict[Counts, int] = field(default_factory=dict)
    _layouts: dict[tuple[int, int, int | None, int], UnitLayouts | None] = field(default_factory=dict)
    _known_chains: dict[tuple[str, int, int, int, bool, int], list[Option]] = field(default_factory=dict)

    def candidates(self, counts: Collection[Counts] | None = None) -> Iterator[PlanCandidate]:
        """Yield the candidates, only those with these counts if any are given."""
        bases, devices = [*self.bases(self.least_left, counts)], self.spaces[self.home].cluster.num_devices
        for one in bases:
            key, free = _counts_of(one), devices - one.gpus
            self._free[key] = max(free, self._free.get(key, 0))
        for one in bases:
            yield from self._joined(one)

    def bases(self, left: int, counts: Collection[Counts] | None = None) -> Iterator[PlanCandidate]:
        """Yield the layouts of the language model and the units with it that may be in time and leave `left` devices;
        counts: as in `candidates`."""
        space = self.spaces[self.home]
        here = Roles(
            tuple(unit for unit in space.roles.encoders if unit not in self.away),
            space.roles.language,
            tuple(unit for unit in space.roles.generators if unit not in self.away),
        )
        without_away = space.with_roles(here)
        for replicas in range(1, space.cluster.num_devices - left + 1):
            for (count, row_tokens), groups in space.counts_by_groups(replicas).items():
                if counts is None or (replicas, count, row_tokens) in counts:
                    found = shapes(without_away, replicas, count, row_tokens, self.most_seconds, groups, left)
                    yield from filter(self._is_in_time, found)

    @property
    def least_left(self) -> int:
        """The fewest devices on which the other units' step may be in time."""
        space = self.spaces[self.home]
        here = [unit for unit, group in self.away.items() if group == self.home]
        work = sum(float(space.device_seconds(unit).sum()) for unit in here) * space.global_batch / len(space.tokens)
        least = math.ceil(work * ROUNDING / self.most_seconds) if self.most_seconds > 0.0 else 0
        return min(max(len(here), least), space.cluster.num_devices)

    def _is_in_time(self, base: PlanCandidate) -> bool:
        """Return False if the step surely takes too long: other units can only lengthen it."""
        later = self.spaces[self.home].heaviest(base.replicas * base.num_microbatches)
        return base.estimate * ROUNDING <= self.most_seconds or base.num_microbatches < later

    def _joined(self, base: PlanCandidate) -> Iterator[PlanCandidate]:
        """Yield the candidate joined with the most promising chains of the other units."""
        space = self.spaces[self.home]
        roles, language = space.roles, space.roles.language
        free = space.cluster.num_devices - base.gpus
        at = next(number for number, option in enumerate(base.options) if language in option.chain.cuts)
        own, before, after = base.options[at], base.options[:at], base.options[at + 1 :]
        following = max((option.stages for option in after), default=0)
        layouts = self._known(base, own.stages + following)
        if layouts is None:
            return
        slowest = np.maximum(layouts.seconds["slowest"], max(option.slowest for option in base.options))
        fill = (
            own.total
            + np.maximum(layouts.seconds["before"], max((option.total for option in before), default=0.0))
            + np.maximum(layouts.seconds["after"], max((option.total for option in after), default=0.0))
        )
        sums = max(
            chain_times(space, count, base.num_microbatches, option).exposed_sync
            for option, count in zip(base.options, base.counts)
        )
        counts = base.replicas, base.num_microbatches
        estimates = computed_seconds(space, *counts, fill, slowest, base.options) + np.maximum(
            layouts.seconds["sync"], sums
        )
        estimates[layouts.at_home > free] = np.inf
        most = None if are_few(self.spaces) else MAX_UNIT_LAYOUTS
        bound, groups = max(base.bound, layouts.least(free)), self._groups(base)
        for best in np.argsort(estimates, kind="stable")[:most].tolist():
            if estimates[best] > self.most_seconds or np.isinf(estimates[best]):
                break
            chosen = layouts.joint[best].options
            away = dict(zip(self.away, chosen, strict=True))
            ends = [option.stages for unit, option in away.items() if unit in roles.generators]
            behind = max([following, *ends])
            ahead = [*before, *(option for unit, option in away.items() if unit in roles.encoders)]
            depths = [(own, behind), *((option, own.stages + behind) for option in ahead)]
            if any(option.headroom < stages for option, stages in depths):
                continue
            has_encoders = before or len(own.chain.cuts) > 1
            yield replace(
                base,
                encoders_at=base.encoders_at if has_encoders else EncoderPosition.PARALLEL,
                options=(*base.options, *chosen),
                counts=(*base.counts, *layouts.joint[best].counts),
                estimate=float(estimates[best]),
                bound=bound,
                groups=groups,
            )

    def _groups(self, base: PlanCandidate) -> tuple[int, ...]:
        if len(self.spaces) == 1:
            return ()
        return (*(self.home for _ in base.options), *self.away.values())

    def _known(self, base: PlanCandidate, behind: int) -> UnitLayouts | None:
        """Return the layouts of the other units next to such pipelines, with `behind` stages after the encoders."""
        layouts = None
        for depth in (0, behind):
            key = *_counts_of(base), depth
            if key not in self._layouts:
                self._layouts[key] = self._all(*key)
            layouts = self._layouts[key]
            if layouts is None or layouts.headroom >= behind:  # memory does not limit this depth
                break
        return layouts

    def _all(self, replicas: int, microbatches: int, row_tokens: int | None, behind: int) -> UnitLayouts | None:
        by_tokens, roles = row_tokens is not None, self.spaces[self.home].roles
        samples = self.spaces[self.home].global_batch // microbatches
        left = {group: self.spaces[group].cluster.num_devices for group in self.away.values()}
        if self.home in left:
            left[self.home] = self._free[replicas, microbatches, row_tokens]
        rows: list[JointLayout] = [JointLayout((), (), 0.0, 0.0, 0.0, 0.0, tuple(left.values()))]
        least: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        headroom = math.inf
        for number, (unit, group) in enumerate(self.away.items()):
            depth, at_home = behind * (unit in roles.encoders), group == self.home
            devices = left[group]
            counts = _counts(replicas, samples, devices, by_tokens, are_few(self.spaces))
            uneven = {count: self._uneven(unit, replicas, count, samples) for count in counts}
            own = [
                UnitLayout(option, count, chain_times(self.spaces[group], count, microbatches, option), uneven[count])
                for count in counts
                if not (at_home and count == replicas)  # already among the shapes of equal pipelines
                for option in self._chains(unit, devices, count, microbatches, by_tokens, depth)
            ]
            if not own:
                return None
            least.append(least_by_devices(own, at_home))
            if unit in roles.encoders:
                headroom = min([headroom, *(one.option.headroom for one in own)])
            alone = [*self.away.values()].count(group) == 1 and not (are_few(self.spaces) or at_home)
            own = pareto_layouts(own, alone)
            place = [*left].index(group)
            last = number == len(self.away) - 1 and not (are_few(self.spaces) or self.home in left)
            rows = joined(rows, own, place, unit in roles.encoders, len(self.away) > 1, last)
            if not rows:
                return None
        used = [left[self.home] - row.left[[*left].index(self.home)] if self.home in left else 0 for row in rows]
        return UnitLayouts(rows, least, np.array(used), headroom)

    def _uneven(self, unit: str, replicas: int, count: int, samples: int) -> float:
        """Return the seconds of the fullest of `count` replicas of a unit, as a multiple of the mean; see `_spread`."""
        parts = math.gcd(replicas, count)
        if count == parts:
            return 1.0
        return self.spaces[self.home].fullest_part(unit, samples // parts, count // parts)

    def _chains(
        self, unit: str, devices: int, count: int, microbatches: int, by_tokens: bool, behind: int
    ) -> list[Option]:
        """Return chains of a unit whose `count` replicas share the samples of each microbatch, on `devices` devices in
        all, but none whose slowest stage surely takes more than `most_seconds` for all microbatches."""
        key = unit, devices, count, microbatches, by_tokens, behind
        if key not in self._known_chains:
            space = self.spaces[self.away[unit]]
            budget = devices // count
            table = space.by_tokens if by_tokens else space.table
            table = table.shared_by(count, budget) if budget else table
            samples, found = space.global_batch / microbatches / count, list[Option | None]()
            known = table.fastest_chains(unit, samples, space.cluster.num_devices)
            worth = (known.gpus <= budget) & (microbatches * known.slowest * ROUNDING <= self.most_seconds)
            rows = np.flatnonzero(worth)
            if math.isfinite(self.most_seconds):
                slowest, _ = table.in_memory(known, rows, microbatches, behind)
                rows = rows[microbatches * slowest * ROUNDING <= self.most_seconds]
            for at in rows.tolist():
                found.append(table.chain(known.request(at, microbatches), behind))
            self._known_chains[key] = [option for option in found if option is not None]
        return self._known_chains[key]


def _counts_of(base: PlanCandidate) -> Counts:
    return base.replicas, base.num_microbatches, base.row_tokens


def _counts(replicas: int, samples: int, devices: int, by_tokens: bool, all_of_them: bool) -> list[int]:
    """Return the possible replicas of a unit next to `replicas` language models, whose k-th microbatches have so many
    `samples` together. Each has some of these, and unless all counts are asked for, equally many."""
    most = min(devices, replicas if by_tokens else samples)
    return [n for n in range(1, most + 1) if all_of_them or samples % n == 0 or replicas % n == 0]
