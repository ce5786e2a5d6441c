"""Run status and history: the state of a resilient run, read from its folder, and the page of its generations."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from dilatant.config.errors import UserError
from dilatant.config.files.own_files import MOST_TEXT, open_regular, read_text
from dilatant.config.files.yaml_text import read_yaml
from dilatant.plan.replay.replay import COPYING, RECONFIGURING, UNFINISHED
from dilatant.report.pages.generations_page import Generation, render_generations_page
from dilatant.report.pages.page import write_page
from dilatant.report.pages.page_links import link_pages
from dilatant.report.pages.perfetto import write_generations_trace
from dilatant.report.run_folder import is_deserted, last_step
from dilatant.resilience.processes.agent_process import NodeProcesses
from dilatant.resilience.processes.coordinator_process import COMMIT, EVENTS, RunEvent, read_record
from dilatant.resilience.processes.process import TOO_FEW_EXIT_CODE
from dilatant.resilience.protocol.values import FINISHED, Task, may_resume

Line = TypeVar("Line")
REBUILDS = "rebuilds.jsonl"
"""File in the run's recovery folder: how long the first rank took to rebuild each generation."""
KILLED = "its command was killed; `dilatant resume` goes on from the newest checkpoint"
"""Reason shown for a run that ended without a record of it."""
PAGE = "generations.html"
TRACE = "generations.json"
"""The history's files in the run folder."""


class RebuildRecord(msgspec.Struct, frozen=True):
    """A rebuild as its first rank saw it. step: to continue from. seconds: of each phase. bytes_to_first_rank: copied
    state. salvaged_pairs, missing_pairs: (layer, sample) pairs of the unfinished step, reused and to be repeated.
    ranks_handed_over: departed ranks whose exported gradients are reused. stays: no rank's part has changed. copies,
    shortage, has_sunk: see `Redundancy`. idle: node → its ranks in no pipeline, for nodes that have some. pipelines: of
    the plan, in words."""

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
    copies: dict[str, int] = {}
    shortage: str = ""
    has_sunk: bool = False
    idle: dict[str, int] = {}
    pipelines: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a run. is_member: of the generation; was_member: of any; is_alive: its agent runs or, on another host,
    the run continues with it. idle: number of its ranks that are in no pipeline."""

    name: str
    host: str
    agent: int
    workers: tuple[int, ...]
    is_member: bool
    was_member: bool
    is_alive: bool
    idle: int = 0

    def state(self, has_ended: bool) -> str:
        """Return the node's part in the run in words."""
        if self.is_member:
            some = f", {self.idle} of {len(self.workers)} ranks idle" if self.idle < len(self.workers) else ", idle"
            return f"member{some if self.idle else ''}" if self.is_alive else "member, gone"
        if self.was_member:
            return "left" if self.is_alive else "left, gone"
        if self.is_alive and not has_ended:
            return "waits to join"
        return "came too late" if has_ended else "never joined, gone"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run. step: the last in metrics.jsonl, None before the first. stopped: why the run ended, if it
    did; KILLED if its command is gone and nobody else leads the run. events: the generations' history, as the
    coordinator wrote it. copies: unit → copies of its scarcest layer on different nodes. shortage: why these are too
    few, if they are. pipelines: of the plan, in words."""

    generation: int
    task: str
    step: int | None
    stopped: str
    nodes: tuple[Node, ...]
    events: tuple[RunEvent, ...]
    copies: dict[str, int] = field(default_factory=dict)
    shortage: str = ""
    pipelines: str = ""

    @property
    def exit_code(self) -> int:
        """0: the run is finished. 1: a mistake ended it. 75: it is running, or can be resumed."""
        if self.stopped == FINISHED:
            return 0
        return TOO_FEW_EXIT_CODE if self.stopped == KILLED or may_resume(self.stopped) else 1


def read_status(run: Path) -> RunStatus:
    """Read the status of a run folder. Raises UserError if it is not of a resilient run."""
    folder = run / "resilience"
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(run)!r} cannot be read: {error}") from None
    if record is None:
        raise UserError(
            f"{str(run)!r} is no run with resilience.enabled, or has not begun; the progress of others is in "
            "metrics.jsonl and timeline.html of their folders"
        )
    events = tuple(read_events(run))
    members = {node for event in events for node in event.members}
    rebuilt = next((one for one in read_rebuilds(run) if one.generation == record.generation), None)
    rebuilt = RebuildRecord(record.generation, 0, {}) if rebuilt is None else rebuilt
    nodes = []
    for file in sorted(folder.glob("node*.json")):
        for node in _lines(file, NodeProcesses):
            is_member = node.node in record.members
            is_here = node.host == socket.gethostname() and os.path.isdir("/proc")
            is_alive = Path(f"/proc/{node.pid}").exists() if is_here else is_member and not record.stopped
            workers = tuple(node.workers.values())
            was_member = is_member or node.node in members
            idle = rebuilt.idle.get(node.node, 0)
            nodes.append(Node(node.node, node.host, node.pid, workers, is_member, was_member, is_alive, idle))
    is_led = any(node.is_alive for node in nodes) and _has_standby(run)
    is_killed = is_deserted(run) and not is_led
    task = events[-1].task if events else Task.WAIT.value
    task = Task.RUN.value if task == COMMIT else task
    return RunStatus(
        record.generation,
        task,
        last_step(run / "metrics.jsonl") or None,
        record.stopped or (KILLED if is_killed else ""),
        tuple(nodes),
        events,
        rebuilt.copies,
        rebuilt.shortage,
        rebuilt.pipelines,
    )


def _has_standby(run: Path) -> bool:
    try:
        config = read_yaml(read_text(run / "config.yaml"))
        return bool(config["resilience"].get("standby"))
    except (OSError, ValueError, yaml.YAMLError, LookupError, AttributeError, TypeError):
        return True


def read_events(run: Path) -> Iterator[RunEvent]:
    """Yield the run's history; other lines are skipped."""
    return _lines(run / "resilience" / EVENTS, RunEvent)


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


