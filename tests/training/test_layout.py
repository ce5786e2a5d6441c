"""A plan is trained whole: its microbatches, schedule and policy, unless the config says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.engine_case import CASE, PLAN, build_model, build_samples
from dilatant.config import Config, UserError
from dilatant.config.config import parse_config
from dilatant.config.degrees import Degrees
from dilatant.plan.costs.step_costs import token_costs
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.planning.layout import TrainingPlan, plan_from_config
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.step.cost_correction import CostCorrection
from dilatant.runtime.step.step_planner import StepPlanner
from dilatant.schedule.trainability import trainability_of
from harness.memberships import planner_like

STEP = {"num_microbatches": 3, "schedule": "zb-h1", "assignment": "searched", "predicted_seconds": 0.5}


def config(tmp_path: Path, step: Any = STEP, row_tokens: int = 512, zero: str | None = None, **sections: Any) -> Config:
    document = {**json.loads(PLAN.to_json()), "step": step}
    (tmp_path / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    parallel = {"plan": str(tmp_path / "plan.json"), **sections.pop("parallel", {})}
    tree = {
        "model": {"encoders": {"vision": {"kind": "image", "id": "a"}}, "language_model": {"id": "b"}},
        "data": {"train": [{"path": "x.jsonl"}]},
        "train": {"row_tokens": row_tokens, "zero": zero},
        "parallel": parallel,
        **sections,
    }
    return parse_config(tree, tmp_path)


def test_a_plan_file_says_all_that_the_config_does_not(tmp_path: Path) -> None:
    model = build_model(CASE, "meta")
    planned = plan_from_config(config(tmp_path), model)
    assert planned == TrainingPlan(PLAN, 3, "zb-h1", "searched", 0.5)
    assert TrainingPlan.from_json(planned.to_json()) == planned
    otherwise = config(tmp_path, parallel={"microbatches": 5}, plan={"assignment": "random"})
    assert plan_from_config(otherwise, model) == TrainingPlan(PLAN, 5, "zb-h1", "random", 0.5)


def test_the_config_corrects_the_costs_of_later_memberships(tmp_path: Path) -> None:
    model, costs = build_model(CASE, "meta"), planner_like(PLAN, fault_tolerance=2, num_microbatches=8).costs
    step = {**STEP, "num_microbatches": 5, "chain": costs.to_document()}  # unlike pipelines: 5 + 3

    def planned(microbatches: int | None, step: Any = step, **resilience: Any) -> TrainingPlan:
        sections = {"parallel": {"microbatches": microbatches}, "resilience": resilience}
        return plan_from_config(config(tmp_path, step, **sections), model)

    for least in (None, 4, 5):
        kept = planned(least)
        assert (kept.num_microbatches, kept.chain) == (5, costs)
    more = planned(6)
    assert (more.num_microbatches, more.chain) == (6, None)
    layout = planned(4, {**step, "chain": replace(costs, keeps_layout=True).to_document()})
    assert (layout.num_microbatches, layout.chain) == (4, None)
    with pytest.warns(UserWarning, match=r"loss of 2 nodes .* resilience\.fault_tolerance 1"):
        corrected = planned(None, enabled=True)
    assert corrected.chain == replace(costs, fault_tolerance=1)


def test_state_sharing_follows_config_then_plan_then_default(tmp_path: Path) -> None:
    model = build_model(CASE, "meta")
    assert plan_from_config(config(tmp_path), model).zero == "node"  # of files that do not say it
    far = {**STEP, "zero": "all", "costs": token_costs(PLAN, (True,) * len(PLAN.stages())).to_document()}
    planned = plan_from_config(config(tmp_path, far), model)
    assert planned.zero == "all"
    assert planned.costs is not None
    assert TrainingPlan.from_json(planned.to_json()) == planned
    said = plan_from_config(config(tmp_path, far, zero="none"), model)
    assert said.zero == "none"
    assert said.costs is None  # which count what is held, and sent, under the plan's


def test_four_bit_weights_are_not_asked_to_be_sharded(tmp_path: Path) -> None:
    model = build_model(CASE, "meta")
    model.units["language"].four_bit = frozenset({"language.layers.0.mlp.up_proj.weight"})
    parallel = {"plan": None, "units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}}
    with pytest.raises(UserError, match=r"four-bit weights of language \(model.lora.load_in_4bit\) whole; write grad"):
        plan_from_config(config(tmp_path, parallel=parallel, train={"shard": "weights"}), model)
    asked = config(tmp_path, parallel=parallel, train={"shard": {"language": "gradients"}})
    assert plan_from_config(asked, model).shard == {"language": "gradients"}


@pytest.mark.parametrize("host", [{"pp": 2}, {"replicas": 2}])
def test_colocated_unit_runs_in_first_stages_of_its_host(tmp_path: Path, host: dict[str, int]) -> None:
    layout = {"plan": None, "units": {"language": host}, "colocated": {"vision": "language"}}
    plan = plan_from_config(config(tmp_path, parallel=layout), build_model(CASE, "meta")).plan
    vision, language = (plan.unit(name).replicas for name in ("vision", "language"))
    assert [[stage.ranks for stage in replica.stages] for replica in vision] == [
        [replica.stages[0].ranks] for replica in language
    ]


def test_replicas_that_divide_experts_are_one_of_the_plan(tmp_path: Path) -> None:
    """Of four replicas with ep 2 each two are one, and a colocated encoder divides items among their ranks."""
    model = build_model(replace(CASE, language="mixtral"), "meta")
    layout = {"plan": None, "units": {"language": {"replicas": 4, "ep": 2}}, "colocated": {"vision": "language"}}
    plan = plan_from_config(config(tmp_path, parallel=layout), model).plan
    for unit, degrees in (("language", Degrees(ep=2)), ("vision", Degrees(cp=2))):
        stages = [replica.stages for replica in plan.unit(unit).replicas]
        assert [[(stage.ranks, stage.degrees) for stage in own] for own in stages] == [
            [((0, 1), degrees)],
            [((2, 3), degrees)],
        ]
    layout["units"]["language"]["replicas"] = 3
    with pytest.raises(UserError, match=r"language.replicas: 3 replicas cannot divide experts by 2"):
        plan_from_config(config(tmp_path, parallel=layout), model)


def test_without_a_word_on_steps_there_are_defaults(tmp_path: Path) -> None:
    planned = plan_from_config(config(tmp_path, step={}), build_model(CASE, "meta"))
    assert (planned.num_microbatches, planned.schedule, planned.assignment) == (4, "eager", "balanced")


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_microbatches": True}, "num_microbatches is True"),
        ({"row_tokens": True}, "row_tokens is True"),
        ({"predicted_seconds": -1.0}, "predicted_seconds is -1.0"),
        ({"predicted_seconds": float("nan")}, "predicted_seconds is nan"),
        ({"predicted_seconds": "x"}, "predicted_seconds is 'x'"),
        ({"schedule": "fast"}, "schedule is 'fast'"),
        ({"schedule": ["eager"]}, r"schedule is \['eager'\]"),
        ({"microbatches": 4}, "step.microbatches is no key of a plan"),
        ({"assignment": "mine"}, "assignment is 'mine'"),
        ({"zero": "some"}, "zero is 'some'"),
        ([], "'step' is not a mapping"),
    ],
)
def test_a_plan_file_with_nonsense_is_refused_by_its_key(tmp_path: Path, step: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_from_config(config(tmp_path, step=step), build_model(CASE, "meta"))


def test_a_plan_file_with_an_unknown_key_of_a_stage_is_refused() -> None:
    document = json.loads(TrainingPlan(CASE.plan, 1, "eager", "balanced").to_json())
    document["units"][0]["replicas"][0]["stages"][0]["dp"] = 2
    with pytest.raises(ValueError, match=r"units\[0\].replicas\[0\].stages\[0\].dp is no key of a plan"):
        TrainingPlan.from_json(json.dumps(document))


def test_costs_of_other_stages_are_refused_as_such() -> None:
    document = json.loads(TrainingPlan(CASE.plan, 1, "eager", "balanced").to_json())
    one = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)),)),)),))
    document["step"]["costs"] = token_costs(one, (True,)).to_document()
    with pytest.raises(ValueError, match=r"step.costs: they are not of the \d+ stages that this plan has"):
        TrainingPlan.from_json(json.dumps(document))


@pytest.mark.parametrize("policy", ["random", "entrain", "balanced", "searched"])
def test_the_token_budget_holds_under_every_policy(tmp_path: Path, policy: str) -> None:
    model, samples = build_model(CASE, "meta"), build_samples(CASE)
    longest = max(sample.sizes["language"] for sample in samples)
    chosen = config(tmp_path, row_tokens=longest + 1, plan={"assignment": policy}, parallel={"microbatches": 1})
    planned = plan_from_config(chosen, model)
    trainability = trainability_of(planned.plan, trainable_layers(model.units))
    costs = CostCorrection(planned.plan, token_costs(planned.plan, trainability.backward))
    planner = StepPlanner(planned.plan, trainability, model.graph, planned.microbatching(chosen), costs, 0)
    batches = planner.plan_step(samples, 0).assignment.microbatches["language"][0]
    assert len(batches) > 1
    assert sorted(s for batch in batches for s in batch) == list(range(len(samples)))
    for batch in batches:
        assert sum(samples[s].sizes["language"] for s in batch) <= longest + 1
