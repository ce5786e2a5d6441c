"""Planning a run: from its config to the best plan for its model, its data and its devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dilatant.config import Config, UserError, list_problems
from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import Zero
from dilatant.cost.model import CostModel
from dilatant.data.text.tokenizer import count_ids
from dilatant.models.language.position_limit import check_positions
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.costs.stable_batch import StableBatch, feasible_allocations, minimum_stable_batch, sample_work
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.workload import Workload, squares_of
from dilatant.plan.errors import BatchError, DoesNotFitError, PlanError
from dilatant.plan.layouts.space import SearchProblem, SearchSettings
from dilatant.plan.model_spec import EncoderPosition
from dilatant.plan.plan import Plan
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.refusals import microbatch_sizes_for
from dilatant.plan.search.search import Enumerate, search
from dilatant.plan.search.search_result import SearchResult
from dilatant.plan.search.why_not import AskedLayout, WhyNot, parse_asked_layout, why_not
from dilatant.plan.templates.membership import ChainCosts
from dilatant.plan.validate import validate
from dilatant.planning.assemble import Samples, recompute_by_unit
from dilatant.planning.measuring.cost_cache import cached_costs, store_costs
from dilatant.planning.measuring.decode_costs import DecodeCost, decode_cost
from dilatant.planning.measuring.layer_costs import costs_in_use, degrees_of, layer_costs
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.planning.problem.describe_model import ModelDescription, build_meta_model, describe_model, require_trained
from dilatant.planning.problem.planned_hardware import Target, target_of_run
from dilatant.planning.problem.planned_samples import PlannedSamples, planned_samples
from dilatant.planning.problem.searched_settings import may_shard, with_requested_degrees, zero_variants
from dilatant.report.text.plan_summary import fullest_text, no_plan_text
from dilatant.runtime.layouts import context_problems
from dilatant.schedule import plan_scorer
from dilatant.schedule.assignment.assign import NamedPolicy
from dilatant.schedule.assignment.step_assignment import QUICK
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.schedule import MeasuredStep
from dilatant.schedule.simulator.predict import predict
from dilatant.schedule.timeline import Timeline

ALIKE = 0.02
"""Divisions of devices whose slowest units differ by less (relatively) count as equal: a batch may ask for either."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanningProblem:
    """Input of a search or a simulation. measured: layer costs as measured or modelled. costs: the same as this run
    uses them (see `costs_in_use`). from_before: all costs are from an earlier measurement. decoding: cost of decoding
    samples on this machine, None if unknown."""

    config: Config
    target: Target
    model: ModelDescription
    measured: CostModel
    costs: CostModel
    samples: PlannedSamples
    from_before: bool = False
    decoding: DecodeCost | None = None

    @property
    def policy(self) -> NamedPolicy:
        """Policy that groups samples into microbatches."""
        return self.config.plan.assignment or "balanced"

    @property
    def global_batch(self) -> int:
        return self.config.train.global_batch_size

    def sharing(self, zero: Zero, shard: Mapping[str, Shard] | None = None) -> PlanningProblem:
        """Return the problem with optimizer state shared as `zero` says and, if given, with other `shard` by unit."""
        return replace(self, target=self.target.sharing(zero, shard))

    def with_row_tokens(self, tokens: int) -> PlanningProblem:
        """Return the problem with rows of up to `tokens` tokens, and the costs with such rows."""
        train = self.config.train.model_copy(update={"row_tokens": tokens})
        costs = costs_in_use(self.measured, self.model, self.samples.targets, tokens, train.loss_chunk)
        return replace(self, config=self.config.model_copy(update={"train": train}), costs=costs)

    def memory_text(self, plan: Plan, score: PlanScore) -> str:
        """Describe the memory of the fullest device."""
        return fullest_text(self.target.cluster, plan, score)

    def simulated(self) -> Workload:
        """Return the global batches that plans are simulated on."""
        return self.samples.first(self.config.debug.planned_steps * self.global_batch)

    def forward_seconds(self, samples: int) -> dict[str, tuple[float, float]]:
        """Return layer type → forward seconds of a mean microbatch on one device: (all, constant part of calls)."""
        simulated, seconds = self.simulated(), defaultdict[str, list[float]](lambda: [0.0, 0.0])
        for unit in self.model.spec.units:
            square, linear, _ = simulated.mean_row(unit.name, samples).tolist()
            for layer in unit.layers:
                forward = next(iter(self.costs.layers[layer.kind].values())).forward
                seconds[layer.kind][0] += forward.a * square + forward.b * linear + forward.c
                seconds[layer.kind][1] += forward.c
        return {kind: (whole, fixed) for kind, (whole, fixed) in seconds.items()}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRun:
    """Result of planning. typical: simulated step of the winner that is nearest to the mean. problem: under its `zero`.

    work: [samples, units] seconds of distinct samples on one device. stable: global batch from which on the data call
    for the same division of devices; None if there is nothing to divide. rows: reasons for a row length that was chosen
    here. notes: warnings. chain: costs from which later memberships are planned, if the winner was made from them.
    """

    problem: PlanningProblem
    result: SearchResult
    typical: Timeline
    work: NDArray[np.float64]
    stable: StableBatch | None
    rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chain: ChainCosts | None = None


