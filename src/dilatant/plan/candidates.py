"""Every shape that pipelines can take on a number of devices, with an estimate and a lower bound of a step."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from dilatant.plan.cluster import Cluster
from dilatant.plan.errors import PlanError
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.options import UNLIMITED, Option, OptionTable
from dilatant.plan.rank_mapping import Chain
from dilatant.plan.stable_batch import feasible_allocations, minimum_stable_batch

NOTABLE = 0.02
"""The part of a step that going round the devices several times must save by its own sums to be tried."""


GAPS = 1.08
"""What interleaved steps take more in simulations than by these sums."""


class EncoderPosition(StrEnum):
    """Where the encoders run."""

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    IN_LANGUAGE = "in-language"


class Mode(StrEnum):
    """Whose search: all that is known here, or one of the published systems' for comparison.

    cornstarch: encoders parallel or colocated, aware of freezing (v3 4.1). entrain: encoders as one, devices handed
    out in proportion to the data's mean work, then the best factors (thesis 4.4.3). megatron: encoders in one stage
    before the language model with its degrees, layers spread as if everything trained.
    """

    BEST = "best"
    CORNSTARCH = "cornstarch"
    ENTRAIN = "entrain"
    DISTTRAIN = "disttrain"
    MEGATRON = "megatron"


@dataclass(frozen=True, slots=True)
class Roles:
    """The units by what they do: encoders feed the language model, which feeds generators."""

    encoders: tuple[str, ...]
    language: str
    generators: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        return (*self.encoders, self.language, *self.generators)


def roles_of(model: ModelSpec) -> Roles:
    """The roles of a model's units. Of two units the second is the language model, unless the first has that name.

    Raises PlanError for graphs other than encoders, one language model, generators.
    """
    feeds = {unit.name: set(unit.feeds) for unit in model.units}
    for language in sorted(feeds, key=lambda name: (name != "language", bool(feeds[name]))):
        encoders = tuple(name for name in feeds if feeds[name] == {language})
        generators = tuple(name for name in feeds if name in feeds[language])
        ends = all(not feeds[name] for name in generators)
        if ends and {*encoders, language, *generators} == feeds.keys():
            return Roles(encoders, language, generators)
    raise PlanError(
        "plans are searched for encoders that feed one language model, which may feed generators; "
        f"this model is { ({name: sorted(targets) for name, targets in feeds.items()}) }"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Chains of stages with their numbers of replicas; `replicas` is the language model's.

    `estimate` is the seconds of a step by fill time, slowest stage and exposed gradient sync; `bound` what no schedule
    of this candidate beats: the work of its slowest stage. `disaggregated`: found by DistTrain's search. `groups`: by
    option, the group of unlike devices that it takes its devices of; then several options may hold the same unit, each
    some of its replicas. Of a cluster of equal devices nothing.
    """

    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[Option, ...]
    counts: tuple[int, ...]
    estimate: float
    bound: float
    disaggregated: bool = False
    groups: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(count * option.gpus for count, option in zip(self.counts, self.options))

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(
            Chain(
                count,
                option.tp,
                option.cp,
                option.cuts,
                option.chunks,
                option.recompute,
                {[*option.cuts][-1]: option.ep},
            )
            for count, option in zip(self.counts, self.options)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Chains that run side by side, before or after the language model."""

    options: tuple[Option, ...] = ()
    gpus: int = 0
    slowest: float = 0.0
    fill: float = 0.0
    stages: int = 0

    def beside(self, option: Option) -> _Side:
        return _Side(
            (*self.options, option),
            self.gpus + option.gpus,
            max(self.slowest, option.slowest),
            max(self.fill, option.total),
            max(self.stages, option.stages),
        )


@dataclass(eq=False)
class Space:
    """The candidates of one model on one cluster; options and their joins are computed once."""

    model: ModelSpec
    roles: Roles
    table: OptionTable
    unaware: OptionTable
    cluster: Cluster
    global_batch: int
    chunks: tuple[int, ...] = (1,)
    _sides: dict[tuple[int, tuple[tuple[Option, ...], ...]], list[list[_Side]]] = field(default_factory=dict)
    _heaviest: dict[int, float] = field(default_factory=dict)

    def heaviest(self, samples: int) -> float:
        """The load of the heaviest microbatch of the language model as a multiple of the mean, where so many samples
        each are spread evenly: in the mean global batch."""
        if samples not in self._heaviest:
            name = self.roles.language
            tp, cp = self.table.degrees([name])[0]
            loads = self.table.of_samples(name, tp, cp).reshape(-1, self.global_batch)
            ratios = []
            for batch in loads:
                bins = [0.0] * (self.global_batch // samples)
                for load in sorted(batch.tolist(), reverse=True):
                    heapq.heapreplace(bins, bins[0] + load)
                ratios.append(max(bins) / (sum(bins) / len(bins)) if any(bins) else 1.0)
            self._heaviest[samples] = float(np.mean(ratios))
        return self._heaviest[samples]

    def candidates(self, mode: Mode, replicas: int, microbatch_size: int) -> Iterator[Candidate]:
        """The candidates of `replicas` pipelines, on devices of the same number for each."""
        budget = self.cluster.num_devices // replicas
        table = self.table.shared_by(replicas, budget)
        microbatches = self.global_batch // (replicas * microbatch_size)
        shape = _Shape(self, table, replicas, microbatch_size, microbatches)
        if mode is Mode.MEGATRON:
            yield from shape.megatron(budget)
        elif mode is Mode.ENTRAIN:
            yield from shape.entrain(budget)
        else:
            yield from shape.beside(budget, EncoderPosition.PARALLEL)
            if len(self.roles.encoders) > 1:
                yield from shape.beside(budget, EncoderPosition.COLOCATED)
            if mode is Mode.BEST and self.roles.encoders:
                yield from shape.inside(budget)

    def joined(self, each: Sequence[Sequence[Option]], budget: int) -> list[list[_Side]]:
        """[devices]: the undominated ways to run one option of each list side by side on so many, or on fewer."""
        key = budget, tuple(tuple(options) for options in each)
        if key not in self._sides:
            sides = {0: [_Side()]}
            for options in each:
                sides = _extended(sides, options, budget)
            self._sides[key] = _cumulated(sides, budget)
        return self._sides[key]


def _extended(
    sides: Mapping[int, Sequence[_Side]], options: Sequence[Option], budget: int
) -> dict[int, list[_Side]]:
    """`sides` with one of `options` beside each, on at most `budget` devices; only undominated ones."""
    old = [side for group in sides.values() for side in group]
    gpus = np.add.outer([side.gpus for side in old], [option.gpus for option in options])
    slowest = np.maximum.outer([side.slowest for side in old], [option.slowest for option in options])
    fill = np.maximum.outer([side.fill for side in old], [option.total for option in options])
    found: dict[int, list[_Side]] = defaultdict(list)
    least = np.full(budget + 1, np.inf)
    for flat in np.lexsort((fill.ravel(), slowest.ravel())).tolist():
        row, column = divmod(flat, len(options))
        devices = int(gpus[row, column])
        if devices <= budget and fill[row, column] < least[devices]:
            least[devices] = fill[row, column]
            found[devices].append(old[row].beside(options[column]))
    return found


def _cumulated(sides: Mapping[int, Sequence[_Side]], budget: int) -> list[list[_Side]]:
    """[devices up to `budget`]: of the sides on so many devices or on fewer those that none of these dominates; of
    equal ones that on the most."""
    result: list[list[_Side]] = []
    kept: list[_Side] = []
    for devices in range(budget + 1):
        new = sides.get(devices, ())
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


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """The candidates with some number of pipelines and samples per microbatch."""

    space: Space
    table: OptionTable
    replicas: int
    samples: int
    microbatches: int
    _known: dict[tuple[object, ...], list[Option]] = field(default_factory=dict)
    _sides: dict[tuple[object, ...], tuple[int, list[list[_Side]]]] = field(default_factory=dict)

    def beside(
        self, budget: int, encoders_at: EncoderPosition, allocation: tuple[int, ...] | None = None
    ) -> Iterator[Candidate]:
        """Encoders on devices of their own, on all devices or on fewer; `allocation` fixes those of encoders, language
        model and generators."""
        for after in self._after(budget):
            for language in self._language(budget - after.gpus, after.stages):
                left = budget - after.gpus - language.gpus
                if allocation is not None and (left, language.gpus, after.gpus) != allocation:
                    continue
                behind = language.stages + after.stages
                for before in self._before(encoders_at, budget, behind)[left]:
                    yield self._candidate(encoders_at, before, language, after)

    def inside(self, budget: int) -> Iterator[Candidate]:
        """Encoders on the devices of the language model's first stage."""
        roles = self.space.roles
        for after in self._after(budget):
            for tp, cp in self.table.degrees([*roles.encoders, roles.language]):
                most = len(self.space.model.unit(roles.language).layers)
                for stages in range(1, min(most, (budget - after.gpus) // (tp * cp)) + 1):
                    shape = roles.language, tp, cp, stages, self.samples, self.microbatches, after.stages
                    for ep in self.table.expert_degrees(roles.language, tp, cp):
                        option = self.table.chain(*shape, roles.encoders, ep=ep)
                        if option is not None:
                            yield self._candidate(EncoderPosition.IN_LANGUAGE, _Side(), option, after)

    def megatron(self, budget: int) -> Iterator[Candidate]:
        """One stage for all encoders, one for all generators, the language model's degrees everywhere.

        Cut and estimated as if every layer trained.
        """
        space, roles = self.space, self.space.roles
        ends = [units for units in (roles.encoders, roles.generators) if units]
        for tp, cp in self.table.degrees(roles.units):
            stages = budget // (tp * cp) - len(ends)
            if not 1 <= stages <= len(space.model.unit(roles.language).layers):
                continue
            after = len(ends) - bool(roles.encoders)
            balance = space.unaware.layers(roles.language, tp, cp, self.samples).seconds
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
            before = _Side().beside(sides[0]) if roles.encoders else _Side()
            behind = _Side().beside(sides[-1]) if roles.generators else _Side()
            candidate = self._candidate(EncoderPosition.COLOCATED, before, language, behind)
            yield replace(candidate, estimate=total + (self.microbatches - 1) * slowest)

    def entrain(self, budget: int) -> Iterator[Candidate]:
        """Devices in proportion to mean work among the allocations that exist; then all factors of these."""
        roles = self.space.roles
        encoders_at = EncoderPosition.COLOCATED if len(roles.encoders) > 1 else EncoderPosition.PARALLEL
        if not roles.encoders:
            yield from self.beside(budget, encoders_at)
            return
        sizes = [
            sorted({side.gpus for group in self._before(encoders_at, budget, 1) for side in group}),
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
        """Device seconds of the mean sample in a unit, at the smallest degrees that it has costs for."""
        degrees = self.table.degrees([unit])
        tp, cp = min(degrees, key=lambda degree: (degree[0] * degree[1], degree))
        return float(self.table.layers(unit, tp, cp, 1).seconds.sum()) * tp * cp

    def _chains(self, unit: str, budget: int, behind: int) -> list[Option]:
        """The options of a unit on at most `budget` devices that let `behind` stages follow."""
        key = unit, budget, behind
        if key not in self._known:
            most = len(self.space.model.unit(unit).layers)
            found = [
                self.table.chain(unit, tp, cp, stages, self.samples, self.microbatches, behind, ep=ep)
                for tp, cp in self.table.degrees([unit])
                for ep in self.table.expert_degrees(unit, tp, cp)
                for stages in range(1, min(most, budget // (tp * cp)) + 1)
            ]
            self._known[key] = [option for option in found if option is not None]
        return self._known[key]

    def _language(self, budget: int, behind: int) -> list[Option]:
        """Those of the language model; also with several stages for each group of devices where that can pay."""
        name = self.space.roles.language
        plain = self._chains(name, budget, behind)
        most = len(self.space.model.unit(name).layers)
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

    def _before(self, encoders_at: EncoderPosition, budget: int, behind: int) -> list[list[_Side]]:
        """[devices]: the ways to run the encoders on so many devices or fewer, with `behind` stages behind them."""
        for far in (0, behind):
            key = encoders_at, budget, far
            if key not in self._sides:
                each = self._encoders(encoders_at, budget, far)
                room = min((option.room for options in each for option in options), default=UNLIMITED)
                self._sides[key] = room, self.space.joined(each, budget)
            room, sides = self._sides[key]
            if room >= behind:  # memory makes no difference
                break
        return sides

    def _encoders(self, encoders_at: EncoderPosition, budget: int, behind: int) -> list[list[Option]]:
        """For each chain of encoders the options that let `behind` stages follow."""
        encoders = self.space.roles.encoders
        if encoders_at is not EncoderPosition.COLOCATED:
            return [self._chains(unit, budget, behind) for unit in encoders]
        most = min(len(self.space.model.unit(unit).layers) for unit in encoders)
        options = [
            self.table.colocated(encoders, tp, cp, stages, self.samples, self.microbatches)
            for tp, cp in self.table.degrees(encoders)
            for stages in range(1, min(most, budget // (tp * cp)) + 1)
        ]
        return [[option for option in options if option is not None and option.room >= behind]]

    def _after(self, budget: int) -> list[_Side]:
        chains = [self._chains(unit, budget, 0) for unit in self.space.roles.generators]
        return list(dict.fromkeys(side for group in self.space.joined(chains, budget) for side in group))

    def _candidate(
        self, encoders_at: EncoderPosition, before: _Side, language: Option, after: _Side
    ) -> Candidate:
        options = (*before.options, language, *after.options)
        slowest = max(before.slowest, language.slowest, after.slowest)
        fill = before.fill + language.total + after.fill
        return Candidate(
            encoders_at=encoders_at,
            replicas=self.replicas,
            microbatch_size=self.samples,
            num_microbatches=self.microbatches,
            options=options,
            counts=(self.replicas,) * len(options),
            estimate=self._seconds(fill, slowest, options) + self._sync(options),
            bound=max(self._bound(option, before, language) for option in options),
        )

    def _seconds(self, fill: float, slowest: float, options: Sequence[Option]) -> float:
        """Of a step with these seconds for the first microbatch and for each of the others. The heaviest delays those
        behind it on its way through the stages, by about half in simulations."""
        heavy = (self.space.heaviest(self.samples) - 1.0) / 2 * (fill - slowest)
        rounds = GAPS if any(option.chunks > 1 for option in options) else 1.0
        return rounds * (fill + (self.microbatches - 1) * slowest) + heavy

    def _bound(self, option: Option, before: _Side, language: Option) -> float:
        """Seconds that no schedule of a candidate with this chain beats: each stage's work, after the least that comes
        before its first microbatch and before the least that comes after its last; and the way of the heaviest sample.
        """
        ahead = (
            max((float(one.light.sum()) for one in before.options), default=0.0)
            if option is language
            else 0.0
        )
        busy = self.microbatches * option.work
        if option.chunks == 1:
            busy = busy + np.cumsum(option.light) - option.light
        return max(ahead + float(busy.max()), option.heavy) + self._least_sync(option)

    def _least_sync(self, option: Option) -> float:
        return least_ring_seconds(option, self.replicas, self.space.cluster)

    def _sync(self, options: Sequence[Option]) -> float:
        """Seconds to sum the gradients of the fullest rank on a ring, if its replicas lie side by side."""
        return max(ring_seconds(option, self.replicas, self.space.cluster) for option in options)


def least_ring_seconds(option: Option, replicas: int, cluster: Cluster) -> float:
    """A lower bound of the seconds in which the stage with the least gradients sums them over the replicas, however
    these are spread over nodes."""
    group = replicas * option.cp
    crosses = group * option.tp > cluster.gpus_per_node
    bandwidth = min(cluster.inside.bandwidth, cluster.between.bandwidth if crosses else math.inf)
    return 2 * (group - 1) / group * option.least_gradient_bytes / bandwidth


def ring_seconds(option: Option, replicas: int, cluster: Cluster) -> float:
    """Seconds to sum the gradients of a chain's fullest rank over so many replicas side by side on equal devices."""
    group, bandwidth = replicas * option.cp, cluster.inside.bandwidth
    if group * option.tp > cluster.gpus_per_node:
        near = min(group, max(1, cluster.gpus_per_node // option.tp))
        bandwidth = min(bandwidth, near * cluster.between.bandwidth / cluster.gpus_per_node)
    return 2 * (group - 1) / group * option.gradient_bytes / bandwidth
