"""Measure recovery from a kill to the next committed step: the quickstart in four replicas, one killed at a time.

All kills happen in one run: a lost node is started again and joins before the next kill; the victim is drawn. The run's
own history (resilience/events.jsonl, rebuilds.jsonl) says when the loss was noticed, when all ranks stood still and
when they ran again; the clock ends when the coordinator commits the survivors' first step. For comparison, torchrun
restarts a plain data-parallel loop of the same model after such kills, up to its first finished step.

And torchft with its defaults, if it is installed (`pip install torchft` brings OpenTelemetry along).

    python -m benchmarks.recovery.recovery --kills 50 --json benchmarks/results/recovery.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import machine

CONFIG = ROOT / "examples" / "quickstart.yaml"
REPLICAS = 4
LONGEST_SECONDS = 300.0
"""Longest wait for a run to make progress."""


def train(folder: Path, data: Path, restarts: int, device: str) -> subprocess.Popen[bytes]:
    """Start the quickstart with one process per replica and more steps than are ever taken."""
    layout = {"units": {"language": {"replicas": REPLICAS}}, "colocated": {"vision": "language"}, "microbatches": 1}
    resilience = {"enabled": True, "restarts": restarts}
    overrides = [
        f"data.train=[{{path: {data / 'train.jsonl'}}}]",
        "data.eval=[]",
        f"output_dir={folder / 'run'}",
        f"parallel={json.dumps(layout)}",
        f"resilience={json.dumps(resilience)}",
        "train.steps=1000000",
        "train.save_steps=null",
        f"train.device={device}",
    ]
    command = [sys.executable, "-m", "dilatant", "train", str(CONFIG)]
    command += [part for override in overrides for part in ("--set", override)]
    return _start(command, folder)


@dataclass
class Recoveries:
    """Recoveries of a run. kills: seconds of each, by part. step_seconds: of a median step. held: what a process that
    is never killed has before each kill: open files, threads, MiB of memory."""

    kills: list[dict[str, float]]
    step_seconds: float
    held: list[dict[str, int]]


def recoveries(folder: Path, data: Path, kills: int, seed: int, pause: float, device: str) -> Recoveries:
    run = train(folder, data, kills, device)
    history, draw = folder / "run" / "resilience", random.Random(seed)
    found: list[dict[str, float]] = []
    held: list[dict[str, int]] = []
    try:
        for _ in range(kills):
            _await(run, lambda: _is_complete(_lines(history / "events.jsonl")))
            time.sleep(pause)
            before = _lines(history / "events.jsonl")[-1]
            *others, spared = sorted(before["members"])  # it has its first name still, so it is the last
            held.append(_held(_worker(history, spared)))
            victim = _worker(history, draw.choice(others))
            generation = before["generation"] + 1
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            _await(run, lambda: "commit" in _times(history, generation))  # noqa: B023  # called at once
            when = _times(history, generation)
            rebuild = next(line for line in _lines(history / "rebuilds.jsonl") if line["generation"] == generation)
            parts = rebuild["seconds"]
            found.append(
                {
                    "detect": when["fence"] - killed,
                    "fence": when["rebuild"] - when["fence"],
                    "decide": parts["plan"],
                    "rebuild": parts["build"],
                    "copy": parts["copy"],
                    "salvage": parts["salvage"],
                    "get ready": when["run"] - when["rebuild"] - sum(parts.values()),
                    "first step": when["commit"] - when["run"],
                    "kill to committed step": when["commit"] - killed,
                    "CPU of the first rank": rebuild["cpu_seconds"],
                }
            )
            print(f"  {found[-1]['kill to committed step'] * 1e3:6.0f} ms", end="", flush=True)
    finally:
        _end(run, folder)
        print()
    steps = [line["step_seconds"] for line in _lines(folder / "run" / "metrics.jsonl")]
    return Recoveries(found, statistics.median(steps), held)


def restarts(folder: Path, kills: int) -> list[float]:
    """Return the seconds from each kill to the first step that is done after torchrun has restarted everything."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={REPLICAS}", f"--max-restarts={kills}"]
    run = _start([*command, "-m", "benchmarks.recovery.torchrun_loop", str(CONFIG), str(folder)], folder)
    steps, found = folder / "steps", []

    def done() -> list[float]:
        return [float(at) for at, _ in _words(steps)]

    try:
        for number in range(kills):
            began = time.time()
            _await(run, lambda: any(at > began for at in done()))  # noqa: B023
            time.sleep(2.0)
            known = _words(folder / "pids")
            pids = {int(rank): int(pid) for rank, pid in known[-REPLICAS:]}
            killed = time.time()
            os.kill(pids[number % REPLICAS], signal.SIGKILL)
            # All of them have to be there again: the others may finish the step that they are in.
            _await(run, lambda: len(_words(folder / "pids")) >= len(known) + REPLICAS)  # noqa: B023
            again = time.time()
            _await(run, lambda: any(at > again for at in done()))  # noqa: B023
            first = next(at for at in done() if at > again)
            found.append(first - killed)
            print(f"  {found[-1]:6.2f} s", end="", flush=True)
    finally:
        _end(run, folder)
        print()
    return found


