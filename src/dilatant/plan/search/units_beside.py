"""Units with their own number of replicas next to the language model's pipelines, on any device group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option import Option
from dilatant.plan.layouts.space import Space, are_few
from dilatant.plan.layouts.ways import (
    JointLayout,
    UnitLayout,
    UnitLayouts,
    joined,
    least_by_devices,
    pareto_layouts,
)
from dilatant.plan.modes import EncoderPosition
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.estimate import chain_times, computed_seconds

MAX_UNIT_LAYOUTS = 4
"""On many devices, most layouts of the units with separate replicas that are kept for each language-model layout."""

SUM_TOLERANCE = 1.0 - 1e-9
"""Tolerance for sums in a different order."""


@dataclass(eq=False)
class SeparateUnits:
    """Adds units with separate replicas to candidates of the language model's device group, `home`.
    `away`: unit → its device group, which may be `home` for devices left there. `spaces`: the spaces of all groups."""

    spaces: Sequence[Space]
    home: int
    away: Mapping[str, int]
    _ways: dict[tuple[int, int, int | None, int], UnitLayouts | None] = field(default_factory=dict)
    _known_chains: dict[tuple[str, int, int, bool, int], list[Option]] = field(default_factory=dict)

    def joined(self, near: PlanCandidate, most_seconds: float) -> Iterator[PlanCandidate]:
        """Yield the candidate joined with the most promising chains of the other units."""
        space = self.spaces[self.home]
        roles, language = space.roles, space.roles.language
        free = space.cluster.num_devices - near.gpus
        if free < list(self.away.values()).count(self.home):
            return
        later = space.heaviest(near.replicas * near.num_microbatches)
        if near.estimate * SUM_TOLERANCE > most_seconds and near.num_microbatches >= later:
            return  # other units can only lengthen the step
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
        estimates[ways.at_home > free] = np.inf
        most = None if are_few(self.spaces) else MAX_UNIT_LAYOUTS
        bound, groups = max(near.bound, ways.least(free)), self._groups(near)
        for best in np.argsort(estimates, kind="stable")[:most].tolist():
            if estimates[best] > most_seconds or np.isinf(estimates[best]):
                break
            chosen = ways.options[best]
            away = dict(zip(self.away, chosen, strict=True))
            ends = [option.stages for unit, option in away.items() if unit in roles.generators]
            behind = max([following, *ends])
            ahead = [*before, *(option for unit, option in away.items() if unit in roles.encoders)]
            rooms = [(own, behind), *((option, own.stages + behind) for option in ahead)]
            if any(option.room < stages for option, stages in rooms):
                continue
            yield PlanCandidate(
                encoders_at=near.encoders_at if before or len(own.cuts) > 1 else EncoderPosition.PARALLEL,
                replicas=near.replicas,
                microbatch_size=near.microbatch_size,
                num_microbatches=near.num_microbatches,
                options=(*near.options, *chosen),
                counts=(*near.counts, *ways.counts[best]),
                estimate=float(estimates[best]),
                bound=bound,
                groups=groups,
                row_tokens=near.row_tokens,
            )

    def _groups(self, near: PlanCandidate) -> tuple[int, ...]:
        if len(self.spaces) == 1:
            return ()
        return (*(self.home for _ in near.options), *self.away.values())

    def _known(self, near: PlanCandidate, behind: int) -> UnitLayouts | None:
        """Return the layouts of the other units next to such pipelines, with `behind` stages after the encoders."""
        ways = None
        for far in (0, behind):
            key = near.replicas, near.num_microbatches, near.row_tokens, far
            if key not in self._ways:
                self._ways[key] = self._all(*key)
            ways = self._ways[key]
            if ways is None or ways.room >= behind:  # memory does not limit this depth
                break
        return ways

    def _all(
        self, replicas: int, microbatches: int, row_tokens: int | None, behind: int
    ) -> UnitLayouts | None:
        space, by_tokens = self.spaces[self.home], row_tokens is not None
        roles, shared = space.roles, 1 if by_tokens else space.global_batch // (replicas * microbatches)
        left = {group: self.spaces[group].cluster.num_devices for group in self.away.values()}
        rows: list[JointLayout] = [JointLayout((), (), 0.0, 0.0, 0.0, 0.0, tuple(left.values()))]
        least: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        room = float("inf")
        for number, (unit, group) in enumerate(self.away.items()):
            far, at_home = behind * (unit in roles.encoders), group == self.home
            counts = _counts(replicas, shared)
            uneven = {
                count: space.fullest_part(unit, shared, count // replicas) if count > replicas else 1.0
                for count in counts
            }
            own = [
                UnitLayout(
                    option, count, chain_times(self.spaces[group], count, microbatches, option), uneven[count]
                )
                for count in counts
                if not (at_home and count == replicas)  # already among the shapes of equal pipelines
                for option in self._chains(unit, count, microbatches, by_tokens, far)
            ]
            if not own:
                return None
            least.append(least_by_devices(own, at_home))
            if unit in roles.encoders:
                room = min([room, *(one.option.room for one in own)])
            alone = [*self.away.values()].count(group) == 1 and not (are_few(self.spaces) or at_home)
            own = pareto_layouts(own, alone)
            place = [*left].index(group)
            last = number == len(self.away) - 1 and not (are_few(self.spaces) or self.home in left)
            rows = joined(rows, own, place, unit in roles.encoders, len(self.away) > 1, last)
        if not rows:
            return None
        home = [*left].index(self.home) if self.home in left else None
        return UnitLayouts(
            options=[row.options for row in rows],
            counts=[row.counts for row in rows],
            slowest=np.array([row.slowest for row in rows]),
            before=np.array([row.before for row in rows]),
            after=np.array([row.after for row in rows]),
            sync=np.array([row.sync for row in rows]),
            at_home=np.array([0 if home is None else left[self.home] - row.left[home] for row in rows]),
            by_devices=least,
            room=room,
        )

    def _chains(self, unit: str, count: int, microbatches: int, by_tokens: bool, behind: int) -> list[Option]:
        """Return chains of a unit whose `count` replicas share the samples of each microbatch."""
        key = unit, count, microbatches, by_tokens, behind
        if key not in self._known_chains:
            space = self.spaces[self.away[unit]]
            budget, most = space.cluster.num_devices // count, space.model.unit(unit).most_stages
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
    """Return the possible replicas of a unit next to `replicas` language models: a divisor, or a multiple.
    A multiple shares each microbatch of `size` samples."""
    parts = [part for part in range(1, replicas + 1) if replicas % part == 0]
    return [*parts, *(replicas * share for share in range(2, size + 1) if size % share == 0)]
