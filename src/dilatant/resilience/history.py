"""Run history: the generations of a resilient run, as recorded by its coordinators and first ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dilatant.config.errors import UserError
from dilatant.plan.replay.replay import COPYING, RECONFIGURING, UNFINISHED
from dilatant.report.pages.generations_page import Generation, write_generations_page
from dilatant.report.pages.page_links import link_pages
from dilatant.report.pages.perfetto import write_generations_trace
from dilatant.resilience.processes.coordinator_process import COMMIT, RunEvent
from dilatant.resilience.protocol.values import Task
from dilatant.resilience.status import RebuildRecord, read_rebuilds, read_status

PAGE = "generations.html"
TRACE = "generations.json"
"""The history's files in the run folder."""


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
            write_generations_page(run / PAGE, found, title, status.stopped)
            write_generations_trace(run / TRACE, found)
            link_pages(run)
