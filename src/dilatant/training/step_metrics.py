"""Step metrics: compute `StepMetrics` from a step's batch and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilatant.data.workers.loader import GlobalBatch
from dilatant.report.metrics import StepMetrics
from dilatant.runtime.step.step_result import StepResult
from dilatant.training.model_flops import ModelFlops

NOTED_WAIT = 0.02
"""Share of a step's time above which a wait for data is reported with the names of the slowest samples."""


@dataclass(frozen=True, slots=True)
class StepMeter:
    """Constants of a run that step metrics need. anchor: unit whose tokens count as throughput. sources: names of data
    sets, by number. peak_rates: label of an optimizer group → its peak learning rate. peak_flops: of one device, if
    known."""

    total_steps: int
    devices: int
    anchor: str
    sources: tuple[str, ...]
    peak_rates: Mapping[str, float]
    flops: ModelFlops
    peak_flops: float | None

    def of(
        self, step: int, batch: GlobalBatch, result: StepResult, rate: float, seconds: float, waited: float
    ) -> StepMetrics:
        """Return the metrics of `step`: `seconds` long, `waited` of them for data, at `rate` times the peak rates."""
        per_device = self.flops.of(batch.samples) / seconds / self.devices
        return StepMetrics(
            step=step,
            total_steps=self.total_steps,
            loss=result.loss,
            losses=result.losses if len(result.losses) > 1 else {},
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
            busy=result.shares.busy,
            waited=result.shares.waited,
            predicted_seconds=result.predicted_seconds,
            is_rough=result.is_rough,
            drift=result.drift,
            warning=result.warning,
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
