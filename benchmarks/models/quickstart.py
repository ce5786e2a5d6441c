"""The quickstart as three processes, against the same training in one.

Runs `dilatant train examples/quickstart.yaml` as it stands and with `parallel=single`, in turn, so that noise of the
machine falls on both. Both see the same batches and differ in rounding only. Compared are whole commands, from start to
export, and the training alone; both must reach the accuracy that the README promises.

    python -m benchmarks.models.quickstart --json benchmarks/results/quickstart.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import machine

LAYOUTS = {"one process": ["--set", "parallel=single"], "three processes": []}
ACCURACY = 0.95
BAR = 1.3


def train(data: Path, output: Path, arguments: list[str]) -> dict[str, float]:
    """Train once; seconds of the command, of the training in it, and of its median step; and held-out accuracy."""
    sources = [
        f"data.{kind}=[{{path: {data / name}}}]" for kind, name in (("train", "train.jsonl"), ("eval", "heldout.jsonl"))
    ]
    overrides = [part for source in [*sources, f"output_dir={output}"] for part in ("--set", source)]
    command = [sys.executable, "-m", "dilatant", "train", str(ROOT / "examples" / "quickstart.yaml")]
    began = time.perf_counter()
    done = subprocess.run([*command, *overrides, *arguments, "--json"], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return {
        "command_seconds": seconds,
        "training_seconds": summary["seconds"],
        "median_step_seconds": statistics.median(steps),
        "exact_match": summary["exact_match"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of the example; too few miss the accuracy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    shorter = ["--set", f"train.steps={options.steps}"] if options.steps else []
    print(f"{'':16} {'command':>9} {'training':>9} {'a step':>9} {'accuracy':>9}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        digits = [sys.executable, str(ROOT / "examples" / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        for pair in range(options.pairs):
            for layout, arguments in LAYOUTS.items():
                run = train(data, Path(folder) / f"{layout} {pair}", [*arguments, *shorter])
                runs[layout].append(run)
                print(
                    f"{layout:16} {run['command_seconds']:7.1f} s {run['training_seconds']:7.1f} s "
                    f"{run['median_step_seconds'] * 1e3:6.1f} ms {run['exact_match']:9.1%}",
                    flush=True,
                )
    result: dict[str, Any] = {"machine": machine(), "steps": options.steps, "runs": runs, "ratio": {}}
    for what in ("command_seconds", "training_seconds", "median_step_seconds"):
        one, three = ([run[what] for run in runs[layout]] for layout in LAYOUTS)
        ratios = [b / a for a, b in zip(one, three)]
        result["ratio"][what] = {
            "best": min(three) / min(one),
            "median_of_pairs": statistics.median(ratios),
            "worst_pair": max(ratios),
        }
        print(
            f"three processes to one, {what.replace('_', ' ')}: {min(three) / min(one):.2f} (best runs), "
            f"{statistics.median(ratios):.2f} (median of pairs), {max(ratios):.2f} (worst pair); bar {BAR}"
        )
    reached = min(run["exact_match"] for run in runs["three processes"])
    print(f"accuracy of three processes: at least {reached:.1%}; bar {ACCURACY:.0%}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
