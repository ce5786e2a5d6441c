"""Simulation of candidates as plans, in several rank orders, with more recomputation where they overflow memory,
and with one more pipeline on idle devices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from dilatant.config.errors import UserError
from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScore, PlanScorer
from dilatant.plan.costs.sync_time import sync_seconds
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import Option, PlanCandidate
from dilatant.plan.layouts.option_table import ChainRequest
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import (
    CLOSE,
    HOPELESS_FACTOR,
    LARGE_CLUSTER,
    MAX_EXTENDED_CANDIDATES,
    MOST_CAREFUL,
    MOVED_CUTS,
    SMALL_CLUSTER,
)
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.plan import Plan, Replica
from dilatant.plan.rank_mapping import RankOrder, map_ranks, replicas_of
from dilatant.plan.search.refusals import rejection
from dilatant.plan.search.repairs import Repair, recomputing
from dilatant.plan.templates.copies import copies_on_nodes


@dataclass(frozen=True, slots=True, eq=False)
class RankedPlan:
    """A plan with its simulated score. `replicas`: equal pipelines, which `extra` others join on devices that these
    leave idle; `microbatch_size` is theirs alone; `bound`, `row_tokens`: as in `PlanCandidate`; `zero`: sharding of
    optimizer state."""

    plan: Plan
    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    idle_devices: int
    bound: float
    score: PlanScore
    row_tokens: int | None = None
    zero: Zero = DEFAULT_ZERO
    extra: int = 0

    @property
    def microbatches(self) -> tuple[int, int]:
        """Microbatches per pipeline in a simulated step, and mean samples of one.
        There are more and smaller microbatches than requested where a token budget cut them."""
        count = max(self.score.num_microbatches, self.num_microbatches)
        share = self.replicas / (self.replicas + self.extra)
        return count, max(1, round(share * self.microbatch_size * self.num_microbatches / count))


class Finals:
    """Simulated candidates: `ranked` has the plans that fit memory, `rejected` the overflows in bytes with their text.
    skipped: least bound of the candidates not simulated because one of their options had overflowed. seconds: candidate
    → simulated step, infinite if no plan of it fits. slower: candidates with a plan that is not in `ranked`, since it
    surely takes longer than the best, or would if it recomputed enough. ceiling: seconds of an already known plan."""

    def __init__(self, space: Space, scorer: PlanScorer, ceiling: float = math.inf) -> None:
        self._ceiling = ceiling
        self._space, self._rules, self._scorer = space, space.table.units.rules, scorer
        self._layers = {unit.name: len(unit.layers) for unit in space.model.units}
        self._feeds = {unit.name: unit.feeds for unit in space.model.units}
        self._overflowing: set[tuple[Option, int, int]] = set()  # (option, pipelines, microbatches): not tried again
        self._seen: dict[tuple[Plan, int, int | None], PlanCandidate] = {}
        self._found: list[tuple[RankedPlan, PlanCandidate]] = []
        self.rejected: list[tuple[float, str]] = []
        self.seconds: dict[PlanCandidate, float] = {}
        self.skipped = math.inf
        self.slower: set[PlanCandidate] = set()

    @property
    def ranked(self) -> list[RankedPlan]:
        return [one for one, _ in self._found]

    @property
    def best(self) -> float:
        """Seconds of the fastest known plan."""
        return min([self._ceiling, *(one.score.seconds for one in self.ranked)])

    def simulate(self, candidate: PlanCandidate) -> bool:
        """Simulate the candidate in its most promising rank order, recomputing more if it overflows; True if a plan
        fits, or surely takes so much longer than the best one that it has no place in `ranked`."""
        counts = candidate.replicas, candidate.num_microbatches
        if any((option, *counts) in self._overflowing for option in candidate.options):
            self.skipped = min(self.skipped, candidate.bound)
            return False
        overflow: tuple[Option, float, str] | None = None
        self.seconds.setdefault(candidate, math.inf)
        for plan in sorted(self._plans(candidate), key=self._travel):
            overflow = self._score(candidate, plan)
            if overflow is None:
                return True
        if overflow is not None:  # in every rank order: neighbours may share state
            culprit, excess, text = overflow
            self.rejected.append((excess, text))
            self._overflowing.add((culprit, *counts))
        return False

    def relax(self, most: int) -> None:
        """Choose anew what the best plans recompute, up to `most` of them, by the memory that is left in simulation."""
        again = [
            (one, candidate)
            for one, candidate in self._found
            if one.score.seconds < CLOSE * self.best and one.score.peak_bytes and recomputes(one.plan)
        ]
        for one, candidate in sorted(again, key=lambda found: found[0].score.seconds)[:most]:
            for _ in range(MOST_CAREFUL):  # the estimate of what is in flight leaves memory
                known = len(self._found)
                plan = self._chosen_anew(candidate, one.plan, self._excess(one.plan, one.score))
                if plan is not None:
                    self._score(candidate, plan, one.score.schedule or None)
                if len(self._found) == known or self._found[-1][0].score.seconds >= one.score.seconds:
                    break
                one = self._found[-1][0]

    def reorder(self) -> None:
        """Simulate the two best plans in every other rank order, under the schedule that suited them best."""
        for one, candidate in self._ordered()[:2]:
            if candidate.bound >= self._ceiling:
                continue
            for plan in self._plans(candidate):
                again = {unit.name: unit.recompute for unit in one.plan.units}
                self._score(candidate, recomputing(plan, again), one.score.schedule or None)

    def move_cuts(self, most: int) -> None:
        """Move single layers of the best plans to a neighbouring stage, as long as that makes them faster. At most
        `most` plans are simulated, MOVED_CUTS from one plan, under the schedule that suited it best."""
        shapes: dict[PlanCandidate, RankedPlan] = {}
        for one, candidate in self._ordered():
            if one.score.seconds < CLOSE * self.best:
                shapes.setdefault(candidate, one)
        for candidate, one in shapes.items():
            left, most = min(most, MOVED_CUTS), most - MOVED_CUTS
            while left > 0:
                known, times = len(self._found), one.score.seconds / self.best if self.best else 1.0
                for plan in itertools.islice(moved_cuts(one.plan), left):
                    left -= 1
                    if self._has_copies(plan):
                        self._score(candidate, plan, one.score.schedule or None, most_times=times)
                    faster = [found for found, _ in self._found[known:] if found.score.seconds < one.score.seconds]
                    if faster:
                        one = faster[0]
                        break
                else:
                    break

    def prove(self, found: Sequence[PlanCandidate], most: int) -> float:
        """Simulate up to `most` further candidates, lowest bound first, until none could be fastest.
        Returns the least bound of the candidates that were not simulated."""
        unseen = sorted((one for one in found if one not in self.seconds), key=lambda one: one.bound)
        for one in unseen[:most]:
            if one.bound >= self.best:
                break
            self.simulate(one)
        return min((one.bound for one in unseen if one not in self.seconds), default=math.inf)

    def fill_idle(self, found: Sequence[PlanCandidate], most: int) -> None:
        """Simulate up to `most` plans with one more pipeline on idle devices, most promising candidates first. On many
        devices, under the schedule that suited the candidate best."""
        devices = self._space.cluster.num_devices
        many, times = devices > LARGE_CLUSTER, CLOSE if devices > LARGE_CLUSTER else HOPELESS_FACTOR
        longest = math.inf if devices <= SMALL_CLUSTER else times * self.best
        suited = {one: found.score.schedule for found, one in reversed(self._ordered())} if many else {}
        filled = (
            (candidate, filled)
            for candidate in promising(self._space, found, self.best)
            for plan in sorted(self._plans(candidate), key=self._travel)[:1]
            for filled in with_extra_pipeline(plan, candidate, self._space, longest)
        )
        for candidate, plan in itertools.islice(filled, most):
            self._score(candidate, plan, suited.get(candidate) or None, most_times=1.0)

    def _ordered(self) -> list[tuple[RankedPlan, PlanCandidate]]:
        """Return the plans that fit memory, fastest first."""
        return sorted(self._found, key=lambda found: found[0].score.seconds)

    def _plans(self, candidate: PlanCandidate) -> list[Plan]:
        """Return the plans of every rank order with enough copies; none if tensor groups do not pack into nodes."""
        orders = self._space.settings.orders if self._space.cluster.nodes > 1 else [RankOrder.STAGES]
        found: dict[Plan, None] = {}
        for order in orders:
            with suppress(PlanError):
                shape = candidate.chains, self._layers, self._feeds, self._space.cluster, order
                found[map_ranks(*shape, candidate.groups)] = None
        return [plan for plan in found if self._has_copies(plan)]

    def _has_copies(self, plan: Plan) -> bool:
        """Return True if every layer is on as many nodes as asked for."""
        settings = self._space.settings
        per_node = settings.ranks_per_node or self._space.cluster.gpus_per_node
        return settings.copies == 1 or min(copies_on_nodes(plan, per_node).values()) >= settings.copies

    def _travel(self, plan: Plan) -> float:
        """Return seconds until the last rank has synced its gradients, which differ most between rank orders."""
        cluster = self._space.cluster
        if cluster.nodes == 1:
            return 0.0
        return sync_seconds(plan, self._space.model, cluster, self._rules).longest

    def _score(
        self,
        candidate: PlanCandidate,
        plan: Plan,
        schedule: str | None = None,
        careful: int = MOST_CAREFUL,
        most_times: float = CLOSE,
    ) -> tuple[Option, float, str] | None:
        """Rank the plan and return None (also if seen before, or too slow); if it overflows return the option, the
        bytes and the reason. schedule: the schedule family to simulate; default: the one that suits the plan best.
        careful: how often as few layers as seem to do may recompute more. most_times: plans that surely take longer
        than so many times the best one are too slow."""
        key = plan, candidate.num_microbatches, candidate.row_tokens
        if key in self._seen:  # several candidates, or searches, may find one plan
            first = self._seen[key]
            known = self.seconds.get(first, math.inf)
            self.seconds[candidate] = min(self.seconds.get(candidate, math.inf), known)
            if first in self.slower:
                self.slower.add(candidate)
            return None
        self._seen[key] = candidate
        cluster = self._space.cluster
        best = math.inf if self._space.settings.all_devices else self.best
        score = self._scorer(*key, schedule, most_times * best)
        is_slow = score.least_seconds >= most_times * best
        excess = 0.0 if is_slow else cluster.overflow(plan.ranks, score.peak_bytes)
        # Recomputation only adds to a plan that has none; others may recompute other layers, for less.
        if is_slow or (excess > 0.0 and score.least_seconds >= best and not recomputes(plan)):
            self.slower.add(candidate)
            return None
        if excess > 0.0:
            frugal = self._repaired(candidate, plan, score, careful)
            if frugal is not None:
                return self._score(candidate, frugal, schedule, careful - 1, most_times)
            culprit, text = rejection(plan, candidate, score, cluster, excess)
            return culprit, excess, text
        self._found.append((_ranked(plan, candidate, score, cluster, self._rules.zero), candidate))
        self.seconds[candidate] = min(self.seconds.get(candidate, math.inf), score.seconds)
        return None

    def _repaired(self, candidate: PlanCandidate, plan: Plan, score: PlanScore, careful: int) -> Plan | None:
        """Return the plan with more recomputation on the ranks that overflow, if more is possible."""
        excess = {rank: own for rank, own in self._excess(plan, score).items() if own > 0.0}
        found = self._chosen_anew(candidate, plan, excess) if careful > 0 else None
        return found or self._repair(candidate).next_level(plan, excess)

    def _chosen_anew(self, candidate: PlanCandidate, plan: Plan, excess: Mapping[int, float]) -> Plan | None:
        """Return the plan with the cheapest recomputation that saves so many bytes of each rank, if any does."""
        with suppress(UserError):  # other groups of devices may have degrees without costs here
            return self._repair(candidate).fewest(plan, excess)
        return None

    def _repair(self, candidate: PlanCandidate) -> Repair:
        return Repair(self._space.table.units, self._space.global_batch, candidate.num_microbatches)

    def _excess(self, plan: Plan, score: PlanScore) -> dict[int, float]:
        """Return rank → bytes that it lacks; negative if some are left."""
        more = np.asarray(score.peak_bytes) - self._space.cluster.bytes_of(plan.ranks)
        return dict(zip(plan.ranks, more.tolist(), strict=True))


def in_turns(found: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return the candidates, the first of each number of pipelines and microbatches before the second of any."""
    turns: Counter[tuple[object, ...]] = Counter()
    order = list[tuple[int, int]]()
    for candidate in found:
        key = candidate.counts, candidate.num_microbatches, candidate.row_tokens, candidate.encoders_at
        order.append((turns[key], len(order)))
        turns[key] += 1
    return [found[at] for _, at in sorted(order)]


