"""DistTrain: orchestration of disaggregated modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.disttrain.case import (
    BATCH,
    GPUS,
    MEGATRON_STAGES,
    NODE,
    SEQUENCE,
    by_operations,
    case,
    hardware,
    megatron,
    mfu,
    samples,
    units,
)
from benchmarks.papers.disttrain.orchestrate import ModuleCost, orchestrate
from benchmarks.papers.disttrain.order import disttrain
from benchmarks.papers.models import DISTTRAIN_LLM, backward, seconds
from benchmarks.papers.planner import layout_text
from benchmarks.papers.searches import Mode
from benchmarks.papers.tables import Outcome, PaperTable, in_range, spread

_LARGE, _LARGE_BATCH = 1296, 1920
_TABLE_2 = {1296: (1920, 0.922), 648: (960, 0.641), 324: (480, 0.441), 112: (240, 0.133)}
_FROZEN: Mapping[str, frozenset[str]] = {
    "all modules frozen": frozenset(),
    "encoder trains": frozenset({"vision"}),
    "LLM trains": frozenset({"language"}),
    "generator trains": frozenset({"generator"}),
}


def orchestration_time(shared: Path) -> PaperTable:
    """Table 2: milliseconds to find the layout of MLLM-72B."""
    device = hardware()
    drawn = samples(shared, "72B", 64)
    mean = {"vision": drawn.patches.mean(), "language": float(SEQUENCE), "generator": drawn.images.mean()}
    modules = {}
    for unit in units("72B"):
        by_degree = {
            tp: float(
                seconds(unit.parts, device, mean[unit.name], tp=tp)
                + backward(unit.parts, device, mean[unit.name], tp)
            )
            for tp, _ in unit.degrees
        }  # fmt: skip
        weights = sum(part.count * part.shape.parameters for part in unit.parts)
        layers = sum(part.count for part in unit.parts)
        modules[unit.name] = ModuleCost(unit.name, layers, by_degree, 6 * weights, 12 * weights)
    rows: list[tuple[Any, ...]] = []
    for gpus, (batch, paper) in _TABLE_2.items():
        answers = [
            orchestrate([modules["vision"]], modules["language"], [modules["generator"]], gpus, batch, 1, device.memory)
            for _ in range(4)
        ]
        found = min(answer.wall_seconds for answer in answers)
        layout = ", ".join(f"{one.name} {one.replicas} x tp{one.tp} x pp{one.pp}" for one in answers[0].modules)
        rows.append((gpus, batch, 1e3 * paper, 1e3 * found, paper / found, layout, answers[0].proven))
    return orchestration_table(rows)


def orchestration_table(rows: Sequence[tuple[Any, ...]]) -> PaperTable:
    """The table of some measured rows."""
    ratios = [row[4] for row in rows]
    return PaperTable(
        "DistTrain Table 2",
        "milliseconds to orchestrate MLLM-72B",
        "measured here (one thread); costs modelled",
        ("GPUs", "global batch", "paper ms", "ours ms", "ratio", "our layout", "optimal"),
        tuple(rows),
        (
            Outcome(
                "milliseconds to find the layout, paper over ours",
                "1",
                f"{min(ratios):.0f} to {max(ratios):.0f}",
                "beats" if min(ratios) > 1 and all(row[6] for row in rows) else "falls short",
                "measured",
                "to the integer optimum; the paper relaxes to a convex program, whose rounding is left open",
            ),
        ),
        timed=True,
    )


def large_scale(shared: Path) -> PaperTable:
    """Figs. 15 and 16: 1,296 GPUs and a batch of 1,920, against Megatron's rigid layout."""
    rows: list[tuple[Any, ...]] = []
    for model in DISTTRAIN_LLM:
        one = case(shared, model, _LARGE, _LARGE_BATCH)
        rigid, gpus, _ = megatron(one, model)
        found = one.search(Mode.DISTTRAIN, (1,), policy=disttrain)
        rigid_share = mfu(one, gpus, rigid)
        if found is None:
            rows.append((f"MLLM-{model}", "no layout fits", None, None, gpus, rigid_share, None, None, None))
            continue
        own = one.cluster.num_devices - found.winner.idle_devices
        share = mfu(one, own, found.seconds)
        rows.append(
            (f"MLLM-{model}", layout_text(found.winner.plan), own, share, gpus, rigid_share,
             share / rigid_share, rigid / found.seconds, found.winner.score.sync_seconds / found.seconds)
        )  # fmt: skip
    placed = [row for row in rows if row[2] is not None]

    def over(column: int, models: tuple[str, ...], what: str, low: float, high: float) -> Outcome:
        own = [row[column] for row in placed if str(row[0]).removeprefix("MLLM-") in models]
        if len(own) < len(models):
            ours = f"{spread(own)}, {len(models) - len(own)} without a layout" if own else "no layout"
            return Outcome(what, f"{low} to {high}", ours, "falls short", "predicted", _NO_LAYOUT)
        return in_range(what, low, high, (min(own), max(own)), "predicted")

    everything = tuple(DISTTRAIN_LLM)
    return PaperTable(
        "DistTrain Figs. 15, 16",
        f"MFU and throughput on up to {_LARGE:,} GPUs, batch {_LARGE_BATCH:,}",
        "predicted: our mode disttrain and the rigid layout of 8.1 on the shipped analytic costs, exact simulation "
        "with gradient sync; COCO image sizes (real), texts modelled",
        (
            "model", "layout", "GPUs", "MFU", "Megatron GPUs", "Megatron MFU", "MFU x", "throughput x", "sync / step",
        ),
        tuple(rows),
        (
            over(3, everything, "MFU of DistTrain", 0.518, 0.547),
            over(6, ("9B", "15B"), "MFU over Megatron's, 9B and 15B", 1.7, 2.8),
            over(7, ("9B", "15B"), "throughput over Megatron's, 9B and 15B", 1.7, 2.2),
            over(6, ("72B",), "MFU over Megatron's, 72B", 1.2, 1.2),
            over(7, ("72B",), "throughput over Megatron's, 72B", 1.3, 1.3),
        ),
        (
            f"Of our steps {spread(row[8] for row in placed)} is gradient sync that the last backward cannot hide; "
            "the paper's objective leaves it out.",
            "Single bars of the figures are not in the text and are not compared.",
        ),
    )  # fmt: skip


