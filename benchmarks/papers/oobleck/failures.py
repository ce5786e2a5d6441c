"""Oobleck (thesis chapter 2): throughput while nodes are lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.papers.models import Part, gpt, seconds
from benchmarks.papers.oobleck.node_reactions import from_templates, mean_nodes
from benchmarks.papers.tables import Outcome, PaperTable, spread, untested
from dilatant.config.errors import UserError
from dilatant.cost.hardware import load_hardware
from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import load_node_trace
from dilatant.plan.replay.replay import Reaction, RecoveryCosts, Replay, RunningPipelines, replay
from dilatant.plan.templates.templates import LayerMemory, Template, compose_pipelines, plan_templates
from dilatant.planning.failures import restart_from_checkpoint

# Thesis Table 2.2, Oobleck's rows (samples/s), and Table 2.4's of Varuna with and without checkpoints.
_THROUGHPUT = {
    "BERT-large": {"6h": 287.10, "1h": 286.28, "10m": 282.11},
    "GPT-2": {"6h": 85.59, "1h": 85.42, "10m": 84.80},
    "GPT-3-medium": {"6h": 29.30, "1h": 29.21, "10m": 28.70},
    "GPT-3-2.7b": {"6h": 7.29, "1h": 7.23, "10m": 6.89},
    "GPT-3-6.7b": {"6h": 4.33, "1h": 4.22, "10m": 3.55},
}
_VARUNA = {
    "BERT-large": {"6h": (260.11, 275.88), "1h": (246.03, 273.85), "10m": (173.52, 264.16)},
    "GPT-3-6.7b": {"6h": (4.14, 4.61), "1h": (2.69, 4.29), "10m": (0.26, 1.98)},
}
_SPOT = {"P3": "scale_p3-trace.csv", "GCP": "scale_gcp-trace.csv"}


@dataclass(frozen=True, slots=True)
class _Model:
    """A trained model: layers, tokens of a sample, samples of a microbatch and of a global batch (thesis Table 2.1)."""

    parts: tuple[Part, ...]
    tokens: int
    microbatch: int
    batch: int

    @property
    def microbatches(self) -> int:
        return self.batch // self.microbatch


# BERT-large, GPT-2 and GPT-3 medium have 24 layers of 1,024; GPT-3 2.7b and 6.7b 32 of 2,560 and 4,096. The thesis
# tells no lengths; 512 for BERT and 1,024 or 2,048 for GPT are those of the models' own papers.
MODELS = {
    "BERT-large": _Model(gpt(24, 1024, 16, 30_522), 512, 32, 8192),
    "GPT-2": _Model(gpt(24, 1024, 16, 50_257), 1024, 32, 8192),
    "GPT-3-medium": _Model(gpt(24, 1024, 16, 50_257), 2048, 16, 8192),
    "GPT-3-2.7b": _Model(gpt(32, 2560, 32, 50_257), 2048, 2, 1024),
    "GPT-3-6.7b": _Model(gpt(32, 4096, 32, 50_257), 2048, 2, 1024),
}
_NODES, FAULTS = 30, 1


def under_failures(shared: Path) -> list[PaperTable]:
    """Return the tables for Tables 2.2 and 2.4, Figs. 2.1, 2.10, 2.11 and A.1."""
    folder = shared / "traces/oobleck"
    if not folder.exists():
        return []
    known = json.loads((folder / "throughput_by_nodes.json").read_text(encoding="utf-8"))
    return [
        by_nodes(known),
        controlled_failures(folder, known),
        checkpoints(folder, known),
        spot_instances(folder, known),
    ]


def by_nodes(known: Mapping[str, Any]) -> PaperTable:
    """Compare the throughput on fewer nodes by our templates with the input of Oobleck's simulator."""
    rows: list[tuple[Any, ...]] = []
    for name in MODELS:
        templates, microbatches = templates_of(name), MODELS[name].microbatches
        theirs = {int(nodes): rate for nodes, rate in known["throughput_by_nodes"][name].items() if rate}
        ours = {nodes: 1.0 / _composed(templates, nodes, microbatches) for nodes in theirs}
        off = [ours[n] / ours[_NODES] / (theirs[n] / theirs[_NODES]) for n in theirs if n != _NODES]
        rows.append(
            (name, microbatches, theirs[_NODES], MODELS[name].batch * ours[_NODES],
             theirs[15] / theirs[_NODES] if 15 in theirs else None,
             ours[15] / ours[_NODES] if 15 in ours else None, min(off), max(off))
        )  # fmt: skip
    distance = max(max(abs(row[6] - 1), abs(row[7] - 1)) for row in rows)
    return PaperTable(
        "Oobleck's throughput by nodes",
        "what 29 to 15 nodes keep of the throughput of 30",
        "predicted: our templates and compositions on the shipped analytic costs of an A40 (fp32 as TF32, blocks "
        "recomputed, f = 1), one GPU a node; theirs are the numbers that Oobleck's own simulator reads",
        (
            "model",
            "microbatches",
            "paper samples/s, 30 nodes",
            "ours samples/s",
            "paper, 15 of 30",
            "ours, 15 of 30",
            "least ours / paper",
            "most ours / paper",
        ),
        tuple(rows),
        (
            Outcome(
                "share of throughput that is left with fewer nodes, 74 cells",
                "1",
                f"{min(row[6] for row in rows):.2f} to {max(row[7] for row in rows):.2f} of the paper's",
                "agrees" if distance <= 0.15 else "falls short",
                "predicted",
            ),
            Outcome(
                "samples per second on 30 nodes",
                "1",
                f"{spread(row[3] / row[2] for row in rows)} of the paper's",
                "agrees" if all(abs(row[3] / row[2] - 1) <= 0.25 for row in rows) else "falls short",
                "predicted",
                "lengths of samples are not told and taken from the models' papers",
            ),
        ),
    )


