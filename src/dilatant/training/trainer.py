"""The training loop: batches in, optimizer steps out, checkpoints on the way.

The loop knows nothing of how a batch is executed or shown: it drives a runtime with `execute`, and tells an observer
what happened.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dilatant.config import Config, UserError
from dilatant.data.loader import GlobalBatch, Loader
from dilatant.data.sampler import SamplerState
from dilatant.models.freeze import select
from dilatant.models.multimodal import MultimodalModel
from dilatant.profiling.assemble import Samples
from dilatant.runtime.step import Engine
from dilatant.training.checkpoint import Tensors, load, stored_shapes
from dilatant.training.checkpoint_writer import PATIENCE_SECONDS, CheckpointWriter
from dilatant.training.learning_rate import rate_factor
from dilatant.training.metrics import StepMetrics
from dilatant.training.optimizer import (
    allocate_moments,
    build_optimizer,
    optimizer_tensors,
    peak_rates,
    set_rate_factor,
)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`step` steps are done; `finished` is False when the run was asked to stop before its last one."""

    step: int
    total_steps: int
    seconds: float
    finished: bool


class Trainer:
    """One run, or this rank's part of it. `close` ends its background work.

    model: the whole model, of which the engine may hold a part; the rest may be on the meta device.
    """

    def __init__(
        self,
        config: Config,
        model: MultimodalModel,
        samples: Samples,
        engine: Engine,
        checkpoint_folder: Path,
    ) -> None:
        self.engine = engine
        self.step = 0
        self.total_steps = count_steps(config, samples)
        self._config = config
        self._samples = samples
        self._sampler = samples.train.sampler(config.seed, config.train.global_batch_size)
        self._position = self._sampler.start()
        self._half_updated = False
        self._unpublished = False
        self._known = {weight.canonical for unit in model.units.values() for weight in unit.weights}

        def matching(pattern: str) -> frozenset[str]:
            return select(model.units, [pattern])

        trainable = [
            name
            for unit in model.units.values()
            for name, p in unit.named_logical_parameters()
            if p.requires_grad
        ]
        self._peak_rates = peak_rates(trainable, config.train.optimizer, matching)
        self._optimizer = build_optimizer(engine.parameters, config.train.optimizer, matching)
        self._writer = CheckpointWriter(
            checkpoint_folder, config.train.keep_checkpoints, engine.session, engine.rank, engine.size
        )

    def restore(self, checkpoint: Path) -> None:
        """Go on from `checkpoint`: weights, moments and data position, by name, under any layout. Raises UserError."""
        held = {name for name, p in self.engine.parameters.items() if p.requires_grad}
        moments = {name.rpartition(".")[0] for name in stored_shapes(checkpoint, "optimizer")}
        allocate_moments(self._optimizer, held & moments)
        values = load(checkpoint, self._tensors(), known=self._known)
        self.step = values["step"]
        self._position = self._sampler.resume(SamplerState.from_json(values["position"]))
        self.engine.agree(False)  # all have read it: its name may change now
        if self.engine.rank == 0:
            self._writer.continue_from(checkpoint)

    def run(
        self,
        observe: Callable[[StepMetrics], None],
        should_stop: Callable[[], bool] = lambda: False,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> TrainResult:
        """Train to the last step, or until `should_stop` says so after a step.

        A last checkpoint is written either way, also when the data or the model raise: no finished step is lost, unless
        a rank died with its part of it.
        """
        config = self._config.train
        began = time.perf_counter()
        saved = self.step
        self.engine.train()
        stop = self.engine.agree(should_stop())
        try:
            with self.engine.batches(self._open_loader) as loader:
                while self.step < self.total_steps and not stop:
                    metrics, stop = self._train_step(loader, should_stop)
                    if self.step % config.logging_steps == 0 or self.step == self.total_steps:
                        observe(metrics)
                    if config.save_steps and self.step % config.save_steps == 0:
                        self._save()
                        saved = self.step
                    elif self._unpublished and not self.engine.agree(not self._writer.ready()):
                        self._publish()
                    after_step(self.step)
        except BaseException as error:
            self.engine.fail(error)
            with contextlib.suppress(UserError):  # the first error counts
                if saved != self.step and not self._half_updated:
                    self._save()
                if self._unpublished:
                    self._publish(patience_seconds=20.0)
                self._writer.wait()
            raise
        if saved != self.step:
            self._save()
        self._complete()
        self.engine.agree(False)  # rank 0 has published
        seconds = time.perf_counter() - began
        return TrainResult(self.step, self.total_steps, seconds, self.step >= self.total_steps)

    def close(self) -> None:
        """Finish writing and end the engine."""
        try:
            self._writer.close()
        finally:
            self.engine.close()

    def _train_step(
        self, loader: Iterator[GlobalBatch], should_stop: Callable[[], bool]
    ) -> tuple[StepMetrics, bool]:
        """One optimizer step; whether any rank was asked to stop."""
        began = time.perf_counter()
        batch = next(loader)
        seed_everything(self._config.seed, self.step)
        factor = rate_factor(self._config.train.schedule, self.step, self.total_steps)
        set_rate_factor(self._optimizer, factor)
        output = self.engine.execute(batch, should_stop)
        grad_norm = self.engine.clip_gradients(self._config.train.max_grad_norm or math.inf)
        self._half_updated = True
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._position = batch.position
        self._half_updated = False
        seconds = time.perf_counter() - began
        tokens = batch.tokens
        metrics = StepMetrics(
            step=self.step,
            total_steps=self.total_steps,
            loss=output.loss,
            grad_norm=grad_norm,
            learning_rates={label: factor * peak for label, peak in self._peak_rates.items()},
            step_seconds=seconds,
            data_wait_seconds=batch.wait_seconds,
            samples=batch.num_samples,
            skipped_samples=batch.skipped,
            target_tokens=output.target_tokens,
            tokens=tokens,
            tokens_per_second=tokens.get("language", 0) / seconds,
            epoch=batch.epoch,
            busy=output.shares.busy,
            waited=output.shares.waited,
        )
        return metrics, output.stop

    def _open_loader(self, packs: bool) -> Loader:
        data = self._config.data
        return Loader(
            self._samples.train,
            self._samples.encoding,
            self._sampler,
            row_tokens=self._config.train.row_tokens or data.max_length,
            position=self._position,
            steps=self.total_steps - self.step,
            workers=data.workers,
            on_error=data.on_error,
            packs=packs,
        )

    def _tensors(self) -> Tensors:
        return {"model": self.engine.tensors(), "optimizer": optimizer_tensors(self._optimizer)}

    def _save(self) -> None:
        self._complete()
        tensors = {
            kind: {name: tensor for name, tensor in held.items() if self.engine.saves(name)}
            for kind, held in self._tensors().items()
        }
        frozen = [name for name, p in self.engine.parameters.items() if not p.requires_grad]
        values = {"step": self.step, "position": self._position.to_json()}
        self._writer.save(self.step, tensors, values, frozen)
        self._unpublished = True

    def _complete(self) -> None:
        """Publish the last save, on whose parts all ranks wait."""
        self._writer.wait()
        if self._unpublished:
            self.engine.agree(False)
            self._publish()
            self._writer.wait()

    def _publish(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._unpublished = False
        if self.engine.rank == 0:
            self._writer.publish(patience_seconds)


def count_steps(config: Config, samples: Samples) -> int:
    """Optimizer steps of the run: `train.steps`, or enough for `train.epochs` passes (default 1).

    Raises UserError when the length of the data is unknown.
    """
    if config.train.steps is not None:
        return config.train.steps
    passes = 1.0 if config.train.epochs is None else config.train.epochs
    return max(1, math.ceil(passes * len(samples.train) / config.train.global_batch_size))


def seed_everything(seed: int, step: int) -> None:
    """Seed the generators that model code may draw from (dropout), as a function of the step: no state to save."""
    (key,) = np.random.SeedSequence([seed, step]).generate_state(1).tolist()
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002  # model code draws from the global generator, if any
    torch.manual_seed(key)
