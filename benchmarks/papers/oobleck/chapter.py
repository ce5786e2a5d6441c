"""Oobleck (thesis chapter 2): planning latency; its other tables are in failures."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.papers.oobleck import failures
from benchmarks.papers.oobleck.recovery import measured_recovery
from benchmarks.papers.tables import Outcome, PaperTable
from dilatant.plan.templates.templates import plan_templates

# Thesis Table 2.3: seconds for one template, by (nodes, GPUs per node), for these numbers of layers.
_LAYERS = (24, 32, 64, 96)
_LATENCY = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
_MICROBATCHES = 128
_TP_OVERHEAD = 0.06  # of a layer's time per doubling of the GPUs that share it


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    return [
        *([planning_latency()] if timed else []),
        *failures.under_failures(shared),
        *measured_recovery(shared, RESULTS),
    ]


def planning_latency() -> PaperTable:
    """Table 2.3. The paper plans one template; we plan those of every node count up to the named one at once."""
    _seconds(2, 2, 8, noise=0.0)  # compile
    rows: list[tuple[Any, ...]] = []
    for (nodes, gpus), paper in _LATENCY.items():
        for layers, there in zip(_LAYERS, paper, strict=True):
            typed, arbitrary = _seconds(nodes, gpus, layers, 0.0), _seconds(nodes, gpus, layers, 0.02)
            rows.append((nodes, gpus, layers, there, typed, arbitrary, there / typed, there / arbitrary))
    return latency_table(rows)


def latency_table(rows: Sequence[tuple[Any, ...]]) -> PaperTable:
    """The table of some measured rows."""
    factors = [row[6] for row in rows] + [row[7] for row in rows]
    theirs, ours = rows[-1][3] / rows[-4][3], rows[-1][5] / rows[-4][5]
    return PaperTable(
        "Thesis Table 2.3",
        "planning latency in seconds",
        "measured here (one thread); ours are the templates of all node counts 1..n, theirs one template on an unknown "
        "computer",
        (
            "nodes",
            "GPUs",
            "layers",
            "paper s",
            "ours s, equal layers",
            "ours s, all differ",
            "ratio",
            "ratio, all differ",
        ),
        tuple(rows),
        (
            Outcome(
                "seconds to plan, 36 cells, paper over ours",
                "1",
                f"{min(factors):,.0f} to {max(factors):,.0f}",
                "beats" if min(factors) > 1.0 else "falls short",
                "measured",
                "for n times the work and exact over whole plans; the ratio mixes computers and algorithms",
            ),
            Outcome(
                "growth from 24 to 96 layers at 24 x 8, all layers different",
                f"{theirs:.0f} x",
                f"{ours:.0f} x",
                "beats" if ours < theirs else "falls short",
                "measured",
                "the computer cancels",
            ),
        ),
        timed=True,
    )


def _seconds(nodes: int, gpus: int, layers: int, noise: float) -> float:
    draw = random.Random(layers)
    widths = [width for width in (1, 2, 4, 8) if width <= gpus]
    base = [0.01 * (1.0 + noise * draw.uniform(-1.0, 1.0)) for _ in range(layers)]
    costs = {width: [layer / width * (1.0 + _TP_OVERHEAD * math.log2(width)) for layer in base] for width in widths}
    best = math.inf
    for _ in range(3 if nodes * gpus * layers < 3000 else 1):
        started = time.perf_counter()
        plan_templates(costs, range(1, nodes + 1), gpus, _MICROBATCHES)
        best = min(best, time.perf_counter() - started)
    return best
