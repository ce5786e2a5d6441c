"""Candidates over groups of unlike devices: units on the devices that suit them, and pipelines of several kinds.

DistTrain's disaggregation puts encoders on other devices than the language model's; that these may be of another kind,
each unit where it runs best, is what is added here.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.candidates import (
    GAPS,
    Candidate,
    EncoderPosition,
    Mode,
    Roles,
    Space,
    least_ring_seconds,
    ring_seconds,
)
from dilatant.plan.options import Option

FEW = 16
"""On no more devices, whatever could help is looked at, so that more of them never hurt."""
MOST_WAYS = 4
"""On many devices, to run the units that are on other groups, for each way to run the language model."""
MOST_KINDS = 8
"""On many devices so many kinds of pipelines of each group, and of those that place units, are tried beside others, for
each number of microbatches: the most promising on so many devices or fewer."""


def placed_candidates(
    spaces: Sequence[Space],
    sizes: Sequence[int],
    microbatches: int | None = None,
    most_seconds: float = math.inf,
) -> Iterator[Candidate]:
    """Candidates of which some units are on other groups of devices than the language model; one space for each group.

    For each way to run the language model, and units beside it, the other units' chains that promise most with it; they
    may have fewer or more replicas. The bound is that of all of these. Left out are estimates above `most_seconds`.
    """
    roles = spaces[0].roles
    others = [unit for unit in roles.units if unit != roles.language]
    for home, space in enumerate(spaces):
        for where in itertools.product(range(len(spaces)), repeat=len(others)):
            away = {unit: group for unit, group in zip(others, where) if group != home}
            if not away:
                continue
            here = Roles(
                tuple(unit for unit in roles.encoders if unit not in away),
                roles.language,
                tuple(unit for unit in roles.generators if unit not in away),
            )
            near, join = replace(space, roles=here, _sides={}), _Join(spaces, home, away)
            for replicas in range(1, space.cluster.num_devices + 1):
                for size in sizes:
                    count, rest = divmod(space.global_batch, replicas * size)
                    if rest == 0 and microbatches in (None, count):
                        for one in near.candidates(Mode.BEST, replicas, size):
                            yield from join.with_units_away(one, most_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Ways to run all units that are away, [ways] each: `seconds` of the slowest stage, until encoders, and until
    generators, have seen a first microbatch, and of sums of gradients. bound: the least of all that there are."""

    options: list[tuple[Option, ...]]
    counts: list[tuple[int, ...]]
    slowest: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    sync: NDArray[np.float64]
    bound: float
    room: float


