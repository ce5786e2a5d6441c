"""Trainer: the training loop of one rank, from global batches to optimizer steps and checkpoints."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object, any_rank
from dilatant.comm.launch import Worker
from dilatant.config import Config, UserError
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler
from dilatant.data.workers.batches import GlobalBatch
from dilatant.hf.stored_weights import first_weights
from dilatant.models.core.freeze import select
from dilatant.models.multimodal import MultimodalModel
from dilatant.planning.assemble import Samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.problem.describe_model import describe_model
from dilatant.report.metrics import StepMetrics
from dilatant.runtime.build import boxes_to_read
from dilatant.runtime.precision import compute_repeatably, pick_precision
from dilatant.runtime.runtime import Execution, Recovery, Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.runtime.step.step_result import StepResult
from dilatant.schedule.schedule import DataWait
from dilatant.training.callbacks import CallbackList, RunControl, open_callbacks
from dilatant.training.commit import FIXED_MEMBERSHIP, RunMembership
from dilatant.training.evaluation.evaluation import Evaluation, Evaluator
from dilatant.training.feeding.feed import gather_bad_samples, merge_bad_samples
from dilatant.training.feeding.inputs import HELD_OUT, TRAIN, RankInputs, Steps
from dilatant.training.feeding.latents import with_latents
from dilatant.training.feeding.step_data import draws, seed_step
from dilatant.training.gradient_hashes import gradient_hashes, owned_gradients
from dilatant.training.model_flops import ModelFlops, model_flops, peak_flops
from dilatant.training.optimizers.master_weights import Averages, WithMasters, make_masters
from dilatant.training.optimizers.optimizer import build_optimizer, peak_rates, rate_factor, set_rate_factor
from dilatant.training.optimizers.own_optimizer import OwnOptimizer
from dilatant.training.own_parts import find_optimizer, find_schedule
from dilatant.training.references import FILE, References, complete_samples
from dilatant.training.run_state import RunState
from dilatant.training.saving import Saving
from dilatant.training.step_metrics import StepLog, StepMeter, explain_nonfinite, is_finite
from dilatant.training.step_profiler import StepProfiler

SLOWER = 5
"""A step is considered hung after SLOWER times the duration of the longest step so far."""


class Trainer:
    """Training loop of one rank of a plan, from its parts to its last checkpoint. `close` ends the background work.

    model: the whole model, of which this rank allocates only its own layers; the rest stays on the meta device.
    membership: for a run that survives the loss of ranks. Its commit barrier then decides which steps count, and errors
    are left to the caller: no checkpoint is saved and no other rank is notified. before: this rank's closed trainer of
    the previous generation, whose stages this rank keeps. Its weights, and its optimizer if the same parts are owned,
    are shared with this trainer, which changes none of them before `Runtime.clear_gradients`; `model` is then the
    previous trainer's model.
    references: those of pairs, if the run's loss compares with the start model.
    state: what checkpoints store and the next generation inherits. is_torn: an update was interrupted, so that `state`
    is that of no step. done: the steps that count. recovery: costs of the recovery that led to this generation, for the
    first step's metrics. owes_evaluation, owes_save: the previous generation ended before the evaluation after the
    current step was recorded everywhere, or before a due checkpoint was published; `run` begins with these.
    """

    def __init__(
        self,
        config: Config,
        samples: Samples,
        model: MultimodalModel,
        planned: TrainingPlan,
        worker: Worker,
        checkpoints: Path,
        membership: RunMembership = FIXED_MEMBERSHIP,
        before: Trainer | None = None,
    ) -> None:
        self.rank = worker.rank
        self.membership = membership
        self.recovery: Mapping[str, float] = {}
        self.owes_evaluation = self.owes_save = False
        self._config = config
        self._gate = membership.gate
        place = worker.store, worker.rank, worker.size
        self.comm = Comm(*place, membership.generation, worker.device, config.parallel.timeout_seconds)
        membership.opened(self.comm)
        sources = samples.train.source_names if isinstance(samples.train, Blend) else ()
        own_loss, pair_loss = model.language.token_loss, model.language.pair_loss
        if pair_loss is not None or (own_loss is not None and not own_loss.is_per_token):
            sources = ()  # a data set's share of the loss is unknown
        self.runtime, weights = _open_runtime(config, model, planned, self.comm, len(sources), membership, before)
        self._profiler = StepProfiler(config, worker, self.runtime.named_ranges)
        flops = model_flops(describe_model(model)) if before is None else before._meter.flops
        shared = before.state if before is not None and self.runtime.owned.stays else None
        optimizer, averages = _open_optimizer(config, self.runtime, weights, shared)
        self._meter: StepMeter = _open_meter(config, model, planned, sources, flops, optimizer)
        data = with_latents(self.comm, config, samples, worker.device)
        self.state: RunState = RunState(config, data, self.runtime, optimizer, averages)
        self._inputs = RankInputs(self.comm, self.runtime, config, data, membership.pool)
        metrics = config.part("metrics")
        own = {} if metrics is None else {function.__name__: function for function in metrics.value}
        self.evaluator = Evaluator(config.evaluation, samples, self._inputs, self.state, own, pair_loss)
        self.references: References | None = None
        if pair_loss is not None and pair_loss.how.has_reference:
            self.references = References(data, self._inputs, checkpoints.parent / FILE)
            if membership.weights_follow:
                self.references.read()
        self.saving = Saving(self.comm, checkpoints, config.train.keep_checkpoints, self.state)
        self.done = StepLog(config.train.logging_steps, self._gate is not None)
        self._background = contextlib.ExitStack()
        self._steps: Steps | None = None
        self._schedule = find_schedule(config)
        self.callbacks: CallbackList | None = open_callbacks(config) if before is None else before.callbacks
        self._layer_of = {weight.name: weight.layer for unit in model.units.values() for weight in unit.weights}
        self._skipped_updates = 0
        self._half_updated = self.is_torn = False
        self._reported_slowness = 0.0
        self._voted: tuple[StepResult, GlobalBatch] | None = None
        self._data_wait: DataWait | None = None
        self._began = self._rate = self._longest_step = 0.0

    @property
    def step(self) -> int:
        """Number of optimizer steps that are done."""
        return self.state.step

    @property
    def is_finished(self) -> bool:
        """True after the last step, if evaluations stopped improving, or if callbacks ended the run."""
        return self.step >= self.state.total_steps or self.evaluator.ends_early or self.state.stopped

    @property
    def is_save_overdue(self) -> bool:
        """True if a checkpoint was due after the last save that was published."""
        every = self._config.train.save_steps
        return every is not None and self.step // every * every > self.saving.step

    def find_references(self, keeps: bool, progress: Callable[[str], None] = lambda text: None) -> None:
        """Compute the references of the pairs that the run uses, while the weights are those that it starts from;
        called by all ranks before `restore`. keeps: those in the run folder are this run's. Raises UserError."""
        assert self.references is not None
        config, state = self._config, self.state
        assert isinstance(state.sampler, Sampler)
        is_drawn = np.zeros(state.sampler.num_samples, bool)
        for step in draws(state.sampler, state.position, 0, state.total_steps):
            is_drawn[step.indices] = True
            if is_drawn.all():
                break
        held_out = self._inputs.first_held_out(config.evaluation.limit)
        needed = {TRAIN: np.flatnonzero(is_drawn), HELD_OUT: held_out}
        self.references.compute(self.runtime, needed, config.train.global_batch_size, keeps, progress)

    def restore(self, checkpoint: Path) -> None:
        """Resume from `checkpoint`, written under any layout; called by all ranks. Raises UserError."""
        self.state.restore(checkpoint)
        any_rank(self.comm, False, "all to have read the checkpoint")
        # The folder may be renamed now.
        self.saving.continue_from(self.step, checkpoint if self.rank == 0 else None)

    @property
    def voted_step(self) -> int | None:
        """The step whose gradients this rank has voted for and not applied, or None; see `apply_voted`."""
        return None if self._voted is None else self.step

    def apply_voted(self) -> None:
        """Apply the step that was voted for after communication has ended, to the parts that this rank owns. Weights
        owned by other ranks stay stale, but `RunState.tensors` does not read them."""
        assert self._voted is not None
        result, batch = self._voted
        self._update(result, batch)
        seconds = time.perf_counter() - self._began
        self.done.keep(self._metrics(batch, result, seconds, 0.0))

    def run(
        self,
        observe: Callable[[StepMetrics], None],
        should_stop: Callable[[], bool] = lambda: False,
        on_evaluation: Callable[[int, Evaluation], None] = lambda step, evaluation: None,
        decide: Callable[[StepMetrics | None], RunControl | None] = lambda metrics: None,
    ) -> Evaluation | None:
        """Train to the last step, until `should_stop` returns True after a step, or until evaluations stop improving.
        Returns the evaluation after the last step, if one was due. on_evaluation: callback invoked with each evaluation
        result during the run, including the last step's. decide: on rank 0, calls the user's callbacks for a step
        (None: unknown here), once, and returns what they decided so far.

        A final checkpoint is written in every case, also when the data or the model raise: no finished step is lost,
        unless a rank died with its part of the state.
        """
        config = self._config.train
        self.runtime.train()
        stop = any_rank(self.comm, should_stop(), "the agreement to begin")
        evaluation = None
        try:
            with self.done.telling(observe), self._background:
                shorten_collections(self.comm.device, self._background)
                steps = self.begin_steps()
                if self._config.data.on_error == "skip":
                    steps.leave_out(gather_bad_samples(self.comm, steps.found()))
                if self._gate is not None and self.step:  # a loss may have cut off what was decided
                    self._follow(decide(self.done.last), with_figures=False)
                if self.owes_evaluation:
                    evaluation = self.evaluator.judge(on_evaluation)
                    self._follow(decide(self.done.last), with_figures=False)
                if (self.owes_save or self.evaluator.keeps) and self.saving.step != self.step:
                    self._save(waits=True)
                while not stop and not self.is_finished:
                    with self._profiler.step(self.step + 1):
                        metrics, stop = self._train_step(steps, should_stop)
                    if self.callbacks is not None:
                        self.done.keep(metrics)  # whoever goes on after a loss reports the step
                        figures = self._follow(decide(metrics))
                        self.callbacks.reported("on_step", self.step)
                        metrics = replace(metrics, figures=figures)
                    self.done.add(metrics)
                    saves = config.save_steps and self.step % config.save_steps == 0
                    if saves or self.evaluator.is_due:
                        self.done.catch_up()
                    evaluation = self.evaluator.judge(on_evaluation)
                    if evaluation is not None:
                        self._follow(decide(metrics))
                    if saves or self.evaluator.keeps:
                        self._save(waits=False)
                    else:
                        self.saving.publish_if_written()
                self.done.catch_up()
        except BaseException as error:
            if self._gate is not None:
                raise
            self.fail(error)
            with contextlib.suppress(Exception):  # the first error counts
                self.saving.save_alone(self._half_updated)
            raise
        if self.saving.step != self.step:
            self.saving.save()
        self.saving.complete()
        any_rank(self.comm, False, "the checkpoint's publication")
        return evaluation

    def _save(self, waits: bool) -> None:
        """Save a checkpoint in the background, or wait for it: where ranks may be lost, checkpoints that are owed, and
        those of the best evaluation, which no later one replaces."""
        self.saving.save()
        if waits or (self._gate is not None and self.evaluator.keeps):
            self.saving.complete()

    def _follow(self, control: RunControl | None, with_figures: bool = True) -> dict[str, float]:
        """Adopt what rank 0's callbacks decided on all ranks, and return the figures that they logged; without
        `with_figures`, these stay for the next step. control: on rank 0 alone."""
        if self.callbacks is None:
            return {}
        own = None
        if control is not None:
            own = control.is_stopping, control.learning_rate_factor, control.figures if with_figures else {}
        stopped, self.state.rate_factor, figures = all_gather_object(self.comm, own)[0]
        self.state.stopped = self.state.stopped or stopped
        if control is None:
            self.callbacks.control.follow(self.step, stopped, self.state.rate_factor)
        elif with_figures:
            control.take_figures()
        return figures

    def begin_steps(self) -> Steps:
        """Return the steps of the run, which are planned and decoded in the background from the first call on, perhaps
        before `run` needs them. Call this once the starting position and the gradients recovered from an interrupted
        step are known: a step planned before would run in full, perhaps on some ranks only."""
        if self._steps is None:
            state = self.state
            steps = self._inputs.training(state.sampler, state.position, state.step, state.total_steps, state.left_out)
            self._steps = self._background.enter_context(steps)
        return self._steps

    def data_waits(self) -> tuple[DataWait, ...]:
        """Gather how long each rank waited for samples before the last step; called by all ranks."""
        own = msgspec.to_builtins(self._data_wait)
        rows = all_gather_object(self.comm, own)
        return msgspec.convert([row for row in rows if row is not None], tuple[DataWait, ...])

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot continue: ranks that wait for it raise. Never raises."""
        self.comm.abort(f"rank {self.rank} failed: {error}")

    def close(self) -> None:
        """Finish writing, and close the runtime and its communication."""
        try:
            self._background.close()
            self._inputs.close()
            self.saving.close()
            self._profiler.close()
        finally:
            self.runtime.close()

    def _train_step(self, steps: Steps, should_stop: Callable[[], bool]) -> tuple[StepMetrics, bool]:
        """Run one optimizer step. Returns its metrics, and whether any rank was asked to stop."""
        began, waited = time.perf_counter(), steps.waited_seconds
        self._began, turned = began, time.time()
        inputs = next(steps, None)
        if inputs is None:
            raise UserError(
                f"the data ended after step {self.step} of {self.state.total_steps}; a stream must repeat, or set "
                "train.steps"
            )
        batch = inputs.batch
        self._data_wait = DataWait(self.rank, turned, time.perf_counter() - began, batch.slowest)
        self._rate = rate_factor(self._schedule, self.step, self.state.total_steps) * self.state.rate_factor
        set_rate_factor(self.state.optimizer, self._rate)
        seed_step(self._config.seed, self.step)
        if self._gate is not None:
            self._gate.begin(self.step, self._step_limit_seconds())
        samples = complete_samples(self.runtime, inputs)
        result = self.runtime.execute(
            samples, inputs.step, should_stop=should_stop, found=steps.found, step_number=self.step
        )
        self._report_slowness()
        self._apply(result, batch)
        steps.leave_out(merge_bad_samples([result.found]))
        self.state.left_out = steps.left_out
        # If bad samples are skipped, this step also waits for the next step's samples, to find the bad ones.
        waited = steps.waited_seconds - waited
        seconds = time.perf_counter() - began
        self._longest_step = max(self._longest_step, seconds)
        metrics = self._metrics(batch, result, seconds, waited)
        self.recovery = {}
        return metrics, result.should_stop

    def _report_slowness(self) -> None:
        if self._gate is None or (bound := self._config.resilience.evict_slower) is None:
            return
        times = self.runtime.costs.slowness.of(self.rank)
        reported = times if times > bound else 0.0
        if reported != self._reported_slowness:
            self._reported_slowness = reported
            self._gate.slow(reported)

    def _step_limit_seconds(self) -> float:
        """Return the seconds after which this rank's step counts as hung: for the first, the communication timeout."""
        if not self._longest_step:
            return self._config.parallel.timeout_seconds
        return max(self._config.resilience.progress_seconds, SLOWER * self._longest_step)

    def _apply(self, result: StepResult, batch: GlobalBatch) -> None:
        """Apply the update on all ranks or on none, never with a non-finite loss or gradient. Raises UserError for
        these unless they are to be skipped."""
        if not is_finite(result) and self._config.train.on_nonfinite == "stop":
            raise UserError(explain_nonfinite(self.step + 1, result, batch))
        if self._gate is not None:
            self._voted = result, batch
            gradients = owned_gradients(self.runtime.owned)
            self._gate.propose(self.step, gradient_hashes(gradients, self._layer_of))
            self.done.catch_up()  # if it raises, the step may still be committed: `apply_voted`
            self._gate.await_commit()
        self._half_updated = True
        self._update(result, batch)
        if is_finite(result):
            self.runtime.owned.gather()
        self._half_updated = False

    def _update(self, result: StepResult, batch: GlobalBatch) -> None:
        """Update what this rank owns, without communication."""
        state, self._voted = self.state, None
        self.runtime.unfinished.forget()
        self.is_torn = True
        if is_finite(result):
            limit = self._config.train.max_grad_norm
            if limit is not None:
                self.runtime.clip_grad_norm_(limit, result.grad_norm)
            state.optimizer.step()
            if state.averages is not None:
                state.averages.update(state.optimizer.masters, state.step + 1)
        else:
            self._skipped_updates += 1
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.position = batch.position
        self.is_torn = False

    def _metrics(self, batch: GlobalBatch, result: StepResult, seconds: float, waited: float) -> StepMetrics:
        return replace(
            self._meter.of(self.state, batch, result, self._rate, seconds, waited),
            skipped_updates=self._skipped_updates,
            generation=self.membership.generation,
            recovery=self.recovery,
        )


