"""Layers on several devices: what is left of a measured curve, and what the group's collectives add."""

from __future__ import annotations

import pytest

from dilatant.config.degrees import Degrees
from dilatant.cost.analytic import block_shape, collective_seconds, group_cost
from dilatant.cost.hardware import GroupLinks, Link, load_hardware
from dilatant.cost.layer import LayerCost
from dilatant.cost.quadratic import Quadratic

SHAPE = block_shape(64, 256, 8, 4)
LINK = Link(bandwidth=1e9, latency=1e-5)
SHARE = LayerCost(
    forward=Quadratic(4e-9, 2e-6, 1e-4),
    input_gradient=Quadratic(8e-9, 3e-6, 2e-4),
    weight_gradient=Quadratic(0, 2e-6, 1e-4),
    first_trainable=Quadratic(8e-9, 4e-6, 3e-4),
    recompute=Quadratic(4e-9, 2e-6, 1e-4),
    activation_bytes=Quadratic(2, 400, 8),
    weight_bytes=Quadratic(0, 200, 0),
    checkpoint_bytes=Quadratic(0, 256, 0),
    output_bytes=Quadratic(0, 256, 0),
    parameters=1000,
    fit_error=0.01,
)
PASSES = ("forward", "input_gradient", "first_trainable", "recompute")
ALONE = ("weight_gradient", "activation_bytes", "weight_bytes", "checkpoint_bytes", "output_bytes")


def test_one_device_has_the_measured_curve():
    assert group_cost(SHARE, SHAPE, GroupLinks(LINK, LINK), "float32", Degrees()) == SHARE


@pytest.mark.parametrize("degree", [(1, 2), (2, 1), (2, 4)])
def test_a_rank_costs_its_part_of_a_row_plus_collectives(degree):
    tp, cp = degree
    found = group_cost(SHARE, SHAPE, GroupLinks(LINK, LINK), "float32", Degrees(*degree))
    for tokens in (128, 4096):
        added = dict.fromkeys(PASSES, 0.0)
        for name in PASSES:
            if tp > 1:  # two all-gathers and two reduce-scatters, each moving (tp - 1) / tp of this rank's tokens
                added[name] += 4 * (1e-5 + (tp - 1) / tp * tokens / cp * 64 * 4 / 1e9)
            if cp > 1:  # keys and values of the other ranks: 4 heads of 8, split over tp; backward, and gradients
                times = 2 if name in ("input_gradient", "first_trainable") else 1
                added[name] += times * (1e-5 + (cp - 1) / cp * tokens * 2 * (4 * 8) / tp * 4 / 1e9)
        for name in PASSES + ALONE:
            whole = getattr(SHARE, name)
            part = whole.a * tokens**2 / cp + whole.b * tokens / cp + whole.c
            # Coefficients are kept to six digits.
            assert getattr(found, name)(tokens) == pytest.approx(part + added.get(name, 0.0), rel=1e-5)
        # Of what is waited for again, keeping attention saves the reduce-scatters and all of keys and values.
        saved = added["recompute"]
        if tp > 1:
            saved -= 2 * (1e-5 + (tp - 1) / tp * tokens / cp * 64 * 4 / 1e9)
        assert found.attention(tokens) == pytest.approx(saved, rel=1e-5)
    assert (found.parameters, found.fit_error) == (1000, 0.01)


def test_keys_and_values_that_leave_a_node_take_its_ports():
    """16 ranks on two nodes of 8: a ring passes each node's border once, and tp rings share its ports."""
    hardware, tokens = load_hardware("H100"), 4096
    for tp in (1, 2, 4):
        cp = 16 // tp
        links = hardware.group_links(Degrees(tp, cp), 8)
        both, alone = (
            collective_seconds(SHAPE, one, "bfloat16", Degrees(tp, cp))
            for one in (links, hardware.group_links(Degrees(tp, cp)))
        )
        moved = (cp - 1) / cp * SHAPE.key_value_width * 2 * tokens / tp
        rate = min(hardware.inside.bandwidth, hardware.between.bandwidth / tp)
        more = moved * (1 / rate - 1 / hardware.inside.bandwidth)
        more += hardware.between.latency - hardware.inside.latency
        assert both(tokens) - alone(tokens) == pytest.approx(more, rel=1e-9)  # doubles
    assert hardware.group_links(Degrees(2, 4), 8) == hardware.group_links(Degrees(2, 4)), "all on one node"
