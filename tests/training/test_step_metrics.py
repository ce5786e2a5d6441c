"""Figures of a step: by token where they say so, and of the devices that there are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dilatant.report.progress import describe
from dilatant.runtime.step.step_result import StepTimes
from dilatant.training.step_metrics import NOTED_WAIT, StepMeter

TARGETS = ((0, 4), (1, 6), (0, 2), (2, 0))
"""Of samples: the data set, and the tokens that carry loss."""


def _of(waited: float = 0.0, sources: tuple[float, ...] = (6 / 12, 12 / 12, 0.0)) -> Any:
    samples = [SimpleNamespace(source=source, target_tokens=count, desired=None) for source, count in TARGETS]
    batch: Any = SimpleNamespace(
        samples=samples, num_samples=4, skipped=1, epoch=0.5, tokens={"vision": 8, "language": 40},
        slowest=(("a", 0.5),),
    )  # fmt: skip
    result: Any = SimpleNamespace(
        loss=1.5, losses={"language": 1.5}, source_losses=sources, grad_norm=2.0, target_tokens=12,
        warning=None, times=StepTimes(), peak_bytes=3 * 2**30,
    )  # fmt: skip
    meter = StepMeter(
        4, "language", ("one", "two", "none"), {"vision": 0.1, "language": 0.2},
        flops=SimpleNamespace(of=lambda samples: 8e12),  # type: ignore[arg-type]
        peak_flops=4e12,
    )  # fmt: skip
    state: Any = SimpleNamespace(step=3, total_steps=9)
    return meter.of(state, batch, result, 0.5, 2.0, waited)


def test_losses_of_data_sets_are_of_a_target_token_of_theirs() -> None:
    """Six tokens of the first lose 6 in all, six of the second 12; the third has none."""
    assert _of().source_losses == {"one": 1.0, "two": 2.0}
    assert _of(sources=()).source_losses == {}


def test_speed_is_a_second_and_a_device() -> None:
    found = _of()
    assert (found.teraflops, found.mfu, found.tokens_per_second) == (1.0, 0.25, 20.0)
    assert found.learning_rates == {"vision": 0.05, "language": 0.1}
    assert "  mem 3.0 GiB  " in describe(found, None)
    assert found.to_record()["peak_bytes"] == 3 * 2**30
    on_cpus = replace(found, peak_bytes=None)
    assert " mem " not in describe(on_cpus, None)
    assert "peak_bytes" not in on_cpus.to_record()


@pytest.mark.parametrize(("waited", "named"), [(2 * NOTED_WAIT, {}), (2 * NOTED_WAIT + 1e-3, {"a": 0.5})])
def test_slow_samples_are_named_where_a_step_waited_for_them(waited: float, named: dict[str, float]) -> None:
    assert _of(waited).slowest_samples == named
