"""A measured step for Perfetto, and a summary of who worked and who waited for whom."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilatant.plan.plan import Plan
from dilatant.schedule.measured import MeasuredAction
from dilatant.schedule.schedule import Action, ActionKind

Arrow = tuple[Action, Action]
"""The action that makes rows, and the one that uses them."""

KIND_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank in one step: seconds of work, seconds waited for rows by the rank awaited, and the rest (`idle`:
    before its first and after its last action, and between them)."""

    rank: int
    busy: float
    waiting: dict[int, float]
    idle: float


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage in one step: seconds by kind of action, and the share of the step in which its rank did not work."""

    stage: int
    unit: str
    replica: int
    position: int
    seconds: dict[str, float]
    bubble: float


@dataclass(frozen=True, slots=True)
class StepSummary:
    """`seconds` from the first action's start to the last one's end, over all ranks."""

    seconds: float
    ranks: tuple[RankSummary, ...]
    stages: tuple[StageSummary, ...]


def summarize(actions: Sequence[MeasuredAction], plan: Plan) -> StepSummary:
    """Who worked and who waited. Raises ValueError without actions."""
    if not actions:
        raise ValueError("nothing was measured")
    seconds = max(a.end for a in actions) - min(a.start for a in actions)
    busy: dict[int, float] = defaultdict(float)
    waiting: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    by_stage: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for action in actions:
        busy[action.rank] += action.seconds
        by_stage[action.action.stage][action.action.kind.value] += action.seconds
        if action.waited_for is not None:
            waiting[action.rank][action.waited_for] += action.waited_seconds
    ranks = tuple(
        RankSummary(rank, busy[rank], dict(waiting[rank]), seconds - busy[rank] - sum(waiting[rank].values()))
        for rank in plan.ranks
    )
    stages = tuple(
        StageSummary(
            placed.index,
            placed.unit,
            placed.replica,
            placed.position,
            dict(by_stage[placed.index]),
            1 - busy[placed.stage.ranks[0]] / seconds if seconds else 0.0,
        )
        for placed in plan.stages()
    )
    return StepSummary(seconds, ranks, stages)


def describe(summary: StepSummary) -> str:
    """The summary as a table in plain text."""
    lines = [f"step {summary.seconds * 1e3:.1f} ms"]
    for rank in summary.ranks:
        waits = ", ".join(
            f"{seconds * 1e3:.1f} ms for rank {other}" for other, seconds in sorted(rank.waiting.items())
        )
        share = rank.busy / summary.seconds if summary.seconds else 0.0
        lines.append(f"rank {rank.rank}: busy {share:6.1%}" + (f", waited {waits}" if waits else ""))
    for stage in summary.stages:
        work = ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in stage.seconds.items())
        lines.append(
            f"{stage.unit} replica {stage.replica} stage {stage.position}: {work or 'no work'}, "
            f"bubble {stage.bubble:.1%}"
        )
    return "\n".join(lines)


def write_timeline(
    path: Path, actions: Sequence[MeasuredAction], plan: Plan, arrows: Iterable[Arrow] = ()
) -> None:
    """Write `timeline.json` in the trace event format, which ui.perfetto.dev and chrome://tracing open.

    One track a rank. Slices carry the name "<unit> <action>", from which Perfetto takes the colour; numbers are in
    their arguments. Arrows lead along edges from the action that makes rows to the one that uses them.
    """
    path.write_text(json.dumps(trace_events(actions, plan, arrows)) + "\n", encoding="utf-8")


def trace_events(
    actions: Sequence[MeasuredAction], plan: Plan, arrows: Iterable[Arrow] = ()
) -> dict[str, Any]:
    """The document that `write_timeline` writes; times are microseconds since the first action's start."""
    origin = min((action.start for action in actions), default=0.0)
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
                "name": f"{measured.unit} {KIND_NAMES[action.kind]}",
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
        # An arrow binds to the slice around its time: just before the end of one, just after the start of the other.
        left = (made.end - origin) * 1e6
        right = (used.start + used.waited_seconds - origin) * 1e6
        events.append(arrow | {"ph": "s", "tid": made.rank, "ts": left - min(0.01, made.seconds * 5e5)})
        events.append(
            arrow | {"ph": "f", "bp": "e", "tid": used.rank, "ts": right + min(0.01, used.seconds * 5e5)}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
