"""Plan search: find replicas, degrees, stages and placement of every unit; simulation ranks the candidates.

Kinds of optimizer-state sharding (ZeRO) are searched one after the other, each only for faster plans.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from dilatant.cost.memory import Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScorer
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import SearchProblem, SearchSettings, Space, are_few
from dilatant.plan.limits import (
    CLOSE,
    FAR,
    FEWEST,
    HOPELESS_FACTOR,
    LARGE_CLUSTER,
    MAX_EXTENDED_PLANS,
    MAX_MOVED_CUTS,
    MAX_PROOF_CANDIDATES,
    MAX_RELAXED,
    SLOW,
    SLOW_ON_MANY,
    SMALL_CLUSTER,
)
from dilatant.plan.search.enumeration import (
    best_of_fewer,
    enumerate_candidates,
    kinds_of,
    least_seconds,
    spanning_candidates,
)
from dilatant.plan.search.finals import Finals, RankedPlan, in_turns
from dilatant.plan.search.refusals import check_devices, does_not_fit, microbatch_sizes_for, no_plan_fits
from dilatant.plan.search.search_result import (
    NoneFasterError,
    SearchResult,
    answer_of,
    best_of,
    none_faster,
    on_ranks_from,
)
from dilatant.plan.search.shapes import textbook_shapes

Enumerate = Callable[[Space], list[PlanCandidate]]
"""Function that returns the only candidates of a search, lowest estimate first."""
NO_OTHERS: Mapping[Zero, PlanScorer] = MappingProxyType({})


def search(
    problem: SearchProblem,
    scorer: PlanScorer,
    finalists: int = 24,
    others: Mapping[Zero, PlanScorer] = NO_OTHERS,
    rescored: Mapping[Zero, PlanScorer] = NO_OTHERS,
    only: Enumerate | None = None,
) -> SearchResult:
    """Find the plan with the fastest simulated step.

    The search enumerates the number of pipelines, samples per microbatch, tensor and context degrees (those with costs)
    and number of stages of every unit, stages per group of devices, and encoder positions (`EncoderPosition`).
    `SearchSettings` restrict it. only: enumerates other candidates instead, such as those of a published system.
    others: scorers for other kinds of optimizer-state sharding than that of the problem's rules, each searched in full;
    of equally fast plans the first is chosen. rescored: scorers for kinds that only rescore the best plans, and are
    searched only if no other finds a plan that fits.

    Stages are cut aware of freezing, and within memory where the unconstrained cut does not fit; if none fits and the
    model leaves recomputation open, as few layers as possible recompute. Candidates are simulated by `scorer` on the
    problem's samples, lowest estimate first, until `finalists` of them fit memory or no other can be faster; then the
    best are tried in other rank orders. Devices that the fastest plan does not use are reported as idle. This search
    includes Algorithm 1 of Cornstarch (the thesis).

    Raises BatchError (no microbatch size divides the global batch: nearest named), TooFewDevicesError, DoesNotFitError
    (which unit, by how much), UserError for missing costs.
    """
    started = time.perf_counter()
    sizes = microbatch_sizes_for(problem.global_batch, problem.settings.microbatch_sizes)
    problem = replace(problem, settings=replace(problem.settings, microbatch_sizes=sizes))
    spaces = problem.spaces()

    def under(zero: Zero, scorer: PlanScorer, ceiling: float, tries_slow: bool) -> SearchResult:
        run = _Search(problem.settings, scorer, finalists, only, ceiling, tries_slow)
        shared = [space.sharing(zero) for space in spaces]
        if len(shared) == 1:
            return run.on_group(shared[0])[1]
        return run.on_groups(shared, problem.cluster)

    all_scorers = {problem.rules.zero: scorer, **others}
    answer = search_zeros(under, all_scorers, rescored, problem.cluster, problem.settings.all_devices)
    return replace(answer, wall_seconds=time.perf_counter() - started)


class SlowLeftError(PlanError):
    """No plan near the best estimate fits memory; slower ones were not tried."""


@dataclass(frozen=True, slots=True)
class _Search:
    """A search under one kind of optimizer-state sharding; `settings`, `scorer`, `finalists` and `only` as in `search`.
    ceiling: seconds of a known plan; only faster ones are accepted. tries_slow: where no plan near the best
    estimate fits memory, all others are simulated."""

    settings: SearchSettings
    scorer: PlanScorer
    finalists: int
    only: Enumerate | None
    ceiling: float
    tries_slow: bool = True

    @property
    def knows(self) -> bool:
        """True if a plan is already known."""
        return math.isfinite(self.ceiling)

    def finalists_on(self, devices: int) -> int:
        """Return how many candidates to simulate: fewer on many devices, where a simulation takes longer, and only a
        few for plans that must beat a known one."""
        if self.knows and devices > SMALL_CLUSTER:
            return min(self.finalists, FEWEST)
        return min(self.finalists, max(FEWEST, self.finalists * LARGE_CLUSTER // devices))

    def on_group(self, space: Space, ceiling: float = math.inf) -> tuple[list[PlanCandidate], SearchResult]:
        """Search equal devices: return the candidates, except surely slow ones, and the best plan.
        Only the most promising candidates are simulated if none can be faster than `ceiling` seconds. Raises PlanError;
        NoneFasterError if nothing beats `self.ceiling`."""
        may_omit = self.only is None and self.settings.copies == 1 and not self.settings.all_devices
        most_times = math.inf
        if may_omit and space.cluster.num_devices > SMALL_CLUSTER:
            try:
                many = space.cluster.num_devices > LARGE_CLUSTER
                found, answer = self._within(SLOW_ON_MANY if many else SLOW, space, ceiling)
                best = min(ceiling, self.ceiling, answer.seconds)
                if many or best < SLOW * found[0].estimate:
                    return found, answer
                most_times = SLOW * best / found[0].estimate
            except NoneFasterError:
                raise
            except PlanError as error:
                if not self.tries_slow:  # perhaps only slow ones fit
                    raise SlowLeftError("no plan near the best estimate fits memory") from error
        return self._within(most_times, space, ceiling)

    def _within(self, most_times: float, space: Space, ceiling: float) -> tuple[list[PlanCandidate], SearchResult]:
        """Search as `on_group` does, among candidates within `most_times` the best estimate."""
        settings, devices, omits = self.settings, space.cluster.num_devices, most_times < math.inf
        check_devices(space)
        if self.only is None:
            found = enumerate_candidates(space, CLOSE * self.ceiling if omits else math.inf, most_times)
        else:
            found = self.only(space)
        if not found and not self.knows:
            raise does_not_fit(space, settings.microbatch_sizes[0])
        found = [candidate for candidate in found if min(candidate.counts) >= settings.copies]
        finals = Finals(space, self.scorer, min(ceiling, self.ceiling))
        most = most_times * found[0].estimate if found and omits else math.inf
        least = min(most, space.omitted) if omits else math.inf
        unseen = min(least, self._simulate(finals, found, devices))
        self._simulate_kinds(finals, found, space, ceiling)
        if self.only is None:
            self._simulate_textbook(finals, space, most)
        if self.only is None and devices <= LARGE_CLUSTER:
            proofs = MAX_PROOF_CANDIDATES * SMALL_CLUSTER // max(SMALL_CLUSTER, devices)
            unseen = min(least, finals.prove(found, proofs))
        if not finals.ranked:
            raise self._refusal(found, finals, min(finals.skipped, unseen), space)
        share = SMALL_CLUSTER / max(SMALL_CLUSTER, devices)
        finals.relax(int(MAX_RELAXED * share))
        finals.reorder()
        if self.only is None:
            finals.move_cuts(int(MAX_MOVED_CUTS * share))
        if settings.fills_idle:
            finals.fill_idle(found, max(FEWEST, int(MAX_EXTENDED_PLANS * share)))
        looked_at = list(dict.fromkeys([*found, *finals.seconds]))  # includes all that were simulated
        return found, answer_of(looked_at, finals, min(finals.skipped, unseen), settings.all_devices)

    def _simulate(self, finals: Finals, found: Sequence[PlanCandidate], devices: int) -> float:
        """Simulate in this order until enough finalists fit memory or no other can be faster; return the least bound of
        the rest. Where a plan is already known, there may be no simulation at all. On many devices, where there are few
        finalists, the best of each number of pipelines come before others, which differ from these by a stage."""
        if devices > LARGE_CLUSTER:
            found = in_turns(found)
        reversed_bounds = [candidate.bound for candidate in reversed(found)]
        remaining_bound = np.minimum.accumulate(reversed_bounds)[::-1].tolist()
        finalists, done = self.finalists_on(devices), 0
        for candidate in found:
            if (self.knows or finals.ranked) and (
                len(finals.ranked) + len(finals.slower) >= finalists or remaining_bound[done] >= finals.best
            ):
                break
            done += 1
            finals.simulate(candidate)
        return float(remaining_bound[done]) if done < len(found) else math.inf

    def _simulate_kinds(self, finals: Finals, found: Sequence[PlanCandidate], space: Space, ceiling: float) -> None:
        """Simulate what a search on fewer devices would simulate, and the most promising candidates of each kind."""
        devices, simulated = space.cluster.num_devices, len(finals.seconds)
        for fewer in best_of_fewer(found) if devices <= LARGE_CLUSTER else ():
            if len(finals.seconds) >= simulated + self.finalists_on(devices):
                break
            if fewer not in finals.seconds and fewer.bound < finals.best:
                finals.simulate(fewer)
        least = least_seconds([space]) if ceiling < math.inf else 0.0
        every_kind = devices <= SMALL_CLUSTER or (not self.knows and least < ceiling)
        for kind in kinds_of(found) if self.only is None and every_kind else ():
            for one in kind[:FEWEST]:
                if one.bound < min(ceiling, self.ceiling) and finals.simulate(one):
                    break
            for one in best_of_fewer(kind) if devices <= LARGE_CLUSTER else ():
                if one not in finals.seconds and one.bound < finals.best:
                    finals.simulate(one)
                    break

    def _simulate_textbook(self, finals: Finals, space: Space, most: float) -> None:
        """Simulate the layouts that people choose without a search, unless their bounds or estimates are hopeless
        beside the best plan or, where none is known, beside `most` seconds."""
        devices = space.cluster.num_devices
        for one in sorted(textbook_shapes(space), key=lambda one: one.estimate):
            best = finals.best if math.isfinite(finals.best) else most
            times = HOPELESS_FACTOR if devices <= SMALL_CLUSTER else SLOW if devices <= LARGE_CLUSTER else SLOW_ON_MANY
            hopeless = one.bound >= best or one.estimate >= times * best
            if one.replicas >= self.settings.copies and not hopeless:
                finals.simulate(one)

    def _refusal(self, found: Sequence[PlanCandidate], finals: Finals, unseen: float, space: Space) -> PlanError:
        """Return the error for a search in which no plan fits memory. unseen: least bound of the others."""
        copies, cluster = self.settings.copies, space.cluster
        if self.knows or finals.slower:
            return none_faster(found, finals, unseen, space.table.units.rules.zero)
        if copies > 1 and not finals.rejected:
            per_node = self.settings.ranks_per_node or cluster.gpus_per_node
            nodes = cluster.num_devices // per_node
            return PlanError(
                f"no plan has every layer on {copies} nodes, of which there are {nodes} with {per_node} devices each; "
                "add nodes, or ask for fewer copies"
            )
        return no_plan_fits(finals.rejected, space)

    def on_groups(self, spaces: Sequence[Space], cluster: Cluster) -> SearchResult:
        """Return the best plan over groups of different devices: on one of them, searched alone, or across groups.
        Searches of given candidates stay on single groups, as do searches on many devices that must beat a known
        plan."""
        if self.settings.copies > 1:
            raise PlanError("plans over groups of unlike devices are not made for nodes that may be lost")
        answers: list[SearchResult] = []
        refused: list[PlanError] = []
        candidates: list[list[PlanCandidate]] = [[] for _ in spaces]
        crosses = self.only is None and not (self.knows and cluster.num_devices > LARGE_CLUSTER)
        # The fastest group comes first: its result reduces the simulations of slower groups.
        for group in sorted(range(len(spaces)), key=lambda group: least_seconds(spaces[group : group + 1])):
            space, first = spaces[group], cluster.firsts[group]
            ceiling = min((answer.seconds for answer in answers), default=math.inf)
            skips = not (crosses or self.settings.all_devices)
            if skips and least_seconds([space]) >= min(ceiling, self.ceiling):
                continue
            try:
                alone = replace(self, scorer=_from_rank(self.scorer, first), tries_slow=True)
                candidates[group], answer = alone.on_group(space, ceiling)
                answers.append(on_ranks_from(answer, first, cluster.num_devices))
            except NoneFasterError as none:
                candidates[group] = list(none.found)
            except PlanError as error:
                refused.append(error)
        both: list[PlanCandidate] = []
        best = min([self.ceiling, *(answer.seconds for answer in answers)])
        least = least_seconds(spaces) if self.only is None else math.inf
        if crosses:
            close, most = (math.inf, math.inf) if are_few(spaces) else (CLOSE * best, FAR * best)
            both = [one for one in spanning_candidates(spaces, candidates, most) if one.estimate <= close]
        finals = Finals(replace(spaces[0], cluster=cluster), self.scorer, best)
        unseen = self._simulate(finals, both, cluster.num_devices)
        if finals.ranked:
            finals.relax(FEWEST)
            finals.reorder()
            unseen = min(finals.skipped, unseen)
            answers.append(answer_of(both, finals, unseen, self.settings.all_devices))
        if not answers and self.knows:
            zero = spaces[0].table.units.rules.zero
            raise none_faster([*itertools.chain(*candidates), *both], finals, least, zero)
        if not answers:
            raise refused[0]
        found = best_of(answers, self.settings.all_devices)
        # Not every combination across groups was enumerated.
        bound = min(found.lower_bound, least)
        return replace(found, lower_bound=bound, proven=found.proven and least >= found.seconds)


def _from_rank(scorer: PlanScorer, first: int) -> PlanScorer:
    """Return a scorer of plans of one group, whose ranks count from 0."""
    return lambda plan, *how: scorer(plan.shifted(first), *how)


def search_zeros(
    find: Callable[[Zero, PlanScorer, float, bool], SearchResult],
    searched: Mapping[Zero, PlanScorer],
    rescored: Mapping[Zero, PlanScorer],
    cluster: Cluster,
    all_devices: bool = False,
) -> SearchResult:
    """Search every kind of optimizer-state sharding in `searched`, in this order, and return the best result.

    The best plan of each search is also simulated under every later kind, including `rescored` (on many devices under
    its own schedule), and the overall best under all kinds. `rescored` is searched only if no search finds a plan.
    find(zero, scorer, seconds, tries_slow): search one kind for plans below `seconds`; without `tries_slow` it may
    raise SlowLeftError and is called again, after the others. Of equally fast plans the first is chosen. Raises the
    first search's PlanError if all find nothing.
    """
    scorers = {**searched, **rescored}
    answers: list[SearchResult] = []
    exhausted: list[NoneFasterError] = []
    refused: dict[Zero, PlanError] = {}
    waiting, left = list(scorers), set[Zero]()
    while waiting:
        zero = waiting.pop(0)
        if answers and zero not in searched:
            continue
        later = {other: scorers[other] for other in waiting if other not in left}
        try:
            answer = find(zero, scorers[zero], _ceiling(answers, all_devices), zero in left)
            tried = [answer.winner, *_of_groups(answer, cluster)]
            answers.append(_under_each(answer, tried, later, cluster, all_devices))
        except NoneFasterError as none:
            exhausted.append(none)
        except SlowLeftError:
            left.add(zero)
            waiting.append(zero)  # with a known plan, few remain
        except PlanError as error:
            refused[zero] = error
    if not answers:
        raise next(refused[zero] for zero in scorers if zero in refused)
    best = best_of(answers, all_devices, exhausted)
    if len(scorers) == 1:
        return best
    known = [one.zero for one in (best.winner, *best.runners_up) if _is_same(one, best.winner)]
    earlier = itertools.takewhile(lambda zero: zero != best.winner.zero, scorers)
    untried = {zero: scorers[zero] for zero in earlier if zero not in known}
    best = _under_each(best, [best.winner], untried, cluster, all_devices)
    steps = [(one.zero, one.score.seconds) for one in (best.winner, *best.runners_up)]
    return replace(best, by_zero={zero: min((s for own, s in steps if own == zero), default=None) for zero in scorers})


def _ceiling(answers: list[SearchResult], all_devices: bool) -> float:
    """Return the seconds a plan must beat; with `all_devices`, plans that leave devices idle set no limit."""
    return min((one.seconds for one in answers if not (all_devices and one.winner.idle_devices)), default=math.inf)


def _under_each(
    answer: SearchResult,
    tried: Sequence[RankedPlan],
    scorers: Mapping[Zero, PlanScorer],
    cluster: Cluster,
    all_devices: bool,
) -> SearchResult:
    """Return the result extended by simulations of the plans in `tried` under other shardings of optimizer state."""
    ranked = [answer.winner, *answer.runners_up]
    for zero, scorer in scorers.items():
        others = (_scored(one, zero, scorer, cluster) for one in tried)
        ranked += [other for other in others if other is not None]
    ranked.sort(key=lambda one: (one.idle_devices if all_devices else 0, one.score.seconds))
    seconds = ranked[0].score.seconds
    return replace(
        answer,
        winner=ranked[0],
        runners_up=tuple(ranked[1:]),
        seconds=seconds,
        lower_bound=min(answer.lower_bound, seconds),
    )


def _is_same(one: RankedPlan, other: RankedPlan) -> bool:
    """Return True if the plans differ at most in the sharding of optimizer state."""
    return (one.plan, one.num_microbatches, one.row_tokens) == (other.plan, other.num_microbatches, other.row_tokens)


def _of_groups(answer: SearchResult, cluster: Cluster) -> list[RankedPlan]:
    """Return each device group's fastest plan on that group alone, if it is not the winner but may become it.
    A search of that group alone found nothing faster."""
    found: dict[int, RankedPlan] = {}
    for one in (answer.winner, *answer.runners_up) if cluster.parts else ():
        groups = {cluster.group_of(rank) for rank in one.plan.ranks}
        if len(groups) == 1 and one.score.seconds < HOPELESS_FACTOR * answer.seconds:
            found.setdefault(groups.pop(), one)
    return [one for one in found.values() if one is not answer.winner]


def _scored(one: RankedPlan, zero: Zero, scorer: PlanScorer, cluster: Cluster) -> RankedPlan | None:
    """Return the plan scored under this sharding of optimizer state; None if it does not fit."""
    schedule = (one.score.schedule or None) if cluster.num_devices > LARGE_CLUSTER else None
    score = scorer(one.plan, one.num_microbatches, one.row_tokens, schedule)
    if cluster.overflow(one.plan.ranks, score.peak_bytes) > 0.0:
        return None
    return replace(one, score=score, zero=zero)
