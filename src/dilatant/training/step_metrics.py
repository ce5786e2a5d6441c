"""Metrics of finished steps: computed from batch and result, and reported at once or while the ranks vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dilatant.data.workers.batches import GlobalBatch
from dilatant.models.language.pair_loss import REWARDS, with_margins
from dilatant.report.metrics import StepMetrics
from dilatant.runtime.step.step_result import StepResult
from dilatant.training.model_flops import ModelFlops
from dilatant.training.run_state import RunState

NOTED_WAIT = 0.02
"""Share of a step's time above which a wait for data is reported with the names of the slowest samples."""


@dataclass(frozen=True, slots=True)
class StepMeter:
    """Constants of a run that step metrics need. anchor: unit whose tokens count as throughput. sources: names of data
    sets, by number. peak_rates: label of an optimizer group → its peak learning rate. peak_flops: of one device, if
    known."""

    devices: int
    anchor: str
    sources: tuple[str, ...]
    peak_rates: Mapping[str, float]
    flops: ModelFlops
    peak_flops: float | None

    def of(
        self, state: RunState, batch: GlobalBatch, result: StepResult, rate: float, seconds: float, waited: float
    ) -> StepMetrics:
        """Return the metrics of the last step: `seconds` long, `waited` of them for data, at `rate` times the peak
        rates."""
        rewards = {name: value for name, value in result.losses.items() if name.startswith(REWARDS)}
        losses = {name: value for name, value in result.losses.items() if name not in rewards}
        marks = {sample.desired for sample in batch.samples}
        for mark, name in ((True, "rejected"), (False, "chosen")):
            if marks == {mark}:  # no answer has the other mark, so nothing was measured
                rewards.pop(f"{REWARDS}{name}", None)
        per_device = self.flops.of(batch.samples) / seconds / self.devices
        return StepMetrics(
            step=state.step,
            total_steps=state.total_steps,
            loss=result.loss,
            losses=losses if len(losses) > 1 else {},
            rewards={name.removeprefix(REWARDS): value for name, value in with_margins(rewards).items()},
            source_losses=self._source_losses(batch, result),
            grad_norm=result.grad_norm,
            learning_rates={label: rate * peak for label, peak in self.peak_rates.items()},
            step_seconds=seconds,
            data_wait_seconds=waited,
            samples=batch.num_samples,
            skipped_samples=batch.skipped,
            skipped_updates=0,
            target_tokens=result.target_tokens,
            tokens=batch.tokens,
            tokens_per_second=batch.tokens.get(self.anchor, 0) / seconds,
            teraflops=per_device / 1e12,
            mfu=None if self.peak_flops is None else per_device / self.peak_flops,
            epoch=batch.epoch,
            busy=result.times.busy,
            waited=result.times.waited,
            predicted_seconds=result.times.predicted_seconds,
            is_rough=result.times.is_rough,
            drift=result.times.drift,
            warning=result.warning,
            peak_bytes=result.peak_bytes,
            slowest_samples=dict(batch.slowest) if waited > NOTED_WAIT * seconds else {},
        )

    def _source_losses(self, batch: GlobalBatch, result: StepResult) -> dict[str, float]:
        """Return the loss per target token of each data set that has any in this step; {} for a single data set."""
        if len(result.source_losses) < 2:
            return {}
        targets = [0] * len(result.source_losses)
        for sample in batch.samples:
            targets[sample.source] += sample.target_tokens
        return {
            name: share * result.target_tokens / count
            for name, share, count in zip(self.sources, result.source_losses, targets, strict=True)
            if count
        }


AT_ONCE_SECONDS = 1.0
"""Longer steps are reported at once: a vote is negligible beside them, and the live line would lag by a step."""
KEPT = 2
"""Number of steps that may be committed but unreported: one, and the next while its vote is pending."""


class StepLog:
    """Report committed steps to an observer: every `every`-th and the run's last, once each and in order.

    A step with figures of callbacks is always reported. waits: `catch_up` is called after each step, when there is time
    for it. recent: the last of these steps, reported or not, for the ranks that continue when the rank that writes them
    down is lost. last: the last committed step.
    """

    def __init__(self, every: int, waits: bool) -> None:
        self._every = every
        self._waits = waits
        self._waiting: list[StepMetrics] = []
        self._observe: Callable[[StepMetrics], None] = _nobody
        self.recent: tuple[StepMetrics, ...] = ()
        self.last: StepMetrics | None = None

    @contextmanager
    def telling(self, observe: Callable[[StepMetrics], None]) -> Iterator[None]:
        """Report to `observe` inside this context only: the observer may hold the trainer, which holds this log."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = _nobody

    def add(self, metrics: StepMetrics) -> None:
        """Add a committed step, and report it now unless it may wait. Raises what `observe` raises."""
        if not self.keep(metrics):
            return
        self._waiting.append(metrics)
        if not self._waits or metrics.step_seconds > AT_ONCE_SECONDS:
            self.catch_up()

    def keep(self, metrics: StepMetrics) -> bool:
        """Add a committed step to `recent`, or replace it there, without reporting it; return True if it is one of
        those to report."""
        self.last = metrics
        if metrics.step % self._every and metrics.step != metrics.total_steps and not metrics.figures:
            return False
        self.recent = (*(one for one in self.recent if one.step != metrics.step), metrics)[-KEPT:]
        return True

    def catch_up(self) -> None:
        """Report the delayed steps. Raises what `observe` raises; a step for which it raised is not reported again."""
        while self._waiting:
            self._observe(self._waiting.pop(0))


def _nobody(metrics: StepMetrics) -> None:
    """Observer that ignores all steps."""


def is_finite(result: StepResult) -> bool:
    """Return True if a step's loss and gradient norm are finite."""
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)


def explain_nonfinite(step: int, result: StepResult, batch: GlobalBatch) -> str:
    """Return the error text for a non-finite `step`: its effect, its samples and the remedy."""
    if result.nonfinite_samples:
        what = f"the loss became {result.loss} in microbatches with the samples"
        names = result.nonfinite_samples
    else:
        what = f"the gradient's norm is {result.grad_norm} for a step with the samples"
        names = tuple(sample.id for sample in batch.samples)
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"step {step}: {what} {listed}; nothing was updated. Lower the learning rate, look at these samples, or set "
        "train.on_nonfinite: skip"
    )
