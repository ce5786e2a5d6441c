"""Search results: the best plans, a summary of all candidates, and a lower bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.search.finals import Finals, RankedPlan


@dataclass(frozen=True, slots=True)
class SearchedGroup:
    """Numbers of candidates with one encoder position and number of pipelines.
    Of all `candidates`, `simulated` were simulated, of which `overflowed` exceeded memory; `cut` were omitted, or their
    simulation ended, because a bound is above the winner, `left` because others were more promising. bound: the least
    of all; seconds: the fastest that fits, or None; zero: sharding of optimizer state."""

    encoders_at: EncoderPosition
    replicas: int
    candidates: int
    simulated: int
    overflowed: int
    cut: int
    left: int
    bound: float
    seconds: float | None
    zero: Zero = DEFAULT_ZERO


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The best plan and the next ones, fastest first.

    `seconds` is the winner's simulated step. `lower_bound` holds for all plans of equal pipelines in the search space,
    simulated or not; `proven` means that the winner reaches it. `rejected` describes plans that overflowed memory in
    simulation; `groups` summarizes the candidates, fastest first. `by_zero`: the fastest simulated step for each kind
    of optimizer-state sharding that was tried, None if none fits. `wall_seconds`: run time of the search.
    """

    winner: RankedPlan
    runners_up: tuple[RankedPlan, ...]
    rejected: tuple[str, ...]
    candidates: int
    seconds: float
    proven: bool
    lower_bound: float
    wall_seconds: float = field(default=0.0, compare=False)
    groups: tuple[SearchedGroup, ...] = ()
    by_zero: Mapping[Zero, float | None] = field(default_factory=dict)

    @property
    def simulated(self) -> int:
        """Number of simulated candidates, each in one or several rank orders."""
        return sum(group.simulated for group in self.groups)


class NoneFasterError(PlanError):
    """No candidate is faster than the known plan.
    found: the candidates; lower_bound: least bound of those not simulated; groups: as in `SearchResult`."""

    def __init__(self, found: Sequence[PlanCandidate], lower_bound: float, groups: tuple[SearchedGroup, ...]) -> None:
        super().__init__("no plan is faster than the one that is known")
        self.found, self.lower_bound, self.groups = found, lower_bound, groups


def none_faster(found: Sequence[PlanCandidate], finals: Finals, unseen: float, zero: Zero) -> NoneFasterError:
    """Build the error for a search in which no candidate was ranked. unseen: as for `answer_of`."""
    return NoneFasterError(found, unseen, _groups(found, finals, finals.best, zero))


def answer_of(found: Sequence[PlanCandidate], finals: Finals, unseen: float, all_devices: bool) -> SearchResult:
    """Build the result from the simulated ones of `found`. unseen: least bound of the candidates not simulated."""
    ranked = sorted(finals.ranked, key=lambda one: one.score.seconds)
    if all_devices:
        ranked.sort(key=lambda one: one.idle_devices)
    winner = ranked[0]
    return SearchResult(
        winner=winner,
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for _, text in finals.rejected),
        candidates=len(found),
        seconds=winner.score.seconds,
        proven=bool(unseen >= winner.score.seconds),
        lower_bound=min(winner.score.seconds, unseen),
        groups=_groups(found, finals, min(finals.best, winner.score.seconds), winner.zero),
    )


def on_ranks_from(answer: SearchResult, first: int, devices: int) -> SearchResult:
    """Convert the result of one device group, whose ranks begin at `first`, to the ranks of the whole cluster."""

    def there(one: RankedPlan) -> RankedPlan:
        return replace(one, plan=one.plan.shifted(first), idle_devices=devices - len(one.plan.ranks))

    return replace(answer, winner=there(answer.winner), runners_up=tuple(there(one) for one in answer.runners_up))


def best_of(
    answers: Sequence[SearchResult], all_devices: bool = False, others: Sequence[NoneFasterError] = ()
) -> SearchResult:
    """Merge the results of several searches over different plans; of equally fast plans the first wins.
    others: the searches that found nothing faster."""
    ranked = sorted(
        (one for answer in answers for one in (answer.winner, *answer.runners_up)),
        key=lambda one: (one.idle_devices if all_devices else 0, one.score.seconds),
    )
    seconds = ranked[0].score.seconds
    unseen = [answer.lower_bound for answer in answers if not answer.proven]
    unseen += [other.lower_bound for other in others]
    groups = [group for answer in answers for group in answer.groups]
    groups += [group for other in others for group in other.groups]
    return SearchResult(
        winner=ranked[0],
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for answer in answers for text in answer.rejected),
        candidates=sum(answer.candidates for answer in answers) + sum(len(other.found) for other in others),
        seconds=seconds,
        proven=all(bound >= seconds for bound in unseen),
        lower_bound=min([seconds, *unseen]),
        groups=tuple(sorted(groups, key=lambda one: (one.seconds is None, one.seconds or one.bound))),
    )


def _groups(found: Sequence[PlanCandidate], finals: Finals, best: float, zero: Zero) -> tuple[SearchedGroup, ...]:
    by_shape: dict[tuple[EncoderPosition, int], list[PlanCandidate]] = defaultdict(list)
    for one in found:
        by_shape[one.encoders_at, one.replicas].append(one)
    groups = []
    for (encoders_at, replicas), members in by_shape.items():
        slower = {one for one in members if one in finals.slower and math.isinf(finals.seconds.get(one, math.inf))}
        seconds = [finals.seconds[one] for one in members if one in finals.seconds and one not in slower]
        bounds = [one.bound for one in members if one not in finals.seconds and one not in slower]
        hopeless = sum(bound >= best for bound in bounds)
        fastest = min(seconds, default=math.inf)
        groups.append(
            SearchedGroup(
                encoders_at,
                replicas,
                candidates=len(members),
                simulated=len(seconds),
                overflowed=seconds.count(math.inf),
                cut=hopeless + len(slower),
                left=len(bounds) - hopeless,
                bound=min(one.bound for one in members),
                seconds=fastest if math.isfinite(fastest) else None,
                zero=zero,
            )
        )
    return tuple(sorted(groups, key=lambda one: (one.seconds is None, one.seconds or one.bound)))
