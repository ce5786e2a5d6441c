"""Strangers at the ports of a run that outlives its machines: what connections without the token cost its steps.

Two machines of the quickstart's run train on this one. In turns, nobody and a crowd is at the coordinator's port, and
last at all of the run's ports (the store's and the agents', too): connections that say nothing, that send one byte
every few seconds, or that send garbage and claims of huge frames; who is closed out comes back after a second. Steps
are counted as they are written down; a window with a crowd is held against the windows before and after it. Meanwhile
a connection with the token is made to the coordinator, twice a second. The crowd, the coordinator and the store have
the last core of this computer, the agents and their ranks the others: what is measured is what the run loses by being
answered later, not the processor time of strangers, who have computers of their own on a network. Each crowd comes
several times; the mean loss is printed with its standard error.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.recovery.trace_replay import Machines
from dilatant.resilience.processes.messages import connect
from dilatant.resilience.processes.process import Child, ProcessStart
from dilatant.resilience.protocol.values import Settings

COORDINATOR = "dilatant.resilience.processes.coordinator_process"
TOKEN = b"of a crowd's coordinator"
MACHINES = 2
ASK_SECONDS = 0.5
BEGIN_SECONDS = 400.0
KINDS = ("idle", "dripping", "shouting")


def listening_ports(process: int) -> list[int]:
    """TCP ports at which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    tables = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets]


def _strangers(kind: str, count: int, seconds: float, ports: list[int]) -> subprocess.Popen[str]:
    """So many of them at the ports in turn; all are there when this returns."""
    core = str(max(os.sched_getaffinity(0)))
    strangers = str(ROOT / "benchmarks" / "recovery" / "strangers.py")
    command = ["taskset", "-c", core, sys.executable, strangers, kind, str(count), str(seconds)]
    found = subprocess.Popen([*command, *map(str, ports)], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "there\n"
    return found


def _cpu_of(strangers: subprocess.Popen[str]) -> float:
    assert strangers.stdout is not None
    return float(strangers.stdout.readline())


def alone(counts: list[int], seconds: float) -> list[dict[str, Any]]:
    """What a crowd costs the coordinator by itself: its CPU seconds, and how long the right token waits."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        child = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, TOKEN.hex(), Settings(), folder))
        try:
            for count, kind in [(0, KINDS[0]), *itertools.product(counts, KINDS)]:
                before = _cpu_seconds(child.process.pid)
                with _strangers(kind, max(1, count), seconds, [child.port]) as strangers:
                    answers = _answers(child.port, TOKEN, seconds)
                    _cpu_of(strangers)
                share = (_cpu_seconds(child.process.pid) - before) / seconds
                found.append({"kind": kind, "connections": count, "core_share": share, "answers": answers})
                print(
                    f"{count or 'no'} {kind:8} at the coordinator: {share:5.1%} of a core; the right token is answered "
                    f"within {max(answers) * 1e3:.0f} ms, {statistics.median(answers) * 1e3:.0f} in the median",
                    flush=True,
                )
        finally:
            child.close()
    return found


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _answers(port: int, token: bytes, seconds: float) -> list[float]:
    """How long a connection with the token waits, tried every half a second."""
    began, answers = time.monotonic(), list[float]()
    while time.monotonic() < began + seconds:
        asked = time.monotonic()
        connect("127.0.0.1", port, token).close()
        answers.append(time.monotonic() - asked)
        time.sleep(ASK_SECONDS)
    return answers


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _window(run: Path, port: int, token: bytes, seconds: float) -> tuple[int, list[float]]:
    """Steps of so many seconds, and what the right token waited for its answers."""
    before, began = _steps(run), time.monotonic()
    answers = _answers(port, token, seconds)
    return round((_steps(run) - before) * seconds / (time.monotonic() - began)), answers


def crowded(counts: list[int], seconds: float, turns: int) -> dict[str, Any]:
    """turns: how often each crowd comes. Raises RuntimeError where the run does not begin or ends on the way."""
    with tempfile.TemporaryDirectory() as name:
        data, folder = Path(name) / "digits", Path(name)
        digits = [sys.executable, str(ROOT / "examples" / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        machines = Machines(folder, data, MACHINES, apart=True)
        run = folder / "run"
        try:
            for _ in range(MACHINES):
                machines.join()
            deadline = time.monotonic() + BEGIN_SECONDS
            while _steps(run) < 50:
                if time.monotonic() > deadline or machines.leading.poll() is not None:
                    raise RuntimeError(f"it does not train:\n{(folder / 'output').read_text()[-2000:]}")
                time.sleep(0.1)
            pid = run / "resilience" / "coordinator.pid"
            coordinator = int(pid.read_text())
            processes = [coordinator, machines.leading.pid, *(each.pid for each in machines.agents.values())]
            ports = [port for process in processes for port in listening_ports(process)]
            token = machines.token.encode()
            quiet = [_window(run, ports[0], token, seconds)]
            windows: list[dict[str, Any]] = []
            crowds = [*itertools.product(counts, KINDS, (ports[:1],)), (counts[-1], KINDS[-1], ports)]
            for count, kind, at in crowds * turns:
                with _strangers(kind, count, seconds + 1.0, at) as strangers:
                    steps, answers = _window(run, ports[0], token, seconds)
                    cpu = _cpu_of(strangers)
                quiet.append(_window(run, ports[0], token, seconds))
                beside = statistics.mean(each for each, _ in quiet[-2:])
                windows.append(
                    {
                        "kind": kind,
                        "connections": count,
                        "ports": len(at),
                        "steps_before": quiet[-2][0],
                        "steps": steps,
                        "steps_after": quiet[-1][0],
                        "lost": 1 - steps / beside,
                        "longest_answer_seconds": max(answers),
                        "crowd_cpu_seconds": cpu,
                    }
                )
                print(
                    f"{count} {kind:8} at {len(at)} ports: {quiet[-2][0]:4} {steps:4} {quiet[-1][0]:4} "
                    f"steps before, during and after, {1 - steps / beside:+.1%} lost; the right token is answered "
                    f"within {max(answers) * 1e3:.0f} ms; the crowd took {cpu:.1f} s of these cores",
                    flush=True,
                )
            is_same = int(pid.read_text()) == coordinator
            generations = len({line["generation"] for line in machines.steps()})
        finally:
            machines.close()
    lost = [window["lost"] for window in windows]
    mean, error = statistics.mean(lost), statistics.stdev(lost) / len(lost) ** 0.5
    print(f"of {len(lost)} crowds: {mean:+.1%} of the steps lost, with a standard error of {error:.1%}")
    print(f"the coordinator {'is the first one' if is_same else 'WAS REPLACED'}; generations: {generations}")
    return {
        "seconds": seconds,
        "ports": len(ports),
        "windows": windows,
        "lost_mean": mean,
        "lost_standard_error": error,
        "quiet_longest_answer_seconds": max(max(answers) for _, answers in quiet),
        "coordinator_is_the_first": is_same,
        "generations": generations,
    }
