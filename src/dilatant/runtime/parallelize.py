"""The Python API: a model and a layout in, something that executes global batches out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker, local_worker
from dilatant.config.errors import UserError
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import choose_attention, own_attention
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec
from dilatant.runtime.precision import pick_precision
from dilatant.runtime.runtime import Runtime
from dilatant.schedule import FAMILIES
from dilatant.schedule.assign import POLICIES, Policy
from dilatant.schedule.pipeline_shape import Family
from dilatant.schedule.step_assignment import Microbatching


def parallelize(
    model: MultimodalModel,
    specs: Mapping[str, ParallelSpec],
    *,
    num_microbatches: int = 1,
    worker: Worker | None = None,
    colocated: Mapping[str, str] | None = None,
    schedule: str | Family = "1f1b",
    assignment: Policy = "balanced",
    seed: int = 0,
    row_tokens: int | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    **options: Any,
) -> Runtime:
    """Build this rank's stages of `model`, spread over all workers as `specs` say.

    model: built alike on every rank; with device "meta" each rank makes only its own layers, from `seed`. worker: from
    `launch`; not needed where this process is the only one. colocated: see `plan_from_specs`. num_microbatches,
    row_tokens: see `Microbatching`. schedule: a name that `parallel.schedule` may have, or a schedule family of one's
    own. assignment: how samples are grouped into microbatches, as `plan.assignment`. precision: as `train.precision`
    (default: weights stay as the model has them). seed: of random weights and of dropout, which is keyed by each
    sample's `draw` or, where no sample has one, by its place and the number of the step: give `execute` its
    `step_number` when a run goes on later. options: of Runtime. Raises UserError that lists what is wrong, before
    anything is built.
    """
    worker = worker or local_worker()
    plan = plan_from_specs(
        {name: len(unit.layers) for name, unit in model.units.items()},
        specs,
        model.graph.feeds,
        colocated,
    )
    if len(plan.ranks) != worker.size:
        raise UserError(
            f"the specs need {len(plan.ranks)} workers, but there {'are' if worker.size > 1 else 'is'} {worker.size}; "
            f"call this in a function that `launch(function, {len(plan.ranks)})` runs, and hand it the worker"
        )
    if num_microbatches < 1:
        raise UserError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    if isinstance(schedule, str) and schedule not in FAMILIES:
        raise UserError(f"schedule {schedule!r} is unknown; there are {', '.join(FAMILIES)}")
    if assignment not in POLICIES:
        raise UserError(f"assignment {assignment!r} is unknown; there are {', '.join(POLICIES)}")
    family = FAMILIES[schedule] if isinstance(schedule, str) else schedule
    choose_attention(model, own_attention(model.language.model))
    return Runtime(
        model,
        plan,
        Comm(worker.store, worker.rank, worker.size, device=worker.device),
        microbatching=Microbatching(num_microbatches, family, assignment, seed, row_tokens),
        seed=seed,
        precision=None if precision is None else pick_precision(precision, worker.device),
        owns_comm=True,
        **options,
    )
