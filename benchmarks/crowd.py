"""Strangers at the ports of a run that outlives its machines: what connections without the token cost its steps.

Two machines of the quickstart's run train on this one. In turns, nobody and a crowd is at the coordinator's port, and
last at all of the run's ports (the store's and the agents', too): connections that say nothing, that send one byte
every few seconds, or that send garbage and claims of huge frames; who is closed out comes back after a second. Steps
are counted as they are written down; a window with a crowd is held against the windows before and after it. Meanwhile
a connection with the token is made to the coordinator, twice a second. The crowd is a process of its own, which
shares the cores with the run here: its CPU seconds are printed, for on a network it would have cores of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trace_replay import Machines

from dilatant.resilience.wire import connect

ROOT = Path(__file__).resolve().parent.parent
MACHINES = 2
RETURN_SECONDS = 1.0
DRIP_SECONDS = 3.0
ASK_SECONDS = 0.5
BEGIN_SECONDS = 400.0
SHOUT = (b"\xff" * 65536, b"\x00\xff\xff\xff" * 1024, b"GET / HTTP/1.1\r\n\r\n" * 8)
KINDS = ("idle", "dripping", "shouting")


class _Stranger:
    """One connection, and when it does its next thing."""

    def __init__(self, port: int, kind: str, at: float) -> None:
        self.port, self.kind, self.at = port, kind, at
        self.connection: socket.socket | None = None

    def act(self, now: float, selector: selectors.BaseSelector) -> None:
        if self.connection is None:
            self.connection = connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", self.port))
            selector.register(connection, selectors.EVENT_READ, self)
            self.at = now + (0.05 if self.kind == "shouting" else DRIP_SECONDS)
            return
        self.at = now + DRIP_SECONDS
        if self.kind != "idle":
            try:
                self.connection.send(b"x" if self.kind == "dripping" else SHOUT[id(self) // 64 % len(SHOUT)])
            except BlockingIOError:
                pass
            except OSError:
                self.leave(now, selector)

    def hear(self, now: float, selector: selectors.BaseSelector) -> None:
        """Take the challenge, or the end."""
        assert self.connection is not None
        try:
            if self.connection.recv(1 << 12):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.leave(now, selector)

    def leave(self, now: float, selector: selectors.BaseSelector) -> None:
        assert self.connection is not None
        selector.unregister(self.connection)
        self.connection.close()
        self.connection, self.at = None, now + RETURN_SECONDS


def crowd(ports: list[int], kind: str, count: int, seconds: float, spent: Any) -> None:
    """So many strangers, at the ports in turn; CPU seconds go to `spent`."""
    began = time.monotonic()
    strangers = [  # all are there after a second
        _Stranger(ports[number % len(ports)], kind, began + number / count) for number in range(count)
    ]
    with selectors.DefaultSelector() as selector:
        while (now := time.monotonic()) < began + seconds:
            for stranger in strangers:
                if stranger.at <= now:
                    stranger.act(now, selector)
            for key, _ in selector.select(0.02):
                key.data.hear(now, selector)
            time.sleep(0.02)
    spent.put(time.process_time())


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


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _window(run: Path, port: int, token: bytes, seconds: float) -> tuple[int, list[float]]:
    """Steps of so many seconds, and what the right token waited for its answers."""
    began, before, answers = time.monotonic(), _steps(run), list[float]()
    for turn in itertools.count(1):
        asked = time.monotonic()
        connect("127.0.0.1", port, token).close()
        answers.append(time.monotonic() - asked)
        if began + turn * ASK_SECONDS >= began + seconds:
            break
        time.sleep(max(0.0, began + turn * ASK_SECONDS - time.monotonic()))
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return _steps(run) - before, answers


def crowded(counts: list[int], seconds: float) -> dict[str, Any]:
    """Raises RuntimeError where the run does not begin or ends on the way."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        data, folder = Path(name) / "digits", Path(name)
        digits = [sys.executable, str(ROOT / "examples" / "digits.py"), str(data)]
        subprocess.run(digits, check=True, stdout=subprocess.DEVNULL)
        machines = Machines(folder, data, MACHINES)
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
            for count, kind, at in crowds:
                spent = context.Queue()
                strangers = context.Process(target=crowd, args=(at, kind, count, seconds + 2.0, spent))
                strangers.start()
                time.sleep(1.5)  # all are there
                steps, answers = _window(run, ports[0], token, seconds)
                cpu = spent.get(timeout=60.0)
                strangers.join()
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
    print(f"the coordinator {'is the first one' if is_same else 'WAS REPLACED'}; generations: {generations}")
    return {
        "seconds": seconds,
        "ports": len(ports),
        "windows": windows,
        "quiet_longest_answer_seconds": max(max(answers) for _, answers in quiet),
        "coordinator_is_the_first": is_same,
        "generations": generations,
    }
