"""Load numba's compiled step-planning kernels by planning a tiny step at import.

Compiling them takes half a minute of the first process of an installation; later ones spend most of a second on numba's
registries and its cache on disk. The fork server of the ranks imports this module once for all of them.
"""

from dataclasses import replace

import numpy as np

from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.costs.step_costs import token_costs
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
from dilatant.schedule.families.families import zero_bubble_h1
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.predict import time_step
from dilatant.schedule.simulator.simulate import simulate


def _plan_a_step() -> None:
    encoder = UnitPlan("encoder", (Replica((Stage(0, 1, (0,)),)),), ("language",))
    plan = Plan((encoder, UnitPlan("language", (Replica((Stage(0, 1, (1,)), Stage(1, 2, (2,)))),))))
    link = Link(1.0)
    costs = replace(token_costs(plan, (True,) * 3), cluster=Cluster(1, 3, 1.0, link, link))
    samples = costs.workload({"encoder": np.ones(4), "language": np.ones(4)})
    assignment = assign_step(plan, costs, samples, Microbatching(2, row_tokens=2), "language")
    schedule = zero_bubble_h1(plan, assignment)
    simulate(schedule, plan, assignment, lambda action: 1.0)
    time_step(build(plan, assignment, schedule), costs, samples).timeline()


_plan_a_step()