def planning_problem(
    config: Config,
    samples: Samples,
    say: Callable[[str], None] = lambda text: None,
    measure_again: bool = True,
    like: str | None = None,
    asked: Sequence[str] = (),
) -> PlanningProblem:
    """Collect the input of a search. say: called with what is being measured. Costs of earlier measurements of the same
    layers on this hardware replace what `plan.measure_seconds` leave unmeasured; without `measure_again` they are used
    first, and only missing costs are measured. like: a layout whose degrees are tried, too. asked: further layouts,
    which are read before anything is measured. Raises UserError."""
    searched_sizes(config, target_of_run(config))  # before anything is measured
    whole = build_meta_model(config, count_ids(samples.tokenizer))
    model = describe_model(whole, recompute_by_unit(config, whole.units))
    require_trained(whole)
    for text in asked:
        parse_asked_layout(text, [*whole.units])
    if like is not None:
        config = with_requested_degrees(config, model, target_of_run(config), parse_asked_layout(like, [*whole.units]))
    sampled = planned_samples(
        config, samples, model, lambda done, total: say(f"measuring samples: {done:,} of {total:,}")
    )
    check_positions(whole.language, int(sampled.workload.tokens[model.anchor].max()))
    problem = model_problem(config, model, sampled, say, measure_again)
    return replace(problem, decoding=decode_cost(samples, config.seed, config.train.global_batch_size))


def model_problem(
    config: Config,
    model: ModelDescription,
    sampled: PlannedSamples,
    say: Callable[[str], None] = lambda text: None,
    measure_again: bool = True,
) -> PlanningProblem:
    """Return the problem of a given model and samples instead of the config's. Arguments as in `planning_problem`."""
    target = target_of_run(config)
    searched_sizes(config, target)
    measures = config.plan.costs is None and target.is_local and not target.groups
    kept = cached_costs(model, target, (), config.data.max_length) if measures else None
    measured = layer_costs(config, model, target, say, kept, measure_again)
    from_before = kept is not None and all(
        cost == kept.layers[kind].get(degrees) for kind, own in measured.layers.items() for degrees, cost in own.items()
    )
    units = dict.fromkeys(entry.unit for entry in model.types)
    if problems := [problem for unit in units for problem in context_problems(unit)]:
        if max(config.plan.context_parallel or (1,)) > 1:
            raise list_problems("context-parallel degrees (plan.context_parallel):", problems)
        measured = measured.mapped(_without_context)  # a cost file may know more than this model can do
    if measures and not from_before:
        store_costs(measured, model, kept)
    costs = costs_in_use(measured, model, sampled.targets, config.row_tokens, config.train.loss_chunk)
    workload = replace(sampled.workload, dense=dense_rows(model, costs))
    sampled = replace(sampled, workload=workload)
    return PlanningProblem(config, target, model, measured, costs, sampled, from_before)


def _without_context(costs: CostModel) -> CostModel:
    layers = {
        kind: {degrees: cost for degrees, cost in known.items() if degrees.row_parts == 1}
        for kind, known in costs.layers.items()
    }
    return replace(costs, layers=layers)


def plan_run(problem: PlanningProblem, all_devices: bool = False, fault_tolerance: int = 0) -> PlannedRun:
    """Search for the plan of a run. all_devices: leave none idle if any plan uses all. fault_tolerance: nodes that may
    be lost at once. If nothing fits memory and the config leaves it open, weights are sharded. Raises PlanError like
    `plan.search`."""
    notes: tuple[str, ...] = ()
    try:
        result = search_run(problem, all_devices, fault_tolerance)
    except DoesNotFitError as error:
        if not may_shard(problem.config, problem.target, fault_tolerance):
            raise
        problem = problem.sharing(problem.target.rules.zero, {"": "weights"})
        try:
            result = search_run(problem, all_devices)
        except PlanError:
            raise error from None
        notes = ("no plan with whole weights fits memory, so weights and gradients are sharded (train.shard: weights)",)
    return planned_as(problem, result, notes)


