"""Seconds from the command to the first step, by phase, and the host memory of its processes, for several ranks.

Runs `dilatant train examples/quickstart.yaml` for a few steps as it stands (three ranks), in one process and as 4 and 8
replicas on this machine. A phase lasts from its line on standard error to the next one. The first step includes the
start of the data workers and the warm-up. Each turn also times a plain `import torch, transformers`: no command that
trains can be quicker, and on a busy machine only the ratio of the two tells something (`load`: processes that want a
core, before and after). Memory is proportional (a page that n processes share counts 1/n for each), read once after the
first steps, of the command, the fork server, the ranks and the data workers.

    python -m benchmarks.models.startup --json benchmarks/results/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import machine

PHASES = {
    "loading torch and transformers": "imports",
    "opening the data": "data and plan",
    "samples to train on": "processes",
    "building the model": "model and weights",
}
"""Words of the lines with which phases begin, in this order, and their names; the last one ends at the first step."""
STEPS = 40
QUICKSTART = 3
"""Number of ranks of the quickstart, which are those of its own layout."""
BAR = 8.0
"""Seconds to the first step of the quickstart on two cores."""


def memory(root: int) -> list[float]:
    """Return the proportional MiB of every process at or below `root`."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended
    found = []
    for process in parents:
        line = process
        while line not in (root, 0):
            line = parents.get(line, 0)
        try:
            pages = Path("/proc", str(process), "smaps_rollup").read_text().splitlines() if line else []
        except OSError:
            continue
        found += [int(page.split()[1]) / 1024 for page in pages if page.startswith("Pss:")]
    return sorted(round(one, 1) for one in found)


def train(ranks: int, data: Path, output: Path) -> dict[str, Any]:
    """Train for a few steps; return seconds by phase, of the whole start and of the first step, and the memory."""
    layouts = {QUICKSTART: [], 1: ["parallel=single"]}
    replicas = f"parallel={{units: {{language: {{replicas: {ranks}}}}}, colocated: {{vision: language}}}}"
    settings = [
        f"data.train=[{{path: {data / 'train.jsonl'}}}]", f"data.eval=[{{path: {data / 'heldout.jsonl'}}}]",
        f"output_dir={output}", f"train.steps={STEPS}", *layouts.get(ranks, [replicas]),
    ]  # fmt: skip
    command = [sys.executable, "-m", "dilatant", "train", str(ROOT / "examples" / "quickstart.yaml"), "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
    metrics, seen = output / "metrics.jsonl", dict[str, float]()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def read_lines() -> None:
        for line in process.stderr or ():
            for phase in PHASES:
                if phase in line:
                    seen.setdefault(phase, time.perf_counter() - began)

    reader = threading.Thread(target=read_lines)
    reader.start()
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.02)
    held = memory(process.pid)
    output_text = process.stdout.read() if process.stdout else ""
    reader.join()
    if process.wait():
        raise SystemExit(f"the command failed: {' '.join(command)}")
    # The command counts from its own first line, when Python and the command line are loaded.
    start = seen[next(iter(PHASES))] + json.loads(output_text.strip().splitlines()[-1])["startup_seconds"]
    first = json.loads(metrics.read_text().splitlines()[0])
    times = [0.0, *(seen[phase] for phase in PHASES), start]
    names = ["before the first line", *PHASES.values()]
    phases = {name: later - sooner for name, sooner, later in zip(names, times, times[1:])}
    phases |= {"first step": first["step_seconds"], "of it, for data": first.get("data_wait_seconds", 0.0)}
    return {"startup_seconds": start, "phases": phases, "mebibytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, QUICKSTART, 4, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in options.ranks}
    imports, load = list[float](), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        digits = [sys.executable, str(ROOT / "examples" / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        for turn in range(options.turns):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
            imports.append(time.perf_counter() - began)
            for ranks in options.ranks:
                runs[ranks].append(train(ranks, data, Path(folder) / f"{ranks}-{turn}"))
    bound = statistics.median(imports)
    print(f"import torch, transformers: {bound:.1f} s")
    for ranks, found in runs.items():
        start = statistics.median(run["startup_seconds"] for run in found)
        bar = f"; bar {BAR:.0f} s" if ranks == QUICKSTART else ""
        print(f"{ranks} ranks: {start:.1f} s to the first step, {start / bound:.1f}x the imports{bar}")
        for phase in found[0]["phases"]:
            print(f"    {phase:32} {statistics.median(run['phases'][phase] for run in found):5.2f} s")
        held = found[-1]["mebibytes"]
        print(f"    {sum(held):.0f} MiB in {len(held)} processes")
    fewest, most = min(runs), max(runs)
    if most > fewest:
        grown = sum(runs[most][-1]["mebibytes"]) - sum(runs[fewest][-1]["mebibytes"])
        print(f"each rank more takes {grown / (most - fewest):.0f} MiB")
    if options.json:
        load.append(os.getloadavg()[0])
        result = {"machine": machine(), "load": load, "imports_seconds": imports, "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
