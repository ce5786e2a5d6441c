"""The live line: figures of a step, beside what was planned where that is known."""

from __future__ import annotations

from dataclasses import replace

from dilatant.report.metrics import StepMetrics
from dilatant.report.progress import describe

METRICS = StepMetrics(
    step=3,
    total_steps=13,
    loss=0.25,
    grad_norm=1.0,
    learning_rates={},
    step_seconds=2.0,
    data_wait_seconds=0.1,
    samples=8,
    skipped_samples=0,
    skipped_updates=0,
    target_tokens=10,
    tokens={"vision": 3000, "language": 500},
    tokens_per_second=250.0,
    epoch=0.1,
)


def test_the_line_has_rates_waits_and_what_is_left():
    assert describe(METRICS, 6.2) == "loss 0.2500  tok/s vision 1.5k  language 250  data 5%  left 1:02"
    assert "predicted_seconds" not in METRICS.to_record()


def test_measured_seconds_stand_beside_the_planned_ones():
    metrics = replace(METRICS, predicted_seconds=1.84)
    assert "  step 2.00 s (planned 1.84 s)  " in describe(metrics, 6.2)
    assert metrics.to_record()["predicted_seconds"] == 1.84
    assert metrics.to_scalars()["train/predicted_seconds"] == 1.84
