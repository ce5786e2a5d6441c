"""Gradients are summed at the speed of links and ports: closed forms, and rings played message by message."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import model, unit
from dilatant.cost.memory import ParameterBytes
from dilatant.plan import Cluster, Link
from dilatant.plan.cluster import cluster_of_groups
from dilatant.plan.costs.sync_time import sync_seconds
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from oracles.ring import all_reduce

RULES = ParameterBytes(1.0, 1.0, 2.0)
INSIDE, PORT = 450e9, 50e9


def machine(nodes, per_node=8, ports=8):
    return Cluster(nodes, per_node, 1e12, Link(INSIDE), Link(PORT * ports), ports)


def replicas(groups, tp=1):
    """A unit of one layer, each replica one stage on these ranks."""
    return Plan((UnitPlan("language", tuple(Replica((Stage(0, 1, tuple(ranks), tp),)) for ranks in groups)),))


def seconds(plan, cluster, parameters):
    return sync_seconds(plan, model(unit("language", 1, parameters=parameters)), cluster, RULES).beside


def test_replicas_of_one_node_pass_rings_over_its_links():
    found = seconds(replicas([[rank] for rank in range(8)]), machine(1), 8_000_000)
    assert found[3] == pytest.approx(2 * 7 / 8 * 8e6 / INSIDE)


@pytest.mark.parametrize("members", [2, 4, 8])
def test_members_of_a_mesh_pass_rings_over_the_wires_to_each_other(members):
    mesh = replace(machine(1), inside=Link(INSIDE, mesh=8))
    found = seconds(replicas([[rank] for rank in range(members)]), mesh, 8_000_000)
    assert found[1] == pytest.approx(2 * (members - 1) / members * 8e6 / (INSIDE * (members - 1) / 7))


def test_members_of_a_mesh_on_other_nodes_give_no_wires():
    mesh = replace(machine(2), inside=Link(INSIDE, mesh=8))
    found = seconds(replicas([[0], [1], [8], [9]]), mesh, 8_000_000)
    assert found[0] == pytest.approx(2 * 3 / 4 * 8e6 * max(7 / INSIDE, 1 / (2 * PORT)))


def test_a_group_with_eight_members_on_each_node_has_eight_ports():
    found = seconds(replicas([[rank] for rank in range(16)]), machine(2), 8_000_000)
    assert found[0] == pytest.approx(2 * 15 / 16 * 8e6 / (8 * PORT))


def test_a_group_with_one_member_on_each_node_has_one_port():
    found = seconds(replicas([[0], [8]]), machine(2), 8_000_000)
    assert found[0] == pytest.approx(8e6 / PORT)


def test_of_unlike_devices_the_slowest_link_and_port_decide():
    slow = Cluster(1, 2, 1e12, Link(1e9), Link(2e9, 0.5), name="slow")
    both = cluster_of_groups([replace(machine(1, 4, 1), name="fast"), slow])
    assert seconds(replicas([[0], [4]]), both, 8_000_000)[0] == pytest.approx(2 * 0.5 + 8e6 / 2e9)
    found = seconds(replicas([[0], [1], [4], [5]]), both, 8_000_000)
    assert found[5] == pytest.approx(4 * 0.5 + 2 * 3 / 4 * 8e6 / 1e9)  # its link is slower than its port
    assert found[0] == pytest.approx(4 * 0.5 + 2 * 3 / 4 * 8e6 / 2e9)


def test_groups_that_share_the_only_port_of_a_node_take_turns():
    one_port = machine(2, 4, 1)
    alone = seconds(replicas([[0], [4]]), one_port, 8_000_000)
    # Two tensor-parallel ranks with half of the layer each, and through the same port.
    halves = seconds(replicas([[0, 1], [4, 5]], tp=2), one_port, 8_000_000)
    assert halves[0] == pytest.approx(alone[0])
    spread = seconds(replicas([[0, 1], [4, 5]], tp=2), machine(2, 4, 4), 8_000_000)
    assert spread[0] == pytest.approx(4e6 / PORT)


def test_unlike_tensor_parallelism_sums_by_the_finest_parts():
    plan = replicas([[0, 1], [2]])
    stages = [Stage(0, 1, (0, 1), 2), Stage(0, 1, (2,))]
    plan = Plan((UnitPlan("language", tuple(Replica((stage,)) for stage in stages)),))
    found = seconds(plan, machine(1), 8_000_000)
    assert found[0] == pytest.approx(4e6 / INSIDE)
    assert found[2] == pytest.approx(8e6 / INSIDE)


def test_sharded_state_syncs_inside_nodes_then_across_them():
    rules = ParameterBytes(1.0, 2.0, 8.0, "node", 8)
    spec, plan = model(unit("language", 1, parameters=8_000_000)), replicas([[rank] for rank in range(16)])
    found = sync_seconds(plan, spec, machine(2), rules)
    # 16 MB of gradients divided among eight, and of each part its sum over two nodes, each through a port of its own.
    assert found.beside[3] == pytest.approx(max(7 / 8 * 16e6 / INSIDE, 2e6 / PORT))
    assert found.after[3] == pytest.approx(7 / 8 * 8e6 / INSIDE)
    everywhere = sync_seconds(plan, spec, machine(2), replace(rules, zero="all"))
    assert everywhere.beside[3] == pytest.approx(15 / 16 * 16e6 / (8 * PORT))
    assert everywhere.after[3] == pytest.approx(15 / 16 * 8e6 / (8 * PORT))
    # Three holders on one node and one on the other cut parts of unlike size: these are summed as a whole.
    uneven = sync_seconds(replicas([[0], [1], [2], [8]]), spec, machine(2), rules)
    assert uneven.beside[0] == pytest.approx(2 * 3 / 4 * 16e6 / PORT)
    assert uneven.after[8] == 0.0 < uneven.after[0]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_rings_played_message_by_message_take_as_long(seed):
    """Groups of equal size spread alike over nodes: stages of a unit of unlike sizes, side by side or not."""
    draw = random.Random(seed)
    nodes, per_node = draw.choice([1, 2, 3, 4]), draw.choice([2, 4, 8])
    ports = draw.choice([n for n in (1, 2, 4, 8) if n <= per_node])
    cluster = machine(nodes, per_node, ports)
    near = draw.choice([n for n in (1, 2, 4, 8) if n <= per_node])  # members of a group on each node
    groups = [
        [node * per_node + first + k for node in range(nodes) for k in range(near)]
        for first in range(0, per_node, near)
    ]
    if nodes * near == 1:
        return
    sizes = [draw.randint(1, 9) * 1_000_000 for _ in groups]
    units = tuple(
        UnitPlan(f"u{n}", tuple(Replica((Stage(0, 1, (rank,)),)) for rank in ranks)) for n, ranks in enumerate(groups)
    )
    spec = model(*(unit(f"u{n}", 1, parameters=size) for n, size in enumerate(sizes)))
    found = sync_seconds(Plan(units), spec, cluster, RULES).longest
    rings = list(zip(map(float, sizes), groups))
    played = all_reduce(rings, cluster.node_of, lambda rank: cluster.place_of(rank)[1], INSIDE, PORT)
    # Rings that share a port leave gaps in each other's rounds; and a ring is as fast as its slowest hop, while bytes
    # through ports and links are counted apart.
    assert found <= played * (1 + 1e-9)
    assert found >= 0.75 * played


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_weight_is_summed_and_updated_once_by_who_holds_both_ends(stages):
    """Of 1,000 embedded parameters and a head of 10 more that repeats them, a rank with both has 1,010."""
    layers = (LayerSpec("in", "any", 1000), LayerSpec("out", "any", 1010, tied=1000))
    cuts = [(0, 2)] if stages == 1 else [(0, 1), (1, 2)]
    chains = [
        Replica(tuple(Stage(*cut, (stages * number + own,)) for own, cut in enumerate(cuts))) for number in (0, 1)
    ]
    plan = Plan((UnitPlan("language", tuple(chains)),))
    cluster = Cluster(1, 2 * stages, 1e12, Link(1e9), Link(1e9), memory_bandwidth=1e9)
    found = sync_seconds(plan, ModelSpec((UnitSpec("language", layers),)), cluster, replace(RULES, zero="none"))
    expected = [1010] if stages == 1 else [1000, 1010]
    for each, size in ((found.beside, RULES.summed), (found.updates, 50)):
        assert [each[rank] for rank in range(stages)] == pytest.approx([size * own / 1e9 for own in expected])
