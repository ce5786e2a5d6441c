"""The search for a plan: replicas, degrees, stages and placement of every unit, ranked by simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.answer import Answer
from dilatant.plan.candidates import Candidate, EncoderPosition, Mode, Space, roles_of
from dilatant.plan.cluster import Cluster
from dilatant.plan.copies import copies_on_nodes
from dilatant.plan.errors import PlanError
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.options import Option, OptionTable
from dilatant.plan.orchestrate import ModuleCost, orchestrate
from dilatant.plan.plan import Plan
from dilatant.plan.rank_mapping import RankOrder, map_ranks
from dilatant.plan.recomputation import more_recomputed, recomputing
from dilatant.plan.refusals import (
    check_devices,
    does_not_fit,
    microbatch_sizes_for,
    nothing_survived,
    rejection,
)
from dilatant.plan.score import PlanScore, PlanScorer
from dilatant.plan.sync_time import sync_seconds
from dilatant.plan.workload import Workload

MANY, FEWEST = 128, 6
"""On more devices than this fewer plans are simulated than were asked for, but not fewer than these."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedPlan:
    """A plan with what simulation says of it. `stage_seconds[unit]` are the mean microbatch's, forward plus backward
    (colocated units are listed together under the chain's last unit); `estimate` is the closed form that chose it for
    simulation."""

    plan: Plan
    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    stage_seconds: dict[str, tuple[float, ...]]
    idle_devices: int
    estimate: float
    bound: float
    score: PlanScore


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult(Answer):
    """The best plan and the next ones, fastest first.

    `seconds` is the winner's simulated step. `lower_bound` is one that no plan in the searched space beats, simulated
    or not; `proven` says that the winner reaches the least any other could. `rejected` names plans that
    overflowed memory in simulation.
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
) -> SearchResult:
    """The plan with the fastest simulated step.

    Enumerated: the number of pipelines, samples per microbatch, for every unit tensor and context degree (those with
    costs) and number of stages, of which a group of devices has any of `chunks` (the language model's), and where
    encoders run (`EncoderPosition`); `mode` restricts this to what a published system would consider,
    `num_microbatches` to plans with that many, `all_devices` to those on the largest number of devices that any uses,
    `copies` to those with every layer on so many nodes of `ranks_per_node` devices (default: those of the cluster).
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
    roles = roles_of(model)
    sizes = microbatch_sizes_for(global_batch, microbatch_sizes)
    limits = cluster.gpus_per_node, rules, global_batch
    table = OptionTable(model, costs, workload, cluster.bytes_per_device, *limits)
    check_devices(table, roles, cluster, mode)
    unaware = OptionTable(_all_trainable(model), costs, workload, math.inf, *limits)
    space = Space(model, roles, table, unaware, cluster, global_batch, tuple(chunks))
    found = _enumerate(space, mode, sizes, num_microbatches, all_devices)
    if not found:
        raise does_not_fit(space, mode, sizes[0])
    found = [candidate for candidate in found if min(candidate.counts) >= copies]
    per_node = ranks_per_node or cluster.gpus_per_node
    # Steps on many devices take longer to simulate, and all of their candidates together are to take seconds.
    finalists = min(finalists, max(FEWEST, finalists * MANY // cluster.num_devices))
    finals = _Finals(space, rules, scorer, copies, per_node)
    remaining_bound = np.minimum.accumulate([candidate.bound for candidate in reversed(found)])[::-1].tolist()
    done = 0
    for candidate in found:
        if finals.ranked and (len(finals.ranked) >= finalists or remaining_bound[done] >= finals.best):
            break
        done += 1
        finals.simulate(candidate)
    for first in _first_of_modes(space, found, mode, sizes, num_microbatches, all_devices):
        finals.simulate(first)
    if not finals.ranked and copies > 1 and not finals.rejected:
        nodes = cluster.num_devices // per_node
        raise PlanError(
            f"no plan has every layer on {copies} nodes, of which there are {nodes} with {per_node} devices each; add "
            "nodes, or ask for fewer copies"
        )
    if not finals.ranked:
        raise nothing_survived(finals.rejected, cluster)
    finals.reorder()
    ranked = sorted(finals.ranked, key=lambda one: one.score.seconds)
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
    )


class _Finals:
    """The candidates that were simulated: `ranked` those that fit memory, `rejected` the others by what they lack.
    skipped: the least bound of those that were not simulated because a part of them had overflowed."""

    def __init__(
        self, space: Space, rules: ParameterBytes, scorer: PlanScorer, copies: int, ranks_per_node: int
    ) -> None:
        self._space, self._rules, self._scorer = space, rules, scorer
        self._copies, self._ranks_per_node = copies, ranks_per_node
        self._layers = {unit.name: len(unit.layers) for unit in space.model.units}
        self._feeds = {unit.name: unit.feeds for unit in space.model.units}
        self._overflowing: set[tuple[Option, int]] = set()  # by number of pipelines: not tried again
        self._seen: set[tuple[Plan, int]] = set()
        self._found: list[tuple[RankedPlan, Candidate]] = []
        self.rejected: list[tuple[float, str]] = []
        self.skipped = math.inf

    @property
    def ranked(self) -> list[RankedPlan]:
        return [one for one, _ in self._found]

    @property
    def best(self) -> float:
        return min((one.score.seconds for one in self.ranked), default=math.inf)

    def simulate(self, candidate: Candidate) -> None:
        """Simulate the candidate in the rank order that promises most, with more recomputed where it overflows."""
        if any((option, candidate.replicas) in self._overflowing for option in candidate.options):
            self.skipped = min(self.skipped, candidate.bound)
            return
        overflow: tuple[Option, float, str] | None = None
        for plan in sorted(self._plans(candidate), key=self._travel):
            overflow = self._score(candidate, plan)
            if overflow is None:
                return
        if overflow is not None:  # in every order: state is shared by who lies side by side
            culprit, excess, text = overflow
            self.rejected.append((excess, text))
            self._overflowing.add((culprit, candidate.replicas))

    def reorder(self, most: int = 2) -> None:
        """Simulate the best plans in every other rank order too."""
        for one, candidate in sorted(self._found, key=lambda found: found[0].score.seconds)[:most]:
            for plan in self._plans(candidate):
                again = {unit.name: unit.recompute for unit in one.plan.units}
                self._score(candidate, recomputing(plan, again))

    def _plans(self, candidate: Candidate) -> list[Plan]:
        """In every order of ranks with enough copies; none where tensor groups do not pack into nodes."""
        orders = list(RankOrder) if self._space.cluster.nodes > 1 else [RankOrder.STAGES]
        found: dict[Plan, None] = {}
        for order in orders:
            with suppress(PlanError):
                found[map_ranks(candidate.chains, self._layers, self._feeds, self._space.cluster, order)] = (
                    None
                )
        if self._copies == 1:
            return list(found)
        return [
            plan
            for plan in found
            if min(copies_on_nodes(plan, self._ranks_per_node).values()) >= self._copies
        ]

    def _travel(self, plan: Plan) -> float:
        """Seconds until the last rank has summed its gradients: what differs most between orders of ranks."""
        cluster = self._space.cluster
        if cluster.nodes == 1:
            return 0.0
        sums = sync_seconds(plan, self._space.model, cluster, self._rules)
        return max(sums.values(), default=0.0)

    def _score(self, candidate: Candidate, plan: Plan) -> tuple[Option, float, str] | None:
        """None if the plan is ranked now, or was seen before; else the part that overflows, its bytes, and why."""
        key = plan, candidate.num_microbatches
        if key in self._seen:
            return None  # DistTrain's search finds some of the others' plans
        self._seen.add(key)
        cluster = self._space.cluster
        score = self._scorer(plan, candidate.num_microbatches)
        excess = max(score.peak_bytes, default=0.0) - cluster.bytes_per_device
        if excess > 0.0:
            frugal = more_recomputed(plan, score, self._space.table, cluster.bytes_per_device)
            if frugal is not None:
                return self._score(candidate, frugal)
            culprit, text = rejection(plan, candidate, score, excess)
            return culprit, excess, text
        self._found.append((_ranked(plan, candidate, score, cluster.num_devices), candidate))
        return None


def _enumerate(
    space: Space, mode: Mode, sizes: Sequence[int], microbatches: int | None, all_devices: bool
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
        for one in _disaggregated(space, sizes):
            if microbatches in (None, one.num_microbatches):
                yield one
    if mode is Mode.DISTTRAIN:
        return
    for replicas in range(1, space.cluster.num_devices + 1):
        for size in sizes:
            count, rest = divmod(space.global_batch, replicas * size)
            if rest == 0 and microbatches in (None, count):
                yield from space.candidates(mode, replicas, size)


def _first_of_modes(
    space: Space,
    found: Sequence[Candidate],
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None,
    all_devices: bool,
) -> Iterator[Candidate]:
    """What each published system would choose, for a search among all: it is to be no slower than any of them."""
    if mode is not Mode.BEST:
        return
    yield from [one for one in found if one.disaggregated][:1]
    yield from [one for one in found if one.encoders_at is not EncoderPosition.IN_LANGUAGE][
        :1
    ]  # Cornstarch's
    for other in (Mode.ENTRAIN, Mode.MEGATRON):
        yield from _enumerate(space, other, sizes, microbatches, all_devices)[:1]


def _disaggregated(space: Space, sizes: Sequence[int]) -> Iterator[Candidate]:
    """DistTrain's optimum for every microbatch size: replicas of its own for every unit."""
    table, roles = space.table, space.roles
    for size in sizes:
        modules = {name: _module(space, name) for name in roles.units}
        try:
            answer = orchestrate(
                [modules[name] for name in roles.encoders],
                modules[roles.language],
                [modules[name] for name in roles.generators],
                space.cluster.num_devices,
                space.global_batch,
                size,
                space.cluster.bytes_per_device,
            )
        except PlanError:
            continue
        allocations = {module.name: module for module in answer.modules}
        language = allocations[roles.language]
        last = max((allocations[name].pp for name in roles.generators), default=0)
        options = []
        for name in roles.units:
            own = allocations[name]
            behind = 0 if name in roles.generators else last + (language.pp if name in roles.encoders else 0)
            samples = size * (language.replicas // own.replicas)
            held = table.shared_by(own.replicas, own.tp * own.pp)
            options.append(held.chain(name, own.tp, 1, own.pp, samples, answer.num_microbatches, behind))
        if None in options:
            continue
        chains = tuple(option for option in options if option is not None)
        yield Candidate(
            encoders_at=EncoderPosition.PARALLEL,
            replicas=language.replicas,
            microbatch_size=size,
            num_microbatches=answer.num_microbatches,
            options=chains,
            counts=tuple(allocations[name].replicas for name in roles.units),
            estimate=answer.seconds,
            bound=answer.num_microbatches * max(float(option.work.max()) for option in chains),
            disaggregated=True,
        )


def _module(space: Space, name: str) -> ModuleCost:
    """A unit as uniform layers under the mean sample, without context parallelism."""
    degrees = [tp for tp, cp in space.table.degrees([name]) if cp == 1]
    if not degrees:
        raise PlanError(
            f"unit {name!r} has no costs without context parallelism, which DistTrain's search needs"
        )
    by_degree = {tp: space.table.layers(name, tp, 1, 1) for tp in degrees}
    one = by_degree[degrees[0]]
    return ModuleCost(
        name=name,
        layers=len(one.seconds),
        seconds={tp: float(layers.seconds.sum()) for tp, layers in by_degree.items()},
        state_bytes=float(one.static.sum()) * degrees[0],
        activation_bytes=float(one.kept.sum()) * degrees[0],
    )


def _ranked(plan: Plan, candidate: Candidate, score: PlanScore, devices: int) -> RankedPlan:
    return RankedPlan(
        plan=plan,
        encoders_at=candidate.encoders_at,
        replicas=candidate.replicas,
        microbatch_size=candidate.microbatch_size,
        num_microbatches=candidate.num_microbatches,
        stage_seconds={[*option.cuts][-1]: tuple(option.seconds.tolist()) for option in candidate.options},
        idle_devices=devices - candidate.gpus,
        estimate=candidate.estimate,
        bound=candidate.bound,
        score=score,
    )


def _all_trainable(model: ModelSpec) -> ModelSpec:
    return ModelSpec(
        tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
            for unit in model.units
        )
    )
