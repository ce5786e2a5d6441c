"""Timeline data for the page: columns of little-endian numbers in base64, sample lists stored once."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart
from dilatant.report.text.wording import ranks_text


def pack_chart(timeline: GanttChart, plan: Plan, title: str, span: float | None = None) -> dict[str, Any]:
    """Return the data that `timeline.js` draws; `rows` has one base64 column for each field of `GanttRow`.

    span: seconds of the whole width, for charts that share a scale; default: the step's seconds. 131,072 actions (1,024
    ranks) take 3.7 MB of page; as objects they would take 15 MB.
    """
    units = [unit.name for unit in plan.units]
    sample_sets: dict[tuple[int, ...], int] = {}
    kinds: dict[str, int] = {}
    rows = sorted(timeline.rows, key=lambda row: (row.lane, row.start))
    samples = [sample_sets.setdefault(row.samples, len(sample_sets)) for row in rows]
    kind = [kinds.setdefault(row.kind, len(kinds)) for row in rows]
    return {
        "title": title,
        "seconds": timeline.seconds,
        "span": max(span or 0.0, timeline.seconds),
        "units": units,
        "stages": [
            [units.index(placed.unit), placed.replica, placed.position, placed.stage.first, placed.stage.end]
            for placed in plan.stages()
        ],
        "lanes": [{"ranks": ranks_text(lane.ranks), "stages": list(lane.stages)} for lane in timeline.lanes],
        "idle": [dict(idle) for idle in timeline.idle],
        "kinds": list(kinds),
        "samples": [list(numbers) for numbers in sample_sets],
        "rows": {
            "lane": _column([row.lane for row in rows], "<u4"),
            "stage": _column([row.stage for row in rows], "<i4"),
            "kind": _column(kind, "<u4"),
            "microbatch": _column([row.microbatch for row in rows], "<i4"),
            "samples": _column(samples, "<u4"),
            "start": _column([row.start for row in rows], "<f4"),
            "seconds": _column([row.seconds for row in rows], "<f4"),
        },
    }


def _column(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")
