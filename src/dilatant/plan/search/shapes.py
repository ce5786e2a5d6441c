"""Pipeline shapes: enumerate every layout of equal pipelines on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dilatant.config.degrees import Degrees
from dilatant.plan.layouts.option import UNLIMITED, Option
from dilatant.plan.layouts.option_table import ChainRequest, OptionTable
from dilatant.plan.layouts.parallel_chains import ParallelChains
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import NOTABLE
from dilatant.plan.roles import EncoderPosition
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.estimate import bound, chain_times, estimate


def shapes(
    space: Space,
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
    yield from shape.beside(budget, EncoderPosition.PARALLEL)
    if len(space.roles.encoders) > 1:
        yield from shape.beside(budget, EncoderPosition.COLOCATED)
    if space.roles.encoders:
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
    _encoder_chains: dict[tuple[object, ...], tuple[int, list[list[ParallelChains]]]] = field(
        default_factory=dict
    )

    def beside(self, budget: int, encoders_at: EncoderPosition) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on separate devices, on all devices or fewer."""
        for after in self._after(budget):
            for language in self._language(budget - after.gpus, after.stages):
                left = budget - after.gpus - language.gpus
                behind = language.stages + after.stages
                for before in self._before(encoders_at, budget, behind, left):
                    yield self._candidate(encoders_at, before, language, after)

    def inside(self, budget: int) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on the ranks of the language model's first stage.
        These ranks divide the encoders' layers as they do the language model's, or the encoders' items."""
        roles, units = self.space.roles, self.table.units
        alone = set(units.degrees(roles.encoders))
        ways = [(degrees, False) for degrees in units.all_degrees([*roles.encoders, roles.language])]
        ways += [
            (degrees, True)
            for degrees in units.all_degrees([roles.language])
            if degrees.tp > 1 and Degrees(cp=degrees.ranks) in alone
        ]
        for after in self._after(budget):
            for degrees, whole_items in ways:
                for stages in self._numbers_of_stages(roles.language, degrees, budget - after.gpus):
                    shape = roles.language, degrees, stages, self.samples, self.microbatches
                    request = ChainRequest(*shape, roles.encoders, whole_items=whole_items)
                    option = self.table.chain(request, after.stages)
                    if option is not None:
                        yield self._candidate(EncoderPosition.IN_LANGUAGE, ParallelChains(), option, after)

    def _chains(self, unit: str, budget: int, behind: int) -> list[Option]:
        """Return the options of a unit on at most `budget` devices whose memory allows `behind` stages after them."""
        key = unit, budget, behind
        if key not in self._known:
            found = [
                self.table.chain(ChainRequest(unit, degrees, stages, self.samples, self.microbatches), behind)
                for degrees in self.table.units.all_degrees([unit])
                for stages in self._numbers_of_stages(unit, degrees, budget)
            ]
            self._known[key] = [option for option in found if option is not None]
        return self._known[key]

    def _numbers_of_stages(self, unit: str, degrees: Degrees, budget: int) -> range:
        """Return a unit's numbers of stages on at most `budget` devices, without those that surely take too long."""
        fewest = 1
        if 0.0 < self.most_seconds < math.inf:
            layers = self.table.units.layers(unit, degrees, self.samples)
            fewest = max(1, math.ceil(self.microbatches * float(layers.work.sum()) / self.most_seconds))
        return range(fewest, min(self.space.model.unit(unit).most_stages, budget // degrees.ranks) + 1)

    def _language(self, budget: int, behind: int) -> list[Option]:
        """Return the language model's options, with interleaved chunks where these may pay off."""
        name = self.space.roles.language
        key = name, budget, behind, self.space.settings.chunks
        if key not in self._known:
            self._known[key] = self._with_chunks(name, self._chains(name, budget, behind), behind)
        return self._known[key]

    def _with_chunks(self, name: str, plain: Sequence[Option], behind: int) -> list[Option]:
        most = self.space.model.unit(name).most_stages
        found = [*plain]
        for one in plain:
            for chunks in self.space.settings.chunks:
                saved = (one.total - one.slowest) * (1 - 1 / chunks)
                groups = one.stages
                if groups == 1 or groups * chunks > most or saved < NOTABLE * self.microbatches * one.slowest:
                    continue
                shape = name, one.chain.degrees, groups * chunks, self.samples, self.microbatches
                option = self.table.chain(ChainRequest(*shape, chunks=chunks), behind)
                if option is not None:
                    found.append(option)
        return found

    def _before(
        self, encoders_at: EncoderPosition, budget: int, behind: int, left: int
    ) -> Sequence[ParallelChains]:
        """Return the encoders' chains on at most `left` devices of the budget, with `behind` stages after them.
        In a shared space, those that are Pareto-optimal only for fewer devices are included."""
        for depth in (0, behind):
            key = encoders_at, budget, depth
            if key not in self._encoder_chains:
                each = self._encoders(encoders_at, budget, depth)
                headroom = min((option.headroom for options in each for option in options), default=UNLIMITED)
                self._encoder_chains[key] = headroom, self.space.joined(each, budget)
            headroom, by_devices = self._encoder_chains[key]
            if headroom >= behind:  # memory does not limit this depth
                break
        return _all(by_devices[: left + 1]) if self.space.shared else by_devices[left]

    def _encoders(self, encoders_at: EncoderPosition, budget: int, behind: int) -> list[list[Option]]:
        """Return for each chain of encoders the options whose memory allows `behind` stages after them."""
        encoders = self.space.roles.encoders
        if encoders_at is not EncoderPosition.COLOCATED:
            return [self._chains(unit, budget, behind) for unit in encoders]
        most = min(self.space.model.unit(unit).most_stages for unit in encoders)
        options = [
            self.table.colocated(encoders, degrees, stages, self.samples, self.microbatches)
            for degrees in self.table.units.degrees(encoders)
            for stages in range(1, min(most, budget // degrees.ranks) + 1)
        ]
        return [[option for option in options if option is not None and option.headroom >= behind]]

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


def _all(by_devices: Sequence[Sequence[ParallelChains]]) -> list[ParallelChains]:
    return list(dict.fromkeys(chains for group in by_devices for chains in group))
