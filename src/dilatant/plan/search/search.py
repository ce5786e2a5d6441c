"""Plan search: find replicas, degrees, stages and placement of every unit; simulation ranks the candidates."""

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
from dilatant.plan.layouts.microbatch_counts import LARGE_CLUSTER
from dilatant.plan.layouts.space import SMALL_CLUSTER, Space, are_few, open_space
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.modes import Mode
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.enumeration import (
    FEWEST,
    best_of_fewer,
    enumerate_candidates,
    of_modes,
    spanning_candidates,
)
from dilatant.plan.search.finals import Finals
from dilatant.plan.search.group_bound import least_seconds
from dilatant.plan.search.refusals import (
    check_devices,
    does_not_fit,
    microbatch_sizes_for,
    no_plan_fits,
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

MAX_EXTENDED_PLANS = 40
"""Most simulated plans with one more pipeline on idle devices; fewer on more than FEW devices."""
MAX_PROOF_CANDIDATES = 64
"""Most candidates simulated because their bounds allow them to be the fastest; fewer on more than FEW devices."""
CLOSE, FAR = 1.25, 2.0
"""Limits for candidates that span groups on many devices, as multiples of the best step on one group.

Above CLOSE they are not simulated, above FAR not enumerated.
"""
SLOW = 1.5
"""On many devices, candidates that surely take more than this multiple of the best estimate are not enumerated."""


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
    """Find the plan with the fastest simulated step.

    The search enumerates the number of pipelines, samples per microbatch, tensor and context degrees (those with costs)
    and number of stages of every unit, stages per group of devices (`chunks`, language model only), and encoder
    positions (`EncoderPosition`). `mode` restricts this to what a published system would consider, `num_microbatches`
    to plans with that many, `all_devices` to plans on the largest number of devices that any candidate uses, `copies`
    to plans with every layer on that many nodes of `ranks_per_node` devices (default: the cluster's).
    halves: `scorer` may split backwards (zero-bubble schedules), which lowers the bounds. row_limit: maximum
    language-model tokens in a microbatch, if `scorer` cuts microbatches by tokens.
    row_tokens: token budgets of a language-model microbatch to try as well: any number of pipelines then shares the
    batch, and a step has as many microbatches as its samples need (mode `BEST` without `num_microbatches`).
    leftovers: idle devices of promising plans may form one more pipeline, unlike the others and with fewer samples;
    bounds do not cover these plans.
    others: scorers for other kinds of optimizer-state sharding than that of `rules`, each searched in full; of equally
    fast plans the first is chosen. glanced: scorers for kinds that only rescore the best plans, and are searched only
    if no other finds a plan that fits.

    Stages are cut aware of freezing, and within memory where the unconstrained cut does not fit; if none fits and the
    model leaves recomputation open, as few layers as possible recompute. Candidates are simulated by `scorer` on the
    samples of `workload`, lowest estimate first, until `finalists` of them fit memory or no other can be faster;
    then the best are tried in other rank orders. Devices that the fastest plan does not use are reported as idle. This
    search includes Algorithm 1 of Cornstarch and Algorithm 3 of Entrain (the thesis).

    Raises BatchError (no microbatch size divides the global batch: nearest named), TooFewDevicesError, DoesNotFitError
    (which unit, by how much), UserError for missing costs.
    """
    started = time.perf_counter()
    sizes = microbatch_sizes_for(global_batch, microbatch_sizes)
    how = _SearchSettings(
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
class _SearchSettings:
    """The arguments of `search` with these names. ceiling: seconds of a known plan; only faster ones are accepted."""

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
        """True if a plan is already known."""
        return math.isfinite(self.ceiling)

    def far_on(self, devices: int) -> float:
        """Return the largest multiple of the best estimate that is still enumerated; infinite if slow candidates may be
        needed."""
        all_count = self.mode is Mode.BEST and self.copies == 1 and not self.all_devices
        return SLOW if all_count and devices > LARGE_CLUSTER else math.inf

    def finalists_on(self, devices: int) -> int:
        """Return how many candidates to simulate: fewer on many devices, where a simulation takes longer, and only a
        few for plans that must beat a known one."""
        if self.knows and devices > SMALL_CLUSTER:
            return min(self.finalists, FEWEST)
        return min(self.finalists, max(FEWEST, self.finalists * LARGE_CLUSTER // devices))


def _search_group(
    space: Space, scorer: PlanScorer, how: _SearchSettings, ceiling: float = math.inf
) -> tuple[list[PlanCandidate], SearchResult]:
    """Search equal devices: return the candidates, except surely slow ones, and the best plan.
    Only the most promising candidates are simulated if none can be faster than `ceiling` seconds. Raises PlanError;
    NoneFasterError if nothing beats `how.ceiling`."""
    far = how.far_on(space.cluster.num_devices)
    try:
        return _search_within(far, space, scorer, how, ceiling)
    except NoneFasterError:
        raise
    except PlanError:
        if far == math.inf:
            raise
        return _search_within(math.inf, space, scorer, how, ceiling)  # perhaps only slow ones fit


def _search_within(
    far: float, space: Space, scorer: PlanScorer, how: _SearchSettings, ceiling: float
) -> tuple[list[PlanCandidate], SearchResult]:
    """Search as `_search_group` does, among candidates within `far` times the best estimate."""
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
    for fewer in best_of_fewer(found) if cluster.num_devices <= LARGE_CLUSTER else ():
        if len(finals.seconds) >= simulated + finalists:
            break
        if fewer not in finals.seconds and fewer.bound < finals.best:
            finals.simulate(fewer)
    few = cluster.num_devices <= SMALL_CLUSTER
    least = least_seconds([space]) if ceiling < math.inf else 0.0
    for own in (
        of_modes(space, found, mode, *asked, most) if few or (not how.knows and least < ceiling) else ()
    ):
        for one in own[:FEWEST]:
            if one.bound < min(ceiling, how.ceiling) and finals.simulate(one):
                break
        for one in best_of_fewer(own) if cluster.num_devices <= LARGE_CLUSTER else ():
            if one not in finals.seconds and one.bound < finals.best:
                finals.simulate(one)
                break
    if how.proves and cluster.num_devices <= LARGE_CLUSTER:
        unseen = finals.prove(
            found, MAX_PROOF_CANDIDATES * SMALL_CLUSTER // max(SMALL_CLUSTER, cluster.num_devices)
        )
    if not finals.ranked and how.knows:
        raise none_faster(found, finals, min(finals.skipped, unseen), how.rules.zero)
    if not finals.ranked and copies > 1 and not finals.rejected:
        nodes = cluster.num_devices // per_node
        raise PlanError(
            f"no plan has every layer on {copies} nodes, of which there are {nodes} with {per_node} devices each; add "
            "nodes, or ask for fewer copies"
        )
    if not finals.ranked:
        raise no_plan_fits(finals.rejected, cluster)
    finals.reorder()
    if how.leftovers:
        finals.fill_idle(
            found, max(FEWEST, MAX_EXTENDED_PLANS * SMALL_CLUSTER // max(SMALL_CLUSTER, cluster.num_devices))
        )
    looked_at = list(dict.fromkeys([*found, *finals.seconds]))  # includes all that were simulated
    return found, answer_of(looked_at, finals, min(finals.skipped, unseen), mode, how.all_devices)


def _simulate(finals: Finals, found: Sequence[PlanCandidate], finalists: int, knows: bool = False) -> float:
    """Simulate in this order until `finalists` fit memory or no other can be faster; return the least bound of the
    rest. knows: a plan is already known, so the loop may end without any simulation."""
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


def _search_groups(
    spaces: Sequence[Space], cluster: Cluster, scorer: PlanScorer, how: _SearchSettings
) -> SearchResult:
    """Return the best plan over groups of different devices: on one of them, searched alone, or across groups.
    Modes of published systems search single groups only, as do searches on many devices that must beat a known plan."""
    if how.copies > 1:
        raise PlanError("plans over groups of unlike devices are not made for nodes that may be lost")
    alone: list[SearchResult] = []
    refused: list[PlanError] = []
    candidates: list[list[PlanCandidate]] = [[] for _ in spaces]
    crosses = how.mode is Mode.BEST and not (how.knows and cluster.num_devices > LARGE_CLUSTER)
    # The fastest group comes first: its result reduces the simulations of slower groups.
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
    both: list[PlanCandidate] = []
    least = math.inf
    best = min([how.ceiling, *(answer.seconds for answer in alone)])
    if how.mode is Mode.BEST:
        least = least_seconds(spaces)
    if crosses:
        asked = how.sizes, how.num_microbatches, how.all_devices
        close, far = (math.inf, math.inf) if are_few(spaces) else (CLOSE * best, FAR * best)
        both = [one for one in spanning_candidates(spaces, candidates, *asked, far) if one.estimate <= close]
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
    # Not every combination across groups was enumerated.
    bound = min(found.lower_bound, least)
    return replace(found, lower_bound=bound, proven=found.proven and least >= found.seconds)


def _from_rank(scorer: PlanScorer, first: int) -> PlanScorer:
    """Return a scorer of plans of one group, whose ranks count from 0."""
    return lambda plan, *how: scorer(plan.shifted(first), *how)
