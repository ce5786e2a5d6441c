"""Every run of any model has costs and names their source: the plan, else earlier measurements, else the cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cases.drawn_steps import cases
from cases.engine_case import CASE, PLAN, Case, build_model
from cases.planning.planned_project import config as project_config
from cases.planning.planned_project import write_samples
from dilatant.config import Config, parse_config
from dilatant.config.degrees import ONE, Degrees
from dilatant.config.environment import cache_folder
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.hardware import load_hardware, save_hardware
from dilatant.cost.model import save_costs
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.measuring.cost_cache import cached_costs, store_costs
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.memberships import plan_resiliently
from dilatant.planning.planning import planning_problem
from dilatant.planning.problem.describe_model import describe_model
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.trainability import trainability_of
from dilatant.training.prepare import prepare
from dilatant.training.run_costs import costs_of_run


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))


def config(**sections: Any) -> Config:
    tree = {
        "model": {"encoders": {"vision": {"kind": "image", "id": "a"}}, "language_model": {"id": "b"}},
        "data": {"train": [{"path": "x.jsonl"}]},
        **sections,
    }
    return parse_config(tree, Path("/nowhere"))


@settings(max_examples=4)
@given(cases())
def test_stages_of_any_model_cost_time_only_where_they_compute(case: Case) -> None:
    model = build_model(case, "meta")
    found = costs_of_run(config(resilience={"enabled": True}), model, case.plan)
    trains = trainability_of(case.plan, trainable_layers(model.units))
    seconds = found.stages.seconds
    assert np.isfinite(seconds).all()
    assert seconds.min() >= 0
    assert (seconds[:, 0].sum(axis=1) > 0).all()
    assert [bool(row.any()) for row in seconds[:, 1]] == list(trains.backward)
    assert found.origin.startswith("modelled for")
    assert found.sync.beside.keys() == set(case.plan.ranks)
    layers = trainable_layers(model.units)
    for entry, own in zip(case.plan.stages(), found.stages.own_gradient_bytes, strict=True):
        stage, replicas = entry.stage, case.plan.unit(entry.unit).replicas
        if not any(layers[entry.unit][stage.first : stage.end]):
            assert own == 0
        elif len(replicas) * stage.cp > 1:
            assert own > 0  # what salvage keeps beside sums
        elif stage.tp == 1 and not case.tied:
            assert own == 0


def test_undescribed_layer_costs_as_much_as_its_weights() -> None:
    model = build_model(CASE, "meta")
    described = describe_model(model)
    config_of = model.units["language"].config
    heads = config_of.num_attention_heads
    known = layer_shapes(described)
    config_of.__dict__["num_attention_heads"] = None
    try:
        with pytest.raises(TypeError):
            layer_shapes(described)
        guessed = layer_shapes(described, guess=True)
        assert costs_of_run(config(), model, PLAN).stages.seconds[:, 0].sum(axis=1).min() > 0
    finally:
        config_of.__dict__["num_attention_heads"] = heads
    block = next(kind for kind in known if kind.startswith(CASE.language) and "block" in kind)
    assert guessed[block].matmul == known[block].matmul
    assert guessed[block].parameters == known[block].parameters
    assert {kind for kind in known if guessed[kind] != known[kind]} == {block}


def test_costs_measured_here_take_precedence_over_modelled_ones(tmp_path: Path) -> None:
    model, plan = build_model(CASE, "meta"), PLAN
    described = describe_model(model)
    # As a run of three ranks on this machine looks for them.
    shape = config().cluster.model_copy(update={"gpus_per_node": len(plan.ranks)})
    target = plan_target(shape)
    modelled = analytic_costs(layer_shapes(described), target.hardware, dtype=target.dtype)
    store_costs(modelled, described)
    assert costs_of_run(config(), model, plan).origin.startswith("modelled")
    longest = config().data.max_length
    measured = replace(modelled, origin="measured", hardware=target.hardware.name, longest=longest)
    store_costs(measured, described)
    assert costs_of_run(config(), model, plan).origin == f"measured on {target.hardware.name}"
    assert cached_costs(described, target, [ONE], 2 * longest) == measured
    rough = replace(measured, layers={
        kind: {degree: replace(cost, fit_error=0.9) for degree, cost in own.items()}
        for kind, own in measured.layers.items()
    })  # fmt: skip
    store_costs(rough, described)
    assert cached_costs(described, target, [ONE], longest) == rough  # better than none, and it says so
    other = {kind: {Degrees(2): own[ONE]} for kind, own in measured.layers.items()}
    store_costs(replace(measured, layers=other), described, rough)
    assert cached_costs(described, target, [ONE, Degrees(2)], longest) is not None
    store_costs(measured, described)
    assert cached_costs(described, target, [ONE], 2 * longest + 1) is None  # too far from what was measured
    assert cached_costs(described, target, [Degrees(2)], longest) is None
    assert cached_costs(described, replace(target, dtype="bfloat16"), [ONE], longest) is None
    other = describe_model(build_model(replace(CASE, language="gemma"), "meta"))
    assert cached_costs(other, target, [ONE], longest) is None
    named = tmp_path / "named.yaml"
    save_costs(replace(measured, note="by hand"), named)
    for file in (cache_folder() / "costs").iterdir():
        file.write_bytes(b"\xff not a cost model")
    assert costs_of_run(config(), model, plan).origin.startswith("modelled")
    assert costs_of_run(config(plan={"costs": str(named)}), model, plan).origin.startswith("measured")
    save_costs(replace(measured, hardware="A100"), named)
    origin = costs_of_run(config(plan={"costs": str(named)}), model, plan).origin
    assert origin.startswith("modelled")
    assert "plan.costs does not count" in origin
    assert "holds costs of 'A100'" in origin


def test_the_plans_costs_count_while_the_same_layers_are_frozen() -> None:
    model = build_model(replace(CASE, frozen=("vision",)), "meta")
    trainable = build_model(replace(CASE, frozen=()), "meta")
    planned = replace(costs_of_run(config(), model, PLAN), origin="measured elsewhere")
    assert costs_of_run(config(), model, PLAN, planned) is planned
    found = costs_of_run(config(), trainable, PLAN, planned)
    assert found is not planned
    assert "the plan's own costs are of other frozen layers" in found.origin


def test_a_cluster_that_is_only_planned_for_does_not_stop_a_run() -> None:
    model = build_model(CASE, "meta")
    elsewhere = config(cluster={"hardware": "H100", "hardware_file": "/nowhere/hardware.yaml", "nodes": 64})
    found = costs_of_run(elsewhere, model, PLAN)
    assert "H100" not in found.origin
    assert found.cluster is not None
    assert found.cluster.num_devices == len(PLAN.ranks)


def test_a_layout_brings_the_costs_of_the_memberships_that_follow_it(tmp_path: Path) -> None:
    """The launcher adds them to the plan: ranks that joined later must not count with measurements of their own."""
    write_samples(tmp_path, 32)
    layout = {"units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}, "microbatches": 4}
    first = prepare(project_config(tmp_path, parallel=layout, resilience={"enabled": True}))
    chain = first.planned.chain
    assert chain is not None
    assert chain.keeps_layout
    assert (chain.num_microbatches, chain.fault_tolerance) == (8, 1)
    read = TrainingPlan.from_json(first.planned.to_json())
    assert read.chain == chain
    assert prepare(project_config(tmp_path, resilience={"enabled": True}), read).planned.chain == chain
    assert prepare(project_config(tmp_path, parallel=layout)).planned.chain is None


@pytest.mark.parametrize(
    ("wanted", "note"),
    [
        (1, None),
        (3, "3 lost at once cannot be survived: the smallest pipeline takes 1 node of 2 devices, so 4 are needed; "),
    ],
)
def test_a_plan_that_survives_fewer_losses_says_so(tmp_path: Path, wanted: int, note: str | None) -> None:
    """Two nodes hold at most two copies, so the loss of one can be survived."""
    write_samples(tmp_path, 32)
    cluster = {"hardware": "H100", "nodes": 2, "gpus_per_node": 2}
    tree = {"cluster": cluster, "resilience": {"enabled": True, "fault_tolerance": wanted}}
    asked = project_config(tmp_path, **tree)
    run = plan_resiliently(planning_problem(asked, assemble_samples(asked)))
    assert run.notes == ((note + "this plan survives 1",) if note else ())
    copies = copies_on_nodes(run.result.winner.plan, 2)
    assert set(copies.values()) == {2}


@pytest.mark.parametrize(("hardware", "domains"), [("H100", []), ("GB200", [0, 0, 0, 1, 1])])
def test_plans_for_losses_know_nvlink_domains(tmp_path: Path, hardware: str, domains: list[int]) -> None:
    """Five nodes of four devices, in domains of up to 15 devices if any."""
    write_samples(tmp_path, 32)
    device = replace(load_hardware(hardware), domain=15 if domains else 0)
    save_hardware(device, "mine", tmp_path / "mine.yaml")
    cluster = {"hardware": "mine", "hardware_file": "mine.yaml", "nodes": 5, "gpus_per_node": 4}
    asked = project_config(tmp_path, cluster=cluster, resilience={"enabled": True})
    run = plan_resiliently(planning_problem(asked, assemble_samples(asked)))
    assert run.chain is not None
    assert run.chain.domains == domains
