"""Measuring layers goes on where an earlier run ended, and uses what is known for what it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cases.models.tiny_configs import LLAMA
from dilatant.config import parse_config
from dilatant.config.degrees import ONE, Degrees
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.model import CostModel
from dilatant.planning.measuring.layer_costs import layer_costs, measure_layers
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import ModelDescription, build_meta_model, describe_model
from dilatant.planning.problem.planned_hardware import Target, plan_target

DEGREES = [Degrees(), Degrees(cp=2), Degrees(2)]


@pytest.fixture(scope="module")
def model() -> ModelDescription:
    return describe_model(build_meta_model(config_of({}), 64))


@pytest.fixture(scope="module")
def known(model: ModelDescription) -> CostModel:
    return measure_layers(model, target(), (4, 8), repeats=1, degrees=DEGREES)


def config_of(plan: dict):
    language = {"config": LLAMA, "tokenizer": "bytes"}
    tree = {"model": {"language_model": language}, "data": {"train": [{"path": "none.jsonl"}]}, "plan": plan}
    return parse_config(tree, Path("/nowhere"))


def target() -> Target:
    return plan_target(config_of({}).cluster)


def test_only_missing_costs_are_measured_and_others_stay(model, known):
    block = next(kind for kind in known.layers if "block" in kind)
    head = next(kind for kind in known.layers if "head" in kind)
    lacking = replace(
        known,
        layers={
            **known.layers,
            block: {degree: cost for degree, cost in known.layers[block].items() if degree != Degrees(2)},
            head: {degree: replace(cost, fit_error=None) for degree, cost in known.layers[head].items()},
        },
    )
    said: list[str] = []
    found = measure_layers(model, target(), (4, 8), 1, said.append, DEGREES, seconds=600.0, known=lacking, again=False)
    assert sorted(text.partition(", ")[2] for text in said) == [
        f"{block} at tp 2, cp 1",
        f"{head} at tp 1, cp 1",
        f"{head} at tp 2, cp 1",
    ]
    assert found.unmeasured == []
    assert found.layers.keys() == known.layers.keys()
    for kind, degrees in known.layers.items():
        assert [*found.layers[kind]] == DEGREES
        for degree, cost in degrees.items():
            was_known = kind != head and (kind, degree) != (block, Degrees(2))
            assert (found.layers[kind][degree] == cost) == was_known, (kind, degree)
    assert measure_layers(model, target(), (4, 8), degrees=DEGREES, known=known, again=False) == known


def test_missing_costs_come_first_when_all_are_measured_again(model, known):
    embedding = next(kind for kind in known.layers if "embedding" in kind)  # the cheapest
    layers = {kind: own for kind, own in known.layers.items() if kind != embedding}
    said: list[str] = []
    measure_layers(model, target(), (4, 8), 1, said.append, known=replace(known, layers=layers))
    assert embedding in said[0]
    assert "block" in said[1]  # three layers of the model
    assert len(said) == len(known.layers)


def test_zero_seconds_gives_modelled_costs_and_keeps_known_ones(model, known):
    asked = config_of({"measure_seconds": 0, "tensor_parallel": [1, 2], "context_parallel": [1, 2]})
    modelled = layer_costs(asked, model, target())
    assert modelled.origin == "analytic"
    assert {kind: [*own] for kind, own in modelled.layers.items()} == {
        kind: [Degrees(tp, cp) for tp in (1, 2) for cp in (1, 2)] for kind in known.layers
    }
    found = layer_costs(asked, model, target(), known=known)
    assert found.origin == "measured"
    assert all(found.layers[kind][ONE] == own[ONE] for kind, own in known.layers.items())
    assert found.unmeasured == [*known.layers]  # at (2, 2)


def test_modelled_shards_include_analytic_collective_time(model):
    asked = config_of({"measure_seconds": 0, "tensor_parallel": [2], "context_parallel": [1, 2]})
    found = layer_costs(asked, model, target())
    expected = analytic_costs(layer_shapes(model), target().hardware, [Degrees(2)], target().dtype)
    for kind, own in expected.layers.items():
        assert found.layers[kind][Degrees(2)].forward(8) == pytest.approx(own[Degrees(2)].forward(8), rel=1e-3), kind
