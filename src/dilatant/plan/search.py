"""The search for a plan: replicas, degrees, stages and placement of every unit, ranked by simulation."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.across_groups import in_group, mixed_candidates, placed_candidates
from dilatant.plan.answer import Answer
from dilatant.plan.candidates import Candidate
from dilatant.plan.cluster import Cluster
from dilatant.plan.disaggregated import disaggregated
from dilatant.plan.errors import PlanError
from dilatant.plan.finals import Finals, RankedPlan
from dilatant.plan.group_bound import least_seconds
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.modes import EncoderPosition, Mode
from dilatant.plan.options import OptionTable
from dilatant.plan.refusals import (
    check_devices,
    does_not_fit,
    microbatch_sizes_for,
    nothing_survived,
)
from dilatant.plan.roles import roles_of
from dilatant.plan.score import PlanScorer
from dilatant.plan.shapes import shapes
from dilatant.plan.space import Space
from dilatant.plan.unit_layers import UnitLayers
from dilatant.plan.workload import Workload

MANY, FEWEST = 128, 6
"""On more devices than this fewer plans are simulated than were asked for, but not fewer than these."""
LEFTOVERS = 40
"""Plans with one more pipeline on idle devices that are simulated at most; on many devices fewer, as above."""
CLOSE, FAR = 1.25, 2.0
"""Candidates across groups that promise to take so many times as long as the best on one group are not simulated, and
not looked for."""


@dataclass(frozen=True, slots=True)
class SearchedGroup:
    """The candidates with so many pipelines and encoders there: how many there are, and of them how many were
    `simulated`, of which so many `overflowed` memory; the rest were left out because their bound is above the winner
    (`cut`), or because others promised more (`left`). bound: the least of all, `seconds` of the fastest that was
    simulated and fits, None where none does."""

    encoders_at: EncoderPosition
    replicas: int
    candidates: int
    simulated: int
    overflowed: int
    cut: int
    left: int
    bound: float
    seconds: float | None


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult(Answer):
    """The best plan and the next ones, fastest first.

    `seconds` is the winner's simulated step. `lower_bound` is one that no plan of equal pipelines in the searched space
    beats, simulated or not; `proven` says that the winner reaches the least any of these could. `rejected` names plans
    that overflowed memory in simulation; `groups` say what was looked at, the fastest first.
    """

    winner: RankedPlan
    runners_up: tuple[RankedPlan, ...]
    rejected: tuple[str, ...]
    candidates: int
    mode: Mode
    seconds: float
    proven: bool
    lower_bound: float
    wall_seconds: float = field(default=0.0, compare=False)
    groups: tuple[SearchedGroup, ...] = ()


def search(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    workload: Workload,
    global_batch: int,
    scorer: PlanScorer,
    mode: Mode = Mode.BEST,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    rules: ParameterBytes = BF16,
    finalists: int = 24,
    num_microbatches: int | None = None,
    chunks: Sequence[int] = (1,),
    all_devices: bool = False,
    copies: int = 1,
    ranks_per_node: int | None = None,
    halves: bool = False,
    leftovers: bool = False,
) -> SearchResult:
    """The plan with the fastest simulated step.

    Enumerated: the number of pipelines, samples per microbatch, for every unit tensor and context degree (those with
    costs) and number of stages, of which a group of devices has any of `chunks` (the language model's), and where
    encoders run (`EncoderPosition`); `mode` restricts this to what a published system would consider,
    `num_microbatches` to plans with that many, `all_devices` to those on the largest number of devices that any uses,
    `copies` to those with every layer on so many nodes of `ranks_per_node` devices (default: those of the cluster).
    halves: `scorer` may split backwards (zero-bubble schedules), so bounds count on less.
    leftovers: devices that promising plans leave idle may form one more pipeline, unlike the others and with fewer of
    the samples; of these plans bounds say nothing.
    Stages are cut aware of freezing, and under memory where the free cut does not fit; where none fits, as few layers
    as can be are recomputed, if the model leaves that open. In the order of their closed-form estimate, candidates
    become plans and are simulated by `scorer` on the samples of `workload`, until `finalists` of them fitted memory or
    no other can be faster; then the best in other orders of ranks. Devices that the fastest plan does not use are
    reported as idle.

    Subsumes Cornstarch's Alg. 1 and Entrain's Alg. 3 (reference planning.md 2e, 2f, C8, E12, E13).

    Raises BatchError (the global batch divides into no microbatch size: nearest named), TooFewDevicesError,
    DoesNotFitError (which unit, by how much), UserError for missing costs.
    """
    started = time.perf_counter()
    sizes = microbatch_sizes_for(global_batch, microbatch_sizes)
    how = _How(
        mode, sizes, rules, finalists, num_microbatches, all_devices, copies, ranks_per_node, leftovers
    )
    spaces = [
        open_space(model, costs.on(group.name), group, workload, global_batch, rules, chunks, halves)
        for group in cluster.groups
    ]
    if len(spaces) == 1:
        _, answer = _search_group(spaces[0], scorer, how)
    else:
        answer = _search_groups(spaces, cluster, scorer, how)
    return replace(answer, wall_seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _How:
    """How to search, as the arguments of `search` of these names."""

    mode: Mode
    sizes: Sequence[int]
    rules: ParameterBytes
    finalists: int
    num_microbatches: int | None
    all_devices: bool
    copies: int
    ranks_per_node: int | None
    leftovers: bool

    def finalists_on(self, devices: int) -> int:
        """Steps on many devices take longer to simulate, and all of their candidates together are to take seconds."""
        return min(self.finalists, max(FEWEST, self.finalists * MANY // devices))


def _search_group(
    space: Space, scorer: PlanScorer, how: _How, ceiling: float = math.inf
) -> tuple[list[Candidate], SearchResult]:
    """All candidates on equal devices, and the best of them; of those that cannot be faster than `ceiling` seconds, no
    more than the first. Raises PlanError."""
    cluster, mode, copies = space.cluster, how.mode, how.copies
    asked = how.sizes, how.num_microbatches, how.all_devices
    check_devices(space.table, space.roles, cluster, mode)
    found = enumerate_candidates(space, mode, *asked)
    if not found:
        raise does_not_fit(space, mode, how.sizes[0])
    found = [candidate for candidate in found if min(candidate.counts) >= copies]
    per_node = how.ranks_per_node or cluster.gpus_per_node
    finals = Finals(space, how.rules, scorer, copies, per_node, ceiling)
    finalists = how.finalists_on(cluster.num_devices)
    unseen = _simulate(finals, found, finalists)
    simulated = len(finals.seconds)
    for fewer in _best_of_fewer(found) if cluster.num_devices <= MANY else ():
        if len(finals.seconds) >= simulated + finalists:
            break
        if fewer not in finals.seconds and fewer.bound < finals.best:
            finals.simulate(fewer)
    for own in _of_modes(space, found, mode, *asked):
        for one in own[:FEWEST]:
            if one.bound < ceiling and finals.simulate(one):
                break
    if not finals.ranked and copies > 1 and not finals.rejected:
        nodes = cluster.num_devices // per_node
        raise PlanError(
            f"no plan has every layer on {copies} nodes, of which there are {nodes} with {per_node} devices each; add "
            "nodes, or ask for fewer copies"
        )
    if not finals.ranked:
        raise nothing_survived(finals.rejected, cluster)
    finals.reorder()
    if how.leftovers:
        finals.fill_idle(found, max(FEWEST, LEFTOVERS * MANY // max(MANY, cluster.num_devices)))
    return found, _answer(found, finals, min(finals.skipped, unseen), how)


def _simulate(finals: Finals, found: Sequence[Candidate], finalists: int) -> float:
    """Simulate in this order until so many fit memory, or no other can be faster; returns the least bound of those that
    were not simulated."""
    remaining_bound = np.minimum.accumulate([candidate.bound for candidate in reversed(found)])[::-1].tolist()
    done = 0
    for candidate in found:
        if finals.ranked and (len(finals.ranked) >= finalists or remaining_bound[done] >= finals.best):
            break
        done += 1
        finals.simulate(candidate)
    return float(remaining_bound[done]) if done < len(found) else math.inf


def _answer(found: Sequence[Candidate], finals: Finals, unseen: float, how: _How) -> SearchResult:
    ranked = sorted(finals.ranked, key=lambda one: one.score.seconds)
    if how.all_devices:
        ranked.sort(key=lambda one: one.idle_devices)
    winner = ranked[0]
    return SearchResult(
        winner=winner,
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for _, text in finals.rejected),
        candidates=len(found),
        mode=how.mode,
        seconds=winner.score.seconds,
        proven=bool(unseen >= winner.score.seconds),
        lower_bound=min(winner.score.seconds, unseen),
        groups=_groups(found, finals, winner.score.seconds),
    )


def _search_groups(spaces: Sequence[Space], cluster: Cluster, scorer: PlanScorer, how: _How) -> SearchResult:
    """The best of all plans over groups of unlike devices: of those on one group, which are searched as if it were
    alone, and those across groups (`across_groups`). Published systems' searches know only the former."""
    if how.copies > 1:
        raise PlanError("plans over groups of unlike devices are not made for nodes that may be lost")
    alone: list[SearchResult] = []
    refused: list[PlanError] = []
    candidates: list[list[Candidate]] = [[] for _ in spaces]
    # The group that can do most first: of others less is simulated where they cannot be faster.
    for group in sorted(range(len(spaces)), key=lambda group: least_seconds(spaces[group : group + 1])):
        space, first = spaces[group], cluster.firsts[group]
        try:
            ceiling = min((answer.seconds for answer in alone), default=math.inf)
            own, answer = _search_group(space, _from_rank(scorer, first), how, ceiling)
        except PlanError as error:
            refused.append(error)
            continue
        candidates[group] = [in_group(one, group) for one in own]
        alone.append(on_ranks_from(answer, first, cluster.num_devices))
    across: list[Candidate] = []
    least = math.inf
    if how.mode is Mode.BEST:
        least = least_seconds(spaces)
        best = min((answer.seconds for answer in alone), default=math.inf)
        asked = how.sizes, how.num_microbatches, how.all_devices
        across = _across(spaces, candidates, *asked, most_seconds=FAR * best)
    best = min((answer.seconds for answer in alone), default=math.inf)
    finals = Finals(replace(spaces[0], cluster=cluster), how.rules, scorer, ceiling=best)
    across = [one for one in across if one.estimate <= CLOSE * best]
    answers = alone
    if across:
        unseen = _simulate(finals, across, how.finalists_on(cluster.num_devices))
        if finals.ranked:
            finals.reorder()
            answers = [*alone, _answer(across, finals, min(finals.skipped, unseen), how)]
    if not answers:
        raise refused[0]
    found = best_of(answers, how.all_devices)
    # Not all that could stand side by side, or on several groups, were looked at.
    bound = min(found.lower_bound, least)
    return replace(found, lower_bound=bound, proven=found.proven and least >= found.seconds)


def _across(
    spaces: Sequence[Space],
    alone: Sequence[Sequence[Candidate]],
    sizes: Sequence[int],
    microbatches: int | None,
    all_devices: bool,
    most_seconds: float = math.inf,
) -> list[Candidate]:
    """The candidates that take devices of several groups, the most promising first; `alone` are those of each.
    most_seconds: units are not placed where that promises to take longer."""
    placed = list(placed_candidates(spaces, sizes, microbatches, most_seconds))
    mixed = mixed_candidates(spaces, alone, placed, least_seconds(spaces))
    found = sorted([*placed, *mixed], key=lambda one: (one.estimate, -one.gpus))
    most = max((one.gpus for one in found), default=0)
    return [one for one in found if not all_devices or one.gpus == most]


def all_candidates(
    spaces: Sequence[Space],
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None = None,
    all_devices: bool = False,
) -> list[Candidate]:
    """As `enumerate_candidates`, over groups of unlike devices with a space for each."""
    asked = sizes, microbatches, all_devices
    if len(spaces) == 1:
        return enumerate_candidates(spaces[0], mode, *asked)
    alone = [
        [in_group(one, group) for one in enumerate_candidates(space, mode, *asked)]
        for group, space in enumerate(spaces)
    ]
    across = _across(spaces, alone, *asked) if mode is Mode.BEST else []
    return sorted([*itertools.chain(*alone), *across], key=lambda one: (one.estimate, -one.gpus))


def _from_rank(scorer: PlanScorer, first: int) -> PlanScorer:
    """Scores plans of a group whose ranks count from 0."""
    return lambda plan, count: scorer(plan.shifted(first), count)


def open_space(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    workload: Workload,
    global_batch: int,
    rules: ParameterBytes = BF16,
    chunks: Sequence[int] = (1,),
    halves: bool = False,
) -> Space:
    """What `search` searches, with arguments as there."""
    limits = cluster.gpus_per_node, rules, global_batch, halves
    table = OptionTable(UnitLayers(model, costs, workload, *limits), cluster.bytes_per_device)
    unaware = OptionTable(UnitLayers(_all_trainable(model), costs, workload, *limits), math.inf)
    return Space(model, roles_of(model), table, unaware, cluster, global_batch, tuple(chunks))


def on_ranks_from(answer: SearchResult, first: int, devices: int) -> SearchResult:
    """The answer for a group of devices as one for all of them, of which it has the ranks from `first` on."""

    def there(one: RankedPlan) -> RankedPlan:
        return replace(one, plan=one.plan.shifted(first), idle_devices=devices - len(one.plan.ranks))

    return replace(
        answer, winner=there(answer.winner), runners_up=tuple(there(one) for one in answer.runners_up)
    )


def best_of(answers: Sequence[SearchResult], all_devices: bool = False) -> SearchResult:
    """One answer of several, each of which has looked at other plans."""
    ranked = sorted(
        (one for answer in answers for one in (answer.winner, *answer.runners_up)),
        key=lambda one: (one.idle_devices if all_devices else 0, one.score.seconds),
    )
    seconds = ranked[0].score.seconds
    unseen = [answer.lower_bound for answer in answers if not answer.proven]
    groups = [group for answer in answers for group in answer.groups]
    return SearchResult(
        winner=ranked[0],
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for answer in answers for text in answer.rejected),
        candidates=sum(answer.candidates for answer in answers),
        mode=answers[0].mode,
        seconds=seconds,
        proven=all(bound >= seconds for bound in unseen),
        lower_bound=min([seconds, *unseen]),
        groups=tuple(sorted(groups, key=lambda one: (one.seconds is None, one.seconds or one.bound))),
    )