def _ranked(plan: Plan, candidate: PlanCandidate, score: PlanScore, cluster: Cluster, zero: Zero) -> RankedPlan:
    return RankedPlan(
        plan=plan,
        encoders_at=candidate.encoders_at,
        replicas=candidate.replicas,
        microbatch_size=candidate.microbatch_size,
        num_microbatches=candidate.num_microbatches,
        idle_devices=cluster.num_devices - len(plan.ranks),
        bound=candidate.bound,
        score=score,
        row_tokens=candidate.row_tokens,
        zero=zero,
        extra=int(len(plan.ranks) > candidate.gpus),
    )


def recomputes(plan: Plan) -> bool:
    """Return True if some layer of the plan recomputes."""
    return any({*unit.recompute} - {"none"} for unit in plan.units)


def moved_cuts(plan: Plan) -> Iterator[Plan]:
    """Yield the plans in which one stage of a unit has one layer less and a neighbour one more, in all replicas with
    these cuts."""
    for unit in plan.units:
        for shape in dict.fromkeys(replica.shape for replica in unit.replicas):
            for border, step in itertools.product(range(1, len(shape)), (1, -1)):
                at = shape[border][0] + step
                if not shape[border - 1][0] < at < shape[border][1]:
                    continue
                replicas = []
                for replica in unit.replicas:
                    stages = list(replica.stages)
                    if replica.shape == shape:
                        stages[border - 1] = replace(stages[border - 1], end=at)
                        stages[border] = replace(stages[border], first=at)
                    replicas.append(Replica(tuple(stages)))
                units = {unit.name: replace(unit, replicas=tuple(replicas))}
                yield Plan(tuple(units.get(other.name, other) for other in plan.units))