def planned_as(problem: PlanningProblem, result: SearchResult, notes: tuple[str, ...]) -> PlannedRun:
    """Return the planned run of a search's result."""
    problem = problem.sharing(result.winner.zero)
    work = _work(problem)
    typical = typical_step(problem, result.winner).timeline
    return PlannedRun(problem, result, typical, work, _stable_batch(problem, result.winner, work), notes=notes)


def with_faster(planned: PlannedRun, asked: Mapping[str, AskedLayout]) -> PlannedRun:
    """Return the run with the fastest of the layouts that a user asks about, if it is faster than the search's plan."""
    result = planned.result
    for text, layout in asked.items():
        for one in answer_why_not(planned, layout).plans[:1]:
            if one.score.seconds < result.seconds:
                note = f"the search had not found {text!r}, which is faster than its plan and replaces it"
                others = (result.winner, *result.runners_up)
                result = replace(result, winner=one, runners_up=others, seconds=one.score.seconds, proven=False,
                                 lower_bound=min(result.lower_bound, one.score.seconds))  # fmt: skip
                planned = replace(planned_as(planned.problem, result, (*planned.notes, note)), rows=planned.rows)
    return planned


def answer_why_not(planned: PlannedRun, asked: AskedLayout) -> WhyNot:
    """Explain why the search of this run chose no layout like `asked`."""
    problem = planned.problem.sharing(asked.zero or planned.result.winner.zero)
    return _why_not(problem, asked, planned.result)


def plan_like(problem: PlanningProblem, asked: AskedLayout) -> PlannedRun:
    """Return the fastest plan like `asked`, under each ZeRO variant that a search tries. Raises UserError that says why
    there is none."""
    variants = [asked.zero] if asked.zero else zero_variants(problem.config, problem.target)[0]
    answers = {zero: _why_not(problem.sharing(zero), asked, None) for zero in variants}
    fitting = [zero for zero in variants if answers[zero].plans]
    if not fitting:
        raise UserError(" ".join(no_plan_text(answers[variants[0]], problem.target.cluster)))
    zero = min(fitting, key=lambda zero: answers[zero].plans[0].score.seconds)
    return _alone(problem.sharing(zero), answers[zero].plans)


def _why_not(problem: PlanningProblem, asked: AskedLayout, result: SearchResult | None) -> WhyNot:
    searched = search_problem(problem)
    return why_not(searched.spaces(), searched.cluster, asked, result, scorer_of(problem))


def _alone(problem: PlanningProblem, plans: Sequence[RankedPlan]) -> PlannedRun:
    """Return the first of `plans` as the result of a "search" that looked at no others."""
    winner = plans[0]
    result = SearchResult(
        winner=winner,
        runners_up=tuple(plans[1:]),
        rejected=(),
        candidates=len(plans),
        seconds=winner.score.seconds,
        proven=False,
        lower_bound=0.0,
    )
    return PlannedRun(problem, result, typical_step(problem, winner).timeline, _work(problem), None)


def search_run(
    problem: PlanningProblem,
    all_devices: bool,
    fault_tolerance: int = 0,
    only: Enumerate | None = None,
    finalists: int | None = None,
) -> SearchResult:
    """Search under the ZeRO variants that the config leaves open. only, finalists: as in `search`; default: those of
    the config."""
    (first, *others), rescored = zero_variants(problem.config, problem.target, fault_tolerance)
    problem = problem.sharing(first)
    return search(
        search_problem(problem, all_devices, fault_tolerance),
        scorer_of(problem),
        finalists or problem.config.debug.finalists,
        others={zero: scorer_of(problem.sharing(zero)) for zero in others},
        rescored={zero: scorer_of(problem.sharing(zero)) for zero in rescored},
        only=only,
    )


