"""Oobleck (thesis, chapter 2): spot traces with recovery as long as it is here, against what no cost would leave."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dilatant.config.errors import UserError
from dilatant.plan.node_trace import NodeTrace, load_node_trace
from dilatant.plan.reactions import from_templates
from dilatant.plan.replay import RecoveryCosts, replay
from papers.oobleck_failures import FAULTS, MODELS, layer_bytes, templates_of
from papers.tables import Outcome, PaperTable

TRACES = {
    "EC2, as Oobleck's": "oobleck/scale_p3-trace.csv",
    "GCP, as Oobleck's": "oobleck/scale_gcp-trace.csv",
    "EC2, as Bamboo's": "bamboo/p3-trace.csv",
    "SkyPilot's, 16 nodes": "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-west-2a_v100_1.json",
}
COPY_BYTES_PER_SECOND = 3e9
LARGE, LARGE_BAR, SMALL_BAR = "GPT-3-6.7b", 0.90, 0.95
_FREE = RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0)


def measured_recovery(shared: Path, results: Path) -> list[PaperTable]:
    """One table, or none without recovery.json or traces."""
    file, traces = results / "recovery.json", _traces(shared / "traces")
    if not file.exists() or not traces:
        return []
    pause = _pause_seconds(json.loads(file.read_text(encoding="utf-8")))
    costs = RecoveryCosts(pause, COPY_BYTES_PER_SECOND, checkpoint_seconds=0.0)
    salvaging = replace(costs, keeps_pipelines=True)
    rows: list[tuple[Any, ...]] = []
    for name, trace in traces.items():
        for model in MODELS:
            sizes = MODELS[model]
            reaction = from_templates(
                templates_of(model), FAULTS, sizes.microbatches, layer_bytes=layer_bytes(model)
            )
            most, ours, kept = (
                replay(model, trace, reaction, sizes.batch, one).samples_per_second
                for one in (_FREE, costs, salvaging)
            )
            if most:
                rows.append((name, model, trace.mean_nodes, most, ours, ours / most, kept / most))
    if not rows:
        return []
    return [
        PaperTable(
            "Spot traces with recovery as measured here",
            "samples per second on spot traces, and the part of what would be left if recovery took no time",
            f"predicted: templates and steps as in Table 2.2, on up to {max(templates_of(LARGE))} nodes a pipeline; "
            f"{pause:.2f} s from a loss to the next step's begin, as benchmarks/recovery.py measured with the "
            f"quickstart's model on CPUs (recovery.json); state travels at {COPY_BYTES_PER_SECOND / 1e9:g} GB/s a "
            "node, which is assumed; an interrupted step is repeated, or, in the last column, what the pipelines "
            "had done of it that lost no node is kept, as `resilience.salvage` does",
            ("trace", "model", "mean nodes", "at no cost", "repeated", "of that", "salvaged, of that"),
            tuple(rows),
            tuple(
                outcome
                for column, what in ((5, "the step in hand repeated"), (6, "the step in hand salvaged"))
                for outcome in _outcomes(rows, column, what)
            ),
        )
    ]


def _outcomes(rows: list[tuple[Any, ...]], column: int, what: str) -> Iterator[Outcome]:
    small = min(row[column] for row in rows if row[1] != LARGE)
    large = min((row[column] for row in rows if row[1] == LARGE), default=0.0)
    yield Outcome(
        f"models up to 2.7b, {what}: part of the throughput at no cost",
        f"{SMALL_BAR:g}, our own bar",
        f"{small:.2f} at least",
        "agrees" if small >= SMALL_BAR else "falls short",
        "predicted",
    )
    yield Outcome(
        f"GPT-3 6.7b, {what}: part of the throughput at no cost",
        f"{LARGE_BAR:g}, our own bar; Oobleck's artifact 0.59 on EC2's trace",
        f"{large:.2f} at least",
        "agrees" if large >= LARGE_BAR else "falls short",
        "predicted",
    )


def _pause_seconds(measured: dict[str, Any]) -> float:
    """From the loss until survivors compute again; what the first step takes longer than others belongs to it."""
    first, step = median(kill["first step"] for kill in measured["kills"]), measured["step_seconds"]
    whole = median(kill["kill to committed step"] - kill["first step"] for kill in measured["kills"])
    return whole + max(0.0, first - step)


def _traces(folder: Path) -> dict[str, NodeTrace]:
    found = {}
    for name, file in TRACES.items():
        try:
            found[name] = load_node_trace(folder / file)
        except (OSError, UserError):
            continue
    return found
