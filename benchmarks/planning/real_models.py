"""How long real models take to plan: meta model, modelled costs and search, and `dilatant plan --help`.

    python -m benchmarks.planning.real_models [--only NAME ..] [--as before|after] [--json FILE] [--first TREE]

Configs have the published sizes of each model; weights and tokenizers are not needed. Samples are synthetic: one to
four images, each of a number of patches drawn around the typical one, and a log-normal number of words. Seconds are
those of the processor in one thread, with compiled planners cached. Goals: 20 s for each model, 10 s for the search on
1,296 devices, 3 s for the command's start. The goals were set where the planner of their day, of commit 4f79e3cb, took
100 s for the 72B on 1,024 devices. With `--first`, a checkout of that commit (`git worktree add TREE 4f79e3cb`), its
planner runs right before today's, so that goals can be scaled to the processor at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.planning.model_configs import CASES, Case
from dilatant.config import load_config
from dilatant.plan.costs.workload import Workload, squares_of
from dilatant.planning.assemble import recompute_by_unit
from dilatant.planning.planning import model_problem, plan_run
from dilatant.planning.problem.describe_model import ModelDescription, build_meta_model, describe_model
from dilatant.planning.problem.planned_samples import PlannedSamples


def samples_of(model: ModelDescription, batch: int, steps: int = 2) -> PlannedSamples:
    """Draw global batches of samples."""
    draw, count = np.random.default_rng(0), batch * steps
    tokens, rows = {}, draw.lognormal(5.3, 1.0, count).round()
    for unit in model.units.values():
        if unit.unit == model.anchor:
            continue
        each = model.item_tokens.get(unit.unit, 64.0)
        items = draw.integers(1, 5, count) * np.maximum(
            1, each * (draw.lognormal(0.0, 0.5, count) if unit.packs else 1)
        )
        tokens[unit.unit] = items.round()
        geometry = unit.geometry
        rows += items * (1 if geometry is None else geometry.tokens_per_row / geometry.encoder_tokens)
    tokens[model.anchor] = rows.round()
    ordered = {unit.name: tokens[unit.name] for unit in model.spec.units}
    workload = Workload(ordered, squares_of(ordered, model.item_tokens, model.media_pairs))
    return PlannedSamples(workload, 0.5, count, 0)


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """Plan one model; return its plan and the seconds of each part."""
    config = load_config(case.write(folder))
    times = [time.process_time()]
    whole = build_meta_model(config, 256)
    model = describe_model(whole, recompute_by_unit(config, whole.units))
    samples = samples_of(model, case.batch)
    times.append(time.process_time())
    problem = model_problem(config, model, samples)
    times.append(time.process_time())
    run = plan_run(problem)
    times.append(time.process_time())
    winner = run.result.winner
    layouts = [
        f"{unit.name} {len(unit.replicas)} x {len(own)} stages of {own[0].degrees.text(always=('tp',))}"
        for unit in winner.plan.units
        for own in [unit.replicas[0].stages]
    ]
    parts = dict(zip(("model", "costs", "search"), np.diff(times).tolist(), strict=True))
    return {
        "devices": case.devices, "batch": case.batch, "seconds": times[-1] - times[0], **parts,
        "candidates": run.result.candidates, "simulated": run.result.simulated,
        "step_seconds": winner.score.seconds, "plan": ", ".join(layouts), "zero": winner.zero,
    }  # fmt: skip


def first_planned(tree: Path, name: str) -> dict[str, Any]:
    """Plan one model by the planner of `tree`, a checkout of commit 4f79e3cb."""
    command = [sys.executable, "-m", "benchmarks.planning.first_planner", name]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree.resolve() / "src", root)))}
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, "first:", json.dumps(found), flush=True)
    return found


def start() -> float:
    """Return the wall-clock seconds of `dilatant plan --help`, the fastest of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        program = "from dilatant.cli.app import main; main()"
        subprocess.run([sys.executable, "-c", program, "plan", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument(
        "--as", dest="state", choices=("before", "after"), default="after", help="column of the results"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well; others of this file stay")
    parser.add_argument("--first", metavar="TREE", type=Path, help="a checkout of commit 4f79e3cb, also timed")
    given = parser.parse_args()
    document: dict[str, Any] = {"models": {}, "start": {}}
    if given.json and given.json.exists():
        document = json.loads(given.json.read_text(encoding="utf-8"))
    document |= machine()
    for name in given.only:
        if given.first:
            document["models"].setdefault(name, {})["first"] = first_planned(given.first, name)
        with tempfile.TemporaryDirectory() as folder:
            found = planned(CASES[name], Path(folder))
        document["models"].setdefault(name, {})[given.state] = found
        print(name, json.dumps(found), flush=True)
        if given.json:
            given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document["start"][given.state] = start()
    print(f"dilatant plan --help: {document['start'][given.state]:.2f} s")
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
