"""Pipeline shapes: every layout of equal pipelines on a number of devices. Each has a closed-form estimate of the step
and a lower bound for every schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.sync_time import least_sync
from dilatant.plan.layouts.option import UNLIMITED, ChainTimes, Option, ParallelChains, PlanCandidate
from dilatant.plan.layouts.option_table import ROUNDING, ChainRequest, FastestChains, OptionTable
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import NOTABLE
from dilatant.plan.model_spec import EncoderPosition


def shapes(
    space: Space,
    replicas: int,
    microbatches: int,
    row_tokens: int | None = None,
    most_seconds: float = math.inf,
    groups: Collection[int] = (),
) -> Iterator[PlanCandidate]:
    """Yield the candidates of `replicas` equal pipelines with `microbatches` microbatches each.

    With `row_tokens`, the maximum tokens of a microbatch, `microbatches` is the minimum number. most_seconds: chains
    whose slowest stage takes longer, and candidates with larger estimates, are omitted; `Space.omitted` has their least
    bound. groups: numbers of groups that stages of the language model may have; empty
    for any.
    """
    budget = space.cluster.num_devices // replicas
    table = (space.table if row_tokens is None else space.by_tokens).shared_by(replicas, budget)
    samples = space.global_batch / (replicas * microbatches)
    chains = space.chains(replicas, microbatches, row_tokens, math.isfinite(most_seconds))
    shape = _Shape(
        space, table, replicas, samples, microbatches, row_tokens, most_seconds, chains, groups or space.groups
    )
    found = [shape.beside(budget, EncoderPosition.PARALLEL)]
    if len(space.roles.encoders) > 1:
        found.append(shape.beside(budget, EncoderPosition.COLOCATED))
    if space.roles.encoders:
        found.append(shape.inside(budget))
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
    _encoder_chains: dict[tuple[object, ...], tuple[int, list[list[ParallelChains]]]] = field(default_factory=dict)

    def beside(self, budget: int, encoders_at: EncoderPosition) -> Iterator[PlanCandidate]:
        """Yield candidates with encoders on separate devices, on all devices or fewer."""
        alone = self._language(budget, 0)
        room = budget - min((language.gpus for language in alone), default=budget + 1)  # of the other units
        if room < 0:
            return
        floor = (
            min(language.slowest for language in alone),
            min(float(language.costs.work.max()) for language in alone),
        )
        for after in self._after(room, floor):
            for language in self._language(budget - after.gpus, after.stages):
                left = budget - after.gpus - language.gpus
                behind = language.stages + after.stages
                for before in self._before(encoders_at, room, behind, left, floor):
                    yield self.candidate(encoders_at, before, language, after)

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
        ways = [way for way in ways if way[0].groups in self._groups]
        for after in self._after(budget):
            for degrees, whole_items in ways:
                fewest, most = 1, self.space.model.unit(roles.language).most_stages
                if 0.0 < self.most_seconds < math.inf:
                    work = units.layers(roles.language, degrees, self.samples).work
                    fewest = max(1, math.ceil(self.microbatches * float(work.sum()) * ROUNDING / self.most_seconds))
                for stages in range(fewest, min(most, (budget - after.gpus) // degrees.ranks) + 1):
                    shape = roles.language, degrees, stages, self.samples, self.microbatches
                    request = ChainRequest(*shape, roles.encoders, whole_items=whole_items)
                    option = self._chain(request, after.stages) if self._may_pay(request) else None
                    if option is not None:
                        yield self.candidate(EncoderPosition.IN_LANGUAGE, ParallelChains(), option, after)

    def _fast_chains(self, unit: str, budget: int, behind: int, floor: Floor = (0.0, 0.0)) -> list[Option]:
        """Return the chains of a unit beside the language model whose memory allows `behind` stages after them, without
        those that take too long. With a limit of time, chains that another surely beats on no fewer devices are left
        out. floor: least seconds of the language model beside it, for which any chain must wait."""
        key = unit, budget, behind, self.most_seconds, floor
        if key not in self._known:
            known = self.table.fastest_chains(unit, self.samples, self.space.cluster.num_devices)
            slowest = np.maximum(known.slowest, floor[0])
            order = np.lexsort((known.gpus, known.total, slowest))
            worth = self._in_time(known, known.gpus <= budget)
            least = [*zip(known.gpus.tolist(), slowest.tolist(), known.total.tolist())]
            best, found = list[tuple[int, float, float]](), list[Option]()
            for at in order[worth[order]].tolist():
                if math.isfinite(self.most_seconds) and any(_is_better(one, least[at]) for one in best):
                    self._omit(max(float(known.busiest[at]), floor[1]))
                    continue
                option = self._chain(known.requests[at]._replace(microbatches=self.microbatches), behind)
                if option is not None:
                    found.append(option)
                    best.append((option.gpus, max(option.slowest, floor[0]), option.total))
            self._known[key] = found
        return self._known[key]

    def _in_time(self, known: FastestChains, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask of chains `there` whose slowest stage does not take too long."""
        fast = self.microbatches * known.slowest * ROUNDING <= self.most_seconds
        self._omit(float(known.busiest[there & ~fast].min(initial=math.inf)))
        return there & fast

    def _omit(self, work: float) -> None:
        """Record that chains were omitted whose busiest stage works at least so many seconds on a microbatch."""
        self.space.omitted = min(self.space.omitted, self.microbatches * work)

    def _chain(self, request: ChainRequest, behind: int) -> Option | None:
        """Return the chain; None if memory forbids it, or if it takes too long."""
        option = self.table.chain(request, behind)
        return option if option is not None and self._is_in_time(option) else None

    def _may_pay(self, request: ChainRequest) -> bool:
        """Return False if pipelines with this chain of the language model take too long without recomputation and other
        units."""
        if math.isinf(self.most_seconds):
            return True
        one = self.table.fastest(request)
        if not self._is_in_time(one):
            return False
        alone = computed_seconds(self.space, self.replicas, self.microbatches, one.total, one.slowest, [one])
        if alone * CLOSE_BELOW <= self.most_seconds:
            return True
        self._omit(float(one.costs.work.max()))
        return False

    def _is_in_time(self, option: Option) -> bool:
        """Return False if the slowest stage takes too long."""
        if self.microbatches * option.slowest * ROUNDING <= self.most_seconds:
            return True
        self._omit(float(option.costs.work.max()))
        return False

    def _language(self, budget: int, behind: int) -> list[Option]:
        """Return the language model's options, with interleaved chunks where these may pay off."""
        name = self.space.roles.language
        key = name, budget, behind, self.space.settings.chunks
        if key not in self._known:
            known, found = self.table.fastest_chains(name, self.samples, self.space.cluster.num_devices), list[Option]()
            there = (known.gpus <= budget) & np.isin(known.groups, [*self._groups])
            fast = self._in_time(known, there)
            # A chain that takes too long may be fast enough in chunks, which are cut more evenly.
            chunked = there & (self.microbatches * known.mean * ROUNDING <= self.most_seconds)
            for at in np.flatnonzero(fast | chunked).tolist():
                request = known.requests[at]._replace(microbatches=self.microbatches)
                requests = [*([request] if fast[at] else []), *self._in_chunks(request)]
                laid_out = [self._chain(one, behind) for one in requests if self._may_pay(one)]
                found += [option for option in laid_out if option is not None]
            self._known[key] = found
        return self._known[key]

    def _in_chunks(self, request: ChainRequest) -> Iterator[ChainRequest]:
        """Yield a chain in interleaved chunks that may save a notable part of a step."""
        one = self.table.fastest(request)
        most = self.space.model.unit(request.unit).most_stages
        for chunks in self.space.settings.chunks:
            saved = (one.total - one.slowest) * (1 - 1 / chunks)
            if 1 < request.stages <= most // chunks and saved >= NOTABLE * self.microbatches * one.slowest:
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
            return [self._fast_chains(unit, budget, behind, floor) for unit in encoders]
        most = min(self.space.model.unit(unit).most_stages for unit in encoders)
        options = [
            self.table.colocated(encoders, degrees, stages, self.samples, self.microbatches)
            for degrees in self.table.units.degrees(encoders)
            for stages in range(1, min(most, budget // degrees.ranks) + 1)
        ]
        return [[option for option in options if option is not None and option.headroom >= behind]]

    def _after(self, budget: int, floor: Floor = (0.0, 0.0)) -> list[ParallelChains]:
        chains = [self._fast_chains(unit, budget, 0, floor) for unit in self.space.roles.generators]
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


CLOSE_BELOW = 0.95
"""Least estimate of pipelines as a multiple of their language model's alone: the weight gradients of other units may
fill more of its bubbles."""

Floor = tuple[float, float]
"""Seconds of a microbatch that some unit takes in any case: in its slowest stage, and at least in its busiest."""

Seconds = TypeVar("Seconds", float, NDArray[np.float64])

GAPS = 1.08
"""Simulated interleaved steps take this multiple of the closed-form time."""
FILLING, DELAY = 0.75, 0.4
"""Fractions that remain where weight gradients of all layers fill the bubbles, in simulations.

FILLING is of the first microbatch's forwards, DELAY of the delay by the heaviest microbatch.
"""


def chain_times(space: Space, replicas: int, microbatches: int, option: Option) -> ChainTimes:
    """Return lower bounds and exposed sync of one option in `replicas` pipelines of `microbatches` microbatches each.

    A stage takes at least its work plus the gradient sync after its last microbatch, and at least its forwards plus the
    sync of all its gradients. With split backwards, a stage waits for forwards only and syncs all gradients after its
    work. Replicas share the work, but one with fewer samples than microbatches has fewer calls; some replica has all.
    """
    key = option, replicas, microbatches
    if key not in space.times:
        space.times[key] = _chain_times(space, *key)
    return space.times[key]


def _chain_times(space: Space, option: Option, replicas: int, microbatches: int) -> ChainTimes:
    from dilatant.plan.layouts._chain_kernel import chain_times as kernel

    chain, costs, cluster = option.chain, option.costs, space.cluster
    degrees = chain.degrees
    holders = replicas * degrees.copies
    ring = 2 * (holders - 1) / holders
    waits = chain.chunks == 1
    shared = sorted([0, *map(len, chain.cuts.values())])[-2] if waits else len(costs.work)
    sums = (
        _ring_bandwidth(cluster, holders, degrees.tp),
        *least_sync(holders, degrees.tp, cluster, space.table.units.rules),
    )

    def times(lightest: NDArray[np.float64], heaviest: float, sync_at_end: bool) -> tuple[float, float, float, float]:
        busiest, longest, last, exposed = kernel(
            costs.work + costs.calls / replicas, costs.work_host, costs.forward, lightest, costs.lightest_split,
            costs.gradient, costs.backward, microbatches, waits, ring, *sums, float(BUCKET_BYTES), sync_at_end, shared,
        )  # fmt: skip
        if degrees.ep > 1:  # experts may have no other holder
            return busiest, 0.0, heaviest, exposed
        return busiest, longest, heaviest + last, exposed

    stages, synced, path, exposed = times(costs.lightest, option.heaviest, False)
    if not space.settings.splits_backward or not waits:
        return ChainTimes(stages, synced, path, math.inf, math.inf, exposed)
    busiest, longest, path_split, _ = times(costs.lightest_split, option.heaviest_split, True)
    return ChainTimes(stages, synced, path, max(busiest, longest), path_split, exposed)


def exposed_seconds(option: Option, sums: NDArray[np.float64]) -> float:
    """Return the sync seconds after the last backward, maximum over device groups. sums: seconds of gradient sync
    [groups]."""
    backward = option.costs.backward[: len(sums)]  # of the last chunk
    last_bucket = 1.0 / np.maximum(1.0, np.ceil(option.costs.gradient / BUCKET_BYTES))  # its share of the gradients
    return float(np.maximum(sums - backward, sums * last_bucket).max())


def estimate(
    space: Space,
    pipelines: int,
    microbatches: int,
    fill: float,
    slowest: float,
    options: Sequence[Option],
    times: Sequence[ChainTimes],
) -> float:
    """Estimate the seconds of a step of equal pipelines: `computed_seconds` plus exposed gradient sync."""
    computed = computed_seconds(space, pipelines, microbatches, fill, slowest, options)
    return float(computed + max(one.exposed_sync for one in times))


def computed_seconds(
    space: Space, pipelines: int, microbatches: int, fill: Seconds, slowest: Seconds, options: Sequence[Option]
) -> Seconds:
    """Estimate the compute seconds of a step: the first microbatch takes `fill`, each further one `slowest`.
    The heaviest microbatch delays those behind it by about half of its excess in simulations. Where backwards may be
    split, weight gradients fill bubbles in proportion to their share of the work."""
    heavier = (space.heaviest(pipelines * microbatches) - 1.0) * (fill - slowest)
    steady = microbatches * slowest
    whole = fill + steady - slowest
    heaviest = heaviest_split = forwards = total = 0.0
    for option in options:
        if option.chain.chunks > 1:
            return GAPS * whole + heavier / 2
        heaviest += option.heaviest
        heaviest_split += option.heaviest_split
        forwards += option.forwards
        total += option.total
    whole = whole + heavier / 2
    if not (space.settings.splits_backward and heaviest):
        return whole
    late = 1.0 - heaviest_split / heaviest  # fraction of weight gradients
    share = forwards / total
    last = FILLING * share * fill + steady  # last stages wait for the first forward,
    first = (1.0 - late) * fill + (1.0 - share) * steady  # first stages for the first backward
    larger = max if isinstance(fill, float) else np.maximum  # max is faster for two floats
    split = larger(last, first) + DELAY * heavier
    return whole - larger(0.0, whole - split) * min(1.0, 3 * late)


def bound(before: ParallelChains, language: Option, options: Sequence[Option], times: Sequence[ChainTimes]) -> float:
    """Return seconds that no schedule beats; the language model waits at least for the encoders' lightest sample."""
    ahead = max((one.lightest for one in before.options), default=0.0)
    ahead_split = max((one.lightest_split for one in before.options), default=0.0)
    whole = split = 0.0
    for option, own in zip(options, times, strict=True):
        waits = option is language
        whole = max(whole, own.stages + ahead * waits, own.synced + ahead_split * waits, own.path)
        split = max(split, own.stages_split + ahead_split * waits, own.path_split)
    return min(whole, split)


def _ring_bandwidth(cluster: Cluster, holders: int, tp: int) -> float:
    bandwidth = cluster.inside.bandwidth
    if holders * tp > cluster.reach:
        on_node = min(holders, max(1, cluster.reach // tp))
        bandwidth = min(bandwidth, on_node * cluster.between.bandwidth / cluster.gpus_per_node)
    return bandwidth
