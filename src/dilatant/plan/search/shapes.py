"""Pipeline shapes: every layout of equal pipelines on a number of devices. Each has a closed-form estimate of the step
and a lower bound for every schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.plan.layouts.option import UNLIMITED, Option, ParallelChains, PlanCandidate
from dilatant.plan.layouts.option_table import ROUNDING, ChainRequest, FastestChains, OptionTable, degrees_of_extra
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import NOTABLE
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.search.closed_form import Work, bound, chain_times, chunked_seconds, estimate
from dilatant.plan.search.pairing import CLOSE_BELOW, InTime, Pairing, least_step


def shapes(
    space: Space,
    replicas: int,
    microbatches: int,
    row_tokens: int | None = None,
    most_seconds: float = math.inf,
    groups: Collection[int] = (),
    left: int = 0,
) -> Iterator[PlanCandidate]:
    """Yield the candidates of `replicas` equal pipelines with `microbatches` microbatches each.

    With `row_tokens`, the maximum tokens of a microbatch, `microbatches` is the minimum number. most_seconds: chains
    whose slowest stage takes longer, and candidates with larger estimates, are omitted; `Space.omitted` has their least
    bound. groups: numbers of groups that stages of the language model may have; empty for any. left: devices that they
    leave to others.
    """
    devices = space.cluster.num_devices
    table = (space.table if row_tokens is None else space.by_tokens).shared_by(replicas, devices // replicas)
    samples = space.global_batch / (replicas * microbatches)
    chains = space.chains(replicas, microbatches, row_tokens, math.isfinite(most_seconds))
    shape = space, table, replicas, samples, microbatches, row_tokens, most_seconds, chains, groups or space.groups
    own = _Shape(*shape, (devices - left) // replicas)
    found = [own.beside(EncoderPosition.PARALLEL)]
    if len(space.roles.encoders) > 1:
        found.append(own.beside(EncoderPosition.COLOCATED))
    if space.roles.encoders:
        found.append(own.inside())
    for one in itertools.chain(*found):
        if one.estimate * ROUNDING <= most_seconds:
            yield one
        else:
            space.omitted = min(space.omitted, one.bound)


def textbook_shapes(space: Space) -> Iterator[PlanCandidate]:
    """Yield the layouts that people choose without a search. They are equal pipelines on all devices, with
    tensor-parallel degrees and numbers of stages in powers of two and encoders in the first stage; among them is data
    parallelism alone. Models with generators have none."""
    roles = space.roles
    for degrees in space.table.units.all_degrees([*roles.encoders, roles.language]):
        most = space.model.unit(roles.language).most_stages if degrees.cp == 1 and degrees.tp.bit_count() == 1 else 0
        for power in range(most.bit_length()):
            yield from equal_pipelines(space, degrees, 1 << power)


def equal_pipelines(
    space: Space, degrees: Degrees, stages: int, chunks: int = 1, cuts: tuple[int, ...] = ()
) -> Iterator[PlanCandidate]:
    """Yield the layouts of equal pipelines on all devices, one for each number of microbatches. The encoders run in the
    first of `stages` stages, of which each group of devices has `chunks`. cuts: their first layers, instead of the best
    ones. Models with generators have none."""
    roles, devices = space.roles, space.cluster.num_devices
    replicas, rest = divmod(devices, degrees.ranks * stages // chunks)
    if rest or not replicas or roles.generators:
        return
    for count, row_tokens in space.microbatch_counts(replicas, degrees.groups).items():
        table = space.table if row_tokens is None else space.by_tokens
        table = (table.varied(None, {roles.language: cuts}) if cuts else table).shared_by(replicas, devices // replicas)
        samples = space.global_batch / (replicas * count)
        shape = _Shape(space, table, replicas, samples, count, row_tokens, math.inf, {})
        option = table.chain(ChainRequest(roles.language, degrees, stages, samples, count, roles.encoders, chunks), 0)
        if option is not None:
            where = EncoderPosition.IN_LANGUAGE if roles.encoders else EncoderPosition.PARALLEL
            yield shape.candidate(where, ParallelChains(), option, ParallelChains())


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
    _groups: Collection[int] = ()
    _budget: int = 0
    _encoder_chains: dict[tuple[object, ...], tuple[int, list[list[ParallelChains]]]] = field(default_factory=dict)
    _paired: dict[tuple[str, ...], InTime] = field(default_factory=dict)

    def beside(self, encoders_at: EncoderPosition) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on separate devices, on all devices or fewer."""
        budget, others = self._budget, (*self.space.roles.encoders, *self.space.roles.generators)
        alone = self._language(budget, 0, others)
        room = budget - min((language.gpus for language in alone), default=budget + 1)  # of the other units
        if room < 0:
            return
        floor = (
            min(language.slowest for language in alone),
            min(float(language.costs.work.max()) for language in alone),
        )
        for after in self._after(room, others, floor):
            for language in self._language(budget - after.gpus, after.stages, others):
                left = budget - after.gpus - language.gpus
                behind = language.stages + after.stages
                for before in self._before(encoders_at, room, behind, left, floor):
                    yield self.candidate(encoders_at, before, language, after)

    def inside(self) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on the ranks of the language model's first stage.
        These ranks divide the encoders' layers as they do the language model's, or the encoders' items."""
        roles, units, budget = self.space.roles, self.table.units, self._budget
        alone = set(units.degrees(roles.encoders))
        ways = [(degrees, False) for degrees in units.all_degrees([*roles.encoders, roles.language])]
        ways += [
            (degrees, True)
            for degrees in units.all_degrees([roles.language])
            if degrees.tp > 1 and Degrees(cp=degrees.ranks) in alone
        ]
        requests = self._with_encoders([way for way in ways if way[0].groups in self._groups])
        for after in self._after(budget, roles.generators):
            for request in requests:
                if request.degrees.ranks * request.stages <= budget - after.gpus:
                    option = self._chain(request, after.stages)
                    if option is not None:
                        yield self.candidate(EncoderPosition.IN_LANGUAGE, ParallelChains(), option, after)

    def _with_encoders(self, ways: Sequence[tuple[Degrees, bool]]) -> list[ChainRequest]:
        """Return the chains of the language model, with the encoders in the first stage, that may be in time. ways:
        degrees, and True where each rank of them runs whole items."""
        roles, space = self.space.roles, self.space
        in_time = self._in_time(roles.generators)
        known, unit = in_time.known[roles.language], space.model.unit(roles.language)
        each, sums = list[tuple[Degrees, bool, int]](), list[tuple[float, ...]]()
        rows = list[NDArray[np.int64]]()
        for degrees, whole_items in ways:
            first = known.first_of[degrees]
            most = min(unit.most_stages, space.cluster.num_devices // degrees.ranks)
            own = first + np.flatnonzero(in_time.whole[first : first + most])
            if len(own):
                theirs = degrees_of_extra(degrees, whole_items)
                encoders = [self.table.units.layers(other, theirs, self.samples).sums for other in roles.encoders]
                each += [(degrees, whole_items, row - first + 1) for row in own.tolist()]
                sums += [tuple(map(sum, zip(*encoders)))] * len(own)
                rows.append(own)
        if not each:
            return []
        at, (seconds, least, forwards, *_) = np.concatenate(rows), np.array(sums).T
        fill, slowest = known.total[at] + seconds, np.maximum(known.slowest[at], seconds)
        work = Work(known.forwards[at] + forwards, fill, known.heaviest[at], known.heaviest_split[at])
        step = least_step(space, self.replicas, self.microbatches, fill, slowest, work)
        worth = step * CLOSE_BELOW <= self.most_seconds
        self._omit(float(np.maximum(least, known.busiest[at])[~worth].min(initial=math.inf)))
        shape = self.samples, self.microbatches, roles.encoders
        return [
            ChainRequest(roles.language, degrees, stages, *shape, whole_items=whole_items)
            for (degrees, whole_items, stages), is_worth in zip(each, worth.tolist())
            if is_worth
        ]

    def _in_time(self, others: tuple[str, ...]) -> InTime:
        """Return the chains that may be in time beside each other, on all devices of a pipeline: of the language model
        and `others`."""
        if others not in self._paired:
            budget, language = self._budget, self._fastest(self.space.roles.language)
            there = (language.gpus <= budget) & np.isin(language.groups, [*self._groups])
            step = self.space, self.table, self.replicas, self.microbatches, self.most_seconds, language, there
            known = {unit: self._fastest(unit) for unit in others}
            self._paired[others] = Pairing(*step, known, budget, self.space.settings.chunks).in_time()
            self._omit(self._paired[others].omitted)
        return self._paired[others]

    def _fastest(self, unit: str) -> FastestChains:
        return self.table.fastest_chains(unit, self.samples, self.space.cluster.num_devices)

    def _fast_chains(
        self, unit: str, budget: int, behind: int, others: tuple[str, ...], floor: Floor = (0.0, 0.0)
    ) -> list[Option]:
        """Return the chains of a unit beside the language model whose memory allows `behind` stages after them, without
        those that take too long. With a limit of time, chains that another surely beats on no fewer devices are left
        out. others: units beside the language model. floor: its least seconds, for which any chain must wait."""
        key = unit, budget, behind, self.most_seconds, floor, others
        if key not in self._known:
            in_time = self._in_time(others)
            known = in_time.known[unit]
            slowest = np.maximum(known.slowest, floor[0])
            worth = np.flatnonzero(in_time.others[unit] & (known.gpus <= budget))
            order = worth[np.lexsort((known.gpus[worth], known.total[worth], slowest[worth]))]
            least = [*zip(known.gpus.tolist(), slowest.tolist(), known.total.tolist())]
            best, found = list[tuple[int, float, float]](), list[Option]()
            for at in order.tolist():
                if math.isfinite(self.most_seconds) and any(_is_better(one, least[at]) for one in best):
                    self._omit(max(float(known.busiest[at]), floor[1]))
                    continue
                option = self._chain(known.request(at, self.microbatches), behind)
                if option is not None:
                    found.append(option)
                    best.append((option.gpus, max(option.slowest, floor[0]), option.total))
            self._known[key] = found
        return self._known[key]

    def _omit(self, work: float) -> None:
        """Record that chains were omitted whose busiest stage works at least so many seconds on a microbatch."""
        self.space.omitted = min(self.space.omitted, self.microbatches * work)

    def _chain(self, request: ChainRequest, behind: int) -> Option | None:
        """Return the chain; None if memory forbids it, or if it takes too long."""
        option = self.table.chain(request, behind)
        return option if option is not None and self._is_in_time(option) else None

    def _may_pay(self, request: ChainRequest) -> bool:
        """Return False if pipelines with this chain of the language model in interleaved chunks take too long without
        recomputation and other units."""
        if math.isinf(self.most_seconds):
            return True
        slowest, total, work = self.table.fastest_in_chunks(request)
        alone = chunked_seconds(self.space, self.replicas, self.microbatches, total, slowest)
        if max(self.microbatches * slowest * ROUNDING, alone * CLOSE_BELOW) <= self.most_seconds:
            return True
        self._omit(work)
        return False

    def _is_in_time(self, option: Option) -> bool:
        """Return False if the slowest stage takes too long."""
        if self.microbatches * option.slowest * ROUNDING <= self.most_seconds:
            return True
        self._omit(float(option.costs.work.max()))
        return False

    def _language(self, budget: int, behind: int, others: tuple[str, ...]) -> list[Option]:
        """Return the language model's options beside `others`, with interleaved chunks where these may pay off."""
        name = self.space.roles.language
        key = name, budget, behind, self.most_seconds, self.space.settings.chunks, others
        if key not in self._known:
            known, worth, found = self._fastest(name), self._in_time(others), list[Option]()
            # A chain that takes too long may be fast enough in chunks, which are cut more evenly.
            for at in np.flatnonzero((worth.whole | worth.chunked) & (known.gpus <= budget)).tolist():
                request = known.request(at, self.microbatches)
                laid_out = [self._chain(request, behind)] if worth.whole[at] else []
                for one in self._in_chunks(request, known, at) if worth.chunked[at] else ():
                    worth_it = self.table.may_fit(one, behind) and self._may_pay(one)
                    laid_out += [self._chain(one, behind)] if worth_it else []
                found += [option for option in laid_out if option is not None]
            self._known[key] = found
        return self._known[key]

    def _in_chunks(self, request: ChainRequest, known: FastestChains, at: int) -> Iterator[ChainRequest]:
        """Yield a chain in interleaved chunks that may save a notable part of a step."""
        most = self.space.model.unit(request.unit).most_stages
        slowest, total = float(known.slowest[at]), float(known.total[at])
        for chunks in self.space.settings.chunks:
            saved = (total - slowest) * (1 - 1 / chunks)
            if 1 < request.stages <= most // chunks and saved >= NOTABLE * self.microbatches * slowest:
                yield request._replace(stages=request.stages * chunks, chunks=chunks)

    def _before(
        self, encoders_at: EncoderPosition, budget: int, behind: int, left: int, floor: Floor
    ) -> Sequence[ParallelChains]:
        """Return the encoders' chains on at most `left` devices of the budget, with `behind` stages after them.
        In a shared space, those that are Pareto-optimal only for fewer devices are included."""
        for depth in (0, min(behind, self.microbatches - 1)):  # from there on, all microbatches are in flight
            key = encoders_at, budget, depth
            if key not in self._encoder_chains:
                each = self._encoders(encoders_at, budget, depth, floor)
                headroom = min((option.headroom for options in each for option in options), default=UNLIMITED)
                self._encoder_chains[key] = headroom, self.space.joined(each, budget)
            headroom, by_devices = self._encoder_chains[key]
            if headroom >= behind:  # memory does not limit this depth
                break
        return _all(by_devices[: left + 1]) if self.space.shared else by_devices[left]

    def _encoders(self, encoders_at: EncoderPosition, budget: int, behind: int, floor: Floor) -> list[list[Option]]:
        """Return for each chain of encoders the options whose memory allows `behind` stages after them."""
        encoders = self.space.roles.encoders
        if encoders_at is not EncoderPosition.COLOCATED:
            beside = *encoders, *self.space.roles.generators
            return [self._fast_chains(unit, budget, behind, beside, floor) for unit in encoders]
        most = min(self.space.model.unit(unit).most_stages for unit in encoders)
        options = [
            self.table.colocated(encoders, degrees, stages, self.samples, self.microbatches)
            for degrees in self.table.units.degrees(encoders)
            for stages in range(1, min(most, budget // degrees.ranks) + 1)
        ]
        return [[option for option in options if option is not None and option.headroom >= behind]]

    def _after(self, budget: int, others: tuple[str, ...], floor: Floor = (0.0, 0.0)) -> list[ParallelChains]:
        chains = [self._fast_chains(unit, budget, 0, others, floor) for unit in self.space.roles.generators]
        return _all(self.space.joined(chains, budget))

    def candidate(
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


def _is_better(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    """Return True if a chain is at least as good as another in devices, slowest stage and total, and faster."""
    return all(own <= theirs for own, theirs in zip(one, other)) and one[1:] != other[1:]


def _all(by_devices: Sequence[Sequence[ParallelChains]]) -> list[ParallelChains]:
    return list(dict.fromkeys(chains for group in by_devices for chains in group))


Floor = tuple[float, float]
"""Seconds of a microbatch that some unit takes in any case: in its slowest stage, and at least in its busiest."""
