"""The runtime executes training steps on one rank, under one plan, for one generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config.errors import UserError, list_problems
from dilatant.config.memory_modes import Compile, Kernels
from dilatant.data.sample import EncodedSample
from dilatant.models.core.fused_modules import KernelSet, kernel_set
from dilatant.models.core.random_draws import draws_of
from dilatant.models.core.running_statistics import unheld_statistics
from dilatant.models.core.stage import Predictions, Stage, StepData, stage_tensors
from dilatant.models.dropout.keyed_dropout import unkeyed_dropout
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.costs.step_costs import StepCosts, token_costs
from dilatant.plan.plan import Plan
from dilatant.plan.sharding import shard_problems
from dilatant.runtime.build import (
    boxes_to_read,
    bucket_stages,
    build_stages,
    compile_stages,
    derive_boundaries,
    first_ranks_costs,
    local_stages,
    release_sharded,
    shard_stages,
)
from dilatant.runtime.compiled_blocks import compiles
from dilatant.runtime.executor import AlreadyAccumulated, Executor, nothing_accumulated
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.state.exact_sums import ExactGradients
from dilatant.runtime.state.full_state import gather_weights, load_full_state
from dilatant.runtime.state.holders import boxes_held_on, holdings_of, slice_of, trainable_layers
from dilatant.runtime.state.host_copies import HostCopies
from dilatant.runtime.state.shared_weights import BucketedWeights, StateLayout
from dilatant.runtime.step.agreement import Agreement, Diverged, digest
from dilatant.runtime.step.cost_correction import CostCorrection
from dilatant.runtime.step.loss_sums import ForwardOutcome
from dilatant.runtime.step.partial_step import Layer
from dilatant.runtime.step.recorder import Recorder
from dilatant.runtime.step.row_owners import RowOwners
from dilatant.runtime.step.step_end import StepEnd
from dilatant.runtime.step.step_planner import PreparedStep, StepPlanner
from dilatant.runtime.step.step_result import SamplePredictions, ShareCounter, StepResult
from dilatant.runtime.step.unfinished_step import UnfinishedStep
from dilatant.runtime.transport import Transport
from dilatant.schedule.assignment.step_assignment import Microbatching
from dilatant.schedule.schedule import Action, Assignment, MeasuredAction, MeasuredStep, Schedule
from dilatant.schedule.trainability import trainability_of


@dataclass(frozen=True, slots=True)
class Execution:
    """Settings of the execution of steps.

    precision: the dtype of weights, activations and rows; the model keeps it. None: the model's own dtypes. With bf16,
    gradients are still fp32; `training.master_weights` has an optimizer for them. exact: make sums over samples
    bit-identical under all plans with equally many ranks per stage; needs microbatches of one sample
    (`Microbatching.alone`). correct_costs: correct the costs by measurements during the run. num_sources: number of
    data sets; with several, the loss is also reported by data set. look_ahead: number of messages that are received
    ahead. check_transport: check with a header that both ends agree on every message. owns_comm: `close` closes the
    communicator, too. compile: as in `train`. compiler: the backend of
    `torch.compile`. kernels: as in `train`, or a kernel set of your own.
    """

    precision: torch.dtype | None = None
    exact: bool = False
    correct_costs: bool = True
    num_sources: int = 1
    look_ahead: int = 2
    check_transport: bool = False
    owns_comm: bool = False
    compile: Compile = "none"
    compiler: str = "inductor"
    kernels: Kernels | KernelSet = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    """Part of a runtime in a run that survives the loss of ranks.

    before: a closed runtime of an earlier generation with the same model, whose `stays` returned True for this rank:
    its stages and weights are reused, and no stage is built. weights_follow: weights are filled in later, and all ranks
    pass equal costs. Otherwise replicas must have equal weights, and rank 0's costs are used. keeps_gradients: keep
    each rank's own gradients until `UnfinishedStep.forget`, so that they survive the loss of other ranks.
    """

    before: Runtime | None = None
    weights_follow: bool = False
    keeps_gradients: bool = False


class Runtime:
    """Build the stages of `comm.rank` under `plan` and execute steps on them until `close()`.

    model: if its units are on the meta device, only the layers held here are materialized, with weights determined by
    `seed`. weights: logical name → tensor that replaces the random one, or its part in `boxes` or `boxes_to_read`.
    Every rank passes the same model and plan. There is no global state: a process may close one runtime and build
    another for another plan. Raises UserError if the plan cannot be trained, or if replicas would start from different
    weights.
    microbatching: settings for planning a step. costs: stage costs for assigning samples and predicting step times, on
    all ranks those of rank 0; None: token counts. layout: how optimizer state, gradients and weights are sharded.
    Unless its `zero` is "none", `owned` receives the gradients: the optimizer updates its parameters, and
    `owned.gather` must follow every update. Sharded weights have values only in steps and in `whole_weights`.

    holdings: the holders of every weight; boxes: logical name → the part of each weight and buffer held here.
    parameters: logical name → parameter held here. After `execute`, any optimizer may update these ordinary parameters,
    identically on all holders. fixed: this rank's parts of sharded frozen weights. unfinished: its gradients of the
    current step, for recovery.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        comm: Comm,
        *,
        microbatching: Microbatching = Microbatching(),  # noqa: B008  # a frozen value
        costs: StepCosts | None = None,
        seed: int | None = 0,
        weights: Mapping[str, Tensor] | None = None,
        layout: StateLayout = StateLayout(),  # noqa: B008  # a frozen value
        execution: Execution = Execution(),  # a frozen value
        recovery: Recovery = Recovery(),  # a frozen value
    ) -> None:
        require_trainable(plan, model.units)
        trains = {name: any(layers) for name, layers in trainable_layers(model.units).items()}
        if problems := shard_problems(plan, trains, layout.zero, layout.shard):
            raise list_problems("this plan cannot train:", problems)
        if execution.exact and layout.shard:
            raise UserError("train.shard: exact sums need whole gradients of every sample; leave it out")
        self._refused_in_training = unkeyed_dropout(model.units.values()) or unheld_statistics(model.units)
        if layout.zero == "node" and layout.node_of is None:
            layout = replace(layout, node_of=comm.nodes)
        rank, before, kind = comm.rank, recovery.before, execution.precision
        self.model, self.plan, self.comm = model, plan, comm
        self._owns_comm, self._seed = execution.owns_comm, seed or 0
        self._plan_digest = digest(plan.to_json(), f"{layout.zero} {layout.node_of} {sorted(layout.shard.items())}")
        attention = model.language.row_attention
        self._placement_digest = digest("" if attention is None else attention.placement)
        self._placed = plan.stages()
        self.holdings = holdings_of(plan, model.units)
        self.boxes = boxes_held_on(self.holdings, rank)
        weights = {
            name: slice_of(tensor, self.boxes[name]) if tensor.shape == self.boxes[name].whole else tensor
            for name, tensor in (weights or {}).items()
            if name in self.boxes
        }
        parts = boxes_to_read(model, plan, comm, layout, kind, self.holdings) if weights else {}
        read = {n: parts[n] for n, t in weights.items() if t.shape == parts[n].shape != self.boxes[n].shape}
        if before is None:
            modules = build_stages(model, plan, comm, seed, weights, self.boxes, kind, layout.shard, read)
        else:
            held = [placed.index for placed in self._placed if rank in placed.stage.ranks]
            modules = dict(zip(held, before.modules.values(), strict=True))
        self._boundaries = derive_boundaries(model, plan)
        trainability = trainability_of(plan, trainable_layers(model.units))
        if execution.exact and execution.compile == "blocks":
            raise UserError(
                "train.compile: blocks may round otherwise in rows of other lengths; leave out deterministic"
            )
        how = "none" if execution.exact else execution.compile
        compiled = {name for name, unit in model.units.items() if compiles(how, comm.device, unit.family)}
        own = execution.kernels
        kernels = kernel_set(own, comm.device) if isinstance(own, str) else own
        of_unit: dict[str, KernelSet] = {name: {} if name in compiled else kernels for name in model.units}
        old = None if before is None else before._shared
        self._shared: BucketedWeights = bucket_stages(
            model, plan, comm, modules, self.holdings, layout, weights, old, read
        )
        if not recovery.weights_follow:
            self._shared.require_equal()
            costs = first_ranks_costs(comm, costs, plan)
        release_sharded(modules.values(), self._shared)
        self.owned, self.fixed = self._shared.owned, self._shared.fixed
        self._stages = local_stages(model, plan, rank, modules, self._boundaries, trainability.backward, of_unit)
        if own == "liger" and not any(stage.fused and stage.fused.places for stage in self._stages.values()):
            warnings.warn(f"train.kernels: liger has no kernel for the modules of rank {rank}", stacklevel=2)
        self.parameters = {
            name: parameter for module in modules.values() for name, parameter in module.named_logical_parameters()
        }
        self._sync = self._shared.sync
        self._sync.keeps = recovery.keeps_gradients and not self._shared.sharded
        if execution.exact:
            self._sync.exact = ExactGradients(self._shared.owned.weights)
        shard_stages(model, self._stages, self._shared, layout)
        self._eager: set[type[nn.Module]] = set() if before is None else before._eager
        compile_stages(model, self._stages, compiled, execution.compiler, self._eager)
        self._recorder = Recorder(rank, comm.device)
        self._transport = Transport(
            comm, [p.stage for p in self._placed], execution.look_ahead, execution.check_transport
        )
        units = {placed.index: placed.unit for placed in self._placed}
        self._executor = Executor(rank, self._stages, units, self._transport, self._sync, self._recorder, comm.device)
        self.unfinished = UnfinishedStep(model, plan, rank, self._sync, self._executor.settle, execution.num_sources)
        # Token counts cannot be compared with measured seconds, and a single rank has nothing to balance.
        corrects = execution.correct_costs and costs is not None and len(plan.ranks) > 1
        self.costs = CostCorrection(plan, costs or token_costs(plan, trainability.backward), corrects)
        if not model.language.packs_rows:
            microbatching = replace(microbatching, alone=True)
        self._planner = StepPlanner(plan, trainability, model.graph, microbatching, self.costs, rank, layout.shard)
        self._end = StepEnd(
            comm, ShareCounter(plan), model.graph, self.costs, self._shared, self._recorder, execution.num_sources
        )
        self.last_step: PreparedStep | None = None  # the last executed one
        self._next_step = 0
        self._on_host: HostCopies | None = None

    @property
    def modules(self) -> dict[int, Stage]:
        """Map stage number → stage held here."""
        return {index: stage.module for index, stage in self._stages.items()}

    def stays(self, plan: Plan, rank: int) -> bool:
        """Return True if a new `Runtime` for `rank` under `plan` can reuse this one. The rank must hold the same layers
        as here, all in stages of one rank."""
        there = [placed for placed in plan.stages() if rank in placed.stage.ranks]
        here = [stage.placed for stage in self._stages.values()]
        return all(len(placed.stage.ranks) == 1 for placed in (*here, *there)) and [
            (placed.unit, placed.stage.first, placed.stage.end) for placed in here
        ] == [(placed.unit, placed.stage.first, placed.stage.end) for placed in there]

    def clear_gradients(self) -> None:
        """Drop the gradients of all weights held here; a reused runtime still has those of the earlier generation."""
        for parameter in (*self.parameters.values(), *self.owned.parameters.values()):
            parameter.grad = None

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Context in which sharded weights are whole, as of the last update, to be read; entered by all ranks. Outside
        of it and of steps, a sharded weight has no values (`owned` has this rank's part)."""
        for stage in self._shared.stages.values():
            stage.gather_all()
        yield
        for stage in self._shared.stages.values():
            stage.release_all()

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Trainable parameters for an optimizer; empty on a rank whose layers are all frozen."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def plan_step(
        self, samples: Sequence[EncodedSample], *, forwards: bool = False, step_number: int | None = None
    ) -> PreparedStep:
        """Plan the step of a global batch and compile it for this rank. Reads only `sizes` and `draw` of the samples,
        does not communicate and keeps no state, so another thread may plan ahead.

        forwards: plan forwards only, for `predict`. step_number: the step's number in the run, by default that of the
        next step to execute. Planning ahead requires it, since all ranks must use the same costs. Raises RuntimeError
        if it is more than `cost_correction.INTERVAL` steps ahead, UserError for samples that cannot be assigned.
        """
        number = self._next_step if step_number is None else step_number
        reuse = None if forwards else self.unfinished.reused_in(number, samples)
        if reuse is None:
            return self._planner.plan_step(samples, number, forwards)
        return self._planner.plan_missing(samples, reuse, self.unfinished.weights, self.unfinished.loss_layers)

    def forwards_of(self, samples: Sequence[EncodedSample], step: PreparedStep) -> PreparedStep:
        """Plan forwards, for `predict`, of the samples of a planned step on the ranks that run them in that step."""
        return self._planner.plan_forwards(samples, step.assignment, self._next_step)

    def prepare(
        self, samples: Sequence[EncodedSample], assignment: Assignment, schedule: Schedule, *, forwards: bool = False
    ) -> PreparedStep:
        """Compile a step from an assignment and a schedule; `plan_step` makes its own. For a step that cannot run,
        notifies the other ranks and raises ScheduleError."""
        with self._telling_others():
            return self._planner.prepare(samples, assignment, schedule, self._next_step, forwards)

    def execute(
        self,
        samples: Sequence[EncodedSample],
        step: PreparedStep | None = None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        found: Callable[[], Sequence[Any]] = tuple,
        step_number: int | None = None,
    ) -> StepResult:
        """Run forward, backward and gradient sync of one global batch; called by all ranks.

        samples: the whole batch, in the same order on all ranks; media are needed only on ranks whose encoder stage
        reads them. step: the result of `plan_step` or `prepare` for these samples; planned here by default. New
        gradients are added to existing ones. Returns when every rank has its reduced gradients, so that all may apply
        them. should_stop: called at the end; True on any rank makes `StepResult.should_stop` True on all. found: called
        at the end for JSON values to share with all ranks, usually none (see `StepResult.found`). step_number: the
        number of this step, counted from 0, by default one more than the last; equal on all ranks.

        Raises Diverged if ranks have different steps, ActionFailed or UserError if an action fails here, CommAborted if
        another rank failed. After an error, the runtime can only be closed.
        """
        if self._refused_in_training is not None and any(module.training for module in self.modules.values()):
            raise self._refused_in_training
        with self._telling_others():
            number = self._next_step if step_number is None else step_number
            step = step or self.plan_step(samples, step_number=number)
            self.last_step = step
            self._next_step = number + 1
            data, outcomes = self._run(samples, step, number)
            return self._end.agree(number, step, data, outcomes, should_stop, found)

    def predict(
        self, samples: Sequence[EncodedSample], step: PreparedStep | None = None
    ) -> dict[int, SamplePredictions]:
        """Return sample number → predictions for the samples whose last language-model stage is on this rank; called by
        all ranks.

        step: the result of `plan_step` with `forwards` for these samples, by default planned here. See `execute`.
        """
        with self._telling_others():
            step = step or self.plan_step(samples, forwards=True)
            if not step.forwards:
                raise ValueError("the step has backwards; plan it with forwards=True")
            predicted = {}
            for outcome in self._run(samples, step, self._next_step, predicts=True)[1]:
                assert isinstance(outcome.value, Predictions)
                counts = [int((samples[number].labels[1:] != -100).sum()) for number in outcome.samples]
                parts = zip(outcome.value.tokens.cpu().split(counts), outcome.value.losses.cpu().split(counts))
                for number, (tokens, losses) in zip(outcome.samples, parts, strict=True):
                    predicted[number] = SamplePredictions(tokens.tolist(), losses.tolist())
            return predicted

    def log_probabilities(self, samples: Sequence[EncodedSample]) -> list[Tensor]:
        """Return the log-probability of each target token, fp32 [targets] for each sample, on every rank; called by all
        ranks. Targets are the labels that are not -100; the model runs in evaluation mode, without gradients."""
        modes = {number: module.training for number, module in self.modules.items()}
        self.train(False)
        own = self.predict(samples)
        for number, module in self.modules.items():
            module.train(modes[number])
        everywhere = all_gather_object(self.comm, list(own))
        elsewhere = {number for numbers in everywhere[: self.comm.rank] for number in numbers}
        found = torch.zeros(sum(counts := [sample.target_tokens for sample in samples]))
        parts = found.split(counts)
        for number, predicted in own.items():
            if number not in elsewhere:  # several ranks may predict a sample
                parts[number].copy_(-torch.tensor(predicted.losses))
        self.comm.world.sum_(found, "log-probabilities").wait()
        return list(parts)

    def named_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, gathered one by one on the host of rank 0 or `everywhere`, under Hugging Face keys (see
        `full_state.full_keys`). All ranks iterate to the end. Adapters are not merged."""
        self._require_weights()
        return gather_weights(self.model, self.holdings, self.comm, self.tensors(), everywhere)

    def state_dict(self, everywhere: bool = False) -> dict[str, Tensor]:
        """Return all of `named_weights`. Called by all ranks."""
        return dict(self.named_weights(everywhere))

    def offload(self, *optimizers: torch.optim.Optimizer, weights: bool = True) -> HostCopies:
        """Move the state of optimizers, and with `weights` weights, buffers and gradients, from this rank's device to
        its host until `restore` of the result. Until then, what needs weights raises RuntimeError."""
        if weights:
            self._require_weights()
        held = [*self.tensors().values(), *self.owned.parameters.values(), *self.fixed.parameters.values()]
        copies = HostCopies(self.comm.device, held, optimizers, weights)
        self._on_host = copies if weights else self._on_host
        return copies

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load weights as `state_dict` returns them; every rank passes all of them, and copies what it holds. An
        optimizer that has masters of its own is made afterwards. Called by all ranks. Raises UserError."""
        self._require_weights()
        load_full_state(self.model, self.boxes, self.tensors(), state)
        self.owned.follow()
        self._shared.require_equal()

    def grad_norm(self) -> float:
        """Return the current norm of all gradients, the same on every rank; called by all ranks."""
        total = torch.tensor(self.owned.squared_norm(), dtype=torch.float64)
        self.comm.world.sum_(total, "the gradient norm").wait()
        return float(total.sqrt())

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm before.

        norm: `StepResult.grad_norm`, if gradients are unchanged since that step; without it, all ranks must call.
        """
        norm = self.grad_norm() if norm is None else norm
        gradients = [p.grad for p in self.owned.parameters.values() if p.grad is not None]
        if norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return norm

    def named_ranges(self) -> AbstractContextManager[None]:
        """Return a context in which actions have named ranges for profilers (see `Recorder.named_ranges`)."""
        return self._recorder.named_ranges()

    def measured(self) -> tuple[MeasuredAction, ...]:
        """Return the measured times of every action of the last step, of all ranks; called by all ranks."""
        rows = all_gather_object(self.comm, msgspec.to_builtins(self._recorder.rows()))
        return msgspec.convert([row for of_rank in rows for row in of_rank], tuple[MeasuredAction, ...])

    def measured_step(self) -> MeasuredStep | None:
        """Return the last executed step as measured on all ranks; None before the first; called by all ranks."""
        last = self.last_step
        return None if last is None else MeasuredStep(last.assignment, last.schedule, last.tokens, self.measured())

    def arrows(self) -> list[tuple[Action, Action]]:
        """Return (producer, consumer) action pairs of the last step's messages, for `write_timeline`."""
        return [] if self.last_step is None else self.last_step.arrows(self.plan)

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight and persistent buffer held here by logical name, without copying, tied weights once.
        `boxes` has the part of each tensor that is held."""
        held: dict[str, Tensor] = {}
        for module in self.modules.values():
            held |= stage_tensors(module)
        return held

    def require_equal(self, masters: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Check, after loading, that all holders of a weight have equal weights and all owners of a box equal optimizer
        state; called by all ranks. masters: key → fp32 master of an owned weight. moments: key → kind → tensor, as
        `optimizer_tensors` returns them. Raises UserError."""
        copies = {key: tensor for key, tensor in masters.items() if tensor is not self.owned.parameters[key]}
        state = {"master weights": copies}
        for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer", "ema"):
            state[f"moments ({kind})"] = {key: tensors[kind] for key, tensors in moments.items() if kind in tensors}
        self._shared.require_equal(state)

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode on the stages held here."""
        for module in self.modules.values():
            module.train(mode)

    def close(self) -> None:
        """Restore the model's plain linear layers and remove hooks. `comm` stays open unless owned."""
        self._sync.close()
        for stage in self._stages.values():
            stage.close()
        if self._owns_comm:
            self.comm.close()
        self._executor.settle()

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except Diverged:  # every rank detects this itself; an abort could arrive first
            raise
        except BaseException as error:
            self.comm.abort(f"rank {self.comm.rank} failed: {error}")
            raise

    def _require_weights(self) -> None:
        if self._on_host is not None and self._on_host.copies:
            raise RuntimeError("the weights are on the host; call `restore` of what `offload` returned")

    def _run(
        self, samples: Sequence[EncodedSample], step: PreparedStep, number: int, predicts: bool = False
    ) -> tuple[StepData, list[ForwardOutcome]]:
        """Run this rank's part of a step; returns its data, and its losses or predictions with their samples."""
        self._require_weights()
        draws = draws_of(samples, number)
        data = StepData.of(samples, self.model.graph.losses, self.comm.device, predicts, self._seed, draws)
        agreement = Agreement(
            self.comm,
            {
                "the plan": self._plan_digest,
                "how rows are placed on ranks": self._placement_digest,
                **step.agreed(samples, number),
                "the seed or the samples' draws": digest(str(data.seed), *data.draws),
            },
        )
        owners = RowOwners(self.model.units, self._placed, self._boundaries, step.routes, data)
        if not self._transport.has_open(step.routes):
            agreement.require()
        self._transport.begin(step.routes, owners, agreement.require)
        self._recorder.begin(kept=not data.predicts)
        if data.predicts:
            return data, self._executor.run(step.actions, step.routes, data, agreement, owners, joins=step.joins)
        salvaged = step.salvaged
        sources = [sample.source for sample in samples]
        ledger = self.unfinished.begin(number, step.draws, salvaged, sources)
        covered: AlreadyAccumulated = nothing_accumulated
        if salvaged is not None:
            covered = partial(self._covered, salvaged.reuse.covered())
        run = self._executor.run
        return data, run(step.actions, step.routes, data, agreement, owners, ledger, covered, step.joins)

    def _covered(
        self, by_layer: Mapping[Layer, frozenset[int]], stage: int, samples: tuple[int, ...]
    ) -> list[nn.Parameter]:
        """Return the weights of a stage whose gradients of these samples have been recovered."""
        names = self.unfinished.covered(stage, samples, by_layer)
        return [self.parameters[name] for name in sorted(names)]