def search_problem(problem: PlanningProblem, all_devices: bool = False, fault_tolerance: int = 0) -> SearchProblem:
    """Return the input of `search`."""
    config, target = problem.config, problem.target
    settings = SearchSettings(
        microbatch_sizes=searched_sizes(config, target),
        num_microbatches=config.parallel.microbatches,
        chunks=config.plan.chunks if config.parallel.schedule in (None, "interleaved") else (1,),
        row_tokens=searched_row_tokens(config),
        row_limit=config.row_tokens,
        splits_backward=_splits(config),
        all_devices=all_devices,
        copies=fault_tolerance + 1,
        ranks_per_node=config.resilience.ranks_per_node if target.cluster.nodes == 1 else None,
        # Recovery keeps no pipeline whose units have unlike shares of their replicas, nor do those have shards.
        fills_idle=not (config.resilience.enabled or fault_tolerance or target.rules.shard),
        fills_microbatches=problem.policy in QUICK,
    )
    known = problem.costs, target.cluster, problem.simulated(), problem.global_batch, target.rules
    return SearchProblem(problem.model.spec, *known, settings)


def searched_row_tokens(config: Config) -> Sequence[int]:
    """Return the token limits of a microbatch to try: none if the config sets the number of microbatches."""
    if config.parallel.microbatches is not None:
        return ()
    asked = config.plan.microbatch_tokens
    return (config.row_tokens,) if asked is None else asked


def _splits(config: Config) -> bool:
    """Return True if the search tries a schedule that splits backwards."""
    named = config.parallel.schedule
    return named is None or named in plan_scorer.SPLIT_BACKWARD_FAMILIES


