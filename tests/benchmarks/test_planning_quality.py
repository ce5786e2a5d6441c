"""No plan of small cases is faster than the search's: an oracle enumerates all cuts, degrees and replicas."""

from __future__ import annotations

import pytest

from benchmarks.planning.planning_quality import small_cases


@pytest.mark.parametrize("cases", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_no_enumerated_plan_is_faster_and_bounds_hold(cases):
    found = small_cases(cases)
    assert found.cases == cases
    assert found.worst_gap == 0.0
    assert found.wrong_bounds == 0
