"""Predictions of measured steps and bytes: how far they are off, whether they choose well, and fits in turn."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.papers.corpus.programs import Sums
from benchmarks.papers.corpus.reasons import REASONS
from benchmarks.papers.corpus.rows import BALANCED, Measured, MeasuredMemory, measured_memory, measured_runs, read_lines
from benchmarks.papers.models import PaperUnit, cost_model, model_spec, parameters
from benchmarks.papers.planner import Case, even_chain, same_samples
from dilatant.config.degrees import Degrees
from dilatant.cost.analytic import BESIDE, MEGATRON, analytic_cost
from dilatant.cost.hardware import load_hardware
from dilatant.cost.memory import ParameterBytes
from dilatant.cost.published_runs import PublishedRun
from dilatant.plan import Plan, PlanScore
from dilatant.plan.cluster import cluster_of
from dilatant.plan.costs.sync_time import sync_seconds
from dilatant.plan.rank_mapping import RankOrder


def simulated(case: Case, plan: Plan, microbatches: int, schedule: str, sums: Sums) -> PlanScore:
    """Return the simulated step, with gradients summed beside the last backward or after it."""
    if sums.overlap:
        return case.score([plan], microbatches, schedule=schedule)
    alone = replace(case, rules=replace(case.rules, gradient=0.0))  # nothing is summed
    score = alone.score([plan], microbatches, schedule=schedule)
    after = sync_seconds(plan, model_spec(case.units), case.cluster, case.rules).longest
    return replace(score, seconds=score.seconds + after)


def predicted_seconds(run: Measured) -> float:
    """Return the seconds of a step of a measured run."""
    unit = PaperUnit("language", run.parts, (), None, ((run.tp, run.cp),), run.recompute, run.runner)
    gpus, layers, sums = run.tp * run.cp * run.pp * run.dp, sum(part.count for part in run.parts), run.sums
    cluster = cluster_of(run.hardware, -(-gpus // run.per_node), min(gpus, run.per_node))
    rules = ParameterBytes(
        zero=run.zero, ranks_per_node=8 if run.zero == "node" else None, gradient=sums.bytes, shard=(("", run.shard),)
    )
    workload = same_samples({"language": run.tokens}, run.batch)
    work = [part.shape.matmul for part in run.parts for _ in range(part.count)] if run.source in BALANCED else None
    chain = even_chain(
        "language", layers, run.dp, run.tp, run.pp, run.cp, run.chunks, run.recompute, run.recomputed, work
    )
    if "images" in run.group:  # multi-token prediction and the heads are the last stage's besides its blocks
        blocks = run.stages or (run.parts[1].count // run.pp,) * run.pp
        chain = replace(chain, cuts={"language": tuple(sum(blocks[:one]) + (one > 0) for one in range(run.pp))})
    case = Case((unit,), run.hardware.among(gpus), cluster, workload, run.batch, rules)
    (plan,) = case.plans([chain], [RankOrder.REPLICAS])
    schedule = "interleaved" if run.chunks > 1 else "1f1b"
    count = run.batch // run.dp // run.microbatch
    if sums.hidden:
        return _with_hidden_gathers(case, plan, count, schedule, run)
    seconds = simulated(case, plan, count, schedule, sums).seconds
    blocks, weights = run.parts[1].count / run.pp, parameters(run.parts) / (run.tp * run.pp)
    if sums.bucket:
        beside = sync_seconds(plan, model_spec(case.units), cluster, rules).beside.values()
        seconds += max(beside, default=0.0) * min(1.0, sums.bucket / weights)
    if run.dp == 1:
        return seconds
    if run.zero != "all":
        return seconds + (sums.whole * weights if run.pp > 1 else 0.0)
    return seconds + sums.gather_seconds(run.dp, blocks, weights)


def _with_hidden_gathers(case: Case, plan: Plan, count: int, schedule: str, run: Measured) -> float:
    """Return the seconds of a step whose gathers of new weights run beside the first forward: they slow it, and what
    takes longer than it is waited for."""
    without = replace(case, rules=replace(case.rules, weight=0.0))
    step = simulated(without, plan, count, schedule, run.sums).seconds
    gathers = sync_seconds(plan, model_spec(case.units), case.cluster, case.rules).after
    updates = sync_seconds(plan, model_spec(case.units), case.cluster, without.rules).after
    longest = max((seconds - updates[rank] for rank, seconds in gathers.items()), default=0.0)
    costs, degrees, tokens = cost_model(case.units, case.hardware).layers, Degrees(run.tp, run.cp), float(run.tokens)
    forward = sum(part.count * costs[f"language {part.kind}"][degrees].forward(tokens) for part in run.parts)
    return step + max(BESIDE * longest, longest - forward * run.microbatch / run.pp)


def corpus_report(runs: Sequence[Measured], seconds: Sequence[float], console: Console) -> list[dict[str, Any]]:
    """Print and return the distance of predictions from measurements, for fitted and held-out sources and by kinds of
    runs."""
    ratios = np.asarray(seconds) / [run.seconds for run in runs]
    groups: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        part = "held out" if run.held_out else "fitted on"
        weights = sum(part.count * part.shape.parameters for part in run.parts)
        devices = run.tp * run.cp * run.pp * run.dp
        for kind in (
            "all" + run.label,
            f"source: {run.source}{run.label}",
            f"GPU: {run.gpus}{run.label}",
            f"{run.source} on {run.gpus}{run.label}",
            f"tokens: {_up_to(run.tokens, (2048, 4096, 8192))}{run.label}",
            f"weights in billions: {_up_to(weights / 1e9, (2, 10, 40))}{run.label}",
            f"devices: {_up_to(devices, (8, 64, 256))}{run.label}",
            f"tp {run.tp}{run.label}",
        ):
            groups.setdefault((part, kind), []).append(number)
    table = Table(
        "part", "runs", "number", "median ratio", "mean ratio", "mean distance", "95 % within", "worst", box=None
    )
    found = []
    for (part, kind), numbers in sorted(groups.items()):
        own = ratios[numbers]
        off = np.abs(own - 1.0)
        distances = float(off.mean()), float(np.quantile(off, 0.95)), float(off.max())
        table.add_row(
            part, kind, str(len(own)), f"{np.median(own):.2f}", f"{own.mean():.2f}",
            *(f"{one:.1%}" for one in distances),
        )  # fmt: skip
        figures = (len(own), float(np.median(own)), *distances)
        names = ("number", "median_ratio", "mean_distance", "95_percent_within", "worst_distance")
        found.append({"part": part, "runs": kind, **dict(zip(names, figures, strict=True))})
    console.print(table)
    return found


def _up_to(value: float, limits: Sequence[int]) -> str:
    """Return the first of these limits that the value keeps, in words."""
    return next((f"up to {limit:,}" for limit in limits if value <= limit), "more")


LAYOUTS = 6
"""Fewest measured layouts of one model, on as many GPUs and for one batch, among which a choice is judged."""


def choices(runs: Sequence[Measured], seconds: Sequence[float], console: Console) -> list[dict[str, Any]]:
    """Print and return by source, over sets of layouts of one model: how much longer the layout that is predicted to be
    the fastest took than the fastest one (regret), how often it is one of the three fastest, and Kendall's tau."""
    sets: dict[tuple[Any, ...], list[int]] = {}
    for number, run in enumerate(runs):
        gpus = run.tp * run.cp * run.pp * run.dp
        place = run.source + run.label, run.model, run.parts[1].shape, run.tokens, run.gpus, gpus, run.batch, run.sums
        sets.setdefault(place, []).append(number)
    by_source: dict[str, list[tuple[float, float, float]]] = {}
    for place, numbers in sets.items():
        if len(numbers) < LAYOUTS:
            continue
        measured, predicted = (
            np.array([runs[one].seconds for one in numbers]), np.array([seconds[one] for one in numbers])
        )  # fmt: skip
        chosen = measured[int(predicted.argmin())]
        signs = np.sign(np.subtract.outer(measured, measured)) * np.sign(np.subtract.outer(predicted, predicted))
        tau = float(signs.sum() / (len(numbers) * (len(numbers) - 1)))
        by_source.setdefault(place[0], []).append((chosen / measured.min(), float((measured < chosen).sum() < 3), tau))
    table = Table("source", "sets", "median regret", "worst regret", "in the first three", "median tau", box=None)
    found = []
    for source, own in sorted(by_source.items()):
        regrets, first, taus = zip(*own, strict=True)
        figures = (
            len(own), float(np.median(regrets)), max(regrets), float(np.mean(first)), float(np.median(taus))
        )  # fmt: skip
        names = ("sets", "median_regret", "worst_regret", "in_first_three", "median_tau")
        found.append({"source": source, **dict(zip(names, figures, strict=True))})
        table.add_row(source, str(figures[0]), *(f"{one:.2f}" for one in figures[1:]))
    console.print(table)
    return found