def generations(events: Iterable[RunEvent], rebuilds: Iterable[RebuildRecord] = ()) -> tuple[Generation, ...]:
    """Return events and rebuilds by generation, in order; empty for a run that has not begun.

    A generation's lost time runs from the coordinator's detection of the change to its first committed step. Before
    training resumes, all time that the first rank did not spend on copying is reported as reconfiguration.
    """
    rebuilt = {record.generation: record for record in rebuilds}
    when: dict[int, dict[str, RunEvent]] = {}
    for event in events:
        when.setdefault(event.generation, {}).setdefault(event.task, event)
    found: list[Generation] = []
    before: tuple[str, ...] = ()
    for number, by_task in sorted(when.items()):
        begun = by_task.get(Task.FENCE.value) or next(iter(by_task.values()))
        members = begun.members
        runs, commits = by_task.get(Task.RUN.value), by_task.get(COMMIT)
        lost: dict[str, float] = {}
        phases: dict[str, float] = {}
        rebuild = rebuilt.get(number, RebuildRecord(number, 0, {}))
        if runs is not None and found and begun is not runs:
            whole = max(0.0, runs.time - begun.time)
            copying = min(whole, rebuild.seconds.get("copy", 0.0))
            lost = {RECONFIGURING: whole - copying, COPYING: copying}
            if (stood := by_task.get(Task.REBUILD.value)) is not None:
                fencing = min(whole, max(0.0, stood.time - begun.time))
                waiting = whole - fencing - sum(rebuild.seconds.values())
                phases = {"fence": fencing, **rebuild.seconds, "await others": max(0.0, waiting)}
            if commits is not None:
                lost[UNFINISHED] = max(0.0, commits.time - runs.time)
                phases["first step"] = lost[UNFINISHED]
        found.append(
            Generation(
                number=number,
                time=begun.time,
                step=(runs or begun).step,
                members=len(members),
                left=tuple(node for node in before if node not in members),
                joined=tuple(node for node in members if node not in before) if before else (),
                reason=begun.reason,
                lost=lost,
                phases=phases,
                kept=rebuild.salvaged_pairs,
                missing=rebuild.missing_pairs,
                copies=min(rebuild.copies.values(), default=None),
                shortage=rebuild.shortage,
                idle=tuple(rebuild.idle),
                pipelines=rebuild.pipelines,
            )
        )
        before = members
    return tuple(found)


def write_history(run: Path, title: str) -> None:
    """Write the generations page of a run that has more than one; never raises, so that training continues."""
    with suppress(OSError, UserError, ValueError):
        status = read_status(run)
        found = generations(status.events, read_rebuilds(run))
        if len(found) > 1:
            write_page(run / PAGE, render_generations_page(found, title, status.stopped))
            write_generations_trace(run / TRACE, found)
            link_pages(run)
