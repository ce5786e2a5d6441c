"""A mixture whose experts fit no device is planned with its experts on several, and the runtime takes such a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cases.engine_case import CASE, build_model
from cases.search_cases import search
from dilatant.config.degrees import Degrees
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.hardware import load_hardware
from dilatant.plan import Cluster, Workload
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import describe_model
from dilatant.runtime.layouts import layout_problems
from dilatant.schedule.plan_scorer import PlanSimulator


@pytest.mark.parametrize("degrees", [(Degrees(),), (Degrees(), Degrees(cp=2))], ids=["replicas", "cp"])
@pytest.mark.parametrize(("capacity", "ep"), [(1.3e6, 2), (1e9, 1)])
def test_a_mixture_is_planned_on_the_ranks_its_experts_need(
    capacity: float, ep: int, degrees: tuple[Degrees, ...]
) -> None:
    """98,304 parameters of four experts in one block, at 18 bytes each; little besides."""
    case = replace(
        CASE,
        language="mixtral",
        language_layers=1,
        encoders=(),
        attention="causal",
        frozen=(),
        settings={"intermediate_size": 512},
    )
    model = build_model(case, "meta")
    found = describe_model(model)
    machine = load_hardware("A100")
    costs = analytic_costs(layer_shapes(found), machine, degrees)
    capacity += 1e5 * (len(degrees) == 1)  # a sample's activations, which no ranks divide
    cluster = Cluster(1, 2, capacity, machine.inside, machine.between)
    workload = Workload({"language": np.full(4, 16.0)})
    result = search(found.spec, costs, cluster, workload, 4, PlanSimulator(found.spec, costs, cluster, workload, 4))
    plan = result.winner.plan
    stages = [stage for replica in plan.unit("language").replicas for stage in replica.stages]
    assert max(stage.ep for stage in stages) == ep
    assert layout_problems(plan, model.units) == []