def write_table(runs: Sequence[Measured], seconds: Sequence[float], path: Path) -> None:
    """Write the table of `dilatant.cost.published_runs`: of each model, GPU, tensor-parallel degree and sharding in a
    source, the run on the median number of devices and of stages."""
    alike: dict[tuple[Any, ...], list[PublishedRun]] = {}
    for run, predicted in zip(runs, seconds, strict=True):
        if run.group == "contradicted":
            continue
        sharded = "weights" if run.shard == "weights" else "nothing" if run.zero == "none" else "optimizer state"
        billions = sum(part.count * part.shape.parameters for part in run.parts) / 1e9
        of = run.model + run.label, run.gpus, run.tp * run.cp * run.pp * run.dp, round(billions, 1)
        one = PublishedRun(run.id, *of, run.tp, run.pp, sharded, round(predicted / run.seconds, 2))
        alike.setdefault((run.source, one.model, one.hardware, one.tp, one.sharded), []).append(one)
    chosen = [sorted(own, key=lambda one: (one.devices, one.pp, one.source))[len(own) // 2] for own in alike.values()]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(PublishedRun)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(one) for one in sorted(chosen, key=lambda one: one.source))


def corpus(path: Path, every: int, console: Console, table: Path | None = None) -> dict[str, Any]:
    """Predict every `every`-th run of a corpus, in the order of their ids. table: a file for `write_table`."""
    runs, refused = [], Counter[str]()
    for run in measured_runs(read_lines(path)):
        if isinstance(run, str):
            refused[run] += 1
        else:
            runs.append(run)
    runs = [run for number, run in enumerate(sorted(runs, key=lambda one: one.id)) if number % every == 0]
    seconds = [predicted_seconds(run) for run in runs]
    report = corpus_report(runs, seconds, console)
    for why, count in refused.items():
        console.print(f"{count} rows are not predicted: {why}")
    if table:
        write_table(runs, seconds, table)
    found = {"groups": report, "choices": choices(runs, seconds, console), "not_predicted": dict(refused)}
    return {**found, "reasons": [*REASONS]}


IN_TURN = ("llm-foundry", "internevo", "bloom-prequel", "fms-fsdp", "torchtitan")
"""Sources of dense runs in 16 bits, on each of which constants are fitted in turn and tested on the others."""


def in_turn(path: Path, every: int, console: Console) -> list[dict[str, Any]]:
    """Fit the shares of peak FLOP/s and of memory bandwidth that kernels reach, one factor each for all GPUs, on one
    source; report the distance of predictions from measurements on every source; and so for each source in turn."""
    runs = [run for run in measured_runs(read_lines(path)) if not isinstance(run, str)]
    runs = [run for run in runs if run.source in IN_TURN and not run.runner.products]
    runs = sorted(runs, key=lambda one: one.id)[::every]
    measured = np.array([run.seconds for run in runs])
    step = 1.1  # a step's seconds are nearly linear in those of its kernels
    whole, products, traffic = (
        np.array([predicted_seconds(_slower(run, *slower)) for run in runs]) / measured
        for slower in ((1.0, 1.0), (step, 1.0), (1.0, step))
    )
    slopes = (products - whole) / (step - 1.0), (traffic - whole) / (step - 1.0)
    grid = [*itertools.product(np.arange(0.6, 1.8, 0.02), np.arange(0.4, 3.0, 0.05))]
    table = Table("fitted on", "products x", "traffic x", "tested on", "runs", "median", "mean", "worst", box=None)
    found = []
    for fitted in IN_TURN:
        own = np.array([run.source == fitted for run in runs])
        distances = [
            np.abs(whole[own] + (a - 1) * slopes[0][own] + (b - 1) * slopes[1][own] - 1).mean() for a, b in grid
        ]
        best = tuple(map(float, grid[int(np.argmin(distances))]))
        ratios = whole + (best[0] - 1) * slopes[0] + (best[1] - 1) * slopes[1]
        for tested in IN_TURN:
            of = ratios[[run.source == tested for run in runs]]
            off = np.abs(of - 1.0)
            figures = len(of), float(np.median(of)), float(off.mean()), float(off.max())
            names = ("number", "median_ratio", "mean_distance", "worst_distance")
            found.append({"fitted": fitted, "slower": best, "tested": tested, **dict(zip(names, figures, strict=True))})
            share = [f"{one:.1%}" for one in figures[2:]]
            table.add_row(fitted, *(f"{one:.2f}" for one in best), tested, str(len(of)), f"{figures[1]:.2f}", *share)
    console.print(table)
    return found


def _slower(run: Measured, products: float, traffic: float) -> Measured:
    """Return the run on devices whose products and attention, and whose traffic, take so many times as long."""
    slower = run.hardware.clocked(1 / products)
    return replace(run, hardware=replace(slower, memory_efficiency=slower.memory_efficiency / traffic))


WORKSPACES = 64.0 * 2**20
"""Bytes of the workspaces of cuBLAS and Transformer Engine on Hopper, 32 MiB each by their documentation."""


def predicted_bytes(run: MeasuredMemory) -> float:
    """Return the peak bytes of the last rank, which is the one that Megatron reports."""
    unit = PaperUnit("language", run.parts, (), None, ((run.tp, run.cp),), run.recompute, MEGATRON)
    gpus, layers = run.tp * run.cp * run.pp * run.dp, sum(part.count for part in run.parts)
    hardware, batch = load_hardware("H100"), run.microbatches * run.microbatch * run.dp
    cluster = cluster_of(hardware, -(-gpus // 8), min(gpus, 8))
    workload = same_samples({"language": run.tokens}, batch)
    # Megatron's buffers of fp32 gradients exist all the time, as weights do.
    rules = ParameterBytes(weight=6.0, gradient=0.0, zero=run.zero)
    case = Case((unit,), hardware, cluster, workload, batch, rules)
    chain = even_chain("language", layers, run.dp, run.tp, run.pp, run.cp, run.chunks, run.recompute)
    schedule = "interleaved" if run.chunks > 1 else "1f1b"
    score = case.score(case.plans([chain], [RankOrder.REPLICAS]), run.microbatches, schedule=schedule)
    block = analytic_cost(run.parts[1].shape, hardware, degrees=Degrees(run.tp, run.cp), runner=MEGATRON)
    kept = block.activation_bytes(run.tokens) * run.microbatch * run.parts[1].count / (run.pp * run.chunks)
    return WORKSPACES + score.peak_bytes[-1] + kept * run.ahead * (run.chunks - 1)


def memory(path: Path, every: int, console: Console) -> dict[str, Any]:
    """Predict the bytes of every `every`-th test case of Megatron-LM."""
    found = [*measured_memory(read_lines(path))]
    runs = [run for run in found if not isinstance(run, str)][::every]
    predicted = np.array([predicted_bytes(run) for run in runs])
    measured = np.array([run.measured for run in runs])
    large, off = measured >= 4 * 2**30, predicted - measured
    table = Table("runs", "number", "median ratio", "mean distance", "95 % within", "within 300 MiB", box=None)
    kinds = {"4 GiB and more": large, "smaller": ~large}
    kinds |= {f"smaller, pp {pp}": ~large & np.array([run.pp == pp for run in runs]) for pp in (1, 2, 4)}
    report = []
    for kind, of in kinds.items():
        if of.any():
            share = np.abs(off[of]) / measured[of]
            table.add_row(
                kind, str(of.sum()), f"{np.median(predicted[of] / measured[of]):.2f}", f"{share.mean():.1%}",
                f"{np.quantile(share, 0.95):.1%}", f"{(np.abs(off[of]) <= 300 * 2**20).mean():.0%}",
            )  # fmt: skip
            near = float((np.abs(off[of]) <= 300 * 2**20).mean())
            mean = float(share.mean())
            report.append({"runs": kind, "number": int(of.sum()), "mean_distance": mean, "within_300_mib": near})
    console.print(table)
    for why, count in Counter(run for run in found if isinstance(run, str)).items():
        console.print(f"{count} test cases are not predicted: {why}")
    return {"groups": report}
