"""The search for a plan: replicas, degrees, stages and placement of every unit, ranked by simulation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScorer
from dilatant.plan.costs.workload import Workload
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.microbatch_counts import MANY
from dilatant.plan.layouts.space import FEW, Space, are_few, open_space
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.modes import Mode
from dilatant.plan.search.candidates import Candidate
from dilatant.plan.search.enumeration import FEWEST, across, best_of_fewer, enumerate_candidates, of_modes
from dilatant.plan.search.finals import Finals
from dilatant.plan.search.group_bound import least_seconds
from dilatant.plan.search.refusals import (
    check_devices,
    does_not_fit,
    microbatch_sizes_for,
    nothing_survived,
)
from dilatant.plan.search.search_result import (
    NoneFasterError,
    SearchResult,
    answer_of,
    best_of,
    none_faster,
    on_ranks_from,
)
from dilatant.plan.search.zero_search import NO_OTHERS, search_zeros

LEFTOVERS = 40
"""Plans with one more pipeline on idle devices that are simulated at most; on more devices fewer, as above."""
PROOFS = 64
"""Candidates that are simulated at most because by their bounds they may be the fastest; on more devices fewer."""
CLOSE, FAR = 1.25, 2.0
"""On many devices, candidates across groups that promise to take so many times as long as the best on one group are not
simulated, and not looked for."""
SLOW = 1.5
"""On many devices no candidate is looked for that surely takes so many times as long as the most promising one."""


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
    halves: bool = True,
    leftovers: bool = False,
    row_tokens: Sequence[int] = (),
    row_limit: int | None = None,
    others: Mapping[Zero, PlanScorer] = NO_OTHERS,
    glanced: Mapping[Zero, PlanScorer] = NO_OTHERS,
) -> SearchResult:
    """The plan with the fastest simulated step.

    Enumerated: the number of pipelines, samples per microbatch, for every unit tensor and context degree (those with
    costs) and number of stages, of which a group of devices has any of `chunks` (the language model's), and where
    encoders run (`EncoderPosition`); `mode` restricts this to what a published system would consider,
    `num_microbatches` to plans with that many, `all_devices` to those on the largest number of devices that any uses,
    `copies` to those with every layer on so many nodes of `ranks_per_node` devices (default: those of the cluster).
    halves: `scorer` may split backwards (zero-bubble schedules), so bounds count on less. row_limit: most tokens of the
    language model in any microbatch that `scorer` makes, if it cuts them.
    row_tokens: budgets of tokens of the language model to cut microbatches by as well: any number of pipelines then
    shares the batch, and a step has as many microbatches as its samples take (mode `BEST` without `num_microbatches`).
    leftovers: devices that promising plans leave idle may form one more pipeline, unlike the others and with fewer of
    the samples; of these plans bounds say nothing.
    others: the scorers where optimizer state is shared in other ways than `rules` say, under which plans are searched,
    too; of plans that take equally long the first is chosen. glanced: the same of ways that only the best plan is
    simulated under, or that are searched where no other leaves a plan that fits.
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
        mode, sizes, rules, finalists, num_microbatches, all_devices, copies, ranks_per_node, leftovers,
        proves=mode is Mode.BEST and len(cluster.groups) == 1,
    )  # fmt: skip
    spaces = [
        open_space(
            model,
            costs.on(group.name),
            group,
            workload,
            global_batch,
            rules,
            chunks,
            halves,
            row_tokens,
            row_limit,
        )
        for group in cluster.groups
    ]

    def under(zero: Zero, scorer: PlanScorer, ceiling: float) -> SearchResult:
        own = replace(how, rules=replace(rules, zero=zero), ceiling=ceiling)
        shared = [space.sharing(zero) for space in spaces]
        if len(shared) == 1:
            return _search_group(shared[0], scorer, own)[1]
        return _search_groups(shared, cluster, scorer, own)

    answer = search_zeros(under, {rules.zero: scorer, **others}, glanced, cluster, all_devices)
    return replace(answer, wall_seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _How:
    """How to search, as the arguments of `search` of these names. ceiling: seconds of a plan that is known already, to
    which only faster ones are looked for."""

    mode: Mode
    sizes: Sequence[int]
    rules: ParameterBytes
    finalists: int
    num_microbatches: int | None
    all_devices: bool
    copies: int
    ranks_per_node: int | None
    leftovers: bool
    proves: bool
    ceiling: float = math.inf

    @property
    def knows(self) -> bool:
        """Whether there is a plan already."""
        return math.isfinite(self.ceiling)

    def far_on(self, devices: int) -> float:
        """So many times as long as the most promising candidate none may take that is looked for on so many devices;
        not where it need not be among those that count."""
        all_count = self.mode is Mode.BEST and self.copies == 1 and not self.all_devices
        return SLOW if all_count and devices > MANY else math.inf

    def finalists_on(self, devices: int) -> int:
        """Steps on many devices take longer to simulate, and all of their candidates together are to take seconds; of
        those that are to be faster than a known plan the first few tell."""
        if self.knows and devices > FEW:
            return min(self.finalists, FEWEST)
        return min(self.finalists, max(FEWEST, self.finalists * MANY // devices))


def _search_group(
    space: Space, scorer: PlanScorer, how: _How, ceiling: float = math.inf
) -> tuple[list[Candidate], SearchResult]:
    """All candidates on equal devices but those that are left out as surely slow, and the best of them; of those that
    cannot be faster than `ceiling` seconds, no more than the first. Raises PlanError, NoneFasterError where
    `how.ceiling` leaves none."""
    far = how.far_on(space.cluster.num_devices)
    try:
        return _search_within(far, space, scorer, how, ceiling)
    except NoneFasterError:
        raise
    except PlanError:
        if far == math.inf:
            raise
        return _search_within(math.inf, space, scorer, how, ceiling)  # slow ones may be all that fits


def _search_within(
    far: float, space: Space, scorer: PlanScorer, how: _How, ceiling: float
) -> tuple[list[Candidate], SearchResult]:
    """As `_search_group`, but for those that take `far` times as long as the most promising."""
    cluster, mode, copies = space.cluster, how.mode, how.copies
    asked = how.sizes, how.num_microbatches, how.all_devices
    check_devices(space.table, space.roles, cluster, mode)
    found = enumerate_candidates(space, mode, *asked, how.ceiling if far < math.inf else math.inf, far)
    if not found and not how.knows:
        raise does_not_fit(space, mode, how.sizes[0])
    found = [candidate for candidate in found if min(candidate.counts) >= copies]
    per_node = how.ranks_per_node or cluster.gpus_per_node
    finals = Finals(space, how.rules, scorer, copies, per_node, min(ceiling, how.ceiling))
    finalists = how.finalists_on(cluster.num_devices)
    most = far * found[0].estimate if found and far < math.inf else math.inf
    unseen = min(most, _simulate(finals, found, finalists, how.knows))
    simulated = len(finals.seconds)
    for fewer in best_of_fewer(found) if cluster.num_devices <= MANY else ():
        if len(finals.seconds) >= simulated + finalists:
            break
        if fewer not in finals.seconds and fewer.bound < finals.best:
            finals.simulate(fewer)
    few = cluster.num_devices <= FEW
    least = least_seconds([space]) if ceiling < math.inf else 0.0
    for own in (
        of_modes(space, found, mode, *asked, most) if few or (not how.knows and least < ceiling) else ()
    ):
        for one in own[:FEWEST]:
            if one.bound < min(ceiling, how.ceiling) and finals.simulate(one):
                break
        for one in best_of_fewer(own) if cluster.num_devices <= MANY else ():
            if one not in finals.seconds and one.bound < finals.best:
                finals.simulate(one)
                break
    if how.proves and cluster.num_devices <= MANY:
        unseen = finals.prove(found, PROOFS * FEW // max(FEW, cluster.num_devices))
    if not finals.ranked and how.knows:
        raise none_faster(found, finals, min(finals.skipped, unseen), how.rules.zero)
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
        finals.fill_idle(found, max(FEWEST, LEFTOVERS * FEW // max(FEW, cluster.num_devices)))
    looked_at = list(dict.fromkeys([*found, *finals.seconds]))  # own replicas where they were simulated
    return found, answer_of(looked_at, finals, min(finals.skipped, unseen), mode, how.all_devices)


def _simulate(finals: Finals, found: Sequence[Candidate], finalists: int, knows: bool = False) -> float:
    """Simulate in this order until so many fit memory, or no other can be faster; returns the least bound of those that
    were not simulated. knows: there is a plan already, so that none of these need be."""
    remaining_bound = np.minimum.accumulate([candidate.bound for candidate in reversed(found)])[::-1].tolist()
    done = 0
    for candidate in found:
        if (knows or finals.ranked) and (
            len(finals.ranked) >= finalists or remaining_bound[done] >= finals.best
        ):
            break
        done += 1
        finals.simulate(candidate)
    return float(remaining_bound[done]) if done < len(found) else math.inf


def _search_groups(spaces: Sequence[Space], cluster: Cluster, scorer: PlanScorer, how: _How) -> SearchResult:
    """The best of all plans over groups of unlike devices: of those on one group, which are searched as if it were
    alone, and those across groups. Published systems' searches know only the former, and so do those on many devices
    that are only for what is faster than a known plan."""
    if how.copies > 1:
        raise PlanError("plans over groups of unlike devices are not made for nodes that may be lost")
    alone: list[SearchResult] = []
    refused: list[PlanError] = []
    candidates: list[list[Candidate]] = [[] for _ in spaces]
    crosses = how.mode is Mode.BEST and not (how.knows and cluster.num_devices > MANY)
    # The group that can do most first: of others less is simulated where they cannot be faster.
    for group in sorted(range(len(spaces)), key=lambda group: least_seconds(spaces[group : group + 1])):
        space, first = spaces[group], cluster.firsts[group]
        ceiling = min((answer.seconds for answer in alone), default=math.inf)
        if not (crosses or how.all_devices) and least_seconds([space]) >= min(ceiling, how.ceiling):
            continue
        try:
            own, answer = _search_group(space, _from_rank(scorer, first), how, ceiling)
        except NoneFasterError as none:
            candidates[group] = list(none.found)
            continue
        except PlanError as error:
            refused.append(error)
            continue
        candidates[group] = own
        alone.append(on_ranks_from(answer, first, cluster.num_devices))
    both: list[Candidate] = []
    least = math.inf
    best = min([how.ceiling, *(answer.seconds for answer in alone)])
    if how.mode is Mode.BEST:
        least = least_seconds(spaces)
    if crosses:
        asked = how.sizes, how.num_microbatches, how.all_devices
        close, far = (math.inf, math.inf) if are_few(spaces) else (CLOSE * best, FAR * best)
        both = [one for one in across(spaces, candidates, *asked, far) if one.estimate <= close]
    finals = Finals(replace(spaces[0], cluster=cluster), how.rules, scorer, ceiling=best)
    answers = alone
    if both:
        unseen = _simulate(finals, both, how.finalists_on(cluster.num_devices), how.knows)
        if finals.ranked:
            finals.reorder()
            beyond = answer_of(both, finals, min(finals.skipped, unseen), how.mode, how.all_devices)
            answers = [*alone, beyond]
    if not answers and how.knows:
        raise none_faster([*itertools.chain(*candidates), *both], finals, least, how.rules.zero)
    if not answers:
        raise refused[0]
    found = best_of(answers, how.all_devices)
    # Not all that could stand side by side, or on several groups, were looked at.
    bound = min(found.lower_bound, least)
    return replace(found, lower_bound=bound, proven=found.proven and least >= found.seconds)


def _from_rank(scorer: PlanScorer, first: int) -> PlanScorer:
    """Scores plans of a group whose ranks count from 0."""
    return lambda plan, *how: scorer(plan.shifted(first), *how)