def _groups(found: Sequence[Candidate], finals: Finals, best: float) -> tuple[SearchedGroup, ...]:
    by_shape: dict[tuple[EncoderPosition, int], list[Candidate]] = defaultdict(list)
    for one in found:
        by_shape[one.encoders_at, one.replicas].append(one)
    groups = []
    for (encoders_at, replicas), members in by_shape.items():
        seconds = [finals.seconds[one] for one in members if one in finals.seconds]
        bounds = [one.bound for one in members if one not in finals.seconds]
        cut = sum(bound >= best for bound in bounds)
        fastest = min(seconds, default=math.inf)
        groups.append(
            SearchedGroup(
                encoders_at,
                replicas,
                candidates=len(members),
                simulated=len(seconds),
                overflowed=seconds.count(math.inf),
                cut=cut,
                left=len(bounds) - cut,
                bound=min(one.bound for one in members),
                seconds=fastest if math.isfinite(fastest) else None,
            )
        )
    return tuple(sorted(groups, key=lambda one: (one.seconds is None, one.seconds or one.bound)))


def enumerate_candidates(
    space: Space,
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None = None,
    all_devices: bool = False,
) -> list[Candidate]:
    """All candidates of a mode, the most promising first; with `all_devices` those on the largest number of devices
    that any uses."""
    found = list(_candidates(space, mode, sizes, microbatches))
    if all_devices and found:
        most = max(candidate.gpus for candidate in found)
        found = [candidate for candidate in found if candidate.gpus == most]
    # Of equal ones those first that leave the fewest devices idle.
    return sorted(found, key=lambda candidate: (candidate.estimate, -candidate.gpus))


