"""Perfetto trace of a run's generations: memberships, losses, and the phases of each recovery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilatant.config.files.durable import write_durably
from dilatant.report.pages.generations_page import Generation
from dilatant.report.text.wording import counted

MEMBERSHIP, RECOVERY = 0, 1
"""Track numbers."""


def write_generations_trace(path: Path, generations: Sequence[Generation]) -> None:
    """Write a document in the trace event format, which ui.perfetto.dev opens. Raises OSError."""
    write_durably(path, json.dumps(trace_events(generations)) + "\n")


def trace_events(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return a slice per generation, recovery phases on a second track, and a mark at each change of membership.
    Times are microseconds since the first generation."""
    origin = generations[0].time if generations else 0.0
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "generations"}},
        *(
            {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in ((MEMBERSHIP, "membership"), (RECOVERY, "recovery"))
        ),
    ]
    for one, following in zip(generations, [*generations[1:], None]):
        begin = (one.time - origin) * 1e6
        end = begin + one.seconds * 1e6 if following is None else (following.time - origin) * 1e6
        changed = {"left": list(one.left), "joined": list(one.joined), "reason": one.reason}
        about = {"step": one.step, **changed, "pairs kept": one.kept, "pairs run again": one.missing}
        name = f"generation {one.number}: {counted(one.members, 'node')}"
        common = {"pid": 0, "ts": begin, "cat": "membership"}
        events.append(
            common | {"ph": "X", "tid": MEMBERSHIP, "name": name, "dur": end - begin, "args": about}
        )
        if one.left or one.joined:
            gone = f"lost {', '.join(one.left)}" if one.left else f"joined {', '.join(one.joined)}"
            events.append(common | {"ph": "i", "tid": RECOVERY, "s": "p", "name": gone, "args": changed})
        at = begin
        for phase, seconds in one.phases.items():
            events.append(
                {"ph": "X", "pid": 0, "tid": RECOVERY, "cat": "recovery", "name": phase, "ts": at, "dur": seconds * 1e6}
            )  # fmt: skip
            at += seconds * 1e6
    return {"traceEvents": events, "displayTimeUnit": "ms"}
