"""A spot trace for real, with time compressed: machines of the quickstart's run come and go as its nodes did.

Each machine is an agent with one process on this computer; a lost one is killed, agent and all, without notice. An
event that takes a share of the trace's nodes takes that share of ours, one at least; so for what joins. The ceiling is
what would have been trained had each change taken no time: a step in the median time from one step's end to the next
with so many members, over the time they were members. Afterwards one process trains as many steps, and every step has
to have had the same tokens.

    python -m benchmarks.recovery.trace_replay ../shared/traces/oobleck/scale_p3-trace.csv --json results.json

With --memory-gib, a rank may hold only so much, and the run plans itself: where that is less than the model takes, in
pipelines of several machines, of unlike lengths if need be. Then one machine is lost at a time, and none while the
state of the others would not be whole without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from benchmarks import ROOT
from benchmarks.machine import machine
from benchmarks.papers.oobleck.node_reactions import within
from dilatant.plan.plan import Plan
from dilatant.plan.replay.node_trace import NodeTrace, load_node_trace
from dilatant.plan.templates.membership import pipelines_of, ranks_of

CONFIG = ROOT / "examples" / "quickstart.yaml"
BEGIN_SECONDS, END_SECONDS = 120.0, 60.0
SETTLED_SECONDS = 3.0
"""After a change, until the run folder shows its plan."""
COMPARED = 100
"""Steps whose losses are compared, while the learning rate warms up: sums in another order grow into others with every
step (at the full rate by 1e-4 in a hundred, where nothing happens to the replicas, too), and as losses shrink."""


class Machines:
    """One process that leads, and agents, each with what it started in a session of its own."""

    def __init__(
        self, folder: Path, data: Path, machines: int, apart: bool = False, memory_gib: float | None = None
    ) -> None:
        """apart: the leading process has the last core of this computer, and agents with their ranks the others.
        memory_gib: of a rank; None: every machine has a copy of the model."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._folder = folder
        self.token = os.urandom(16).hex()
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "DILATANT_TOKEN": self.token}
        layout = {"units": {"language": {"replicas": machines}}, "colocated": {"vision": "language"}}
        sections: dict[str, Any] = {"resilience": {"enabled": True, "listen": f"127.0.0.1:{self._port}"}}
        if memory_gib is None:
            sections["parallel"] = {**layout, "microbatches": 1}
        else:
            sections |= {"parallel": "auto", "plan": {"measure_seconds": 0.0}}
            sections["cluster"] = {"nodes": machines, "gpus_per_node": 1, "memory_gib": memory_gib}
        self._overrides = [*overrides(folder / "run", data), "train.steps=1000000"]
        self._overrides += [f"{name}={json.dumps(section)}" for name, section in sections.items()]
        self._is_planned = memory_gib is not None
        cores = sorted(os.sched_getaffinity(0))
        self._cores = (cores[-1:], cores[:-1]) if apart and len(cores) > 1 else (cores, cores)
        self.leading = self._start("train", str(CONFIG), *_set(self._overrides))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._born = 0

    def join(self) -> None:
        self._born += 1
        name = f"m{self._born}"
        self.agents[name] = self._start("agent", "--coordinator", f"127.0.0.1:{self._port}", "--name", name)

    def lose(self, name: str) -> None:
        agent = self.agents.pop(name)
        agent.kill()
        agent.wait()

    def members(self) -> list[str]:
        """Of ours, those that the run goes on with."""
        events = read_lines(self._folder / "run" / "resilience" / "events.jsonl")
        names = [node.split("-")[1] for node in events[-1]["members"]] if events else []
        return [name for name in names if name in self.agents]

    def spare(self, members: list[str]) -> int:
        """How many of the members may be lost at once."""
        if not self._is_planned:
            return len(members) - 1
        rebuilds = read_lines(self._folder / "run" / "resilience" / "rebuilds.jsonl")
        return min(1, min(rebuilds[-1]["copies"].values()) - 1) if rebuilds else 0

    def plan(self) -> Plan:
        """The plan of the newest generation that is a second old."""
        return Plan.from_json((self._folder / "run" / "plan.json").read_text(encoding="utf-8"))

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self._folder / "run" / "metrics.jsonl")

    def close(self) -> None:
        """Save and end, so that the last steps are written down."""
        self.leading.terminate()
        for process in (self.leading, *self.agents.values()):
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "output").open("ab") as output:
            cores = ",".join(map(str, self._cores[arguments[0] == "agent"]))
            command = ["taskset", "-c", cores, sys.executable, "-m", "dilatant", *arguments]
            return subprocess.Popen(command, stdout=output, stderr=output, env=self._environment)


def overrides(run: Path, data: Path) -> list[str]:
    return [f"data.train=[{{path: {data / 'train.jsonl'}}}]", "data.eval=[]", f"output_dir={run}",
            "train.save_steps=null", f"train.schedule={{kind: constant, warmup_steps: {COMPARED}}}"]  # fmt: skip


