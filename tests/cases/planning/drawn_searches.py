"""Random models, costs and tokens of a search, drawn from a seed, and a decorator that tests many seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import cost_model
from cases.search_cases import random_vlm
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.model_spec import ModelSpec

ROUNDING = 1 + 1e-9


def often(test):
    """Run a test with a few seeds by default and with 500 as a slow test."""
    return pytest.mark.parametrize("cases", [2, pytest.param(500, marks=pytest.mark.slow)], ids=["few", "many"])(test)


def check(cases, one):
    """Run `one` on seeds until `cases` of them fulfilled its assumptions."""
    given(st.integers(0, 2**32 - 1))(settings(max_examples=cases, deadline=None)(one))()


def drawn(draw, parameters=0, free=False, activation=2.0):
    """Draw a small vision-language model, its costs and its tokens. free: the plan chooses what is recomputed."""
    spec, _ = random_vlm(draw)
    units = tuple(
        replace(
            one,
            layers=tuple(replace(layer, parameters=draw.randint(0, parameters)) for layer in one.layers),
            recompute=None if free else "none",
        )
        for one in spec.units
    )
    costs = cost_model(
        {"vision": draw.random() + 0.1, "language": draw.random() + 0.1},
        activation=activation,
        output=0.0,
        call=draw.choice([0.0, 2.0]),
    )
    layers = {
        kind: {
            degree: replace(
                cost,
                recompute=cost.forward,
                attention=Quadratic(b=0.4 * cost.forward.b),
                attention_bytes=Quadratic(b=0.3 * cost.activation_bytes.b),
                checkpoint_bytes=Quadratic(b=0.2 * cost.activation_bytes.b),
            )
            for degree, cost in degrees.items()
        }
        for kind, degrees in costs.layers.items()
    }
    tokens = {"vision": draw.randint(1, 9), "language": draw.randint(1, 9)}
    return ModelSpec(units), replace(costs, layers=layers), tokens
