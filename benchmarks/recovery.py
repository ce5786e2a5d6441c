"""Going on after a loss: what a step pays for it, and how long it takes from the kill to the next finished step.

The vote is measured with the real processes of coordinator and agents, and workers that do nothing else; the sum over
the bits of gradients by itself; recovery in real runs of a tiny model, one kill each, from the run's own history.
Of more voters than there are cores, the state machine alone is measured: what it decides, without a network.

    python benchmarks/recovery.py --json benchmarks/results/recovery.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from machine import machine

from dilatant.resilience.launch import AGENT, COORDINATOR
from dilatant.resilience.process import Child, Start
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import Phase, Settings, Status, Task
from dilatant.resilience.worker_link import WorkerLink
from dilatant.training.commit import gradient_hashes

ROOT = Path(__file__).parent.parent
TOKEN = bytes(32)


def vote_seconds(nodes: int, rounds: int) -> float:
    """Median of a vote with one worker a node, all on this machine."""
    settings = Settings(lease_seconds=30.0, initial=nodes)
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Child(COORDINATOR, Start("127.0.0.1", 0, TOKEN.hex(), settings, folder))
        start = Start("127.0.0.1", coordinator.port, TOKEN.hex(), settings)
        agents = [Child(AGENT, replace(start, node=f"node{node}")) for node in range(nodes)]
        seconds: list[float] = []

        def work(port: int, counts: bool) -> None:
            link = WorkerLink(port, TOKEN, 0, lambda generation: None)
            link.warm()
            link.await_rebuild(-1, 0, None)
            link.await_activation(0)
            for step in range(rounds):
                began = time.perf_counter()
                link.vote(step, {f"layer{index}": index for index in range(32)})
                if counts:
                    seconds.append(time.perf_counter() - began)
            link.await_end()

        threads = [
            threading.Thread(target=work, args=(agent.port, index == 0)) for index, agent in enumerate(agents)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for child in (*agents, coordinator):
            child.close(5.0)
    return statistics.median(seconds)


def decision_seconds(voters: int, rounds: int = 20) -> float:
    """Median of what the coordinator computes for a step of so many voters."""
    coordinator = Coordinator(Settings(initial=voters), None, 0.0)
    coordinator.start()
    nodes = [Status(f"n{index}", 1) for index in range(voters)]

    def say(**values: object) -> None:
        for index, status in enumerate(nodes):
            nodes[index] = replace(status, serial=status.serial + 1, **values)  # type: ignore[arg-type]
            coordinator.hear(nodes[index], 0.0)

    say()
    say(generation=1, phase=Phase.FENCED)
    say(phase=Phase.READY, ready_at=0)
    say(phase=Phase.RUNNING, base=1)
    assert coordinator.task is Task.RUN
    seconds = []
    for step in range(rounds):
        began = time.perf_counter()
        say(prepared=step, applied=step)
        seconds.append(time.perf_counter() - began)
        assert coordinator.committed == step + 1
    return statistics.median(seconds)


def hash_bytes_per_second() -> float:
    """Of fp32 gradients, in layers of 16 MiB."""
    parameters = {}
    for index in range(8):
        parameter = torch.nn.Parameter(torch.zeros(4 << 20))
        parameter.grad = torch.randn(4 << 20)
        parameters[f"layer{index}"] = parameter
    gradient_hashes(parameters, {})
    began = time.perf_counter()
    for _ in range(5):
        gradient_hashes(parameters, {})
    return 5 * 8 * (16 << 20) / (time.perf_counter() - began)


def recovery(steps: int, kill_after: int) -> dict[str, float]:
    """Seconds from a kill to the next finished step, with its parts."""
    sys.path.insert(0, str(ROOT / "tests" / "cli"))
    from tiny_project import tiny_config, write_images

    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        write_images(project, 48)
        tree: dict[str, Any] = tiny_config(steps=steps, global_batch_size=8, save_steps=None)
        tree["parallel"] = {
            "units": {"language": {"replicas": 4}},
            "colocated": {"vision": "language"},
            "microbatches": 2,
        }
        tree["resilience"] = {"enabled": True}
        (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        code = "from dilatant.cli.app import main; main()"
        command = subprocess.Popen(
            [sys.executable, "-c", code, "train", "config.yaml"],
            cwd=project,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        metrics = project / "run" / "metrics.jsonl"

        def done() -> int:
            return metrics.read_text().count("\n") if metrics.is_file() else 0

        while done() < kill_after and command.poll() is None:
            time.sleep(0.002)
        # Not rank 0, whose successor would have to rewrite metrics.jsonl first: the file is the clock here.
        events = [
            json.loads(line) for line in (project / "run/resilience/events.jsonl").read_text().splitlines()
        ]
        victim = json.loads((project / f"run/resilience/{events[-1]['members'][1]}.json").read_text())
        killed, at = time.time(), done()
        os.kill(victim["workers"]["0"], signal.SIGKILL)
        while not _began_again(project) and command.poll() is None:
            time.sleep(0.002)
        base = done()
        while done() <= max(at, base) and command.poll() is None:
            time.sleep(0.001)
        finished = time.time()
        command.wait()
        events = [
            json.loads(line) for line in (project / "run/resilience/events.jsonl").read_text().splitlines()
        ]
        when = {event["task"]: event["time"] for event in events if event["generation"] == 2}
        rebuilds = [
            json.loads(line) for line in (project / "run/resilience/rebuilds.jsonl").read_text().splitlines()
        ]
    parts = next(record["seconds"] for record in rebuilds if record["generation"] == 2)
    return {
        "detect": when["fence"] - killed,
        "fence_and_decide": when["rebuild"] - when["fence"],
        **{f"rebuild_{part}": seconds for part, seconds in parts.items()},
        "rebuild_all": when["run"] - when["rebuild"],
        "first_step": finished - when["run"],
        "kill_to_next_step": finished - killed,
    }


def _began_again(project: Path) -> bool:
    return '"task": "run", "generation": 2' in (project / "run/resilience/events.jsonl").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    votes = {}
    for nodes in options.nodes:
        votes[nodes] = vote_seconds(nodes, options.rounds)
        share = votes[nodes] / 0.1
        print(
            f"vote of {nodes:3} nodes: {votes[nodes] * 1e3:6.2f} ms, {share:.1%} of a step of 100 ms",
            flush=True,
        )
    decisions = {}
    for voters in (8, 64, 256):
        decisions[voters] = decision_seconds(voters)
        print(
            f"decision for {voters:3} voters (computed only): {decisions[voters] * 1e3:6.2f} ms", flush=True
        )
    rate = hash_bytes_per_second()
    print(f"hash of gradients: {rate / 1e9:.1f} GB/s")
    kills = [recovery(16, 8) for _ in range(options.kills)]
    medians = {part: statistics.median(kill[part] for kill in kills) for part in kills[0]} if kills else {}
    print(f"after a kill, median of {len(kills)}:")
    for part, seconds in medians.items():
        print(f"  {part:20} {seconds * 1e3:8.0f} ms", flush=True)
    if options.json:
        document = {
            "machine": machine(),
            "load_before": load,
            "vote_seconds": votes,
            "decision_seconds": decisions,
            "hash_bytes_per_second": rate,
            "kills": kills,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
