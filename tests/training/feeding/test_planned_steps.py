"""The trainer executes the steps that the planner simulated, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.planning.planned_project import BATCH, config, model_section, write_samples
from dilatant.config import Config
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.hardware import load_hardware
from dilatant.cost.model import save_costs
from dilatant.planning.assemble import assemble_samples, load_model_tokenizer
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.plan_advice import score_unfrozen
from dilatant.planning.planned_run import plan_report, training_plan
from dilatant.planning.planning import PlanningProblem, plan_run, planning_problem, scorer_of, time_plan
from dilatant.planning.problem.describe_model import BLOCK, build_meta_model, describe_model
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.step.cost_correction import CostCorrection
from dilatant.runtime.step.step_planner import StepPlanner
from dilatant.schedule.trainability import trainability_of
from dilatant.training.prepare import PreparedRun, prepare
from harness.loader import Loader

NARROW: dict[str, Any] = {
    "microbatch_sizes": [4],
    "microbatch_tokens": [],
    "tensor_parallel": [1],
    "context_parallel": [1],
}
"""Settings for tests that accept any plan: the search tries few."""


def dense_costs(folder: Path, **sections: Any) -> Path:
    """Write costs, labelled as measured, whose blocks take more time for a longer row of several samples."""
    given = config(folder, **sections)
    model = describe_model(build_meta_model(given, len(load_model_tokenizer(given.model))))
    costs = analytic_costs(layer_shapes(model), load_hardware("H100"))
    blocks = {
        kind: {degree: replace(cost, dense_seconds=((32, 0.0), (256, 1e-4))) for degree, cost in own.items()}
        for kind, own in costs.layers.items()
        if kind in model.kinds(BLOCK) and "llama" in kind
    }
    path = folder / "costs.yaml"
    save_costs(replace(costs, origin="measured", layers={**costs.layers, **blocks}), path)
    return path


def planned_and_prepared(folder: Path, **sections: Any) -> tuple[PlanningProblem, PreparedRun, Config]:
    """Write a plan as `dilatant plan` does; return its problem, and the prepared run that trains it with its config."""
    write_samples(folder, 2 * BATCH)
    asked = config(folder, **sections)
    problem = planning_problem(asked, assemble_samples(asked))
    planned = training_plan(problem, plan_run(problem).result.winner)
    (folder / "plan.json").write_text(planned.to_json(), encoding="utf-8")
    plan = {name: value for name, value in sections.get("plan", {}).items() if name != "assignment"}
    run = config(folder, **{**sections, "plan": plan, "parallel": {"plan": str(folder / "plan.json")}})
    return problem, prepare(run), run


@pytest.mark.parametrize(
    ("policy", "row_tokens", "devices", "dense"),
    [
        pytest.param("random", None, 4, False, marks=pytest.mark.slow),
        pytest.param("entrain", None, 4, False, marks=pytest.mark.slow),
        pytest.param("balanced", 100, 4, False, marks=pytest.mark.slow),
        pytest.param("searched", 100, 4, False, marks=pytest.mark.slow),
        ("balanced", 100, 3, False),  # three replicas can share this batch only by tokens
        pytest.param("balanced", None, 4, True, marks=pytest.mark.slow),
        ("balanced", 100, 1, False),  # one device also cuts its steps as planned
    ],
)
def test_a_planned_run_executes_the_simulated_steps(
    tmp_path: Path, policy: str, row_tokens: int | None, devices: int, dense: bool
) -> None:
    train: dict[str, Any] = {"steps": 2, "global_batch_size": BATCH, "report_to": []}
    plan: dict[str, Any] = {"assignment": policy}
    if policy in ("entrain", "searched"):  # these take long to simulate for every plan
        plan.update(NARROW)
    if devices == 3:
        plan.update(microbatch_tokens=[row_tokens], microbatch_sizes=[2])
    else:
        train["row_tokens"] = row_tokens
    sections: dict[str, Any] = {"train": train, "cluster": {"hardware": "H100", "gpus_per_node": devices}}
    if dense:
        sections["model"] = model_section(attn_implementation="sdpa")
        plan["costs"] = str(dense_costs(tmp_path, **sections))
    problem, prepared, run = planned_and_prepared(tmp_path, plan=plan, **sections)
    planned, model, samples = prepared.planned, prepared.model, prepared.samples
    assert planned.assignment == policy
    assert planned.row_tokens in ((row_tokens,) if devices == 3 else (row_tokens, None))
    assert planned.costs is not None
    assert planned.costs.origin == ("measured on H100" if dense else "modelled for H100")
    assert planned.costs.dense == problem.samples.workload.dense
    assert [*planned.costs.dense] == ["language"] * dense
    trainability = trainability_of(planned.plan, trainable_layers(model.units))
    planner = StepPlanner(
        planned.plan,
        trainability,
        model.graph,
        planned.microbatching(run),
        CostCorrection(planned.plan, planned.costs),
        0,
    )
    shared = problem.sharing(planned.zero)
    simulated = scorer_of(shared).steps(planned.plan, planned.num_microbatches, planned.row_tokens)
    sampler = samples.train.sampler(run.seed, BATCH)
    with Loader(samples.train, samples.encoding, sampler, position=sampler.start(), steps=2, workers=0) as loader:
        batches = [batch.samples for batch in islice(loader, 2)]
    assert len(batches) == len(simulated) == 2
    for number, (batch, expected) in enumerate(zip(batches, simulated, strict=True)):
        step = planner.plan_step(batch, number)
        assert step.assignment == expected.timeline.assignment
        with pytest.raises(ValueError, match="planned for other samples"):
            step.agreed([replace(sample, draw=sample.draw + 1) for sample in batch], number)
        assert step.schedule == expected.timeline.schedule
        assert step.prediction.seconds == pytest.approx(expected.seconds, rel=1e-12)
        if row_tokens is not None:
            for microbatches in step.assignment.microbatches["language"]:
                for microbatch in microbatches:
                    tokens = [step.tokens["language"][sample] for sample in microbatch]
                    assert sum(tokens) <= row_tokens or len(tokens) == 1


@pytest.mark.parametrize(
    "trained",
    [
        {"freeze": ["language", "vision.encoder"]},
        pytest.param({"freeze": [], "lora": {"r": 2, "units": ["language"]}}, marks=pytest.mark.slow),
    ],
)
def test_unfreezing_costs_what_its_own_plan_would(tmp_path: Path, trained: dict[str, Any]) -> None:
    """Compare the score of the plan with an unfrozen language model with that of a config that trains this model."""
    write_samples(tmp_path, 2 * BATCH)
    frozen = model_section() | trained
    whole = model_section() | {"freeze": ["vision.encoder"]}
    asked = config(tmp_path, model=frozen, plan=NARROW)
    problem = planning_problem(asked, assemble_samples(asked))
    winner = plan_run(problem).result.winner
    found = score_unfrozen(problem, winner, "language")
    thawed = config(tmp_path, model=whole, plan=NARROW, parallel={"schedule": winner.score.schedule})
    expected = time_plan(
        planning_problem(thawed, assemble_samples(thawed)).sharing(winner.zero),
        winner.plan, winner.num_microbatches, winner.row_tokens,
    ).result.winner.score  # fmt: skip
    assert found is not None
    # Adapters are weights besides; of so small a model they are some per cent of it.
    near = {"rel": 0.1} if "lora" in trained else {"rel": 1e-9}
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, **near)
    assert found.sync_seconds == pytest.approx(expected.sync_seconds, **near)
    assert max(found.peak_bytes) > max(winner.score.peak_bytes)


def test_plan_page_shows_simulated_microbatches_and_memory(tmp_path: Path) -> None:
    """The row's token limit cuts the plan's microbatches into more, and steps differ in memory."""
    write_samples(tmp_path, 2 * BATCH)
    train: dict[str, Any] = {"steps": 2, "global_batch_size": BATCH, "report_to": [], "row_tokens": 100}
    asked = config(tmp_path, train=train, plan={"microbatch_sizes": [8], "microbatch_tokens": []})
    planned = plan_run(planning_problem(asked, assemble_samples(asked)))
    winner = planned.result.winner
    steps = scorer_of(planned.problem).steps(winner.plan, winner.num_microbatches)
    counts = [len(own) for step in steps for own in step.timeline.assignment.microbatches["language"]]
    count, samples = winner.microbatches
    assert min(counts) <= count <= max(counts)
    assert count > winner.num_microbatches
    assert samples == round(BATCH / (winner.replicas + winner.extra) / count)
    report = plan_report(planned, "test")
    assert all(f"{count} microbatches" in text for text in (report.candidates[0].layout, report.reasons[0]))
    peaks = np.max([step.timeline.peak_bytes for step in steps], axis=0)
    assert max(use.peak_bytes - use.bytes_by_use["reserve"] for use in report.memory) == round(max(peaks))
    assert any("train.row_tokens" in text for text in report.advice)