def searched_sizes(config: Config, target: Target) -> Sequence[int]:
    """Return the samples per microbatch to try, of which some divide the global batch. Raises BatchError."""
    batch, count = config.train.global_batch_size, config.parallel.microbatches
    if count is None:
        return _microbatch_sizes(config)
    # Pipelines on some number of the devices have `count` microbatches each.
    shares = [count * pipelines for pipelines in range(1, target.cluster.num_devices + 1)]
    sizes = sorted({batch // share for share in shares if batch % share == 0})
    if not sizes:
        nearest = tuple(near for near in (batch // count * count, (batch // count + 1) * count) if near)
        raise BatchError(
            f"train.global_batch_size {batch} does not divide into parallel.microbatches {count}; batches of "
            f"{' and '.join(map(str, nearest))} do",
            nearest,
        )
    return sizes


def time_plan(
    problem: PlanningProblem, plan: Plan, num_microbatches: int | None = None, row_tokens: int | None = None
) -> PlannedRun:
    """Time a given plan on the cluster of the problem, as a "search" among this plan alone.

    Without `num_microbatches`, the fastest that `plan.microbatch_sizes` allow is used; row_tokens: as in
    `PlanCandidate`. Raises UserError for a plan that cannot train this model here, or a batch that does not divide
    among its pipelines.
    """
    validate(plan, problem.model.spec, problem.target.cluster)
    if (
        row_tokens is not None and problem.config.train.row_tokens is None
    ):  # the plan may have longer rows than the default
        problem = problem.with_row_tokens(max(row_tokens, problem.config.row_tokens))
    score = scorer_of(problem)
    pipelines = max(len(unit.replicas) for unit in plan.units)
    sizes = () if num_microbatches else _microbatch_sizes(problem.config, pipelines)
    counts = sorted(problem.global_batch // (pipelines * size) for size in sizes) or [num_microbatches or 1]
    found = {count: score(plan, count, row_tokens) for count in counts}

    def rank(count: int) -> tuple[bool, float]:
        overflow = problem.target.cluster.overflow(plan.ranks, found[count].peak_bytes)
        return overflow > 0.0, found[count].seconds

    best = min(found, key=rank)
    return _alone(problem, [_as_ranked(problem, plan, pipelines, best, row_tokens, found[best])])


def typical_step(problem: PlanningProblem, ranked: RankedPlan) -> plan_scorer.Step:
    """Return the simulated step whose time is nearest to their mean."""
    own = ranked.plan, ranked.num_microbatches, ranked.row_tokens
    steps = scorer_of(problem.sharing(ranked.zero), ranked.score.schedule or None).steps(*own)
    mean = float(np.mean([step.seconds for step in steps]))
    return min(steps, key=lambda step: abs(step.seconds - mean))


def predicted_step(problem: PlanningProblem, plan: Plan, step: MeasuredStep) -> Timeline:
    """Predict a measured step: exactly its actions, by the costs of `problem` (without gradient sync)."""
    spec, target = problem.model.spec, problem.target
    validate(plan, spec, target.cluster)
    tokens = {unit: np.asarray(counts, dtype=np.float64) for unit, counts in step.tokens.items()}
    return predict(
        plan,
        step.assignment,
        step.schedule,
        stage_costs(plan, spec, problem.costs, target.rules, target.cluster),
        tokens,
        target.cluster,
        squares=squares_of(tokens, problem.model.item_tokens, problem.model.media_pairs),
        dense=problem.samples.workload.dense,
    )


def tried_schedules(problem: PlanningProblem) -> tuple[str, ...]:
    """Return the schedule families that a search of this problem tries."""
    if problem.config.parallel.schedule is not None:
        return (problem.config.parallel.schedule,)
    rounds = tuple(plan_scorer.INTERLEAVED_FAMILIES) if max(problem.config.plan.chunks) > 1 else ()
    return (
        *(plan_scorer.CANDIDATE_FAMILIES if _splits(problem.config) else plan_scorer.WHOLE_BACKWARD_FAMILIES),
        *rounds,
    )


def searched_counts(problem: PlanningProblem, pipelines: int) -> tuple[int, ...]:
    """Return the numbers of microbatches that a search tries with this many pipelines."""
    sizes = searched_sizes(problem.config, problem.target)
    return tuple(problem.global_batch // (pipelines * size) for size in sizes
                 if problem.global_batch % (pipelines * size) == 0)  # fmt: skip


def _work(problem: PlanningProblem) -> NDArray[np.float64]:
    return sample_work(problem.model.spec, problem.costs, problem.samples.first(problem.samples.available))


def scorer_of(problem: PlanningProblem, schedule: str | None = None) -> plan_scorer.PlanSimulator:
    """Return the function that scores plans under `schedule`, else under the best schedule that a search tries."""
    named = schedule or problem.config.parallel.schedule
    return plan_scorer.PlanSimulator(
        problem.model.spec,
        problem.costs,
        problem.target.cluster,
        problem.simulated(),
        problem.global_batch,
        problem.policy,
        problem.target.rules,
        problem.config.seed,
        problem.config.row_tokens,
        {named: FAMILIES[named]} if named else partial(plan_scorer.families_for, splits=_splits(problem.config)),
    )


def _stable_batch(problem: PlanningProblem, winner: RankedPlan, work: NDArray[np.float64]) -> StableBatch | None:
    """Return the global batch from which on the data call for the same devices per unit. The devices are those of a
    pipeline; if the winner's units share them, of the longest that could keep units apart. None for unlike devices."""
    devices = problem.target.cluster.num_devices
    budget = devices // winner.replicas if winner.encoders_at is not EncoderPosition.IN_LANGUAGE else devices
    if work.shape[1] == 1 or not work.any() or problem.target.groups:
        return None
    for share in range(budget, 0, -1):
        allocations = _allocations(problem, share) if budget % share == 0 else ()
        if len(allocations) > 1:
            return minimum_stable_batch(work, allocations, tolerance=ALIKE)
    return None


def _allocations(problem: PlanningProblem, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the ways to divide exactly these devices among the units, of one replica each."""
    sizes = [
        {
            degrees.ranks * stages
            for degrees in degrees_of(problem.costs)
            for stages in range(1, min(len(unit.layers), devices // degrees.ranks) + 1)
        }
        for unit in problem.model.spec.units
    ]
    return feasible_allocations([sorted(own) for own in sizes], devices) if all(sizes) else ()


def _as_ranked(
    problem: PlanningProblem,
    plan: Plan,
    pipelines: int,
    num_microbatches: int,
    row_tokens: int | None,
    score: PlanScore,
) -> RankedPlan:
    return RankedPlan(
        plan=plan,
        encoders_at=EncoderPosition.PARALLEL,
        replicas=pipelines,
        microbatch_size=max(1, round(problem.global_batch / (pipelines * num_microbatches))),
        num_microbatches=num_microbatches,
        idle_devices=problem.target.cluster.num_devices - len(plan.ranks),
        bound=0.0,
        score=score,
        row_tokens=row_tokens,
        zero=problem.target.rules.zero,
    )


def _microbatch_sizes(config: Config, pipelines: int = 1) -> list[int]:
    """Return the samples per microbatch that the config allows. Raises BatchError, naming the keys."""
    try:
        return microbatch_sizes_for(config.train.global_batch_size, config.plan.microbatch_sizes, pipelines)
    except BatchError as error:
        where = "train.global_batch_size and plan.microbatch_sizes"
        raise BatchError(f"{where}: {error}", error.nearest) from None
