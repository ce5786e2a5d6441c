"""The search over who shares optimizer state: one way after the other, each only for what is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from dilatant.cost.memory import Zero
from dilatant.plan.cluster import Cluster
from dilatant.plan.errors import PlanError
from dilatant.plan.finals import RankedPlan
from dilatant.plan.microbatch_counts import MANY
from dilatant.plan.score import PlanScorer
from dilatant.plan.search_result import NoneFasterError, SearchResult, best_of

NO_OTHERS: Mapping[Zero, PlanScorer] = MappingProxyType({})


def search_zeros(
    find: Callable[[Zero, PlanScorer, float], SearchResult],
    searched: Mapping[Zero, PlanScorer],
    glanced: Mapping[Zero, PlanScorer],
    cluster: Cluster,
    all_devices: bool = False,
) -> SearchResult:
    """The best answer of searches in which optimizer state is shared as each key of `searched` says, in this order, and
    then of its plan under every other way, `glanced` too (on many devices under its own schedule); where no search
    finds one, `glanced` are searched.

    find: of such a search, for plans that take less than so many seconds. Of equally fast plans the first found is
    chosen. Raises PlanError of the first search where all find nothing.
    """
    answers: list[SearchResult] = []
    exhausted: list[NoneFasterError] = []
    refused: dict[Zero, PlanError] = {}
    for zero, scorer in {**searched, **glanced}.items():
        if answers and zero not in searched:
            break
        try:
            answers.append(find(zero, scorer, _ceiling(answers, all_devices)))
        except NoneFasterError as none:
            exhausted.append(none)
        except PlanError as error:
            refused[zero] = error
    if not answers:
        raise next(iter(refused.values()))
    best = best_of(answers, all_devices, exhausted)
    if len(searched) + len(glanced) == 1:
        return best
    return _under_each(best, {**searched, **glanced}, cluster)


def _ceiling(answers: list[SearchResult], all_devices: bool) -> float:
    """Seconds that a plan must take less than to be chosen: of plans on more devices nothing is asked where all devices
    are to be used."""
    return min(
        (one.seconds for one in answers if not (all_devices and one.winner.idle_devices)), default=math.inf
    )


def _under_each(best: SearchResult, scorers: Mapping[Zero, PlanScorer], cluster: Cluster) -> SearchResult:
    """The answer with its plan simulated wherever state is shared otherwise, and that way chosen where it is faster."""
    winner = best.winner
    ranked = [winner, *best.runners_up]
    for zero, scorer in scorers.items():
        known = {(one.plan, one.num_microbatches, one.row_tokens) for one in ranked if one.zero == zero}
        if (winner.plan, winner.num_microbatches, winner.row_tokens) in known:
            continue
        other = _scored(winner, zero, scorer, cluster)
        if other is not None:
            ranked.append(other)
    faster = [one for one in ranked if one.plan == winner.plan and one.score.seconds < best.seconds]
    chosen = min(faster, key=lambda one: one.score.seconds, default=winner)
    others = sorted((one for one in ranked if one is not chosen), key=lambda one: one.score.seconds)
    by_zero = {
        zero: min((one.score.seconds for one in ranked if one.zero == zero), default=None) for zero in scorers
    }
    seconds = chosen.score.seconds
    return replace(
        best,
        winner=chosen,
        runners_up=tuple(others),
        seconds=seconds,
        lower_bound=min(best.lower_bound, seconds),
        by_zero=by_zero,
    )


def _scored(one: RankedPlan, zero: Zero, scorer: PlanScorer, cluster: Cluster) -> RankedPlan | None:
    """The plan where state is shared so; None where it does not fit."""
    schedule = [one.score.schedule] if cluster.num_devices > MANY and one.score.schedule else []
    score = scorer(one.plan, one.num_microbatches, one.row_tokens, *schedule)
    if cluster.overflow(one.plan.ranks, score.peak_bytes) > 0.0:
        return None
    return replace(one, score=score, zero=zero)