@dataclass(eq=False)
class _Join:
    """The units that are `away` on other groups, joined to candidates of the language model's group, `home`."""

    spaces: Sequence[Space]
    home: int
    away: Mapping[str, int]
    _ways: dict[tuple[int, int, int, int], _Ways | None] = field(default_factory=dict)
    _known_chains: dict[tuple[str, int, int, int], list[Option]] = field(default_factory=dict)

    def with_units_away(self, near: Candidate, most_seconds: float) -> Iterator[Candidate]:
        """The candidate with chains of the other units, those that promise most."""
        space = self.spaces[self.home]
        roles, language = space.roles, space.roles.language
        at = next(number for number, option in enumerate(near.options) if language in option.cuts)
        own, before, after = near.options[at], near.options[:at], near.options[at + 1 :]
        following = max((option.stages for option in after), default=0)
        ways = self._known(near, own.stages + following)
        if ways is None:
            return
        slowest = np.maximum(ways.slowest, max(option.slowest for option in near.options))
        fill = (
            own.total
            + np.maximum(ways.before, max((option.total for option in before), default=0.0))
            + np.maximum(ways.after, max((option.total for option in after), default=0.0))
        )
        heavy = (space.heaviest(near.microbatch_size) - 1.0) / 2 * (fill - slowest)
        rounds = GAPS if own.chunks > 1 else 1.0
        sums = max(
            ring_seconds(option, count, space.cluster) for option, count in zip(near.options, near.counts)
        )
        seconds = rounds * (fill + (near.num_microbatches - 1) * slowest) + heavy
        estimates = seconds + np.maximum(ways.sync, sums)
        most = None if _are_few(self.spaces) else MOST_WAYS
        for best in np.argsort(estimates, kind="stable")[:most].tolist():
            if estimates[best] > most_seconds:
                break
            chosen = ways.options[best]
            away = dict(zip(self.away, chosen, strict=True))
            ends = [option.stages for unit, option in away.items() if unit in roles.generators]
            behind = max([following, *ends])
            ahead = [*before, *(option for unit, option in away.items() if unit in roles.encoders)]
            rooms = [(own, behind), *((option, own.stages + behind) for option in ahead)]
            if any(option.room < stages for option, stages in rooms):
                continue
            yield replace(
                near,
                encoders_at=near.encoders_at if before or len(own.cuts) > 1 else EncoderPosition.PARALLEL,
                options=(*near.options, *chosen),
                counts=(*near.counts, *ways.counts[best]),
                groups=(*(self.home for _ in near.options), *self.away.values()),
                estimate=float(estimates[best]),
                bound=max(near.bound, ways.bound),
            )

    def _known(self, near: Candidate, behind: int) -> _Ways | None:
        """The ways beside such pipelines, with so many stages behind the encoders."""
        ways = None
        for far in (0, behind):
            key = near.replicas, near.microbatch_size, near.num_microbatches, far
            if key not in self._ways:
                self._ways[key] = self._all(*key)
            ways = self._ways[key]
            if ways is None or ways.room >= behind:  # memory makes no difference
                break
        return ways

    def _all(self, replicas: int, size: int, microbatches: int, behind: int) -> _Ways | None:
        roles = self.spaces[self.home].roles
        left = {group: self.spaces[group].cluster.num_devices for group in self.away.values()}
        rows: list[_Row] = [_Row((), (), 0.0, 0.0, 0.0, 0.0, tuple(left[group] for group in left))]
        bound, room = 0.0, float("inf")
        for number, (unit, group) in enumerate(self.away.items()):
            space = self.spaces[group]
            far = behind * (unit in roles.encoders)
            own = [
                (option, count)
                for count in _counts(replicas, size)
                for option in self._chains(unit, count, replicas * size, microbatches, far)
            ]
            if not own:
                return None
            bound = max(
                bound,
                min(
                    max(microbatches * float(option.work.max()), option.heavy)
                    + least_ring_seconds(option, count, space.cluster)
                    for option, count in own
                ),
            )
            if unit in roles.encoders:
                room = min([room, *(option.room for option, _ in own)])
            alone = [*self.away.values()].count(group) == 1 and not _are_few(self.spaces)
            own = _undominated(own, alone)
            place = [*left].index(group)
            rows = [
                row.beside(option, count, place, unit in roles.encoders, space)
                for row in rows
                for option, count in own
                if option.gpus * count <= row.left[place]
            ]
            if number < len(self.away) - 1 or len(self.away) > 1:
                rows = _best_rows(rows, last=number == len(self.away) - 1)
        if not rows:
            return None
        return _Ways(
            options=[row.options for row in rows],
            counts=[row.counts for row in rows],
            slowest=np.array([row.slowest for row in rows]),
            before=np.array([row.before for row in rows]),
            after=np.array([row.after for row in rows]),
            sync=np.array([row.sync for row in rows]),
            bound=bound,
            room=room,
        )

    def _chains(self, unit: str, count: int, samples: int, microbatches: int, behind: int) -> list[Option]:
        """The chains of `count` replicas of a unit that share so many samples of each microbatch."""
        key = unit, count, microbatches, behind
        if key not in self._known_chains:
            space = self.spaces[self.away[unit]]
            budget, most = space.cluster.num_devices // count, len(space.model.unit(unit).layers)
            table = space.table.shared_by(count, budget) if budget else space.table
            found = (
                table.chain(unit, tp, cp, stages, samples / count, microbatches, behind, ep=ep)
                for tp, cp in table.degrees([unit])
                for ep in table.expert_degrees(unit, tp, cp)
                for stages in range(1, min(most, budget // (tp * cp)) + 1)
            )
            self._known_chains[key] = [option for option in found if option is not None]
        return self._known_chains[key]


def _counts(replicas: int, size: int) -> list[int]:
    """Replicas of a unit for so many of the language model: a part of them, as many, or a multiple that shares each of
    their microbatches of `size` samples."""
    parts = [part for part in range(1, replicas + 1) if replicas % part == 0]
    return [*parts, *(replicas * share for share in range(2, size + 1) if size % share == 0)]


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One way to run some of the units; `left`: devices of each group that are free still."""

    options: tuple[Option, ...]
    counts: tuple[int, ...]
    slowest: float
    before: float
    after: float
    sync: float
    left: tuple[int, ...]

    def beside(self, option: Option, count: int, place: int, is_encoder: bool, space: Space) -> _Row:
        left = [*self.left]
        left[place] -= option.gpus * count
        return _Row(
            (*self.options, option),
            (*self.counts, count),
            max(self.slowest, option.slowest),
            max(self.before, option.total) if is_encoder else self.before,
            self.after if is_encoder else max(self.after, option.total),
            max(self.sync, ring_seconds(option, count, space.cluster)),
            tuple(left),
        )


def _undominated(own: Sequence[tuple[Option, int]], alone: bool) -> list[tuple[Option, int]]:
    """Those that none other beats in all of slowest stage, fill and, unless the unit is alone there, devices; of equal
    ones that on the fewest devices."""
    order = sorted(
        own, key=lambda one: (one[0].slowest, one[0].total, one[0].gpus * one[1], one[0].gradient_bytes)
    )
    kept: list[tuple[Option, int]] = []
    least: list[tuple[float, int]] = []  # (fill, devices) of those kept
    for option, count in order:
        devices = 0 if alone else option.gpus * count
        if not any(total <= option.total and fewer <= devices for total, fewer in least):
            kept.append((option, count))
            least.append((option.total, devices))
    return kept


def _best_rows(rows: Sequence[_Row], last: bool) -> list[_Row]:
    """Those that none other beats in all of slowest stage, fills and, if more units follow, devices that are free."""
    kept: list[_Row] = []
    for row in sorted(
        rows, key=lambda row: (row.slowest, row.before + row.after, [-free for free in row.left])
    ):
        if not any(
            other.before <= row.before
            and other.after <= row.after
            and (last or all(there >= here for there, here in zip(other.left, row.left)))
            for other in kept
        ):
            kept.append(row)
    return kept


def mixed_candidates(
    spaces: Sequence[Space], found: Sequence[Sequence[Candidate]], placed: Sequence[Candidate], bound: float
) -> Iterator[Candidate]:
    """Pipelines of several kinds side by side: those that promise most, of one group (`found`, by group) or with units
    placed on several (`placed`), and on the devices that they leave the best that have room there.

    All have as many microbatches; each kind gets samples as fast as it is. bound: seconds that none of them beats.
    """
    devices = [space.cluster.num_devices for space in spaces]
    most_kinds = None if _are_few(spaces) else MOST_KINDS
    kinds = [_kinds(own, len(spaces), most_kinds) for own in found]
    both = _kinds(placed, len(spaces), most_kinds)
    counts = {count for by_count in (*kinds, both) for count in by_count}
    for count in sorted(counts):
        beside: list[list[Candidate | None]] = [[None, *own.get(count, ())] for own in kinds]
        for members in itertools.product([None, *both.get(count, ())], *beside):
            there = [one for one in members if one is not None]
            fit = all(
                sum(_devices(one, group) for one in there) <= most for group, most in enumerate(devices)
            )
            if len(there) > 1 and fit and _all_have_samples(there, spaces[0].global_batch):
                yield _side_by_side(there, spaces, bound)


def _all_have_samples(members: Sequence[Candidate], batch: int) -> bool:
    """Whether the slowest kind of pipeline has one for each."""
    together = sum(1.0 / one.estimate for one in members)
    return all(batch / one.estimate / together >= one.replicas for one in members)


def _are_few(spaces: Sequence[Space]) -> bool:
    return sum(space.cluster.num_devices for space in spaces) <= FEW


def _kinds(candidates: Iterable[Candidate], groups: int, most: int | None) -> dict[int, list[Candidate]]:
    """Those that can stand beside others, by microbatches: the most promising on so many devices of each group or
    fewer."""
    found: dict[int, list[Candidate]] = defaultdict(list)
    for one in candidates:
        if len(set(one.counts)) == 1 and all(option.chunks == 1 for option in one.options):
            found[one.num_microbatches].append(one)
    kept: dict[int, list[Candidate]] = {}
    for count, own in found.items():
        own.sort(key=lambda one: (one.estimate, one.gpus))
        kept[count] = []
        taken: list[list[int]] = []
        for one in own:
            devices = [_devices(one, group) for group in range(groups)]
            if not any(all(a <= b for a, b in zip(other, devices)) for other in taken):
                kept[count].append(one)
                taken.append(devices)
            if len(kept[count]) == most:
                break
    return kept


def in_group(one: Candidate, group: int) -> Candidate:
    """The candidate of a group alone as one of the whole cluster."""
    return replace(one, groups=(group,) * len(one.options))


def _devices(one: Candidate, group: int) -> int:
    """Those of a group that it takes."""
    return sum(
        count * option.gpus
        for option, count, there in zip(one.options, one.counts, one.groups)
        if there == group
    )


def _side_by_side(members: Sequence[Candidate], spaces: Sequence[Space], bound: float) -> Candidate:
    batch = spaces[0].global_batch
    speeds = np.array([1.0 / one.estimate for one in members])
    shares = speeds / speeds.sum()
    replicas, count = sum(one.replicas for one in members), members[0].num_microbatches
    return Candidate(
        encoders_at=members[0].encoders_at,
        replicas=replicas,
        microbatch_size=max(1, round(batch / (replicas * count))),
        num_microbatches=count,
        options=tuple(
            replace(option, seconds=option.seconds * share, work=option.work * share)
            for one, share in zip(members, shares)
            for option in one.options
        ),
        counts=tuple(number for one in members for number in one.counts),
        estimate=float(1.0 / speeds.sum()) + _sum_between_groups(members, spaces),
        bound=bound,
        groups=tuple(group for one in members for group in one.groups),
    )


def _sum_between_groups(members: Sequence[Candidate], spaces: Sequence[Space]) -> float:
    """Seconds to sum gradients on rings that leave groups: all that the fullest node has goes through its ports."""
    slowest = 0.0
    for one in members:
        for option, group in zip(one.options, one.groups):
            cluster = spaces[group].cluster
            parts = min(cluster.gpus_per_node, option.tp * option.stages)
            slowest = max(slowest, 2 * parts * option.gradient_bytes / cluster.between.bandwidth)
    return slowest
