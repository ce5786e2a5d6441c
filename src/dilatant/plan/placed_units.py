"""Candidates over groups of unlike devices: units on the devices that suit them.

DistTrain's disaggregation puts encoders on other devices than the language model's; that these may be of another kind,
each unit where it runs best, is what is added here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.plan.candidates import Candidate
from dilatant.plan.estimate import chain_times, computed_seconds
from dilatant.plan.microbatch_counts import microbatch_counts
from dilatant.plan.modes import EncoderPosition, Mode
from dilatant.plan.option import Option
from dilatant.plan.roles import Roles
from dilatant.plan.shapes import shapes
from dilatant.plan.space import Space, are_few
from dilatant.plan.ways import Row, Way, Ways, best_rows, undominated

MOST_WAYS = 4
"""On many devices, to run the units that are on other groups, for each way to run the language model."""

SURELY = 1.0 - 1e-9
"""Sums in another order differ by less."""


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
            near, join = space.with_roles(here), _Join(spaces, home, away)
            for replicas in range(1, space.cluster.num_devices + 1):
                counts = microbatch_counts(space, Mode.BEST, replicas, sizes, microbatches)
                for count, row_tokens in counts.items():
                    for one in shapes(near, Mode.BEST, replicas, count, row_tokens, most_seconds):
                        yield from join.with_units_away(one, most_seconds)


@dataclass(eq=False)
class _Join:
    """The units that are `away` on other groups, joined to candidates of the language model's group, `home`."""

    spaces: Sequence[Space]
    home: int
    away: Mapping[str, int]
    _ways: dict[tuple[int, int, int | None, int], Ways | None] = field(default_factory=dict)
    _known_chains: dict[tuple[str, int, int, bool, int], list[Option]] = field(default_factory=dict)

    def with_units_away(self, near: Candidate, most_seconds: float) -> Iterator[Candidate]:
        """The candidate with chains of the other units, those that promise most."""
        space = self.spaces[self.home]
        roles, language = space.roles, space.roles.language
        later = space.heaviest(near.replicas * near.num_microbatches)
        if near.estimate * SURELY > most_seconds and near.num_microbatches >= later:
            return  # other units only add to fill and slowest stage
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
        sums = max(
            chain_times(space, count, near.num_microbatches, option).exposed_sync
            for option, count in zip(near.options, near.counts)
        )
        counts = near.replicas, near.num_microbatches
        estimates = computed_seconds(space, *counts, fill, slowest, near.options) + np.maximum(
            ways.sync, sums
        )
        most = None if are_few(self.spaces) else MOST_WAYS
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

    def _known(self, near: Candidate, behind: int) -> Ways | None:
        """The ways beside such pipelines, with so many stages behind the encoders."""
        ways = None
        for far in (0, behind):
            key = near.replicas, near.num_microbatches, near.row_tokens, far
            if key not in self._ways:
                self._ways[key] = self._all(*key)
            ways = self._ways[key]
            if ways is None or ways.room >= behind:  # memory makes no difference
                break
        return ways

    def _all(self, replicas: int, microbatches: int, row_tokens: int | None, behind: int) -> Ways | None:
        space, by_tokens = self.spaces[self.home], row_tokens is not None
        roles, shared = space.roles, 1 if by_tokens else space.global_batch // (replicas * microbatches)
        left = {group: self.spaces[group].cluster.num_devices for group in self.away.values()}
        rows: list[Row] = [Row((), (), 0.0, 0.0, 0.0, 0.0, tuple(left[group] for group in left))]
        bound, room = 0.0, float("inf")
        for number, (unit, group) in enumerate(self.away.items()):
            far = behind * (unit in roles.encoders)
            own = [
                Way(option, count, chain_times(self.spaces[group], count, microbatches, option))
                for count in _counts(replicas, shared)
                for option in self._chains(unit, count, microbatches, by_tokens, far)
            ]
            if not own:
                return None
            bound = max(bound, min(one.times.least for one in own))
            if unit in roles.encoders:
                room = min([room, *(one.option.room for one in own)])
            alone = [*self.away.values()].count(group) == 1 and not are_few(self.spaces)
            own = undominated(own, alone)
            place = [*left].index(group)
            rows = [
                row.beside(one, place, unit in roles.encoders)
                for row in rows
                for one in own
                if one.devices <= row.left[place]
            ]
            if number < len(self.away) - 1 or len(self.away) > 1:
                rows = best_rows(rows, last=number == len(self.away) - 1)
        if not rows:
            return None
        return Ways(
            options=[row.options for row in rows],
            counts=[row.counts for row in rows],
            slowest=np.array([row.slowest for row in rows]),
            before=np.array([row.before for row in rows]),
            after=np.array([row.after for row in rows]),
            sync=np.array([row.sync for row in rows]),
            bound=bound,
            room=room,
        )

    def _chains(self, unit: str, count: int, microbatches: int, by_tokens: bool, behind: int) -> list[Option]:
        """The chains of `count` replicas of a unit that share the samples of each microbatch."""
        key = unit, count, microbatches, by_tokens, behind
        if key not in self._known_chains:
            space = self.spaces[self.away[unit]]
            budget, most = space.cluster.num_devices // count, len(space.model.unit(unit).layers)
            table = space.by_tokens if by_tokens else space.table
            table = table.shared_by(count, budget) if budget else table
            samples = space.global_batch / microbatches
            found = (
                table.chain(unit, tp, cp, stages, samples / count, microbatches, behind, ep=ep)
                for tp, cp in table.units.degrees([unit])
                for ep in table.units.expert_degrees(unit, tp, cp)
                for stages in range(1, min(most, budget // (tp * cp)) + 1)
            )
            self._known_chains[key] = [option for option in found if option is not None]
        return self._known_chains[key]


def _counts(replicas: int, size: int) -> list[int]:
    """Replicas of a unit for so many of the language model: a part of them, as many, or a multiple that shares each of
    their microbatches of `size` samples."""
    parts = [part for part in range(1, replicas + 1) if replicas % part == 0]
    return [*parts, *(replicas * share for share in range(2, size + 1) if size % share == 0)]
