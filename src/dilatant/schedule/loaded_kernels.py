"""Importing this loads what numba compiled for the planning of a step, by planning a small one.

A process that does so for the first time spends most of a second on numba's registries and its cache on disk. The
server that ranks are forked from imports this once for all of them.
"""

from __future__ import annotations

import numpy as np

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.distribute import assign
from dilatant.schedule.families.zero_bubble import zero_bubble_h1
from dilatant.schedule.simulator.simulate import simulate


def _plan_a_step() -> None:
    stages = (Stage(0, 1, (0,)), Stage(1, 2, (1,)))
    plan = Plan((UnitPlan("unit", (Replica(stages),)),))
    assignment = assign(plan, {"unit": np.ones(2)}, 2)
    simulate(zero_bubble_h1(plan, assignment), plan, assignment, lambda action: 1.0)


_plan_a_step()