def shorten_collections(device: torch.device, until: contextlib.ExitStack) -> None:
    """On GPUs, which wait for Python's garbage collector, exempt all present objects from it until `until` closes."""
    if device.type == "cuda":
        gc.collect()
        gc.freeze()
        until.callback(gc.unfreeze)


def _open_runtime(
    config: Config,
    model: MultimodalModel,
    planned: TrainingPlan,
    comm: Comm,
    num_sources: int,
    membership: RunMembership,
    before: Trainer | None,
) -> tuple[Runtime, Mapping[str, Tensor]]:
    """Return the runtime, and the weights with which it begins."""
    if config.train.deterministic:
        compute_repeatably(comm.device)
    execution = Execution(
        precision=pick_precision(config.train.precision, comm.device),
        exact=config.train.deterministic,
        correct_costs=config.plan.correct_costs,
        num_sources=num_sources,
        check_transport=config.parallel.check_transport,
        owns_comm=True,
        compile=config.train.compile,
        kernels=config.train.kernels,
    )
    layout = StateLayout(
        planned.zero,
        comm.nodes if membership.node_of is None else membership.node_of,
        not config.train.optimizer.offload,
        shard=planned.shard,
        uncut=frozenset().union(*(unit.orthogonal for unit in model.units.values())),
    )
    weights: Mapping[str, Tensor] = {}
    if before is None:
        boxes = boxes_to_read(model, planned.plan, comm, layout, execution.precision)
        weights = first_weights(model, config, boxes, zeros=membership.weights_follow)
    runtime = Runtime(
        model,
        planned.plan,
        comm,
        microbatching=planned.microbatching(config),
        costs=planned.costs,
        seed=config.seed,
        weights=weights,
        layout=layout,
        execution=execution,
        recovery=Recovery(
            None if before is None else before.runtime, membership.weights_follow, membership.keeps_gradients
        ),
    )
    return runtime, weights


