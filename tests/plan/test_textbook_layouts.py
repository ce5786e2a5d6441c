"""Every search also simulates the layouts that people choose without a search, and NVLink domains join nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cases.model_cases import cluster, cost_model, model, unit
from cases.search_cases import RULES, search
from dilatant.plan import PlanScore, Workload
from dilatant.plan.errors import PlanError

BATCH = 512


def shape(plan):
    stages = plan.unit("language").replicas[0].stages
    return len(plan.unit("language").replicas), stages[0].tp, len(stages)


def planted(fast):
    """A scorer in which all plans are slow but those of one shape: (replicas, tp, stages)."""

    def score(plan, microbatches, row_tokens=None, *_):
        seconds = 1.0 if shape(plan) == fast else 1e6
        return PlanScore(seconds, BATCH / seconds, 0.0, {}, (0.0,) * len(plan.ranks))

    return score


def found_on(machine, scorer, layers=16, degrees=((1, 1), (2, 1), (4, 1), (8, 1))):
    spec = model(unit("language", layers, parameters=10))
    costs = cost_model({"language": 1e-6}, degrees=degrees)
    workload = Workload({"language": np.full(BATCH, 4.0)})
    return search(spec, costs, machine, workload, BATCH, scorer, (1, 2), RULES, 6)


@pytest.mark.parametrize("fast", [(64, 4, 1), (32, 8, 1)])
def test_a_textbook_layout_replaces_what_was_estimated_better(fast):
    machine = cluster(32, 8)
    assert shape(found_on(machine, planted(fast)).winner.plan) == fast


def test_domains_of_nvlink_join_nodes():
    trays = cluster(4, 4)
    rack = replace(trays, domain=10)  # two whole nodes of four
    assert rack.reach == 8
    assert rack.link(0, 7) == rack.inside != trays.link(0, 7)
    assert rack.link(7, 8) == rack.port
    assert [rack.node_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("nodes", "reach"), [(1, 4), (2, 8), (16, 64), (18, 72), (32, 64), (36, 72), (20, 40), (64, 64), (288, 72)]
)
def test_nodes_spread_evenly_over_domains(nodes, reach):
    """Trays of four in racks of 72."""
    assert replace(cluster(nodes, 4), domain=72).reach == reach


def test_a_rack_takes_tensor_groups_that_trays_refuse():
    trays = cluster(2, 4)
    only = ((8, 1),)
    with pytest.raises(PlanError):
        found_on(trays, planted((1, 8, 1)), layers=1, degrees=only)
    assert shape(found_on(replace(trays, domain=72), planted((1, 8, 1)), 1, only).winner.plan) == (1, 8, 1)
