"""Layers on several devices: what is left of a measured curve, and what the group's collectives add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilatant.config.degrees import Degrees
from dilatant.cost.analytic import DILATANT, analytic_cost, block_shape, collective_seconds, group_cost
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
                # A quarter is waited for, the rest slows attention, which takes longer, by a fifth of its time.
                times, waited = 2 if name in ("input_gradient", "first_trainable") else 1, 0.25 + 0.75 * 0.2
                added[name] += times * (1e-5 + waited * (cp - 1) / cp * tokens * 2 * (4 * 8) / tp * 4 / 1e9)
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


@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0, 10.0])
def test_keys_and_values_travel_beside_the_kernel_of_the_heads_before(slower):
    """Four gathers one after the other on a link, each beside the kernel of the one before, on a row of 8,192 tokens a
    rank. slower: a gather's seconds, as a multiple of a kernel's."""
    cp, tokens = 4, 4 * 8192
    kernel = 1.0
    gathered, computed = 0.0, [0.0, 0.0]
    for _ in range(4):
        gathered = max(gathered, computed[-2]) + slower * kernel  # into the buffer of the kernel before the last
        computed.append(max(gathered, computed[-1]) + kernel)
    waited = computed[-1] - 4 * kernel
    moved = (cp - 1) / cp * SHAPE.key_value_width * 2 * tokens  # bytes in bf16
    link = Link(bandwidth=moved / (4 * slower * kernel))
    found = collective_seconds(SHAPE, GroupLinks(link, link), "bfloat16", Degrees(1, cp), kernel=4 * kernel / tokens**2)
    # Kernels beside a gather are slower by a fifth of its time, unless that is waited for anyway.
    assert waited <= found(tokens) <= waited + 3 * 0.2 * slower * kernel + 1e-9
    alone = collective_seconds(SHAPE, GroupLinks(link, link), "bfloat16", Degrees(1, cp))
    assert alone(tokens) == pytest.approx(4 * slower * kernel)  # nothing runs beside it


def test_rings_hide_what_our_gathers_expose():
    hardware = load_hardware("H100")
    shape = block_shape(4096, 14_336, 32, 8)
    ours, ring = (
        analytic_cost(shape, hardware, degrees=Degrees(1, 4), runner=replace(DILATANT, exposed=exposed))
        for exposed in (0.25, 0.0)
    )
    moved = 0.75 * 2048 * 2 / hardware.inside.bandwidth  # a token's keys and values, forward
    assert ours.forward.b - ring.forward.b == pytest.approx(0.25 * 0.8 * moved, rel=1e-2)  # six digits are kept
    assert ours.forward.a == ring.forward.a
