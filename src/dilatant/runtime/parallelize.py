"""The Python API: a model and a layout in, something that executes global batches out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker
from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import LANGUAGE, MultimodalModel
from dilatant.models.row_attention import prefer_row_attention
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.runtime.holders import trainable_layers
from dilatant.runtime.precision import Precision, pick_precision
from dilatant.runtime.runtime import Runtime, StepResult
from dilatant.schedule.assign import Policy
from dilatant.schedule.dependencies import messages
from dilatant.schedule.distribute import assign
from dilatant.schedule.families import gpipe, one_f_one_b
from dilatant.schedule.measured import MeasuredStep
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.trainability import Trainability, trainability_of

Family = Callable[[Plan, Assignment, Trainability], Schedule]


class Parallel:
    """This rank's part of a model under one plan; `close()` ends it.

    parameters: logical name → parameter held here. They are ordinary parameters: an ordinary optimizer updates them
    after `execute` as every other holder does.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_microbatches: int,
        family: Family,
        comm: Comm,
        policy: Policy = "balanced",
        seed: int = 0,
    ) -> None:
        self.runtime = runtime
        self.num_microbatches = num_microbatches
        self._family = family
        self._comm = comm
        self._policy = policy
        self._seed = seed
        self._last: tuple[Assignment, Schedule, dict[str, list[int]]] | None = None
        self._trainability = trainability_of(runtime.plan, trainable_layers(runtime.model.units))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.runtime.parameters

    def trainable(self) -> Iterable[nn.Parameter]:
        """Parameters for an optimizer; a rank of frozen layers has none."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def execute(
        self, samples: Sequence[EncodedSample], wish: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Forward, backward and gradient sync of one global batch, the same on all ranks (see `Runtime.execute`).

        Samples are grouped into microbatches by the policy, by their tokens.
        """
        assignment, tokens = self._assign(samples)
        # Batches of equal sizes give equal assignments; the runtime prepares these once.
        if self._last is None or self._last[0] != assignment:
            schedule = self._family(self.runtime.plan, assignment, self._trainability)
        else:
            assignment, schedule, _ = self._last
        self._last = assignment, schedule, tokens
        return self.runtime.execute(samples, assignment, schedule, wish)

    def predict(self, samples: Sequence[EncodedSample]) -> dict[int, list[int]]:
        """The likeliest token in the place of each target (see `Runtime.predict`), in the mode that the model is in."""
        assignment, _ = self._assign(samples)
        nothing = (False,) * len(self.runtime.plan.stages())
        schedule = gpipe(self.runtime.plan, assignment, Trainability(nothing, nothing, nothing))
        return self.runtime.predict(samples, assignment, schedule)

    def arrows(self) -> list[tuple[Action, Action]]:
        """Which action of the last step made rows for which other one, for `write_timeline`."""
        if self._last is None:
            return []
        edges = messages(self.runtime.plan, *self._last[:2]).values()
        return [(message.producer, message.consumer) for edge in edges for message in edge]

    def measured(self) -> MeasuredStep | None:
        """The last step as all ranks ran it, None before the first; called by all of them."""
        if self._last is None:
            return None
        assignment, schedule, tokens = self._last
        counts = {unit: tuple(each) for unit, each in tokens.items()}
        return MeasuredStep(assignment, schedule, counts, self.runtime.measured())

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """As torch.nn.utils.clip_grad_norm_, over the whole model; norm: see `Runtime.clip_grad_norm_`."""
        return self.runtime.clip_grad_norm_(max_norm, norm)

    def _assign(self, samples: Sequence[EncodedSample]) -> tuple[Assignment, dict[str, list[int]]]:
        """The microbatches of a batch; and the tokens of its samples by unit."""
        plan = self.runtime.plan
        tokens = {unit.name: [sample.sizes.get(unit.name, 0) for sample in samples] for unit in plan.units}
        return assign(plan, tokens, self.num_microbatches, self._policy, self._seed), tokens

    def close(self) -> None:
        self.runtime.close()
        self._comm.close()


def parallelize(
    model: MultimodalModel,
    specs: Mapping[str, ParallelSpec],
    *,
    num_microbatches: int,
    worker: Worker,
    colocated: Mapping[str, str] | None = None,
    family: Family = one_f_one_b,
    seed: int = 0,
    precision: Precision | None = None,
    **options: Any,
) -> Parallel:
    """`model` spread over all workers as `specs` say.

    model: built alike on every rank; with device "meta" each rank makes only its own layers, from `seed`. worker:
    from `launch`. colocated: see `plan_from_specs`. num_microbatches: of each replica of the language model. options:
    of Runtime.
    Raises UserError that lists what is wrong, before anything is built.
    """
    plan = plan_from_specs(
        {name: len(unit.layers) for name, unit in model.units.items()},
        specs,
        {name: (LANGUAGE,) for name in model.units if name != LANGUAGE},
        colocated,
    )
    if len(plan.ranks) != worker.size:
        raise UserError(f"the specs need {len(plan.ranks)} workers, but {worker.size} were started")
    if num_microbatches < 1:
        raise UserError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    if model.language.model.config._attn_implementation == "sdpa":  # what transformers takes if nobody chose
        prefer_row_attention(model)
    comm = Comm(worker.store, worker.rank, worker.size, device=worker.device)
    precision = precision or pick_precision("fp32", torch.device(worker.device))
    runtime = Runtime(model, plan, comm, seed=seed, precision=precision, **options)
    return Parallel(runtime, num_microbatches, family, comm)