def _open_optimizer(
    config: Config, runtime: Runtime, weights: Mapping[str, Tensor], shared: RunState | None
) -> tuple[WithMasters, Averages | None]:
    """Return the optimizer and the averages of the weights that this rank owns: those in `shared`, or new ones.
    weights: values before rounding, where they are known."""
    if shared is not None:
        return shared.optimizer, shared.averages
    owned, held = runtime.owned, runtime.boxes
    exact = {
        key: weights[box.name] if box == held[box.name] else weights[box.name][held[box.name].place(box)]
        for key, box in owned.boxes.items()
        if box.name in weights
    }
    matching = partial(_matching, runtime.model)
    optimizer: WithMasters
    masters = make_masters(owned.parameters, exact) if (own := find_optimizer(config)) is not None else None
    if own is not None and masters:
        optimizer = OwnOptimizer(own, owned.parameters, masters, owned.boxes)
    else:
        orthogonal = frozenset().union(*(unit.orthogonal for unit in runtime.model.units.values()))
        optimizer = build_optimizer(owned.parameters, config.train.optimizer, matching, exact, orthogonal)
    ema = config.train.optimizer.ema
    return optimizer, None if ema is None else Averages(optimizer.masters, ema)


def _open_meter(
    config: Config,
    model: MultimodalModel,
    planned: TrainingPlan,
    sources: tuple[str, ...],
    flops: ModelFlops,
    optimizer: WithMasters,
) -> StepMeter:
    names = [
        name
        for unit in model.units.values()
        for name, weight in unit.named_logical_parameters()
        if weight.requires_grad
    ]
    rates = peak_rates(names, config.train.optimizer, partial(_matching, model))
    if find_optimizer(config) is not None:
        groups = optimizer.param_groups if isinstance(optimizer, OwnOptimizer) else ()
        rates = {f"group {number}": group["peak_lr"] for number, group in enumerate(groups)}
    return StepMeter(len(planned.plan.ranks), model.graph.anchor, sources, rates, flops, peak_flops(config))


def _matching(model: MultimodalModel, pattern: str) -> frozenset[str]:
    return select(model.units, [pattern])