def replay(
    folder: Path, data: Path, trace: NodeTrace, most: int, seconds: float, speed: float, memory_gib: float | None
) -> Machines:
    """Let the machines come and go for `seconds`, `speed` times as fast as in the trace."""
    machines, draw = Machines(folder, data, most, memory_gib=memory_gib), random.Random(0)
    try:
        for _ in range(most):
            machines.join()
        deadline = time.monotonic() + BEGIN_SECONDS
        while not machines.steps():
            if machines.leading.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "output").read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        began, alive = time.monotonic(), 0
        for event in trace.events:
            if event.seconds > seconds * speed:
                break
            before, alive = alive, alive + len(event.joined) - len(event.lost)
            if not before:
                continue  # those that the run began with
            time.sleep(max(0.0, began + event.seconds / speed - time.monotonic()))
            there = machines.members()
            lost = min(machines.spare(there), round_up(len(event.lost) * most / before))
            joined = min(most - len(machines.agents) + lost, round_up(len(event.joined) * most / before))
            for name in draw.sample(there, lost):
                machines.lose(name)
            for _ in range(joined):
                machines.join()
            time.sleep(SETTLED_SECONDS)
            stages = " + ".join(str(len(ranks_of(one))) for one in pipelines_of(machines.plan()))
            print(f"  {event.seconds / speed:6.1f} s: {lost} lost, {joined} join; then {stages} ranks", flush=True)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
    finally:
        machines.close()
    return machines


def round_up(share: float) -> int:
    """At least one of something, none of nothing."""
    return max(1, round(share)) if share else 0


def ended_at(run: Path) -> dict[int, float]:
    """When each step was written down, in seconds since 1970: what trackers were told, in the next one's vote."""
    ended: dict[int, float] = {}
    for file in sorted(run.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            ended.setdefault(event.step, event.wall_time)
    return ended


def fraction(events: list[dict[str, Any]], steps: list[dict[str, Any]], ended: Mapping[int, float]) -> dict[str, Any]:
    """What was trained over what no cost of changes would have left, from the first step's end to the last one's.

    ended: see `ended_at`; what ranks do between steps takes time, too, whether machines change or not.
    """
    commits = [event for event in events if event["task"] == "commit"]
    members = {event["generation"]: len(event["members"]) for event in events}
    by_members: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        if "recovery" not in step and step["step"] > 1:
            seconds = ended[step["step"]] - ended[step["step"] - 1]
            by_members[members[step["generation"]]].append(seconds)
    median = {count: statistics.median(each) for count, each in by_members.items()}
    end = next(event["time"] for event in reversed(events) if event["task"] == "stop")
    changes = [event for event in events if event["task"] == "fence" and event["time"] > commits[0]["time"]]
    since, count, ceiling = commits[0]["time"], len(commits[0]["members"]), 0.0
    for at, following in [*((one["time"], len(one["members"])) for one in changes), (end, 0)]:
        ceiling += (at - since) / median.get(count, statistics.median(median.values()))
        since, count = at, following
    kept = [step["recovery"].get("salvaged_share", 0.0) for step in steps if "recovery" in step]
    return {
        "steps": len(steps), "ceiling": ceiling, "fraction": (len(steps) - 1) / ceiling, "changes": len(changes),
        "seconds": end - commits[0]["time"], "median_step_seconds": median, "salvaged_shares": kept,
    }  # fmt: skip


def check_ledger(folder: Path, data: Path, steps: list[dict[str, Any]]) -> float:
    """Every step once, with the tokens of one process that nothing happens to; the largest relative distance of the
    first `COMPARED` losses. Raises SystemExit."""
    command = [sys.executable, "-m", "dilatant", "train", str(CONFIG), *_set(overrides(folder / "alone", data))]
    command += _set([f"train.steps={len(steps)}", "parallel=single"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        subprocess.run(command, check=True, stdout=output, stderr=output, env=environment)
    alone = read_lines(folder / "alone" / "metrics.jsonl")

    def ledger(of: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(s["step"], s["samples"], s["skipped_samples"], s["target_tokens"], s["tokens"]) for s in of]

    if ledger(steps) != ledger(alone):
        wrong = [ours for ours, theirs in zip(ledger(steps), ledger(alone)) if ours != theirs]
        raise SystemExit(f"the samples of {len(wrong)} steps are others; the first: {wrong[:1]}")
    return max(abs(one["loss"] / other["loss"] - 1) for one, other in zip(steps[:COMPARED], alone))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that others write to."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _set(texts: list[str]) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def report(found: Mapping[str, Any], distance: float) -> None:
    print(f"{found['changes']} changes of membership in {found['seconds']:.0f} s, {found['steps']} steps")
    print(f"{found['fraction']:.3f} of the ceiling of {found['ceiling']:.0f} steps")
    for members, seconds in sorted(found["median_step_seconds"].items()):
        print(f"  a step of {members} machines: {seconds * 1e3:.0f} ms")
    print(f"every step had the samples of an undisturbed run; of the first {COMPARED} losses", end=" ")
    print(f"none differs by more than {distance:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--speed", type=float, default=60.0, help="the trace's seconds in one of ours")
    parser.add_argument("--start", type=float, default=1500.0, help="seconds of the trace that are left out")
    parser.add_argument("--memory-gib", type=float, help="of a rank: the run plans its pipelines")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    trace = load_node_trace(options.trace)
    trace = within(trace, options.start, trace.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name) / "digits"
        digits = [sys.executable, str(CONFIG.parent / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        how = options.machines, options.seconds, options.speed, options.memory_gib
        machines = replay(folder, data, trace, *how)
        steps = machines.steps()
        found = fraction(read_lines(folder / "run" / "resilience" / "events.jsonl"), steps, ended_at(folder / "run"))
        distance = check_ledger(folder, data, steps)
    report(found, distance)
    if options.json:
        document = {
            "machine": machine(), "load_before": load, "trace": trace.name, "machines": options.machines,
            "speed": options.speed, "memory_gib": options.memory_gib, "largest_loss_distance": distance, **found,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
