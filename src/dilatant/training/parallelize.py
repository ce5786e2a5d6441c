"""Python API for parallel training: turn a model and a layout into a runtime that executes global batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.launch import Worker, local_worker
from dilatant.config import ClusterConfig, Config, DataConfig, ParallelConfig, PlanConfig, TrainConfig, UserError
from dilatant.config.config import DebugConfig
from dilatant.config.environment import place_from
from dilatant.config.memory_modes import Precision
from dilatant.data.sample import EncodedSample
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_parallel import with_weights
from dilatant.models.row_attention import choose_attention, explicit_attention
from dilatant.plan.costs.workload import Workload
from dilatant.plan.manual import Specs, plan_from_specs
from dilatant.plan.plan import ParallelSpec
from dilatant.plan.sharding import shard_by_unit
from dilatant.planning.auto_plan import Devices, devices_at_hand
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.planned_run import training_plan
from dilatant.planning.planning import model_problem, plan_run
from dilatant.planning.planning_process import check_all_used, for_devices_here
from dilatant.planning.problem.describe_model import describe_model
from dilatant.planning.problem.planned_samples import PlannedSamples
from dilatant.runtime.precision import pick_precision
from dilatant.runtime.rank_trial import divide_as_planned, divide_where_proven
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.schedule.assignment.assign import POLICIES, NamedPolicy
from dilatant.schedule.assignment.step_assignment import Microbatching
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import ScheduleFamily
from dilatant.training.run_costs import Cutter

MOST_BATCHES = 4
"""Number of global batches that a layout is planned from."""
ROW_TOKENS = 2048
"""Tokens of the rows for which stages are cut if no row length is given."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Request to plan the layout from the model, its data and the workers, like `parallel: auto` in a YAML file.

    batches: global batches like those that will be executed, all with the same number of samples. The first four are
    used, and only sizes and targets are read: samples need no media. cluster, plan: as in YAML (memory, degrees,
    costs); the number of devices is the number of workers.
    """

    batches: Iterable[Sequence[EncodedSample]] = ()
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


def parallelize(
    model: MultimodalModel,
    specs: Specs | Auto,
    *,
    num_microbatches: int | None = None,
    worker: Worker | None = None,
    colocated: Mapping[str, str] | None = None,
    schedule: str | ScheduleFamily | None = None,
    assignment: NamedPolicy | None = None,
    seed: int = 0,
    row_tokens: int | None = None,
    precision: Precision | None = None,
    **options: Any,
) -> Runtime:
    """Build this rank's stages of `model`, distributed over all workers according to `specs`.

    model: built identically on every rank; on device "meta" each rank makes only its own layers, from `seed`. specs:
    unit → layout, whose stages are balanced by layer costs if no `cuts` are given; or `Auto`, planned by rank 0 while
    others wait:

        batches = [samples[k : k + 64] for k in range(0, 256, 64)]
        parallel = parallelize(model, Auto(batches), worker=worker)
        print(parallel.plan)

    worker: from `launch`; not needed in a single process. colocated: see `plan_from_specs`. num_microbatches (default
    1), row_tokens: see `Microbatching`. schedule: a name that `parallel.schedule` accepts (default 1f1b), or a schedule
    family of your own. assignment: how samples are grouped into microbatches, as `plan.assignment`. `Auto` plans
    whichever of these are not given. precision: as `train.precision` (default: the model's own dtype). seed: of random
    weights and of dropout, which is keyed by each sample's `draw` or, if no sample has one, by its position and the
    step number: pass `step_number` to `execute` when a run is resumed. options: `zero` and `shard` (as
    `train.shard`; a sharded weight is whole only in steps and in `whole_weights`; `zero` is then `node` by default),
    and those of `Runtime`. Raises UserError that lists all mistakes.
    """
    worker = worker or local_worker()
    if not isinstance(specs, Auto | Mapping):
        raise UserError(f"specs is {specs!r}; give unit → ParallelSpec, or Auto(batches) to have it planned")
    if num_microbatches is not None and num_microbatches < 1:
        raise UserError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    if isinstance(schedule, str) and schedule not in FAMILIES:
        raise UserError(f"schedule {schedule!r} is unknown; there are {', '.join(FAMILIES)}")
    if assignment is not None and assignment not in POLICIES:
        raise UserError(f"assignment {assignment!r} is unknown; there are {', '.join(POLICIES)}")
    choose_fp8(model.units, precision or "")
    name = schedule if isinstance(schedule, str) else None
    shard = options.pop("shard", None)
    layout = StateLayout(options.pop("zero", "none" if shard is None else "node"))
    auto = specs if isinstance(specs, Auto) else Auto()
    batches = _taken(auto, model, colocated or schedule != name) if specs is auto else []
    rows = [sum(sample.sizes[model.graph.anchor] for sample in batch) for batch in batches]
    is_half = next(model.language.model.parameters()).dtype == torch.bfloat16
    train: dict[str, Any] = {
        "global_batch_size": len(batches[0]) if batches else 1 << 24,  # rows are full
        "row_tokens": row_tokens or max(rows, default=ROW_TOKENS),
        "precision": precision or ("bf16" if is_half else "fp32"),
        "zero": layout.zero,
        "shard": shard,
        "loss_chunk": model.language.loss_chunk,
    }
    longest = max((s.sizes[model.graph.anchor] for batch in batches for s in batch), default=ROW_TOKENS)
    data: dict[str, Any] = {"max_length": min(longest, train["row_tokens"])}
    values: dict[str, Any] = {  # model and data are objects, not config sections
        "data": DataConfig.model_construct(**data),
        "train": TrainConfig(**train),
        "parallel": ParallelConfig.model_validate({"microbatches": num_microbatches, "schedule": name}),
        "cluster": auto.cluster,
        "plan": auto.plan.model_copy(update={"assignment": assignment}),
        "debug": DebugConfig(planned_steps=max(1, len(batches))),
        "seed": seed,
    }
    config = Config.model_construct(**values)
    layers = {unit: len(model.units[unit].layers) for unit in model.units}
    by_hand: Specs = specs if isinstance(specs, Mapping) else dict.fromkeys(layers, ParallelSpec())
    shared: Mapping[str, str] = colocated or {}
    if specs is auto:
        shared = {unit: model.graph.anchor for unit in layers if unit != model.graph.anchor}
    plan = plan_from_specs(layers, by_hand, model.graph.feeds, shared)
    if specs is not auto and len(plan.ranks) != worker.size:
        raise UserError(
            f"the specs need {len(plan.ranks)} workers, but there {'are' if worker.size > 1 else 'is'} {worker.size}; "
            f"call this in a function that `launch(function, {len(plan.ranks)})` runs, and hand it the worker"
        )
    planned = TrainingPlan(plan, num_microbatches or 1, name or "1f1b", assignment or "balanced")
    choose_attention(model, explicit_attention(model.language.model))
    comm = Comm(worker.store, worker.rank, worker.size, device=worker.device)
    if specs is auto and worker.size > 1:
        planned = _of_first_rank(comm, partial(_find_plan, model, config, batches, worker.size))
    elif any(spec.cuts is None and spec.num_stages > 1 for spec in by_hand.values()):

        def cut() -> TrainingPlan:
            own = Cutter(config, model, {})(by_hand, shared, plan)
            return replace(planned, plan=plan_from_specs(layers, own, model.graph.feeds, shared))

        planned = _of_first_rank(comm, cut)
    divide_as_planned(model, planned.plan)
    for unit in planned.plan.units:
        if unit.recompute:
            model.units[unit.name].recompute(unit.recompute)
    family = planned.family if schedule is None or isinstance(schedule, str) else schedule
    tokens = planned.row_tokens or row_tokens
    trains = {unit: any(layers) for unit, layers in trainable_layers(model.units).items()}
    kind = None if precision is None else pick_precision(precision, worker.device)
    return Runtime(
        model,
        planned.plan,
        comm,
        microbatching=Microbatching(planned.num_microbatches, family, planned.assignment, seed, tokens),
        seed=seed,
        layout=replace(layout, shard=planned.shard or shard_by_unit(planned.plan, trains, shard)),
        execution=Execution(kind, owns_comm=True),
        **{"costs": planned.costs, **options},
    )


def _taken(auto: Auto, model: MultimodalModel, is_said: object) -> list[Sequence[EncodedSample]]:
    """Return the batches to plan for. Raises UserError if an input of planning is missing."""
    if is_said:
        raise UserError("Auto says what is colocated, and plans with schedules by name: leave out your own")
    batches = list(islice(auto.batches, MOST_BATCHES))
    sizes = sorted({len(batch) for batch in batches})
    if not batches or sizes[0] == 0:
        raise UserError("Auto has no batches to plan for: Auto([samples of a global batch, ...])")
    if len(sizes) > 1:
        raise UserError(f"Auto: batches of {sizes[0]} and {sizes[-1]} samples; give global batches of one size")
    for sample in (sample for batch in batches for sample in batch):
        if sample.sizes.get(model.graph.anchor, 0) < 1:
            raise UserError(f"Auto: sample {sample.id!r} does not say its tokens: sizes[{model.graph.anchor!r}]")
    return batches


def _find_plan(
    model: MultimodalModel, config: Config, batches: Sequence[Sequence[EncodedSample]], workers: int
) -> TrainingPlan:
    """Return the plan that `parallel: auto` finds with one device for each worker."""
    place = place_from()
    devices = Devices(1, workers, "launch") if place is None else devices_at_hand(config, place)
    config, notes = for_devices_here(config.model_copy(update={"cluster": devices.cluster(config.cluster)}))
    for note in notes:
        warnings.warn(note, stacklevel=4)
    divide_where_proven(model)
    # A copy on the meta device: layers are measured with weights of their own, and `model` stays unchanged.
    hollow = with_weights(
        model,
        {own: nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad) for own in model.parameters()},
    )
    assert isinstance(hollow, MultimodalModel)
    described = describe_model(hollow, dict.fromkeys(hollow.units))
    samples = [sample for batch in batches for sample in batch]
    tokens = {unit: np.array([float(s.sizes.get(unit, 0)) for s in samples]) for unit in model.units}
    targets = sum(sample.target_tokens for sample in samples) / float(tokens[described.anchor].sum())
    squares = {unit: tokens[unit] * item for unit, item in described.item_tokens.items()}
    sampled = PlannedSamples(Workload(tokens, squares), targets, len(samples), 0)
    planned = plan_run(model_problem(config, described, sampled, measure_again=False), all_devices=True)
    check_all_used(planned, devices.launcher)
    return training_plan(planned.problem, planned.result.winner)


def _of_first_rank(comm: Comm, find: Callable[[], TrainingPlan]) -> TrainingPlan:
    """Call `find` on rank 0 and return its plan on all ranks; its UserError is raised on all ranks, too."""
    answer: tuple[str, str] | None = None
    if comm.rank == 0:
        try:
            answer = "plan", find().to_json()
        except UserError as error:
            answer = "refused", str(error)
    kind, text = all_gather_object(comm, answer)[0]
    if kind == "refused":
        comm.close()
        raise UserError(text)
    return TrainingPlan.from_json(text)
