"""Pipeline shapes: enumerate every layout of equal pipelines on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.plan.costs.stable_batch import feasible_allocations, minimum_stable_batch
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import UNLIMITED, Option
from dilatant.plan.layouts.options import OptionTable
from dilatant.plan.layouts.sides import ParallelChains
from dilatant.plan.layouts.space import Space
from dilatant.plan.modes import EncoderPosition, Mode
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.estimate import bound, chain_times, estimate

NOTABLE = 0.02
"""Fraction of a step that interleaved chunks must save in closed form to be tried."""


def shapes(
    space: Space,
    mode: Mode,
    replicas: int,
    microbatches: int,
    row_tokens: int | None = None,
    most_seconds: float = math.inf,
) -> Iterator[PlanCandidate]:
    """Yield the candidates of `replicas` equal pipelines with `microbatches` microbatches each.

    With `row_tokens`, the maximum tokens of a microbatch, `microbatches` is the minimum number. most_seconds: chains
    that surely take longer may be omitted.
    """
    budget = space.cluster.num_devices // replicas
    table = (space.table if row_tokens is None else space.by_tokens).shared_by(replicas, budget)
    samples = space.global_batch / (replicas * microbatches)
    chains = space.chains(replicas, microbatches, row_tokens, math.isfinite(most_seconds))
    shape = _Shape(space, table, replicas, samples, microbatches, row_tokens, most_seconds, chains)
    if mode is Mode.MEGATRON:
        yield from shape.megatron(budget)
    elif mode is Mode.ENTRAIN:
        yield from shape.entrain(budget)
    else:
        yield from shape.beside(budget, EncoderPosition.PARALLEL)
        if len(space.roles.encoders) > 1:
            yield from shape.beside(budget, EncoderPosition.COLOCATED)
        if mode is Mode.BEST and space.roles.encoders:
            yield from shape.inside(budget)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """Generator of the candidates with one number of pipelines and samples per microbatch."""

    space: Space
    table: OptionTable
    replicas: int
    samples: float
    microbatches: int
    row_tokens: int | None
    most_seconds: float
    _known: dict[tuple[object, ...], list[Option]]
    _sides: dict[tuple[object, ...], tuple[int, list[list[ParallelChains]]]] = field(default_factory=dict)

    def beside(
        self, budget: int, encoders_at: EncoderPosition, allocation: tuple[int, ...] | None = None
    ) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on separate devices, on all devices or fewer.
        `allocation` fixes the devices of encoders, language model and generators."""
        for after in self._after(budget):
            for language in self._language(budget - after.gpus, after.stages):
                left = budget - after.gpus - language.gpus
                if allocation is not None and (left, language.gpus, after.gpus) != allocation:
                    continue
                behind = language.stages + after.stages
                for before in self._before(encoders_at, budget, behind, left):
                    yield self._candidate(encoders_at, before, language, after)

    def inside(self, budget: int) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on the ranks of the language model's first stage.
        These ranks divide the encoders' layers as they do the language model's, or the encoders' items."""
        roles, units = self.space.roles, self.table.units
        alone = set(units.degrees(roles.encoders))
        ways = [(tp, cp, False) for tp, cp in units.degrees([*roles.encoders, roles.language])]
        ways += [
            (tp, cp, True) for tp, cp in units.degrees([roles.language]) if tp > 1 and (1, tp * cp) in alone
        ]
        for after in self._after(budget):
            for tp, cp, whole_items in ways:
                for ep in units.expert_degrees(roles.language, tp, cp):
                    for stages in self._numbers_of_stages(roles.language, tp, cp, ep, budget - after.gpus):
                        shape = roles.language, tp, cp, stages, self.samples, self.microbatches, after.stages
                        option = self.table.chain(*shape, roles.encoders, ep=ep, whole_items=whole_items)
                        if option is not None:
                            yield self._candidate(
                                EncoderPosition.IN_LANGUAGE, ParallelChains(), option, after
                            )

    def megatron(self, budget: int) -> Iterator[PlanCandidate]:
        """Yield one stage for all encoders, one for all generators, and the language model's degrees everywhere.

        Cuts and estimates assume that every layer trains.
        """
        space, roles = self.space, self.space.roles
        ends = [units for units in (roles.encoders, roles.generators) if units]
        for tp, cp in self.table.units.degrees(roles.units):
            stages = budget // (tp * cp) - len(ends)
            if not 1 <= stages <= space.model.unit(roles.language).most_stages:
                continue
            after = len(ends) - bool(roles.encoders)
            balance = space.unaware.units.layers(roles.language, tp, cp, self.samples).seconds
            language = self.table.chain(
                roles.language, tp, cp, stages, self.samples, self.microbatches, after, balance=balance
            )
            shape = tp, cp, 1, self.samples, self.microbatches
            sides = [option for units in ends if (option := self.table.colocated(units, *shape))]
            as_trained = [option for units in ends if (option := space.unaware.colocated(units, *shape))]
            if language is None or len(sides) < len(ends):
                continue
            stage_seconds = np.add.reduceat(balance, language.cuts[roles.language])
            slowest = max([float(stage_seconds.max()), *(option.slowest for option in as_trained)])
            total = float(balance.sum()) + sum(option.total for option in as_trained)
            before = ParallelChains().beside(sides[0]) if roles.encoders else ParallelChains()
            behind = ParallelChains().beside(sides[-1]) if roles.generators else ParallelChains()
            candidate = self._candidate(EncoderPosition.COLOCATED, before, language, behind)
            yield replace(candidate, estimate=total + (self.microbatches - 1) * slowest)

    def entrain(self, budget: int) -> Iterator[PlanCandidate]:
        """Choose the device allocation nearest to the units' mean work; then yield all its degrees."""
        roles = self.space.roles
        encoders_at = EncoderPosition.COLOCATED if len(roles.encoders) > 1 else EncoderPosition.PARALLEL
        if not roles.encoders:
            yield from self.beside(budget, encoders_at)
            return
        sizes = [
            sorted({side.gpus for side in _all(self._sides_before(encoders_at, budget, 1))}),
            [option.gpus for option in self._language(budget, 0)],
            sorted({side.gpus for side in self._after(budget)}),
        ]
        if not all(sizes):
            return
        try:
            allocations = feasible_allocations(sizes, budget)
        except PlanError:
            return
        parts = roles.encoders, (roles.language,), roles.generators
        work = [sum(self._device_seconds(unit) for unit in units) for units in parts]
        if not roles.generators:
            work, allocations = work[:2], tuple(own[:2] for own in allocations)
        chosen = minimum_stable_batch([work], allocations, rule="nearest").allocation
        yield from self.beside(budget, encoders_at, (*chosen, 0)[:3])

    def _device_seconds(self, unit: str) -> float:
        """Return the device seconds of the mean sample in a unit, at the smallest degrees with costs."""
        degrees = self.table.units.degrees([unit])
        tp, cp = min(degrees, key=lambda degree: (degree[0] * degree[1], degree))
        return float(self.table.units.layers(unit, tp, cp, 1).seconds.sum()) * tp * cp

    def _chains(self, unit: str, budget: int, behind: int) -> list[Option]:
        """Return the options of a unit on at most `budget` devices whose memory allows `behind` stages after them."""
        key = unit, budget, behind
        if key not in self._known:
            found = [
                self.table.chain(unit, tp, cp, stages, self.samples, self.microbatches, behind, ep=ep)
                for tp, cp in self.table.units.degrees([unit])
                for ep in self.table.units.expert_degrees(unit, tp, cp)
                for stages in self._numbers_of_stages(unit, tp, cp, ep, budget)
            ]
            self._known[key] = [option for option in found if option is not None]
        return self._known[key]

    def _numbers_of_stages(self, unit: str, tp: int, cp: int, ep: int, budget: int) -> range:
        """Return a unit's numbers of stages on at most `budget` devices, without those that surely take too long."""
        fewest = 1
        if 0.0 < self.most_seconds < math.inf:
            layers = self.table.units.layers(unit, tp, cp, self.samples, ep=ep)
            fewest = max(1, math.ceil(self.microbatches * float(layers.work.sum()) / self.most_seconds))
        return range(fewest, min(self.space.model.unit(unit).most_stages, budget // (tp * cp)) + 1)

    def _language(self, budget: int, behind: int) -> list[Option]:
        """Return the language model's options, with interleaved chunks where these may pay off."""
        name = self.space.roles.language
        key = name, budget, behind, self.space.chunks
        if key not in self._known:
            self._known[key] = self._with_chunks(name, self._chains(name, budget, behind), behind)
        return self._known[key]

    def _with_chunks(self, name: str, plain: Sequence[Option], behind: int) -> list[Option]:
        most = self.space.model.unit(name).most_stages
        found = [*plain]
        for one in plain:
            for chunks in self.space.chunks:
                saved = (one.total - one.slowest) * (1 - 1 / chunks)
                groups = one.stages
                if groups == 1 or groups * chunks > most or saved < NOTABLE * self.microbatches * one.slowest:
                    continue
                shape = name, one.tp, one.cp, groups * chunks, self.samples, self.microbatches, behind
                option = self.table.chain(*shape, chunks=chunks, ep=one.ep)
                if option is not None:
                    found.append(option)
        return found

    def _before(
        self, encoders_at: EncoderPosition, budget: int, behind: int, left: int
    ) -> Sequence[ParallelChains]:
        """Return the encoders' sides on at most `left` devices of the budget, with `behind` stages after the encoders.
        In a shared space, sides that are Pareto-optimal only for fewer devices are included."""
        sides = self._sides_before(encoders_at, budget, behind)
        return _all(sides[: left + 1]) if self.space.shared else sides[left]

    def _sides_before(
        self, encoders_at: EncoderPosition, budget: int, behind: int
    ) -> list[list[ParallelChains]]:
        """Return [devices]: the encoders' sides on at most that many devices, with `behind` stages after them."""
        for far in (0, behind):
            key = encoders_at, budget, far
            if key not in self._sides:
                each = self._encoders(encoders_at, budget, far)
                room = min((option.room for options in each for option in options), default=UNLIMITED)
                self._sides[key] = room, self.space.joined(each, budget)
            room, sides = self._sides[key]
            if room >= behind:  # memory does not limit this depth
                break
        return sides

    def _encoders(self, encoders_at: EncoderPosition, budget: int, behind: int) -> list[list[Option]]:
        """Return for each chain of encoders the options whose memory allows `behind` stages after them."""
        encoders = self.space.roles.encoders
        if encoders_at is not EncoderPosition.COLOCATED:
            return [self._chains(unit, budget, behind) for unit in encoders]
        most = min(self.space.model.unit(unit).most_stages for unit in encoders)
        options = [
            self.table.colocated(encoders, tp, cp, stages, self.samples, self.microbatches)
            for tp, cp in self.table.units.degrees(encoders)
            for stages in range(1, min(most, budget // (tp * cp)) + 1)
        ]
        return [[option for option in options if option is not None and option.room >= behind]]

    def _after(self, budget: int) -> list[ParallelChains]:
        chains = [self._chains(unit, budget, 0) for unit in self.space.roles.generators]
        return _all(self.space.joined(chains, budget))

    def _candidate(
        self, encoders_at: EncoderPosition, before: ParallelChains, language: Option, after: ParallelChains
    ) -> PlanCandidate:
        options = (*before.options, language, *after.options)
        slowest = max(before.slowest, language.slowest, after.slowest)
        fill = before.fill + language.total + after.fill
        times = [chain_times(self.space, self.replicas, self.microbatches, option) for option in options]
        return PlanCandidate(
            encoders_at=encoders_at,
            replicas=self.replicas,
            microbatch_size=max(1, round(self.samples)),
            num_microbatches=self.microbatches,
            options=options,
            counts=(self.replicas,) * len(options),
            estimate=estimate(self.space, self.replicas, self.microbatches, fill, slowest, options, times),
            bound=bound(before, language, options, times),
            row_tokens=self.row_tokens,
        )


def _all(sides: Sequence[Sequence[ParallelChains]]) -> list[ParallelChains]:
    return list(dict.fromkeys(side for group in sides for side in group))