_NO_LAYOUT = "mode disttrain finds no layout that fits memory in simulation"


def orchestration_gain(shared: Path) -> PaperTable:
    """Fig. 17: MFU and throughput against Megatron's rigid layout and against GPUs by FLOPs, and our own search."""
    rows: list[tuple[Any, ...]] = []
    for model in DISTTRAIN_LLM:
        one = case(shared, model, GPUS, BATCH[model])
        rigid, rigid_gpus, _ = megatron(one, model)
        flops, flops_gpus = by_operations(one, model)
        found = one.search(Mode.DISTTRAIN, (1, 2), policy=disttrain)
        best = one.search(None, (1, 2))
        assert found is not None, model
        assert best is not None, model
        own = GPUS - found.winner.idle_devices
        share = mfu(one, own, found.seconds)
        rows.append(
            (f"MLLM-{model}", layout_text(found.winner.plan), own, share, rigid_gpus,
             share / mfu(one, rigid_gpus, rigid), rigid / found.seconds, flops_gpus,
             share / mfu(one, flops_gpus, flops), flops / found.seconds,
             found.seconds / best.seconds, layout_text(best.winner.plan))
        )  # fmt: skip
    factors = [row[index] for row in rows for index in (5, 8)]
    idle = [2 * NODE / (NODE * (MEGATRON_STAGES[model] + 2)) for model in DISTTRAIN_LLM]
    ours = [row[10] for row in rows]
    falling = [row[5] for row in rows]
    return PaperTable(
        "DistTrain Fig. 17",
        "disaggregated orchestration against Megatron's rigid layout and GPUs handed out by FLOPs, and our own search",
        f"predicted as for Figs. 15 and 16, on {GPUS} GPUs",
        (
            "model",
            "layout",
            "GPUs",
            "MFU",
            "Megatron GPUs",
            "MFU x",
            "throughput x",
            "by FLOPs GPUs",
            "MFU x ",
            "throughput x ",
            "our search over DistTrain",
            "our layout",
        ),
        tuple(rows),
        (
            in_range(
                "MFU over both baselines",
                1.3,
                2.7,
                (min(factors), max(factors)),
                "predicted",
                note="our costs are counted from operations as well, which favours GPUs by FLOPs",
            ),
            in_range(
                "throughput over both baselines",
                1.4,
                2.7,
                (min(row[i] for row in rows for i in (6, 9)), max(row[i] for row in rows for i in (6, 9))),
                "predicted",
            ),
            Outcome(
                "gain over Megatron falls with the size of the LLM",
                "falls",
                " > ".join(f"{one:.2f}" for one in falling),
                "agrees" if falling == sorted(falling, reverse=True) else "falls short",
                "predicted",
                f"the rigid layout gives encoder and generator {idle[0]:.0%} of all GPUs with 9B, {idle[-1]:.0%} with "
                "72B",
            ),
            Outcome(
                "our search over DistTrain's orchestration",
                "1.00",
                f"{spread(ours)}",
                "beats" if min(ours) > 1.0 else "agrees" if min(ours) > 0.99 else "falls short",
                "predicted",
                "the search optimises the simulator that scores both; microbatches in DistTrain's order there, "
                "balanced here",
            ),
        ),
    )


def frozen_training(shared: Path) -> PaperTable:
    """Figs. 19 and 20: modules frozen in turn, projectors trained."""
    rows: list[tuple[Any, ...]] = []
    for setting, trains in _FROZEN.items():
        for model in DISTTRAIN_LLM:
            one = case(shared, model, GPUS, BATCH[model], trains)
            rigid, gpus, _ = megatron(one, model)
            found = one.search(Mode.DISTTRAIN, (1, 2), policy=disttrain)
            assert found is not None
            own = GPUS - found.winner.idle_devices
            gain = rigid / found.seconds
            rows.append((setting, f"MLLM-{model}", layout_text(found.winner.plan), own, gpus, gain * gpus / own, gain))
    share, rate = [row[5] for row in rows], [row[6] for row in rows]
    return PaperTable(
        "DistTrain Figs. 19, 20",
        "MFU and throughput over Megatron's rigid layout when modules are frozen",
        f"predicted as for Fig. 17, on {GPUS} GPUs",
        ("setting", "model", "layout", "GPUs", "Megatron GPUs", "MFU x", "throughput x"),
        tuple(rows),
        (
            in_range("MFU over Megatron's, 12 cases", 1.4, 2.9, (min(share), max(share)), "predicted"),
            in_range("throughput over Megatron's, 12 cases", 1.2, 2.9, (min(rate), max(rate)), "predicted"),
        ),
    )
