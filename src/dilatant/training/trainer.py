"""Trainer: the training loop of one rank, from global batches to optimizer steps and checkpoints."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object, any_rank
from dilatant.comm.launch import Worker
from dilatant.config import Config, UserError
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import SamplerState
from dilatant.data.workers.loader import GlobalBatch
from dilatant.hf.stored_weights import first_weights
from dilatant.models.core.freeze import select
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import parse_key
from dilatant.planning.assemble import Samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.problem.describe_model import describe_model
from dilatant.report.metrics import StepMetrics
from dilatant.runtime.precision import pick_precision
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import boxes_held_on, holdings_of
from dilatant.runtime.step.step_result import StepResult
from dilatant.schedule.measured import DataWait
from dilatant.training.checkpoints.boxes import Tensors
from dilatant.training.checkpoints.checkpoint import load, stored_shapes
from dilatant.training.checkpoints.run_state import local_state, state_tensors
from dilatant.training.checkpoints.saving import Saving
from dilatant.training.checkpoints.writer import CheckpointWriter
from dilatant.training.commit import FIXED_MEMBERSHIP, RunMembership, gradient_hashes
from dilatant.training.evaluation.best_checkpoint import BestEvaluation
from dilatant.training.evaluation.evaluation import Evaluation
from dilatant.training.evaluation.evaluator import Evaluator
from dilatant.training.feeding.feed import gather_bad_samples, merge_bad_samples
from dilatant.training.feeding.inputs import RankInputs, Steps
from dilatant.training.feeding.latents import with_latents
from dilatant.training.feeding.step_data import count_steps, seed_step
from dilatant.training.model_flops import model_flops, peak_flops
from dilatant.training.optimizers.averages import AVERAGE, Averages
from dilatant.training.optimizers.learning_rate import rate_factor
from dilatant.training.optimizers.master_weights import MOMENTS, WithMasters
from dilatant.training.optimizers.nonfinite import explain_nonfinite, is_finite
from dilatant.training.optimizers.optimizer import (
    allocate_moments,
    build_optimizer,
    optimizer_tensors,
    peak_rates,
    set_rate_factor,
)
from dilatant.training.step_log import StepLog
from dilatant.training.step_metrics import StepMeter

SLOWER = 5
"""A step is considered hung after SLOWER times the duration of the longest step so far."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Outcome of `Trainer.run`. step: steps that are done. finished: False if the run was asked to stop before its last
    step. evaluation: the one after that step, if one was due."""

    step: int
    total_steps: int
    seconds: float
    finished: bool
    evaluation: Evaluation | None = None


class Trainer:
    """Training loop of one rank of a plan, from its parts to its last checkpoint. `close` ends the background work.

    model: the whole model, of which this rank allocates only its own layers; the rest stays on the meta device.
    membership: for a run that survives the loss of ranks. Its commit barrier then decides which steps count, and errors
    are left to the caller: no checkpoint is saved and no other rank is notified. before: this rank's closed trainer of
    the previous generation, whose stages this rank keeps. Its weights, and its optimizer if the same parts are owned,
    are shared with this trainer, which changes none of them before `begin_alone`; `model` is then the previous
    trainer's model.
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
        plan = planned.plan
        self.rank = worker.rank
        self.step = 0
        self.total_steps = count_steps(config, samples)
        self._config = config
        self._samples = samples
        self._device = worker.device
        self._sources = samples.train.source_names if isinstance(samples.train, Blend) else ()
        self.comm = Comm(
            worker.store,
            worker.rank,
            worker.size,
            membership.generation,
            device=worker.device,
            timeout_seconds=600.0 if config.parallel is None else config.parallel.timeout_seconds,
        )
        membership.opened(self.comm)
        self._gate = membership.gate
        self.membership = membership
        self.recovery: Mapping[str, float] = {}
        flops = model_flops(describe_model(model)) if before is None else before._meter.flops
        weights = {}
        if before is None:
            holds = boxes_held_on(holdings_of(plan, model.units), worker.rank)
            weights = first_weights(model, config, holds, zeros=membership.weights_follow)
        self.runtime: Runtime = Runtime(
            model,
            plan,
            self.comm,
            microbatching=planned.microbatching(config),
            costs=planned.costs,
            correct_costs=config.plan.correct_costs,
            seed=config.seed,
            weights=weights,
            precision=pick_precision(config.train.precision, worker.device),
            zero=planned.zero,
            node_of=membership.node_of,
            keeps_masters=not config.train.optimizer.offload,
            keeps_gradients=membership.keeps_gradients,
            exact=config.train.deterministic,
            check_transport=config.parallel is not None and config.parallel.check_transport,
            owns_comm=True,
            num_sources=len(self._sources),
            begins_alike=not membership.weights_follow,
            before=None if before is None else before.runtime,
        )
        held = self.runtime.boxes

        def matching(pattern: str) -> frozenset[str]:
            return select(model.units, [pattern])

        trainable = [
            name
            for unit in model.units.values()
            for name, parameter in unit.named_logical_parameters()
            if parameter.requires_grad
        ]
        rates = peak_rates(trainable, config.train.optimizer, matching)
        self._meter: StepMeter = StepMeter(
            total_steps=self.total_steps,
            devices=len(plan.ranks),
            anchor=model.graph.anchor,
            sources=self._sources,
            peak_rates=rates,
            flops=flops,
            peak_flops=peak_flops(config),
        )
        owned = self.runtime.owned
        exact = {
            key: weights[box.name] if box == held[box.name] else weights[box.name][held[box.name].place(box)]
            for key, box in owned.boxes.items()
            if box.name in weights
        }
        self._optimizer: WithMasters
        self._averages: Averages | None
        if before is not None and owned.stays:
            self._optimizer, self._averages = before._optimizer, before._averages
        else:
            self._optimizer = build_optimizer(owned.parameters, config.train.optimizer, matching, exact)
            ema = config.train.optimizer.ema
            self._averages = None if ema is None else Averages(self._optimizer.masters, ema)
        samples = with_latents(self.comm, config, samples, worker.device)
        self._inputs = RankInputs(self.comm, self.runtime, config, samples, membership.pool)
        self.evaluator = Evaluator(
            config.evaluation, self._samples, self.runtime, self._inputs, self._optimizer, self._averages
        )
        self._ahead: tuple[contextlib.ExitStack, Steps] | None = None
        self._left_out: Mapping[int, str] = {}
        self._data = DataIdentity.of(samples.train, samples.train_sizes)
        self._sampler = samples.train.sampler(config.seed, config.train.global_batch_size)
        self._position = self._sampler.start()
        self._shapes = {name: box.whole for name, box in held.items()}
        self._known = {weight.canonical for unit in model.units.values() for weight in unit.weights}
        session = self.comm.attempt[:16] or secrets.token_hex(8)
        keep = config.train.keep_checkpoints
        self._saving = Saving(
            self.comm,
            CheckpointWriter(checkpoints, keep, session, worker.rank, worker.size),
            self.runtime,
            self._optimizer,
            self._averages,
        )
        self._skipped_updates = 0
        self._half_updated = False
        self._told_slow = 0.0
        self._voted: tuple[StepResult, GlobalBatch] | None = None
        self._data_wait: DataWait | None = None
        self._began = self._rate = self._longest_step = 0.0
        self.done: StepLog = StepLog(config.train.logging_steps, self.total_steps, self._gate is not None)
        self._layer_of = {
            weight.name: weight.layer for unit in model.units.values() for weight in unit.weights
        }

    def restore(self, checkpoint: Path) -> None:
        """Resume from `checkpoint`, written under any layout: weights, moments and data position. Raises UserError."""
        kinds = [name.rpartition(".") for name in stored_shapes(checkpoint, "optimizer")]
        state = self.empty_state({name for name, _, kind in kinds if kind == MOMENTS[0]})
        averaged = {name for name, _, kind in kinds if kind == AVERAGE}
        boxes = self.runtime.owned.boxes
        begins = {key for key in state["optimizer"] if boxes[key].name not in averaged}
        for key in begins:
            state["optimizer"][key].pop(AVERAGE, None)
        values = load(checkpoint, state, known=self._known, shapes=self._shapes)
        if not isinstance(values.get("step"), int) or "position" not in values:
            raise UserError(
                f"checkpoint {str(checkpoint)!r} does not say at which step and sample it was written"
            )
        try:
            self._data.require(values.get("data", ()))
            self.go_on_from(values)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"checkpoint {str(checkpoint)!r}: its value 'costs' is {error}") from None
        if self._averages is not None:
            self._averages.begin(self._optimizer.masters, begins)
        any_rank(self.comm, False, "all to have read the checkpoint")
        self._saving.continue_from(
            self.step, checkpoint if self.rank == 0 else None
        )  # the folder may be renamed now

    def state(self) -> Tensors:
        """Return the weights and moments that this rank holds, by key; not copies."""
        return local_state(self.runtime, self._optimizer.masters, self._optimizer, self._averages)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Map every weight and buffer held on this rank to its full, unsharded shape."""
        return self._shapes

    def values(self) -> dict[str, Any]:
        """Return the progress of the run as JSON, the same on all ranks."""
        return {
            "step": self.step,
            "position": self._position.to_json(),
            "data": self._data.by_source,
            "left_out": dict(self._left_out),
            "costs": self.runtime.costs.to_json(),
            "best": self.evaluator.best.to_json(),
            "template_date": self._config.data.template_date,
        }

    def names_with_moments(self) -> set[str]:
        """Return the names of the weights owned by this rank that were updated at least once."""
        return {
            parse_key(key)[0]
            for key, kinds in optimizer_tensors(self._optimizer).items()
            if MOMENTS[0] in kinds
        }

    def empty_state(self, moments: Set[str]) -> Tensors:
        """Return `state` with moments allocated for the weights named in `moments`; fill it, then `go_on_from`."""
        boxes = self.runtime.owned.boxes
        allocate_moments(self._optimizer, {key for key, box in boxes.items() if box.name in moments})
        return self.state()

    def go_on_from(self, values: Mapping[str, Any], stays: bool = False) -> None:
        """Continue with the state that was filled in, at the step and data position in `values`; called by all ranks.
        stays: no rank filled anything in. Raises ValueError for malformed costs, UserError where replicas differ."""
        self._optimizer.loaded()
        self.runtime.owned.gather()
        if not stays:
            self.runtime.require_equal(
                self._optimizer.masters, state_tensors(self._optimizer, self._averages)
            )
        self.step = values["step"]
        self._position = self._sampler.resume(SamplerState.from_json(values["position"]))
        self._count_steps()
        self._left_out = {int(index): why for index, why in values.get("left_out", {}).items()}
        self.evaluator.best = BestEvaluation.from_json(values.get("best"))
        if "costs" in values:
            self.runtime.costs.from_json(values["costs"])

    def _count_steps(self) -> None:
        """Count the total steps again: a run in epochs may have come this far with another batch size."""
        self.total_steps = count_steps(self._config, self._samples, self.step, self._position.samples)
        self._meter = replace(self._meter, total_steps=self.total_steps)
        self.done.last = self.total_steps

    @property
    def stays(self) -> bool:
        """True if all run state on this rank is what this rank held in the previous generation."""
        return self.runtime.owned.stays

    def begin_alone(self) -> None:
        """Take over what is shared with the previous generation's trainer, once that generation is over for good."""
        self.runtime.clear_gradients()

    def continue_branch(self, saved_step: int, newest: Path | None) -> None:
        """Continue this run's checkpoints, the newest of which is `newest` (known on rank 0), of `saved_step`; called
        by all ranks."""
        self._saving.continue_from(saved_step, newest)

    @property
    def voted_step(self) -> int | None:
        """The step whose gradients this rank has voted for and not applied, or None; see `apply_voted`."""
        return None if self._voted is None else self.step

    def apply_voted(self) -> None:
        """Apply the step that was voted for after communication has ended, to the parts that this rank owns. Weights
        owned by other ranks stay stale, but `state` does not read them."""
        assert self._voted is not None
        result, batch = self._voted
        self._update(result, batch)
        seconds = time.perf_counter() - self._began
        self.done.keep(self._metrics(batch, result, self._rate, seconds, 0.0))

    def run(
        self,
        observe: Callable[[StepMetrics], None],
        should_stop: Callable[[], bool] = lambda: False,
        judged: Callable[[int, Evaluation], None] = lambda step, evaluation: None,
    ) -> TrainResult:
        """Train to the last step, until `should_stop` returns True after a step, or until evaluations stop improving.
        judged: callback invoked with each evaluation result during the run, including the last step's.

        A final checkpoint is written in every case, also when the data or the model raise: no finished step is lost,
        unless a rank died with its part of the state.
        """
        config = self._config.train
        began = time.perf_counter()
        self.runtime.train()
        stop = any_rank(self.comm, should_stop(), "the agreement to begin")
        evaluation = None
        try:
            with self.done.telling(observe), self._begin_steps() as steps:
                if self._config.data.on_error == "skip":
                    steps.leave_out(gather_bad_samples(self.comm, steps.found()))
                while self.step < self.total_steps and not stop and not self.evaluator.ends_early:
                    metrics, stop = self._train_step(steps, should_stop)
                    self.done.add(metrics)
                    saves = config.save_steps and self.step % config.save_steps == 0
                    if saves or self.evaluator.is_due(self.step, self.total_steps):
                        self.done.catch_up()
                    evaluation = self.evaluator.judge(self.step, self.total_steps, judged)
                    if saves or self.evaluator.keeps(self.step):
                        self._saving.save(self.step, self.values())
                    else:
                        self._saving.publish_if_written()
                self.done.catch_up()
        except BaseException as error:
            if self._gate is not None:
                raise
            self.fail(error)
            with contextlib.suppress(Exception):  # the first error counts
                self._saving.save_alone(self.step, None if self._half_updated else self.values())
            raise
        if self._saving.step != self.step:
            self._saving.save(self.step, self.values())
        self._saving.complete()
        any_rank(self.comm, False, "the checkpoint's publication")
        seconds = time.perf_counter() - began
        finished = self.step >= self.total_steps or self.evaluator.ends_early
        return TrainResult(self.step, self.total_steps, seconds, finished, evaluation)

    def decide_ahead(self) -> None:
        """Start planning and decoding the next steps in the background before `run` needs them. Call this once the
        starting position and the gradients recovered from an interrupted step are known: a step planned before would
        run in full, perhaps on some ranks only."""
        stack = contextlib.ExitStack()
        self._ahead = stack, stack.enter_context(self._open_steps())

    @contextlib.contextmanager
    def _begin_steps(self) -> Iterator[Steps]:
        if self._ahead is None:
            with self._open_steps() as steps:
                yield steps
            return
        stack, steps = self._ahead
        with stack:
            yield steps

    def _open_steps(self) -> contextlib.AbstractContextManager[Steps]:
        ahead = self.step, self.total_steps
        return self._inputs.training(self._sampler, self._position, *ahead, self._left_out)

    @property
    def published(self) -> Path | None:
        """The last checkpoint that this run published; known on rank 0."""
        return self._saving.published

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
            if self._ahead is not None:
                self._ahead[0].close()
            self._inputs.close()
            self._saving.close()
        finally:
            self.runtime.close()

    def _train_step(self, steps: Steps, should_stop: Callable[[], bool]) -> tuple[StepMetrics, bool]:
        """Run one optimizer step. Returns its metrics, and whether any rank was asked to stop."""
        began, waited = time.perf_counter(), steps.waited_seconds
        self._began, turned = began, time.time()
        inputs = next(steps, None)
        if inputs is None:
            raise UserError(
                f"the data ended after step {self.step} of {self.total_steps}; a stream must repeat, or set train.steps"
            )
        batch = inputs.batch
        self._data_wait = DataWait(self.rank, turned, time.perf_counter() - began, batch.slowest)
        rate = self._rate = rate_factor(self._config.train.schedule, self.step, self.total_steps)
        set_rate_factor(self._optimizer, rate)
        seed_step(self._config.seed, self.step)
        if self._gate is not None:
            self._gate.begin(self.step, self._step_limit_seconds())
        result = self.runtime.execute(
            batch.samples, inputs.step, should_stop=should_stop, found=steps.found, step_number=self.step
        )
        self._say_if_slow()
        self._apply(result, batch)
        steps.leave_out(merge_bad_samples([result.found]))
        self._left_out = steps.left_out
        # If bad samples are skipped, this step also waits for the next step's samples, to find the bad ones.
        waited = steps.waited_seconds - waited
        seconds = time.perf_counter() - began
        self._longest_step = max(self._longest_step, seconds)
        metrics = self._metrics(batch, result, rate, seconds, waited)
        self.recovery = {}
        return metrics, result.should_stop

    def _say_if_slow(self) -> None:
        if self._gate is None or (bound := self._config.resilience.evict_slower) is None:
            return
        slowness = self.runtime.costs.slowness
        times = float(slowness.factors[self.rank]) if slowness.is_sure else 1.0
        told = times if times > bound else 0.0
        if told != self._told_slow:
            self._told_slow = told
            self._gate.slow(told)

    def _step_limit_seconds(self) -> float:
        """Return the seconds after which this rank's step counts as hung: for the first, the communication timeout."""
        if not self._longest_step:
            return 600.0 if self._config.parallel is None else self._config.parallel.timeout_seconds
        return max(self._config.resilience.progress_seconds, SLOWER * self._longest_step)

    def _apply(self, result: StepResult, batch: GlobalBatch) -> None:
        """Apply the update on all ranks or on none, never with a non-finite loss or gradient. Raises UserError for
        these unless they are to be skipped."""
        if not is_finite(result) and self._config.train.on_nonfinite == "stop":
            raise UserError(explain_nonfinite(self.step + 1, result, batch))
        if self._gate is not None:
            self._voted = result, batch
            self._gate.propose(self.step, gradient_hashes(self.runtime.owned.parameters, self._layer_of))
            self.done.catch_up()  # if it raises, the step may still be committed: `apply_voted`
            self._gate.await_commit()
        self._half_updated = True
        self._update(result, batch)
        if is_finite(result):
            self.runtime.owned.gather()
        self._half_updated = False

    def _update(self, result: StepResult, batch: GlobalBatch) -> None:
        """Update what this rank owns, without communication."""
        self._voted = None
        self.runtime.forget()
        if is_finite(result):
            limit = self._config.train.max_grad_norm
            if limit is not None:
                self.runtime.clip_grad_norm_(limit, result.grad_norm)
            self._optimizer.step()
            if self._averages is not None:
                self._averages.update(self._optimizer.masters, self.step + 1)
        else:
            self._skipped_updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._position = batch.position

    def _metrics(
        self, batch: GlobalBatch, result: StepResult, rate: float, seconds: float, waited: float
    ) -> StepMetrics:
        metrics = self._meter.of(self.step, batch, result, rate, seconds, waited)
        return replace(
            metrics,
            skipped_updates=self._skipped_updates,
            generation=self.membership.generation,
            recovery=self.recovery,
        )
