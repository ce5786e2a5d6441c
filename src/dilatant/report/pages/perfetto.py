"""Perfetto traces, which ui.perfetto.dev and chrome://tracing open: of a measured step, and of a run's generations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilatant.config.files.durable import write_durably
from dilatant.plan.plan import Plan
from dilatant.report.pages.generations_page import Generation
from dilatant.report.text.wording import ACTION_NAMES, counted
from dilatant.schedule.schedule import Action, DataWait, MeasuredAction
from dilatant.schedule.timeline import WAITING_FOR_DATA

FlowArrow = tuple[Action, Action]
"""(action that produces rows, action that consumes them)."""

_MEMBERSHIP, _RECOVERY = 0, 1
"""Track numbers of a trace of generations."""


class _Trace:
    """A document in the trace event format; times are given in seconds, and count from `origin`."""

    def __init__(self, title: str, tracks: Mapping[int, str], origin: float) -> None:
        self._origin = origin
        self._events: list[dict[str, Any]] = []
        self._add("M", name="process_name", args={"name": title})
        for number, name in tracks.items():
            self._add("M", number, name="thread_name", args={"name": name})
            self._add("M", number, name="thread_sort_index", args={"sort_index": number})

    def _add(self, phase: str, track: int = 0, **fields: Any) -> None:
        self._events.append({"ph": phase, "pid": 0, "tid": track, **fields})

    def slice(self, track: int, name: str, category: str, start: float, seconds: float, **args: Any) -> None:
        self._add("X", track, name=name, cat=category, ts=self._at(start), dur=seconds * 1e6, args=args)

    def mark(self, phase: str, track: int, name: str, category: str, time: float, **fields: Any) -> None:
        self._add(phase, track, name=name, cat=category, ts=self._at(time), **fields)

    def _at(self, time: float) -> float:
        return (time - self._origin) * 1e6

    def document(self) -> dict[str, Any]:
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}


def write_timeline(
    path: Path,
    actions: Sequence[MeasuredAction],
    plan: Plan,
    arrows: Iterable[FlowArrow] = (),
    waits: Sequence[DataWait] = (),
) -> None:
    """Write `timeline.json`: each rank has one track, each action a slice.

    Slices are named "<unit> <action>", from which Perfetto derives the colour; numbers are in their arguments. Arrows
    follow edges from the action that produces rows to the one that consumes them. Raises OSError.
    """
    write_durably(path, json.dumps(trace_events(actions, plan, arrows, waits)) + "\n")


def trace_events(
    actions: Sequence[MeasuredAction], plan: Plan, arrows: Iterable[FlowArrow] = (), waits: Sequence[DataWait] = ()
) -> dict[str, Any]:
    """Return the document that `write_timeline` writes; times are microseconds since the first action or wait."""
    placed = plan.stages()
    tracks = {
        rank: f"rank {rank}: {', '.join(f'{one.unit} {one.replica}.{one.position}' for one in held)}"
        for rank, held in plan.stages_of_rank.items()
    }
    origin = min([*(one.start for one in actions), *(one.start for one in waits)], default=0.0)
    trace = _Trace("one training step", tracks, origin)
    for wait in waits:
        slowest = {"slowest samples": dict(wait.slowest)}
        trace.slice(wait.rank, WAITING_FOR_DATA, "wait", wait.start, wait.seconds, **slowest)
    by_action = {measured.action: measured for measured in actions}
    for one in actions:
        action, stage = one.action, placed[one.action.stage]
        if one.waited_for is not None:
            awaited = {"for rank": one.waited_for}
            trace.slice(one.rank, "waiting", "wait", one.start, one.waited_seconds, **awaited)
        trace.slice(
            one.rank,
            f"{one.unit} {ACTION_NAMES[action.kind]}",
            one.unit,
            one.start + one.waited_seconds,
            one.seconds,
            replica=stage.replica,
            stage=stage.position,
            layers=f"{stage.stage.first} to {stage.stage.end - 1}",
            microbatch=action.microbatch,
            samples=list(one.samples),
        )
    for number, (producer, consumer) in enumerate(arrows):
        if producer not in by_action or consumer not in by_action:
            continue
        source, target = by_action[producer], by_action[consumer]
        # An arrow binds to the slice at its time: just before the producer's end, just after the consumer's start.
        left = source.end - min(1e-8, source.seconds / 2)
        right = target.start + target.waited_seconds + min(1e-8, target.seconds / 2)
        trace.mark("s", source.rank, "rows", "edge", left, id=number)
        trace.mark("f", target.rank, "rows", "edge", right, id=number, bp="e")
    return trace.document()


def write_generations_trace(path: Path, generations: Sequence[Generation]) -> None:
    """Write a slice per generation, recovery phases on a second track, and a mark at each change of membership. Raises
    OSError."""
    tracks = {_MEMBERSHIP: "membership", _RECOVERY: "recovery"}
    trace = _Trace("generations", tracks, generations[0].time if generations else 0.0)
    for one, following in zip(generations, [*generations[1:], None]):
        change = {"left": list(one.left), "joined": list(one.joined), "reason": one.reason}
        facts = {"step": one.step, **change, "pairs kept": one.kept, "pairs run again": one.missing}
        name = f"generation {one.number}: {counted(one.members, 'node')}"
        seconds = one.seconds if following is None else following.time - one.time
        trace.slice(_MEMBERSHIP, name, "membership", one.time, seconds, **facts)
        if one.left or one.joined:
            what = f"lost {', '.join(one.left)}" if one.left else f"joined {', '.join(one.joined)}"
            trace.mark("i", _RECOVERY, what, "membership", one.time, s="p", args=change)
        begin = one.time
        for phase, seconds in one.phases.items():
            trace.slice(_RECOVERY, phase, "recovery", begin, seconds)
            begin += seconds
    write_durably(path, json.dumps(trace.document()) + "\n")
