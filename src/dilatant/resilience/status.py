"""Run status: read the state of a resilient run from its folder, on any machine that can see it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from dilatant.config.errors import UserError
from dilatant.config.files.own_files import MOST_TEXT, open_regular
from dilatant.report.run_folder import last_step
from dilatant.resilience.processes.agent_process import NodeProcesses
from dilatant.resilience.processes.coordinator_process import COMMIT, EVENTS, RunEvent, read_record
from dilatant.resilience.processes.process import TOO_FEW_EXIT_CODE
from dilatant.resilience.protocol.values import ASKED, FINISHED, TOO_FEW, Task

Line = TypeVar("Line")
REBUILDS = "rebuilds.jsonl"
"""File in the run's recovery folder: how long the first rank took to rebuild each generation."""


class RebuildRecord(msgspec.Struct, frozen=True):
    """A rebuild as its first rank saw it. step: to continue from. seconds: of each phase. bytes_to_first_rank: copied
    state. salvaged_pairs, missing_pairs: (layer, sample) pairs of the unfinished step, reused and to be repeated.
    ranks_handed_over: departed ranks whose exported gradients are reused. stays: no rank's part has changed."""

    generation: int
    step: int
    seconds: dict[str, float]
    cpu_seconds: float = 0.0
    bytes_to_first_rank: int = 0
    salvaged_share: float = 0.0
    salvaged_pairs: int | None = None
    missing_pairs: int | None = None
    ranks_handed_over: int = 0
    stays: bool = False


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
    events: tuple[RunEvent, ...]

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
    events = tuple(_lines(folder / EVENTS, RunEvent))
    nodes = []
    for file in sorted(folder.glob("node*.json")):
        for node in _lines(file, NodeProcesses):
            is_member = node.node in record.members
            is_here = node.host == socket.gethostname() and os.path.isdir("/proc")
            is_alive = Path(f"/proc/{node.pid}").exists() if is_here else is_member and not record.stopped
            workers = tuple(node.workers.values())
            nodes.append(Node(node.node, node.host, node.pid, workers, is_member, is_alive))
    task = events[-1].task if events else Task.WAIT.value
    task = Task.RUN.value if task == COMMIT else task
    return RunStatus(
        record.generation,
        task,
        last_step(run / "metrics.jsonl") or None,
        record.stopped,
        tuple(nodes),
        events,
    )


def read_rebuilds(run: Path) -> Iterator[RebuildRecord]:
    """Yield the rebuild records of each generation's first rank; other lines are skipped."""
    return _lines(run / "resilience" / REBUILDS, RebuildRecord)


def _lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Yield the lines of that kind of a file that others may be writing to."""
    try:
        with open_regular(path) as file:
            text = file.read(MOST_TEXT)
    except OSError:
        return
    for line in text.splitlines():
        with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=kind)
