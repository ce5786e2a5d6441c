"""The planner of commit 4f79e3cb (24 November 2026), timed on a model of `model_configs`: what goals of planning times
were set against. `benchmarks.planning.real_models --first` starts it, with `src` of that commit before others.

    PYTHONPATH=TREE/src:. python -m benchmarks.planning.first_planner NAME
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.model_configs import CASES, Case


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """Plan one model as `dilatant plan` did then; return the processor seconds of each part."""
    # Names of that commit, which this one's type checker cannot know.
    old = {
        name: import_module(f"dilatant.{name}")
        for name in (
            "config", "plan.workload", "profiling.assemble", "profiling.dense_rows", "profiling.describe_model",
            "profiling.layer_costs", "profiling.planned_hardware", "profiling.planned_samples", "profiling.planning",
        )
    }  # fmt: skip
    costs_of, planning, samples_of = (
        old[f"profiling.{name}"] for name in ("layer_costs", "planning", "planned_samples")
    )
    config = old["config"].load_config(case.write(folder))
    times = [time.process_time()]
    describe = old["profiling.describe_model"]
    whole = describe.skeleton(config, 256)
    model = describe.describe_model(whole, old["profiling.assemble"].recompute_by_unit(config, whole.units))
    tokens = drawn(whole.units, model, case.batch * 2)
    squares = {unit: tokens[unit] * each for unit, each in model.item_tokens.items() if unit in tokens}
    workload = old["plan.workload"].Workload(tokens, squares)
    times.append(time.process_time())
    train = config.train
    keeps = config.resilience.keeps_gradients
    target = old["profiling.planned_hardware"].plan_target(
        config.cluster, train.precision, train.zero, train.optimizer, keeps, train.deterministic
    )
    measured = costs_of.layer_costs(config, model, target, lambda line: None)
    samples = samples_of.PlannedSamples(workload, 0.5, case.batch * 2, 0)
    costs = costs_of.costs_in_use(measured, model, samples.targets, config.row_tokens, train.loss_chunk)
    dense = replace(workload, dense=old["profiling.dense_rows"].dense_rows(model, costs))
    times.append(time.process_time())
    problem = planning.PlanningProblem(config, target, model, measured, costs, replace(samples, workload=dense))
    run = planning.plan_run(problem)
    times.append(time.process_time())
    parts = dict(zip(("model", "costs", "search"), np.diff(times).tolist(), strict=True))
    return {"seconds": times[-1] - times[0], **parts, "candidates": run.result.candidates}


def drawn(units: Any, model: Any, count: int) -> dict[str, Any]:
    """Draw as `real_models.samples_of` does: tokens of each unit in `count` samples."""
    draw = np.random.default_rng(0)
    rows, tokens = draw.lognormal(5.3, 1.0, count).round(), {}
    for unit in units.values():
        if unit.unit == model.anchor:
            continue
        each, packs = model.item_tokens.get(unit.unit, 64.0), getattr(unit, "packs", False)
        spread = draw.lognormal(0.0, 0.5, count) if packs else 1
        items = draw.integers(1, 5, count) * np.maximum(1, each * spread)
        tokens[unit.unit] = items.round()
        geometry = unit.geometry
        rows += items * (1 if geometry is None else geometry.tokens_per_row / geometry.encoder_tokens)
    return {unit.name: {**tokens, model.anchor: rows.round()}[unit.name] for unit in model.spec.units}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(planned(CASES[sys.argv[1]], Path(folder))))
