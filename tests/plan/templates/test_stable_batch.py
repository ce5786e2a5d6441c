"""The minimum stable batch: calibrated, restricted to allocations that exist, and honest about small data."""

from __future__ import annotations

import numpy as np
import pytest

from cases.model_cases import cost_model, model, unit
from dilatant.plan import Workload, feasible_allocations, minimum_stable_batch, sample_work


def lognormal_work(count=20_000, seed=0, language=1.0):
    """[samples, 2] seconds of a vision-language data set: heavy tails, loosely coupled units."""
    draw = np.random.default_rng(seed)
    vision, text = draw.lognormal(6.5, 0.8, count), draw.lognormal(5.3, 1.0, count)
    tokens = vision / 4 + text
    return np.stack([vision * (1 + vision / 8000), language * tokens * (1 + tokens / 16000)], axis=1)


def asked_for(means, allocations):
    """What a batch of these mean works asks for, written out."""
    return min(allocations, key=lambda allocation: max(mean / devices for mean, devices in zip(means, allocation)))


@pytest.mark.parametrize(("tp", "language"), [(1, 1.0), (1, 3.0), (2, 1.0), (2, 2.0)])
def test_delta_method_batches_disagree_at_the_promised_rate(tp, language):
    work = lognormal_work(language=language)
    allocations = feasible_allocations([range(tp, 16, tp)] * 2, 16)
    found = minimum_stable_batch(work, allocations)
    draw = np.random.default_rng(1)
    trials = 600
    differing = sum(
        asked_for(work[draw.integers(len(work), size=found.batch)].mean(axis=0), allocations) != found.allocation
        for _ in range(trials)
    )
    # 5 % promised; the bound adds up rivals and leans on the central limit theorem under heavy tails, and
    # 600 trials scatter by 0.9 %.
    assert 0.005 <= differing / trials <= 0.085
    smaller = minimum_stable_batch(work, allocations, error=0.2).batch
    assert smaller < found.batch


def test_allocations_that_no_plan_has_do_not_count():
    work = lognormal_work()
    fine = minimum_stable_batch(work, feasible_allocations([range(1, 16)] * 2, 16))
    coarse = minimum_stable_batch(work, feasible_allocations([range(2, 16, 2)] * 2, 16))
    assert all(devices % 2 == 0 for devices in coarse.allocation)
    assert coarse.batch < fine.batch


def test_three_units_are_judged_together():
    work = np.concatenate([lognormal_work(4000), lognormal_work(4000, seed=3)[:, :1] * 2], axis=1)
    allocations = feasible_allocations([range(1, 7)] * 3, 8)
    found = minimum_stable_batch(work, allocations)
    assert found.allocation == asked_for(work.mean(axis=0), allocations)
    draw = np.random.default_rng(2)
    differing = np.mean(
        [
            asked_for(work[draw.integers(len(work), size=found.batch)].mean(axis=0), allocations) != found.allocation
            for _ in range(300)
        ]
    )
    assert differing <= 0.07  # 5 % promised by a sum over rivals, which three units make pessimistic


def test_the_ratio_is_of_means_not_a_mean_of_ratios():
    work = np.array([[1.0, 9.0]] * 99 + [[900.0, 100.0]])  # 999 to 991 in all, but 1 to 9 in most samples
    assert minimum_stable_batch(work, [(2, 8), (5, 5)]).allocation == (5, 5)


def test_a_ratio_on_a_breakpoint_does_not_run_for_ever():
    draw = np.random.default_rng(0)
    work = draw.lognormal(0.0, 1.0, (5000, 2))
    work[:, 1] *= work[:, 0].mean() / work[:, 1].mean()
    allocations = [(3, 5), (5, 3)]
    found = minimum_stable_batch(work, allocations)
    assert found.batch is None
    assert found.confidence < 0.95
    assert "too small for a stable ratio" in found.warning(512)
    # Both allocations are equally good, which is what the user should hear.
    relaxed = minimum_stable_batch(work, allocations, tolerance=0.02)
    assert relaxed.batch == 1


def test_the_work_of_samples_follows_the_frozen_rule():
    spec = model(unit("vision", 3, ("language",), trainable=False), unit("language", 2))
    costs = cost_model({"vision": 1.0, "language": 1.0}, degrees=((2, 1),), overhead=0.0, call=1.0)
    work = sample_work(spec, costs, Workload({"vision": np.array([4.0, 0.0]), "language": np.array([5.0, 3.0])}))
    # Forward only in the encoder, no call for a sample without image; the language model's first layer has no
    # input gradient to send. Two devices take half the seconds per token, and the whole call each.
    assert work.tolist() == [[3 * (4 + 2), (2 + 3) * (5 + 2)], [0.0, (2 + 3) * (3 + 2)]]


def test_small_global_batches_are_warned_about():
    found = minimum_stable_batch(lognormal_work(), feasible_allocations([range(1, 16)] * 2, 16))
    assert found.warning(found.batch) is None
    assert f"below the {found.batch} samples" in found.warning(found.batch - 1)


def test_data_too_small_is_said_with_the_confidence_reached():
    found = minimum_stable_batch(lognormal_work(60), feasible_allocations([range(1, 16)] * 2, 16))
    assert found.batch is None
    assert found.largest == 60
    assert f"{found.confidence:.0%}" in found.warning(60)


def test_no_allocation_is_feasible_where_no_sizes_add_up():
    assert feasible_allocations([[4], [8]], 8) == ()
    assert feasible_allocations([[2, 4], [2, 4]], 9) == ()
    assert feasible_allocations([[2, 4], [2, 4]], 6) == ((2, 4), (4, 2))
