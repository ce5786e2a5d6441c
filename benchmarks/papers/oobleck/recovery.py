"""Oobleck (thesis, chapter 2): spot traces with recovery times as measured here, compared with recovery at no cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.papers.oobleck.failures import FAULTS, MODELS, layer_bytes, templates_of
from benchmarks.papers.oobleck.node_reactions import from_templates, mean_nodes
from benchmarks.papers.tables import Outcome, PaperTable
from dilatant.config.errors import UserError
from dilatant.plan.replay.node_trace import NodeTrace, load_node_trace
from dilatant.plan.replay.replay import (
    COPYING,
    RECONFIGURING,
    RESTARTING,
    ROLLED_BACK,
    SAVING,
    TOO_FEW,
    UNFINISHED,
    RecoveryCosts,
    Replay,
    replay,
)
from dilatant.planning.failures import without_cost

TRACES = {
    "EC2, as Oobleck's": "oobleck/scale_p3-trace.csv",
    "GCP, as Oobleck's": "oobleck/scale_gcp-trace.csv",
    "EC2, as Bamboo's": "bamboo/p3-trace.csv",
    "SkyPilot's, 16 nodes": "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-west-2a_v100_1.json",
}
COPY_BYTES_PER_SECOND = 3e9
TEN_GIGABIT = 1.25e9
SLOW_PAUSE_SECONDS = 5.0
CHECKPOINT_SECONDS = 100.0
LARGE, LARGE_BAR, SMALL_BAR = "GPT-3-6.7b", 0.90, 0.95
_FREE = RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0)
_CAUSES = {
    "unfinished steps": (UNFINISHED,),
    "copying": (COPYING,),
    "checkpoints": (SAVING,),
    "reconfiguring": (RECONFIGURING,),
    "restarts": (RESTARTING, ROLLED_BACK),
}


@dataclass(frozen=True, slots=True)
class _Row:
    """A model on a trace: samples per second if recovery costs nothing, and the parts of them that are left. lost:
    cause → part of the time in which there were enough nodes, with steps salvaged."""

    trace: str
    model: str
    mean_nodes: float
    most: float
    repeated: float
    salvaged: float
    lost: tuple[float, ...]
    slow_pause: float
    ten_gigabit: float

    def cells(self) -> tuple[Any, ...]:
        left = (self.most, self.repeated, self.salvaged)
        return (self.trace, self.model, self.mean_nodes, *left, *self.lost, self.slow_pause, self.ten_gigabit)


def measured_recovery(shared: Path, results: Path) -> list[PaperTable]:
    """Return one table, or none without recovery.json or traces."""
    file, traces = results / "recovery.json", _traces(shared / "traces")
    if not file.exists() or not traces:
        return []
    pause = _pause_seconds(json.loads(file.read_text(encoding="utf-8")))
    rows = [row for name, trace in traces.items() for model in MODELS if (row := _row(name, trace, model, pause))]
    if not rows:
        return []
    return [
        PaperTable(
            "Spot traces with recovery as measured here",
            "samples per second on spot traces, and the part of what would be left if recovery took no time",
            f"predicted: templates and steps as in Table 2.2, on up to {max(templates_of(LARGE))} nodes a pipeline; "
            f"{pause:.2f} s from a loss to the next step's begin, as benchmarks/recovery/recovery.py measured with the "
            f"quickstart's model on CPUs (recovery.json); state, 16 bytes a weight, travels at "
            f"{COPY_BYTES_PER_SECOND / 1e9:g} GB/s a node, which is assumed (Oobleck's cluster had 25), and so fast it "
            f"is read off the devices for a checkpoint, every {CHECKPOINT_SECONDS:g} s, but at most one a step; an "
            "interrupted step is repeated, or what the pipelines had done of it that lost no node is kept, but for one "
            "microbatch's way through a pipeline, as `resilience.salvage` does; nobody is warned of a loss. The five "
            "parts of time are lost where it is; last what is left where changes take longer",
            (
                "trace",
                "model",
                "mean nodes",
                "at no cost",
                "repeated",
                "salvaged",
                *_CAUSES,
                f"salvaged, {SLOW_PAUSE_SECONDS:g} s a change",
                "salvaged, 10 Gb/s",
            ),
            tuple(row.cells() for row in rows),
            (
                *_outcomes(rows, "the step in hand repeated", lambda row: row.repeated),
                *_outcomes(rows, "the step in hand salvaged", lambda row: row.salvaged),
                *_outcomes(rows, f"salvaged, {SLOW_PAUSE_SECONDS:g} s a change", lambda row: row.slow_pause),
                *_outcomes(rows, "salvaged, 10 Gb/s between nodes", lambda row: row.ten_gigabit),
            ),
        )
    ]


def _row(name: str, trace: NodeTrace, model: str, pause: float) -> _Row | None:
    """Return the row of a model on a trace; None if the model never trains."""
    sizes = MODELS[model]
    reaction = from_templates(templates_of(model), FAULTS, sizes.microbatches, layer_bytes=layer_bytes(model))
    nodes = max(alive for _, alive in trace.counts())
    step = reaction(None, frozenset(range(nodes))).step_seconds

    def run(pause: float, bytes_per_second: float, keeps: bool = True) -> Replay:
        costs = RecoveryCosts(
            pause,
            bytes_per_second,
            checkpoint_steps=max(1, round(CHECKPOINT_SECONDS / step)),
            checkpoint_seconds=sum(layer_bytes(model)) / nodes / bytes_per_second,
            keeps_pipelines=keeps,
        )
        return replay(model, trace, reaction, sizes.batch, costs)

    most = replay(model, trace, without_cost(reaction), sizes.batch, _FREE).samples
    if not most:
        return None
    kept = run(pause, COPY_BYTES_PER_SECOND)
    there = kept.seconds - kept.lost.get(TOO_FEW, 0.0)
    return _Row(
        name,
        model,
        mean_nodes(trace),
        most / kept.seconds,
        run(pause, COPY_BYTES_PER_SECOND, keeps=False).samples / most,
        kept.samples / most,
        tuple(sum(kept.lost.get(cause, 0.0) for cause in causes) / there for causes in _CAUSES.values()),
        run(SLOW_PAUSE_SECONDS, COPY_BYTES_PER_SECOND).samples / most,
        run(pause, TEN_GIGABIT).samples / most,
    )


def _outcomes(rows: list[_Row], what: str, left: Callable[[_Row], float]) -> Iterator[Outcome]:
    models = (
        (f"models up to 2.7b, {what}", [row for row in rows if row.model != LARGE], SMALL_BAR, ""),
        (
            f"GPT-3 6.7b, {what}",
            [row for row in rows if row.model == LARGE],
            LARGE_BAR,
            "; Oobleck's artifact 0.59 on EC2's trace",
        ),
    )
    for claim, those, bar, theirs in models:
        if those:
            least = min(those, key=left)
            yield Outcome(
                f"{claim}: part of the throughput at no cost",
                f"{bar:g}, our own bar{theirs}",
                f"{left(least):.2f} at least",
                "agrees" if left(least) >= bar else "falls short",
                "predicted",
                f"least: {least.model} on the trace of {least.trace}; salvaged, it loses "
                + ", ".join(f"{part:.1%} to {cause}" for cause, part in zip(_CAUSES, least.lost) if part >= 5e-4),
            )


def _pause_seconds(measured: dict[str, Any]) -> float:
    """Return the seconds from the loss until survivors compute again; extra time of the first step belongs to it."""
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
