"""Plans name the published runs most like them."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from dilatant.cost.hardware import load_hardware
from dilatant.cost.published_runs import mean_errors, nearest_runs, published_runs

MOST_BYTES = 24_000
"""The package holds facts about a part of the published runs, not the corpus."""


def test_the_table_is_small_and_its_hardware_is_known():
    assert len(files("dilatant.cost").joinpath("published_runs.csv").read_bytes()) < MOST_BYTES
    assert {load_hardware(run.hardware).name for run in published_runs()} == {run.hardware for run in published_runs()}
    assert all(0.2 < run.ratio < 3.0 for run in published_runs())


@pytest.mark.parametrize("number", [0, 7, -1])
def test_the_nearest_run_has_the_same_size_and_layout(number):
    run = published_runs()[number]
    first, *others = nearest_runs(run)
    same = ("billions", "devices", "tp", "pp", "sharded", "hardware")
    assert [getattr(first, name) for name in same] == [getattr(run, name) for name in same]
    assert all(other.hardware == run.hardware for other in others)
    assert f"{first.ratio:.2f}" in str(first)
    assert first.source in str(first)


def test_a_doubling_counts_like_another_sharding_and_half_of_experts():
    run = replace(published_runs()[0], model="a")
    assert run.unlike(run) == 0.0
    assert run.unlike(replace(run, sharded="other")) == run.unlike(replace(run, devices=2 * run.devices)) == 1.0
    assert run.unlike(replace(run, model="b, experts")) == 2.0
    assert run.unlike(replace(run, model="b")) == 0.0


def test_hardware_without_runs_has_no_nearest_one():
    assert nearest_runs(replace(published_runs()[0], hardware="L4")) == ()


def test_errors_are_means_over_runs_of_a_source_and_kind():
    lines = files("dilatant.cost").joinpath("published_runs.csv").read_text(encoding="utf-8").splitlines()
    of_source = [line for line in lines if line.startswith("torchtitan-") and ",H100," in line]
    in_fp8 = [abs(float(line.rpartition(",")[2]) - 1.0) for line in of_source if ", FP8" in line]
    in_16_bits = [abs(float(line.rpartition(",")[2]) - 1.0) for line in of_source if ", FP8" not in line]
    found = mean_errors("H100")
    assert len(in_fp8) > 1
    assert found["torchtitan, FP8"] == pytest.approx(sum(in_fp8) / len(in_fp8))
    assert found["torchtitan"] == pytest.approx(sum(in_16_bits) / len(in_16_bits))
    assert not mean_errors("L4")
