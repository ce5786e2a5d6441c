"""Perfetto trace of a measured step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dilatant.config.files.durable import write_durably
from dilatant.plan.plan import Plan
from dilatant.report.text.wording import ACTION_NAMES
from dilatant.schedule.measured import DataWait, MeasuredAction
from dilatant.schedule.schedule import Action
from dilatant.schedule.timeline import WAITING_FOR_DATA

FlowArrow = tuple[Action, Action]
"""(action that produces rows, action that consumes them)."""


def write_timeline(
    path: Path,
    actions: Sequence[MeasuredAction],
    plan: Plan,
    arrows: Iterable[FlowArrow] = (),
    waits: Sequence[DataWait] = (),
) -> None:
    """Write `timeline.json` in the trace event format, which ui.perfetto.dev and chrome://tracing open.

    Each rank has one track. Slices are named "<unit> <action>", from which Perfetto derives the colour; numbers are in
    their arguments. Arrows follow edges from the action that produces rows to the one that consumes them.
    """
    write_durably(path, json.dumps(trace_events(actions, plan, arrows, waits)) + "\n")


def trace_events(
    actions: Sequence[MeasuredAction],
    plan: Plan,
    arrows: Iterable[FlowArrow] = (),
    waits: Sequence[DataWait] = (),
) -> dict[str, Any]:
    """Return the document that `write_timeline` writes; times are microseconds since the first action or wait."""
    origin = min([*(one.start for one in actions), *(one.start for one in waits)], default=0.0)
    placed = plan.stages()
    held: dict[int, list[str]] = defaultdict(list)
    for stage in placed:
        for rank in stage.stage.ranks:
            held[rank].append(f"{stage.unit} {stage.replica}.{stage.position}")
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one training step"}}
    ]
    for rank in plan.ranks:
        name = f"rank {rank}: {', '.join(held[rank])}"
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": name}})
        events.append(
            {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
        )
    for wait in waits:
        events.append(
            {
                "ph": "X", "pid": 0, "tid": wait.rank, "name": WAITING_FOR_DATA, "cat": "wait",
                "ts": (wait.start - origin) * 1e6, "dur": wait.seconds * 1e6,
                "args": {"slowest samples": dict(wait.slowest)},
            }
        )  # fmt: skip
    found: dict[Action, MeasuredAction] = {}
    for measured in actions:
        action, stage = measured.action, placed[measured.action.stage]
        found[action] = measured
        common = {"ph": "X", "pid": 0, "tid": measured.rank}
        start = (measured.start - origin) * 1e6
        if measured.waited_for is not None:
            events.append(
                common
                | {
                    "name": "waiting",
                    "cat": "wait",
                    "ts": start,
                    "dur": measured.waited_seconds * 1e6,
                    "args": {"for rank": measured.waited_for},
                }
            )
        events.append(
            common
            | {
                "name": f"{measured.unit} {ACTION_NAMES[action.kind]}",
                "cat": measured.unit,
                "ts": start + measured.waited_seconds * 1e6,
                "dur": measured.seconds * 1e6,
                "args": {
                    "replica": stage.replica,
                    "stage": stage.position,
                    "layers": f"{stage.stage.first} to {stage.stage.end - 1}",
                    "microbatch": action.microbatch,
                    "samples": list(measured.samples),
                },
            }
        )
    for number, (producer, consumer) in enumerate(arrows):
        if producer not in found or consumer not in found:
            continue
        made, used = found[producer], found[consumer]
        arrow = {"pid": 0, "name": "rows", "cat": "edge", "id": number}
        # An arrow binds to the slice at its time: just before the producer's end, just after the consumer's start.
        left = (made.end - origin) * 1e6
        right = (used.start + used.waited_seconds - origin) * 1e6
        events.append(arrow | {"ph": "s", "tid": made.rank, "ts": left - min(0.01, made.seconds * 5e5)})
        events.append(
            arrow | {"ph": "f", "bp": "e", "tid": used.rank, "ts": right + min(0.01, used.seconds * 5e5)}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
