"""What salvage saves: a run loses a rank at a random moment of a step, with and without `resilience.salvage`.

Four copies of a small model on four ranks of one machine, steps of about a second. Printed of every kill: how much of
the step was salvaged, and the seconds of the step that was repeated, against those of a whole step of the survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT

STEPS, KILLED_AFTER = 7, 3


def one_kill(salvage: bool, moment: float) -> dict[str, float]:
    """moment: of the step, 0 to 1. Seconds of the repeated step and of a whole one, and the share that was kept."""
    sys.path.insert(0, str(ROOT / "tests"))
    from cases.tiny_project import tiny_config, write_images

    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        write_images(project, 256)
        tree: dict[str, Any] = tiny_config(steps=STEPS, global_batch_size=256, save_steps=None)
        tree["parallel"] = {
            "units": {"language": {"replicas": 4}},
            "colocated": {"vision": "language"},
            "microbatches": 16,
        }
        tree["resilience"] = {"enabled": True, "salvage": salvage}
        (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        command = subprocess.Popen(
            [sys.executable, "-c", "from dilatant.cli.app import main; main()", "train", "config.yaml"],
            cwd=project,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while len(_steps(project)) < KILLED_AFTER and command.poll() is None:
            time.sleep(0.002)
        time.sleep(moment * _steps(project)[-1]["step_seconds"])
        victim = json.loads((project / "run/resilience/node1.json").read_text())
        os.kill(victim["workers"]["0"], signal.SIGKILL)
        command.wait()
        steps = _steps(project)
    first = next(step for step in steps if "recovery" in step)
    later = [step["step_seconds"] for step in steps if step["step"] > first["step"]]
    return {
        "moment": moment,
        "kept": first["recovery"]["salvaged_share"],
        "repeated_seconds": first["step_seconds"],
        "whole_seconds": statistics.median(later),
        "salvage_seconds": first["recovery"].get("salvage_seconds", 0.0),
    }


def _steps(project: Path) -> list[dict[str, Any]]:
    file = project / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    draw = random.Random(options.seed)
    kills: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(options.kills):
        moment = draw.random()
        for name, salvage in (("without", False), ("with", True)):
            kills[name].append(found := one_kill(salvage, moment))
            print(
                f"{name:>7} salvage, killed at {found['moment']:.2f} of a step: {found['kept']:.0%} kept, the step "
                f"again in {found['repeated_seconds']:.2f} s, a whole one takes {found['whole_seconds']:.2f} s",
                flush=True,
            )
    shares = {
        name: [found["repeated_seconds"] / found["whole_seconds"] for found in of_name]
        for name, of_name in kills.items()
    }
    for name, of_name in shares.items():
        print(f"{name:>7} salvage: the repeated step takes {statistics.mean(of_name):.2f} of a whole one on average")
    if options.json is not None:
        options.json.write_text(json.dumps(kills, indent=1) + "\n")


if __name__ == "__main__":
    main()