def torchft_recoveries(folder: Path, kills: int) -> list[float]:
    """Return the seconds from each kill to the survivors' next committed step under torchft, with its defaults."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    steps, found = folder / "steps", []

    def begin(replica: int) -> subprocess.Popen[bytes]:
        loop = [sys.executable, "-m", "benchmarks.recovery.torchft_loop"]
        return _start([*loop, str(CONFIG), str(folder), str(replica)], folder)

    def done(after: float, by: int) -> list[float]:
        return [float(at) for at, number, _ in _words(steps) if float(at) > after and int(number) == by]

    runs = {replica: begin(replica) for replica in range(REPLICAS)}
    try:
        for number in range(kills):
            victim, since = number % REPLICAS, time.time()
            _await(runs[victim], lambda: len(done(since, REPLICAS)) > 3 * REPLICAS)  # noqa: B023
            killed = time.time()
            runs[victim].kill()
            runs[victim].wait()
            _await(runs[(victim + 1) % REPLICAS], lambda: bool(done(killed, REPLICAS - 1)))  # noqa: B023
            found.append(min(done(killed, REPLICAS - 1)) - killed)
            print(f"  {found[-1]:6.2f} s", end="", flush=True)
            runs[victim] = begin(victim)
    finally:
        for run in runs.values():
            _end(run, folder)
        lighthouse.shutdown()
        print()
    return found


def _worker(history: Path, node: str) -> int:
    return int(json.loads((history / f"{node}.json").read_text())["workers"]["0"])


def _held(pid: int) -> dict[str, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    return {"files": files, "threads": threads, "MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20}


def _is_complete(events: list[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["task"] == "commit" and len(events[-1]["members"]) == REPLICAS


def _times(history: Path, generation: int) -> dict[str, float]:
    events = _lines(history / "events.jsonl")
    return {event["task"]: event["time"] for event in events if event["generation"] == generation}


def _whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file that others write to."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _whole_lines(path)]


def _words(path: Path) -> list[list[str]]:
    return [line.split() for line in _whole_lines(path)]


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)


def _await(run: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        if run.poll() is not None:
            raise RuntimeError(f"it has ended with exit code {run.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it has not gone on for {LONGEST_SECONDS:.0f} s")
        time.sleep(0.02)


def _end(run: subprocess.Popen[bytes], folder: Path) -> None:
    if run.poll() is not None:
        print(f"\n{(folder / 'output').read_text(errors='replace')[-2000:]}")
    run.terminate()
    try:
        run.wait(30.0)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()


def compared(name: str, measure: Callable[[], list[float]]) -> list[float]:
    """Return the restart times of another system; none if it fails, so that measurements of our own are kept."""
    try:
        return measure()
    except RuntimeError as error:
        print(f"{name}: {error}")
        return []


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that is at least as large as a `share` of the values."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="about 9 s each")
    parser.add_argument("--restarts", type=int, default=3, help="of torchrun and torchft; about 20 s each on two cores")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds of training before each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "auto"), default="cpu", help="auto: a GPU for each rank")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        data, ours, theirs, others = (Path(name) / part for part in ("digits", "ours", "torchrun", "torchft"))
        for folder in (ours, theirs, others):
            folder.mkdir()
        digits = [sys.executable, str(ROOT / "examples" / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        recovered = recoveries(ours, data, options.kills, options.seed, options.pause, options.device)
        count = options.restarts
        restarted = compared("torchrun", lambda: restarts(theirs, count)) if count else []
        has_torchft = importlib.util.find_spec("torchft") is not None
        asked = count and has_torchft
        under_torchft = compared("torchft", lambda: torchft_recoveries(others, count)) if asked else []
    kills, held = recovered.kills, recovered.held
    print(f"a step takes {recovered.step_seconds * 1e3:.0f} ms with {REPLICAS} processes")
    print(f"a process that is never killed has {held[0]} before the first kill, {held[-1]} before the last")
    print(f"{'after a kill':24} {'median':>8} {'p90':>8}")
    summary = {}
    for part in kills[0]:
        values = [kill[part] for kill in kills]
        summary[part] = {"median": statistics.median(values), "p90": percentile(values, 0.9)}
        print(f"{part:24} {summary[part]['median'] * 1e3:5.0f} ms {summary[part]['p90'] * 1e3:5.0f} ms")
    if restarted:
        again = statistics.median(restarted)
        ratio = again / summary["kill to committed step"]["median"]
        print(f"{'torchrun, started again':24} {again:6.2f} s; {ratio:.0f} times as long")
    if under_torchft:
        print(f"{'torchft, its defaults':24} {statistics.median(under_torchft):6.2f} s")
    elif count and not has_torchft:
        print("torchft is left out: it is not installed")
    if options.json:
        document = {
            "machine": machine(),
            "load_before": load,
            "step_seconds": recovered.step_seconds,
            "held": held,
            "kills": kills,
            "summary": summary,
            "torchrun_restart_seconds": restarted,
            "torchft_seconds": under_torchft,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
