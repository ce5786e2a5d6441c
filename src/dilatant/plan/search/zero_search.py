"""The search over who shares optimizer state: one way after the other, each only for what is faster."""

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
from dilatant.plan.layouts.microbatch_counts import MANY
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.search_result import NoneFasterError, SearchResult, best_of

FAR = 2.0
"""Plans that take so many times as long as the best are not faster than it whoever shares state."""
NO_OTHERS: Mapping[Zero, PlanScorer] = MappingProxyType({})


def search_zeros(
    find: Callable[[Zero, PlanScorer, float], SearchResult],
    searched: Mapping[Zero, PlanScorer],
    glanced: Mapping[Zero, PlanScorer],
    cluster: Cluster,
    all_devices: bool = False,
) -> SearchResult:
    """The best answer of searches in which optimizer state is shared as each key of `searched` says, in this order, the
    plan of each of which is simulated under every way that comes later, `glanced` too (on many devices under its own
    schedule), and the best under all; where no search finds one, `glanced` are searched.

    find: of such a search, for plans that take less than so many seconds. Of equally fast plans the first found is
    chosen. Raises PlanError of the first search where all find nothing.
    """
    scorers = {**searched, **glanced}
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
    """Seconds that a plan must take less than to be chosen: of plans on more devices nothing is asked where all devices
    are to be used."""
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
    """The answer with these of its plans simulated where state is shared otherwise, too."""
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
    """But for who shares state."""
    return (one.plan, one.num_microbatches, one.row_tokens) == (
        other.plan,
        other.num_microbatches,
        other.row_tokens,
    )


def _of_groups(answer: SearchResult, cluster: Cluster) -> list[RankedPlan]:
    """Of each group of unlike devices the fastest plan that takes no others, where it is not the best and may become
    so: the group alone then has no faster one."""
    found: dict[int, RankedPlan] = {}
    for one in (answer.winner, *answer.runners_up) if cluster.parts else ():
        groups = {cluster.group_of(rank) for rank in one.plan.ranks}
        if len(groups) == 1 and one.score.seconds < FAR * answer.seconds:
            found.setdefault(groups.pop(), one)
    return [one for one in found.values() if one is not answer.winner]


def _scored(one: RankedPlan, zero: Zero, scorer: PlanScorer, cluster: Cluster) -> RankedPlan | None:
    """The plan where state is shared so; None where it does not fit."""
    schedule = [one.score.schedule] if cluster.num_devices > MANY and one.score.schedule else []
    score = scorer(one.plan, one.num_microbatches, one.row_tokens, *schedule)
    if cluster.overflow(one.plan.ranks, score.peak_bytes) > 0.0:
        return None
    return replace(one, score=score, zero=zero)