def controlled_failures(folder: Path, known: Mapping[str, Any]) -> PaperTable:
    """Replay Table 2.2 with Oobleck's own numbers, and with the steps of our own templates."""
    rows: list[tuple[Any, ...]] = []
    for model, paper in _THROUGHPUT.items():
        batch, costs = known["global_batch"][model], _costs(known, model)
        own, level = _own_reaction(model, known)
        for period, expected in paper.items():
            trace = load_node_trace(folder / f"{period}.csv")
            theirs = replay(model, trace, _their_reaction(known, model), batch, costs).samples_per_second
            ours = replay(model, trace, own, batch, costs).samples_per_second * level
            kept = RecoveryCosts(costs.reconfigure_seconds, checkpoint_seconds=0.0, salvaged=1.0)
            salvaged = replay(model, trace, own, batch, kept).samples_per_second * level
            rows.append(
                (model, period, expected, theirs, theirs / expected, ours, ours / expected, salvaged,
                 salvaged / expected)
            )  # fmt: skip
    replayed, predicted = [row[4] for row in rows], [row[6] for row in rows]
    return PaperTable(
        "Thesis Table 2.2",
        "samples per second while one node is lost per period, 30 to 15 nodes",
        "replayed: throughput by nodes and recovery seconds of Oobleck's own simulator. Calibrated: the throughput of "
        "each "
        "set of nodes from our own templates and reinstantiations, at the paper's level for 30 nodes, recovery "
        "seconds of "
        "the paper",
        ("model", "period", "paper", "replayed", "ratio", "our templates", "ratio ", "work in flight kept", "ratio  "),
        tuple(rows),
        (
            Outcome(
                "15 cells from the paper's own throughput by nodes",
                "1",
                f"{spread(replayed)} of it",
                "agrees" if max(abs(one - 1) for one in replayed) <= 0.1 else "falls short",
                "replayed",
                "tests the arithmetic of the replay only",
            ),
            Outcome(
                "15 cells with our templates and reinstantiations",
                "1",
                f"{spread(predicted)} of it",
                "agrees"
                if max(abs(one - 1) for one in predicted) <= 0.1
                else "beats"
                if min(predicted) >= 0.9
                else "falls short",
                "calibrated",
                "level and recovery seconds are the paper's",
            ),
        ),
    )


