"""Depths shrink to what memory holds, and the simulated peak agrees."""

from __future__ import annotations

import numpy as np
import pytest
from test_memory_sweep import unit_costs

from dilatant.config.errors import UserError
from dilatant.plan import Plan, Replica, Stage, UnitPlan, eager_depths
from dilatant.schedule import Assignment, eager, predict
from dilatant.schedule.depths import depths_in_memory


def chain(stages: int, groups: int) -> tuple[Plan, Assignment]:
    plan = Plan(
        (UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s % groups,)) for s in range(stages))),)),)
    )
    return plan, Assignment({"language": (tuple((k,) for k in range(20)),)})


@pytest.mark.parametrize(("stages", "groups"), [(4, 4), (6, 3)])
@pytest.mark.parametrize("size", [45.0, 60.0, 80.0, 1000.0])
def test_the_simulated_peak_stays_within_memory(stages, groups, size):
    plan, assignment = chain(stages, groups)
    costs, tokens = unit_costs(stages), {"language": [7]}
    depths = depths_in_memory(plan, costs, tokens, size)
    assert all(0 < depth <= most for depth, most in zip(depths, eager_depths(plan), strict=True))
    schedule = eager(plan, assignment, depths=depths)
    timeline = predict(plan, assignment, schedule, costs, {"language": [7] * 20})
    assert timeline.peak_bytes is not None
    assert timeline.peak_bytes.max() <= size
    if size == 1000.0:
        assert depths == eager_depths(plan)


def test_memory_is_used_up_to_the_last_microbatch_that_fits():
    plan, _ = chain(4, 4)
    costs, tokens = unit_costs(4), {"language": [7]}
    # Ten bytes always, seven for each microbatch in flight.
    assert depths_in_memory(plan, costs, tokens, 10 + 7 * 5) == (5, 5, 3, 1)
    assert depths_in_memory(plan, costs, tokens, 10 + 7 * 5 - 1) == (4, 4, 3, 1)


def test_what_cannot_hold_one_microbatch_is_named_with_what_it_lacks():
    plan, _ = chain(4, 2)
    costs = unit_costs(4)
    costs.static_bytes[:] = np.asarray([1e9, 2e9, 1e9, 2e9])
    with pytest.raises(UserError) as raised:
        depths_in_memory(plan, costs, {"language": [7]}, 2.5e9)
    text = str(raised.value)
    assert "ranks [1] (language stage 1, language stage 3) lack 1.40 GiB" in text
    assert "ranks [0]" not in text
