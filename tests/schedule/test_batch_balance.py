"""How long groups wait for the largest: against a count by hand, and better by policy than by count."""

from __future__ import annotations

import numpy as np
import pytest

from dilatant.schedule.assignment.assign import assign_microbatches
from dilatant.schedule.assignment.batch_balance import batch_balance


def test_waits_are_those_of_the_groups_that_the_policy_makes():
    rng = np.random.default_rng(0)
    batches = [np.stack([rng.integers(20, 900, 16), rng.integers(0, 4, 16) * 100], axis=1) for _ in range(5)]
    for found in batch_balance(("language", "vision"), batches):
        loads = []
        for seed, batch in enumerate(batches):
            slots = assign_microbatches(batch, found.groups, found.policy, seed)[0]
            loads.append([[sum(int(batch[s, unit]) for s in slot) for unit in range(2)] for slot in slots])
        loads = np.array(loads)
        for unit, name in enumerate(("language", "vision")):
            mean = sum(loads[b, :, unit].mean() for b in range(5))
            slowest = sum(loads[b, :, unit].max() for b in range(5))
            assert found.waits[name] == pytest.approx(1 - mean / slowest)
        size = loads.mean(axis=(0, 1))
        steps = [(loads[b] / size).max() for b in range(5)]
        assert found.step_waits == pytest.approx(1 - 5 / sum(steps))


def test_balanced_policy_waits_less_and_equal_samples_never_wait():
    rng = np.random.default_rng(1)
    batches = [rng.integers(20, 900, (64, 1)) for _ in range(20)]
    random, balanced = batch_balance(("language",), batches, groups=(4,))
    assert balanced.step_waits < 0.1 * random.step_waits
    even = batch_balance(("language",), [np.full((8, 1), 7)], groups=(4,))
    assert [one.step_waits for one in even] == [0.0, 0.0]


def test_what_cannot_be_divided_is_left_out():
    assert [one.groups for one in batch_balance(("a",), [np.ones((9, 1))])] == [2, 2, 4, 4]
    assert batch_balance(("a",), []) == ()
    assert batch_balance(("a",), [np.zeros((8, 1))]) == ()
    (found, _) = batch_balance(("a", "b"), [np.array([[3, 0]] * 4)])
    assert found.waits == {"a": 0.0}