def checkpoints(folder: Path, known: Mapping[str, Any]) -> PaperTable:
    """Replay Table 2.4 and Figs. 2.1, 2.11: the share of time that is left, and the loss of a grid that restarts."""
    rows: list[tuple[Any, ...]] = []
    for model, by_period in _VARUNA.items():
        batch = known["global_batch"][model]
        own, level = _own_reaction(model, known)
        grid = _scaled(restart_from_checkpoint(templates_of(model), MODELS[model].microbatches), model, batch)
        for period, (varuna, without) in by_period.items():
            trace = load_node_trace(folder / f"{period}.csv")
            ours = replay(model, trace, own, batch, _costs(known, model))
            free = replay(model, trace, own, batch, RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0))
            idle = replay(model, trace, grid, batch, RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0))
            rows.append(
                (model, period, varuna, without, _THROUGHPUT[model][period], _THROUGHPUT[model][period] / without,
                 ours.samples_per_second * level, idle.samples_per_second * level,
                 ours.samples_per_second / idle.samples_per_second, ours.samples_per_second / free.samples_per_second)
            )  # fmt: skip
    effective = [row[9] for row in rows]
    return PaperTable(
        "Thesis Table 2.4, Figs. 2.1, 2.11",
        "samples per second with restarts, with restarts whose checkpoints cost nothing, and with Oobleck",
        "the paper's Varuna, and ours: templates as in Table 2.2; a grid of equal pipelines that restarts for nothing, "
        "which is the most that any system with a grid can reach",
        (
            "model",
            "period",
            "paper Varuna",
            "paper Varuna, free checkpoints",
            "paper Oobleck",
            "paper Oobleck / free",
            "our templates",
            "our grid, free restarts",
            "ours / free grid",
            "of no-failure throughput",
        ),
        tuple(rows),
        (
            Outcome(
                "Oobleck over Varuna with free checkpoints, where failures are rare (6h)",
                f"{spread(row[5] for row in rows if row[1] == '6h')} x",
                f"{spread(row[8] for row in rows if row[1] == '6h')} x",
                "agrees" if all(abs(row[8] / row[5] - 1) <= 0.15 for row in rows if row[1] == "6h") else "falls short",
                "calibrated",
                "the gain of unequal pipelines over a grid alone; recovery seconds are the paper's",
            ),
            Outcome(
                "effective part of the no-failure throughput (Fig. 2.11)",
                "0.75 at least",
                f"{min(effective):.2f} at least",
                "agrees" if min(effective) >= 0.75 else "falls short",
                "calibrated",
                "recovery seconds are the paper's",
            ),
            untested(
                "Varuna's and Bamboo's seconds of restarting, saving and computing twice (Figs. 2.1, 2.11)",
                "bars without figures in the text",
                "neither system is here",
            ),
        ),
    )


def spot_instances(folder: Path, known: Mapping[str, Any]) -> PaperTable:
    """Replay both spot traces (Figs. 2.10 and A.1)."""
    rows: list[tuple[Any, ...]] = []
    for cloud, file in _SPOT.items():
        try:
            trace = load_node_trace(folder / file)
        except (OSError, UserError):
            continue
        for model in MODELS:
            batch, costs = known["global_batch"][model], _costs(known, model)
            own, level = _own_reaction(model, known)
            theirs = replay(model, trace, _their_reaction(known, model), batch, costs)
            ours: Replay = replay(model, trace, own, batch, costs)
            grid = _scaled(restart_from_checkpoint(templates_of(model), MODELS[model].microbatches), model, batch)
            idle = replay(model, trace, grid, batch, RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0))
            rows.append(
                (cloud, model, mean_nodes(trace), theirs.samples_per_second, ours.samples_per_second * level,
                 ours.samples_per_second * level / theirs.samples_per_second,
             ours.samples_per_second / idle.samples_per_second)
            )  # fmt: skip
    ratios = [row[5] for row in rows]
    return PaperTable(
        "Thesis Figs. 2.10, A.1",
        "average samples per second on the two spot traces",
        "replayed with Oobleck's own throughput by nodes, and calibrated with our templates (as in Table 2.2); "
        "averages of "
        "the figures are drawn, not printed",
        (
            "trace",
            "model",
            "mean nodes",
            "replayed",
            "our templates",
            "ours / replayed",
            "ours / grid with free restarts",
        ),
        tuple(rows),
        (
            Outcome(
                "average throughput on both traces with our templates",
                "Oobleck's numbers replayed",
                f"{spread(ratios)} of it",
                "agrees"
                if max(abs(one - 1) for one in ratios) <= 0.1
                else "beats"
                if min(ratios) >= 0.9
                else "falls short",
                "calibrated",
                "level and recovery seconds are the paper's",
            ),
            untested(
                "Oobleck over Varuna and Bamboo on spot traces", "up to 9.1 x", "neither system's costs are printed"
            ),
        ),
    )


