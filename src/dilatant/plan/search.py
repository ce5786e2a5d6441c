"""The search for a plan: replicas, degrees, stages and placement of every unit, ranked by simulation."""

from __future__ import annotations

import bisect
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.answer import Answer
from dilatant.plan.candidates import Candidate
from dilatant.plan.cluster import Cluster
from dilatant.plan.disaggregated import disaggregated
from dilatant.plan.errors import PlanError
from dilatant.plan.finals import Finals, RankedPlan
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
    space = open_space(model, costs, cluster, workload, global_batch, rules, chunks, halves)
    check_devices(space.table, space.roles, cluster, mode)
    found = enumerate_candidates(space, mode, sizes, num_microbatches, all_devices)
    if not found:
        raise does_not_fit(space, mode, sizes[0])
    found = [candidate for candidate in found if min(candidate.counts) >= copies]
    per_node = ranks_per_node or cluster.gpus_per_node
    # Steps on many devices take longer to simulate, and all of their candidates together are to take seconds.
    finalists = min(finalists, max(FEWEST, finalists * MANY // cluster.num_devices))
    finals = Finals(space, rules, scorer, copies, per_node)
    remaining_bound = np.minimum.accumulate([candidate.bound for candidate in reversed(found)])[::-1].tolist()
    done = 0
    for candidate in found:
        if finals.ranked and (len(finals.ranked) >= finalists or remaining_bound[done] >= finals.best):
            break
        done += 1
        finals.simulate(candidate)
    simulated = len(finals.seconds)
    for fewer in _best_of_fewer(found) if cluster.num_devices <= MANY else ():
        if len(finals.seconds) >= simulated + finalists:
            break
        if fewer not in finals.seconds and fewer.bound < finals.best:
            finals.simulate(fewer)
    for own in _of_modes(space, found, mode, sizes, num_microbatches, all_devices):
        for one in own[:FEWEST]:
            if finals.simulate(one):
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
    if leftovers:
        finals.fill_idle(found)
    ranked = sorted(finals.ranked, key=lambda one: one.score.seconds)
    if all_devices:
        ranked.sort(key=lambda one: one.idle_devices)
    winner = ranked[0]
    unseen = min(finals.skipped, remaining_bound[done] if done < len(found) else math.inf)
    return SearchResult(
        winner=winner,
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for _, text in finals.rejected),
        candidates=len(found),
        mode=mode,
        seconds=winner.score.seconds,
        proven=bool(unseen >= winner.score.seconds),
        lower_bound=min(winner.score.seconds, unseen),
        wall_seconds=time.perf_counter() - started,
        groups=_groups(found, finals, winner.score.seconds),
    )


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
