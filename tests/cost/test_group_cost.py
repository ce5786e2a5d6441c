"""Layers on several devices: what is left of a measured curve, and what the group's collectives add."""

from __future__ import annotations

import pytest

from dilatant.cost import LayerCost, Link, Quadratic, block_shape
from dilatant.cost.group import group_cost

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
    assert group_cost(SHARE, SHAPE, LINK, "float32", (1, 1)) == SHARE


@pytest.mark.parametrize("degree", [(1, 2), (2, 1), (2, 4)])
def test_a_rank_has_its_part_of_a_row_and_waits_for_the_collectives(degree):
    tp, cp = degree
    found = group_cost(SHARE, SHAPE, LINK, "float32", degree)
    for tokens in (128, 4096):
        added = dict.fromkeys(PASSES, 0.0)
        for name in PASSES:
            if (
                tp > 1
            ):  # two all-gathers and two reduce-scatters, each moving (tp - 1) / tp of this rank's tokens
                added[name] += 4 * (1e-5 + (tp - 1) / tp * tokens / cp * 64 * 4 / 1e9)
            if (
                cp > 1
            ):  # keys and values of the other ranks: 4 heads of 8, split over tp; backward, and gradients
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