@cache
def templates_of(name: str) -> dict[int, Template]:
    """Return the templates of all node counts on A40s, one GPU a node."""
    model = MODELS[name]
    hardware = load_hardware("A40")
    layers: list[float] = []
    state: list[float] = []
    kept: list[float] = []
    for part in model.parts:
        forward, inputs, weights = (
            model.microbatch * float(seconds((part,), hardware, model.tokens, of)) / part.count * _TF32
            for of in ("forward", "input_gradient", "weight_gradient")
        )
        again = forward if part.shape.attention_width else 0.0
        layers += [forward + again + inputs + weights] * part.count
        state += [16.0 * part.shape.parameters] * part.count
        kept += [4.0 * model.microbatch * model.tokens * part.shape.output_width] * part.count
    memory = LayerMemory({1: state}, {1: kept}, 0.9 * hardware.memory)
    return plan_templates({1: layers}, range(1, _NODES + 1), 1, model.microbatches, memory)


def layer_bytes(name: str) -> list[int]:
    """Return the bytes of every layer's weights and optimizer state, which a node that takes it over receives."""
    return [16 * int(part.shape.parameters) for part in MODELS[name].parts for _ in range(part.count)]


_TF32 = 2.0  # an A40's bf16 peak over its TF32 peak (74.8 TFLOP/s, data sheet)


def from_rates(step_seconds: Callable[[int], float]) -> Reaction:
    """Return a reaction by node count alone, for tables: `step_seconds(nodes)`, infinite if training is impossible."""

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        return RunningPipelines((tuple(sorted(alive)),), step_seconds(len(alive)))

    return react


def _composed(templates: Mapping[int, Template], nodes: int, microbatches: int) -> float:
    """Return the seconds of a step on `nodes` nodes."""
    try:
        return compose_pipelines(templates, nodes, FAULTS, microbatches).seconds
    except PlanError:
        return math.inf


def _own_reaction(name: str, known: Mapping[str, Any]) -> tuple[Reaction, float]:
    """Return our templates' reaction, and the factor that scales its throughput to the paper's level on 30 nodes."""
    model = MODELS[name]
    seconds_of_30 = _composed(templates_of(name), _NODES, model.microbatches)
    level = known["throughput_by_nodes"][name][str(_NODES)] * seconds_of_30 / model.batch
    reaction = from_templates(templates_of(name), FAULTS, model.microbatches)
    return _scaled(reaction, name, known["global_batch"][name]), level


def _scaled(reaction: Reaction, name: str, batch: int) -> Reaction:
    """Return the reaction with steps of `batch` samples, which is what Oobleck's simulator counts as one."""

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        after = reaction(before, alive)
        return replace(after, step_seconds=after.step_seconds * batch / MODELS[name].batch)

    return react


def _their_reaction(known: Mapping[str, Any], model: str) -> Reaction:
    rates = {int(nodes): rate for nodes, rate in known["throughput_by_nodes"][model].items()}
    batch = known["global_batch"][model]

    def step(nodes: int) -> float:
        rate = rates.get(min(nodes, _NODES), 0.0)
        return batch / rate if rate else math.inf

    return from_rates(step)


def _costs(known: Mapping[str, Any], model: str) -> RecoveryCosts:
    return RecoveryCosts(reconfigure_seconds=known["simulated_reconfiguration_s"][model], checkpoint_seconds=0.0)
