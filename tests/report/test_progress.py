"""The live line: figures of a step, beside what was planned where that is known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dilatant.report.metrics import StepMetrics
from dilatant.report.progress import ProgressLine, describe

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
    assert "  0.0934 GFLOP/s  " in describe(replace(METRICS, teraflops=9.34e-5), 6.2)
    assert "  41.2 TFLOP/s  " in describe(replace(METRICS, teraflops=41.2), 6.2)


def test_measured_seconds_stand_beside_the_planned_ones():
    metrics = replace(METRICS, predicted_seconds=1.84)
    assert "  step 2.00 s (planned 1.84 s)  " in describe(metrics, 6.2)
    assert "planned" not in describe(replace(metrics, is_rough=True), 6.2)
    assert metrics.to_record()["predicted_seconds"] == 1.84
    assert "is_rough" not in metrics.to_record()
    assert metrics.to_scalars()["train/predicted_seconds"] == 1.84


def test_a_first_step_says_nothing_of_those_to_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilatant.report.progress._PLAIN_INTERVAL_SECONDS", 0.0)
    out = io.StringIO()
    with ProgressLine(Console(file=out), 5) as line:
        for step, seconds in ((1, 50.0), (2, 1.0), (3, 3.0), (4, 2.0), (5, 2.0)):
            line.update(replace(METRICS, step=step, total_steps=5, step_seconds=seconds, predicted_seconds=1.5))
    first, *others = out.getvalue().splitlines()
    assert "left" not in first
    assert "planned" not in first
    assert [other.split("(planned ")[1] for other in others] == [
        "1.50 s)  left 0:03", "1.50 s)  left 0:04", "1.50 s)  left 0:02", "1.50 s)  left 0:00",
    ]  # fmt: skip