def _candidates(
    space: Space, mode: Mode, sizes: Sequence[int], microbatches: int | None
) -> Iterator[Candidate]:
    if mode in (Mode.BEST, Mode.DISTTRAIN):
        for one in disaggregated(space, sizes):
            if microbatches in (None, one.num_microbatches):
                yield one if mode is Mode.BEST else replace(one, estimate=one.disaggregated)
    if mode is Mode.DISTTRAIN:
        return
    for replicas in range(1, space.cluster.num_devices + 1):
        for size in sizes:
            count, rest = divmod(space.global_batch, replicas * size)
            if rest == 0 and microbatches in (None, count):
                yield from shapes(space, mode, replicas, size)


def _best_of_fewer(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that promise most on at most as many devices as they take, the most promising first: what searches on fewer
    devices would simulate, so that more of them never make a plan slower."""
    taken: list[int] = []
    chosen = []
    for candidate in found:
        if bisect.bisect_right(taken, candidate.gpus) < FEWEST:
            chosen.append(candidate)
        bisect.insort(taken, candidate.gpus)
    return chosen


def _of_modes(
    space: Space,
    found: Sequence[Candidate],
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None,
    all_devices: bool,
) -> Iterator[Sequence[Candidate]]:
    """What each published system would choose, the most promising first, for a search among all: it is to be no slower
    than any of them."""
    if mode is not Mode.BEST:
        return
    yield sorted((one for one in found if one.disaggregated), key=lambda one: one.disaggregated)
    yield [one for one in found if one.encoders_at is not EncoderPosition.IN_LANGUAGE]  # Cornstarch's
    for other in (Mode.ENTRAIN, Mode.MEGATRON):
        yield enumerate_candidates(space, other, sizes, microbatches, all_devices)


def _all_trainable(model: ModelSpec) -> ModelSpec:
    return ModelSpec(
        tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
            for unit in model.units
        )
    )
