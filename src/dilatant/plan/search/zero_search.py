"""Search over the sharding of optimizer state (ZeRO): one kind after the other, each only for faster plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dilatant.cost.memory import Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScorer
from dilatant.plan.errors import PlanError
from dilatant.plan.limits import HOPELESS_FACTOR, LARGE_CLUSTER
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.search_result import NoneFasterError, SearchResult, best_of

NO_OTHERS: Mapping[Zero, PlanScorer] = MappingProxyType({})


def search_zeros(
    find: Callable[[Zero, PlanScorer, float], SearchResult],
    searched: Mapping[Zero, PlanScorer],
    rescored: Mapping[Zero, PlanScorer],
    cluster: Cluster,
    all_devices: bool = False,
) -> SearchResult:
    """Search every kind of optimizer-state sharding in `searched`, in this order, and return the best result.

    The best plan of each search is also simulated under every later kind, including `rescored` (on many devices under
    its own schedule), and the overall best under all kinds. `rescored` is searched only if no search finds a plan.
    find(zero, scorer, seconds): search one kind for plans below `seconds`. Of equally fast plans the first is chosen.
    Raises the first search's PlanError if all find nothing.
    """
    scorers = {**searched, **rescored}
    answers: list[SearchResult] = []
    exhausted: list[NoneFasterError] = []
    refused: dict[Zero, PlanError] = {}
    later = dict(scorers)
    for zero, scorer in scorers.items():
        del later[zero]
        if answers and zero not in searched:
            break
        try:
            answer = find(zero, scorer, _ceiling(answers, all_devices))
            tried = [answer.winner, *_of_groups(answer, cluster)]
            answers.append(_under_each(answer, tried, later, cluster, all_devices))
        except NoneFasterError as none:
            exhausted.append(none)
        except PlanError as error:
            refused[zero] = error
    if not answers:
        raise next(iter(refused.values()))
    best = best_of(answers, all_devices, exhausted)
    if len(scorers) == 1:
        return best
    known = [one.zero for one in (best.winner, *best.runners_up) if _is_same(one, best.winner)]
    earlier = itertools.takewhile(lambda zero: zero != best.winner.zero, scorers)
    untried = {zero: scorers[zero] for zero in earlier if zero not in known}
    best = _under_each(best, [best.winner], untried, cluster, all_devices)
    steps = [(one.zero, one.score.seconds) for one in (best.winner, *best.runners_up)]
    return replace(
        best, by_zero={zero: min((s for own, s in steps if own == zero), default=None) for zero in scorers}
    )


def _ceiling(answers: list[SearchResult], all_devices: bool) -> float:
    """Return the seconds a plan must beat; with `all_devices`, plans that leave devices idle set no limit."""
    return min(
        (one.seconds for one in answers if not (all_devices and one.winner.idle_devices)), default=math.inf
    )


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
    return (one.plan, one.num_microbatches, one.row_tokens) == (
        other.plan,
        other.num_microbatches,
        other.row_tokens,
    )


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
    schedule = [one.score.schedule] if cluster.num_devices > LARGE_CLUSTER and one.score.schedule else []
    score = scorer(one.plan, one.num_microbatches, one.row_tokens, *schedule)
    if cluster.overflow(one.plan.ranks, score.peak_bytes) > 0.0:
        return None
    return replace(one, score=score, zero=zero)
