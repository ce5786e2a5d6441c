"""The search for a plan: replicas, degrees, stages and placement of every unit, ranked by simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.answer import Answer
from dilatant.plan.candidates import Candidate, EncoderPosition, Mode, Space, roles_of
from dilatant.plan.cluster import Cluster
from dilatant.plan.errors import PlanError
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.options import Option, OptionTable
from dilatant.plan.orchestrate import ModuleCost, orchestrate
from dilatant.plan.plan import Plan
from dilatant.plan.rank_mapping import map_ranks
from dilatant.plan.refusals import (
    check_devices,
    does_not_fit,
    excess_by_unit,
    microbatch_sizes_for,
    nothing_survived,
    rejection,
)
from dilatant.plan.score import PlanScore, PlanScorer
from dilatant.plan.workload import Workload


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
) -> SearchResult:
    """The plan with the fastest simulated step among all that use every device.

    Enumerated: the number of pipelines, samples per microbatch, for every unit tensor and context degree (those with
    costs) and number of stages, and where encoders run (`EncoderPosition`); `mode` restricts this to what a published
    system would consider, `num_microbatches` to plans with that many. Stages are cut aware of freezing, and under
    memory where the free cut does not fit. In the order of their closed-form estimate,
    candidates become plans and are simulated by `scorer` on the samples of `workload`, until `finalists` of them fitted
    memory or no other can be faster. When no shape uses all devices exactly, the largest usable number is taken and the
    rest reported as idle.

    Subsumes Cornstarch's Alg. 1 and Entrain's Alg. 3 (reference planning.md 2e, 2f, C8, E12, E13).

    Raises BatchError (the global batch divides into no microbatch size: nearest named), TooFewDevicesError,
    DoesNotFitError (which unit, by how much), UserError for missing costs.
    """
    started = time.perf_counter()
    roles = roles_of(model)
    sizes = microbatch_sizes_for(global_batch, microbatch_sizes)
    limits = cluster.gpus_per_node, rules
    table = OptionTable(model, costs, workload, cluster.bytes_per_device, *limits)
    check_devices(table, roles, cluster, mode)
    unaware = OptionTable(_all_trainable(model), costs, workload, math.inf, *limits)
    space = Space(model, roles, table, unaware, cluster, global_batch)
    found = _enumerate(space, mode, sizes, num_microbatches)
    if not found:
        raise does_not_fit(space, mode, sizes[0])
    found.sort(key=lambda candidate: candidate.estimate)
    remaining_bound = np.minimum.accumulate([candidate.bound for candidate in reversed(found)])[::-1].tolist()

    layers = {unit.name: len(unit.layers) for unit in model.units}
    feeds = {unit.name: unit.feeds for unit in model.units}
    ranked: list[RankedPlan] = []
    rejected: list[tuple[float, str]] = []
    overflowing: set[tuple[Option, int]] = set()  # by number of pipelines: not tried again
    seen: set[tuple[Plan, int]] = set()
    skipped = math.inf
    done = 0
    for candidate in found:
        best = min((one.score.seconds for one in ranked), default=math.inf)
        if len(ranked) >= finalists or remaining_bound[done] >= best:
            break
        done += 1
        if any((option, candidate.replicas) in overflowing for option in candidate.options):
            skipped = min(skipped, candidate.bound)
            continue
        try:
            plan = map_ranks(candidate.chains, layers, feeds, cluster)
        except PlanError:
            continue  # tensor groups do not pack into nodes
        if (plan, candidate.num_microbatches) in seen:
            continue  # DistTrain's search finds some of the others' plans
        seen.add((plan, candidate.num_microbatches))
        score = scorer(plan, candidate.num_microbatches)
        excess = max(score.peak_bytes, default=0.0) - cluster.bytes_per_device
        if excess > 0.0:
            culprit, text = rejection(plan, candidate, score, excess)
            rejected.append((excess, text))
            overflowing.add((culprit, candidate.replicas))
            continue
        ranked.append(_ranked(plan, candidate, score, cluster.num_devices))
    if not ranked:
        raise nothing_survived(rejected, cluster)
    ranked.sort(key=lambda one: one.score.seconds)
    winner = ranked[0]
    unseen = min(skipped, remaining_bound[done] if done < len(found) else math.inf)
    return SearchResult(
        winner=winner,
        runners_up=tuple(ranked[1:]),
        rejected=tuple(text for _, text in rejected),
        candidates=len(found),
        mode=mode,
        seconds=winner.score.seconds,
        proven=unseen >= winner.score.seconds,
        lower_bound=min(winner.score.seconds, unseen),
        wall_seconds=time.perf_counter() - started,
    )


def _enumerate(space: Space, mode: Mode, sizes: Sequence[int], microbatches: int | None) -> list[Candidate]:
    """All candidates on the largest number of devices that any uses exactly."""
    apart = [
        one
        for one in (_disaggregated(space, sizes) if mode in (Mode.BEST, Mode.DISTTRAIN) else ())
        if microbatches in (None, one.num_microbatches)
    ]
    if mode is Mode.DISTTRAIN:
        return apart
    for devices in range(space.cluster.num_devices, 0, -1):
        found = [
            candidate
            for replicas in range(1, devices + 1)
            if devices % replicas == 0
            for size in sizes
            if space.global_batch % (replicas * size) == 0
            and microbatches in (None, space.global_batch // (replicas * size))
            for candidate in space.candidates(mode, devices, replicas, size)
        ]
        if not found and devices == space.cluster.num_devices:
            # One microbatch in flight is the least there is.
            hopeless = excess_by_unit(space, mode, sizes[0], 1)
            if max(hopeless.values()) > 0.0:
                return []
        if found:
            return found + [one for one in apart if one.gpus == devices]
    return []


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
