"""Run status: read the state of a resilient run from its folder, on any machine that can see it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilatant.config.errors import UserError
from dilatant.config.files.own_files import MOST_TEXT, open_regular
from dilatant.report.run_folder import last_step
from dilatant.resilience.processes.coordinator_process import COMMIT, EVENTS, read_record
from dilatant.resilience.processes.process import TOO_FEW_EXIT_CODE
from dilatant.resilience.protocol.values import ASKED, FINISHED, TOO_FEW, Task

REBUILDS = "rebuilds.jsonl"
"""File in the run's recovery folder: how long the first rank took to rebuild each generation."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a run. is_member: of the generation; is_alive: its agent runs or, on another host, the run continues
    with it."""

    name: str
    host: str
    agent: int
    workers: tuple[int, ...]
    is_member: bool
    is_alive: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run. step: the last in metrics.jsonl, None before the first. stopped: why the run ended, if it
    did. events: the generations' history, as the coordinator wrote it."""

    generation: int
    task: str
    step: int | None
    stopped: str
    nodes: tuple[Node, ...]
    events: tuple[dict[str, Any], ...]

    @property
    def exit_code(self) -> int:
        """0: the run is finished. 1: a mistake ended it. 75: it is running, or can be resumed."""
        if self.stopped == FINISHED:
            return 0
        return TOO_FEW_EXIT_CODE if self.stopped in ("", ASKED) or TOO_FEW in self.stopped else 1


def read_status(run: Path) -> RunStatus:
    """Read the status of a run folder. Raises UserError if it is not of a resilient run."""
    folder = run / "resilience"
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(run)!r} cannot be read: {error}") from None
    if record is None:
        raise UserError(f"{str(run)!r} is no run with resilience.enabled, or has not begun")
    events = tuple(event for event in _lines(folder / EVENTS) if _is_event(event))
    nodes = []
    for file in sorted(folder.glob("node*.json")):
        for document in filter(_is_introduction, _lines(file)):
            host = str(document.get("host", socket.gethostname()))
            is_here = host == socket.gethostname() and os.path.isdir("/proc")
            alive = (
                Path(f"/proc/{document['pid']}").exists()
                if is_here
                else document["node"] in record.members and not record.stopped
            )
            workers = tuple(document["workers"].values())
            name = document["node"]
            nodes.append(Node(name, host, document["pid"], workers, name in record.members, alive))
    task = events[-1]["task"] if events else Task.WAIT.value
    task = Task.RUN.value if task == COMMIT else task
    return RunStatus(
        record.generation,
        task,
        last_step(run / "metrics.jsonl") or None,
        record.stopped,
        tuple(nodes),
        events,
    )


def read_rebuilds(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rebuild records of each generation's first rank; other lines are skipped."""
    kinds: dict[str, Any] = {"generation": int, "step": int, "seconds": dict}
    for line in _lines(run / "resilience" / REBUILDS):
        if all(isinstance(line.get(key), kind) for key, kind in kinds.items()) and all(
            isinstance(seconds, int | float) for seconds in line["seconds"].values()
        ):
            yield line


def _is_event(line: dict[str, Any]) -> bool:
    """Return True for a line that the coordinator wrote."""
    kinds: dict[str, Any] = {
        "time": (int, float),
        "generation": int,
        "task": str,
        "step": int,
        "members": list,
        "reason": str,
    }
    return all(isinstance(line.get(key), kind) for key, kind in kinds.items()) and abs(line["time"]) < 1e11


def _is_introduction(line: dict[str, Any]) -> bool:
    """Return True for an agent's description of its node."""
    kinds: dict[str, Any] = {"node": str, "pid": int, "workers": dict}
    if not all(isinstance(line.get(key), kind) for key, kind in kinds.items()):
        return False
    return all(isinstance(pid, int) for pid in line["workers"].values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file that others may be writing to."""
    try:
        with open_regular(path) as file:
            text = file.read(MOST_TEXT).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document