def promising(space: Space, found: Sequence[PlanCandidate], best: float) -> list[PlanCandidate]:
    """Return, best first, the candidates that could beat `best` seconds if their idle devices shared the work.

    Candidates with unequal numbers of replicas per unit, or with chunks, are excluded.
    """
    devices = space.cluster.num_devices
    with_idle = [
        one for one in found if one.gpus < devices and one.is_uniform and one.estimate * one.gpus / devices < best
    ]
    return sorted(with_idle, key=lambda one: one.estimate * one.gpus)[:MAX_EXTENDED_CANDIDATES]


def with_extra_pipeline(
    plan: Plan, candidate: PlanCandidate, space: Space, most_seconds: float = math.inf
) -> Iterator[Plan]:
    """Yield the plan with one more pipeline on its idle devices, for all degrees that leave less than one group idle.

    The language model has one stage per group of ranks, cut independently, with all encoders in the first. Slower
    pipelines get fewer samples (`schedule.assignment.step_assignment`). Yields nothing for models with generators, nor
    pipelines that need more than `most_seconds` for their devices' share of the samples.
    """
    roles, cluster = space.roles, space.cluster
    if roles.generators:
        return
    idle = sorted({*range(cluster.num_devices)} - {*plan.ranks})
    for degrees in space.table.units.all_degrees([*roles.encoders, roles.language]):
        groups = _groups(idle, degrees.ranks, cluster.gpus_per_node)
        groups = groups[: space.model.unit(roles.language).most_stages]
        share = len(groups) * degrees.ranks / cluster.num_devices
        if not groups or share * space.global_batch < 1:
            continue
        samples = max(1, round(share * space.global_batch / candidate.num_microbatches))
        shape = roles.language, degrees, len(groups), samples, candidate.num_microbatches
        option = space.table.chain(ChainRequest(*shape, roles.encoders), 0)
        more = candidate.num_microbatches - 1
        if option is not None and option.total + more * option.slowest <= most_seconds:
            ranks = {(0, 0, number): group for number, group in enumerate(groups)}
            added = {
                unit.name: replicas_of(unit.name, option.chain, len(unit.layers), 0, ranks)
                for unit in space.model.units
            }
            yield Plan(tuple(replace(unit, replicas=(*unit.replicas, *added[unit.name])) for unit in plan.units))


def _groups(idle: list[int], width: int, per_node: int) -> list[tuple[int, ...]]:
    """Divide the idle ranks into groups of `width`, each on one node."""
    found = []
    for _, ranks in itertools.groupby(sorted(idle), lambda rank: rank // per_node):
        own = list(ranks)
        found += [tuple(own[at : at + width]) for at in range(0, len(own) - width + 1, width)]
    return found
