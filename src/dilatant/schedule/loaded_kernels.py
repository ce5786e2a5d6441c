"""Preload numba's compiled step-planning kernels by planning a tiny step at import.

The first such call in a process spends most of a second on numba's registries and its cache on disk. The fork server of
the ranks imports this module once for all of them.
"""

import numpy as np

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.step_assignment import Microbatching, assign
from dilatant.schedule.families.families import zero_bubble_h1
from dilatant.schedule.simulator.simulate import simulate


def _plan_a_step() -> None:
    stages = (Stage(0, 1, (0,)), Stage(1, 2, (1,)))
    plan = Plan((UnitPlan("unit", (Replica(stages),)),))
    assignment = assign(plan, {"unit": np.ones(2)}, Microbatching(2))
    simulate(zero_bubble_h1(plan, assignment), plan, assignment, lambda action: 1.0)


_plan_a_step()
