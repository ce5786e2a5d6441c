"""Speed of the planners, against the figures that papers report and the bars that this project has set itself.

    python -m benchmarks.planning.planning [--only GROUP ...] [--json FILE] [--quick]

Every time is the best of several runs in this process, with compiled code loaded; compiling on first use is measured
separately, in a fresh process with an empty cache. Costs are synthetic (identical layers, or with 2 % noise per layer
and width); the papers' figures were taken on other machines and are quoted with their source.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from benchmarks.papers.disttrain.orchestrate import ModuleCost, orchestrate
from benchmarks.papers.entrain.algorithm_2 import trial_batch
from benchmarks.planning.planning_quality import small_cases
from dilatant.config.degrees import Degrees
from dilatant.cost.layer import LayerCost
from dilatant.cost.memory import BF16, Zero
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import (
    Cluster,
    LayerSpec,
    Link,
    ModelSpec,
    SearchProblem,
    UnitSpec,
    Workload,
    compose_pipelines,
    feasible_allocations,
    minimum_stable_batch,
    partition_layers,
    plan_templates,
    reinstantiate,
)
from dilatant.plan.cluster import cluster_of_groups
from dilatant.plan.search.search import search
from dilatant.plan.search.search_result import SearchResult
from dilatant.plan.templates.reinstantiate import node_layers
from dilatant.schedule.plan_scorer import PlanSimulator


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `value` in `unit`; `bar`, our own limit, and `paper`, the figure of a paper, may be None."""

    name: str
    value: float
    unit: str = "s"
    bar: float | None = None
    paper: float | None = None
    source: str = ""
    note: str = ""

    @property
    def held(self) -> bool:
        """True if the bar, if there is one, is held."""
        return self.bar is None or self.value <= self.bar


def best_of(runs: int, function: Callable[..., object], *arguments: object, **options: object) -> float:
    """Return the seconds of the fastest of `runs` calls, after one that is not counted."""
    function(*arguments, **options)
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        function(*arguments, **options)
        times.append(time.perf_counter() - began)
    return min(times)


def layer_table(layers: int, node: int, noise: float, seed: int = 0) -> dict[int, list[float]]:
    """Return the seconds of each layer on 1, 2, 4, .. GPUs of a node, with 6 % overhead per doubling."""
    draw = np.random.default_rng(seed)
    base = 0.01 * (1 + noise * draw.standard_normal(layers))
    widths = [2**k for k in range(int(math.log2(node)) + 1)]
    return {
        d: (base / d * (1 + 0.06 * math.log2(d)) * (1 + noise * draw.standard_normal(layers))).tolist() for d in widths
    }


PAPER_TEMPLATES = {
    (8, 1, 24): 0.28,
    (8, 8, 96): 109.76,
    (16, 8, 96): 1213.63,
    (24, 1, 96): 1477.54,
    (24, 8, 24): 15.59,
    (24, 8, 96): 3297.92,
}


def template_rows(runs: int) -> Iterator[Row]:
    for (nodes, node, layers), paper in PAPER_TEMPLATES.items():
        for noise, kind, bar in ((0.0, "layer types", 0.15), (0.02, "arbitrary costs", 2.0)):
            table = layer_table(layers, node, noise)
            largest = (nodes, node, layers) == (24, 8, 96)
            for microbatches in (4 * layers, 32) if largest else (4 * layers,):
                seconds = best_of(runs, plan_templates, table, range(1, nodes + 1), node, microbatches)
                yield Row(
                    f"templates {nodes} nodes x {node} GPUs x {layers} layers, {kind}, {microbatches} microbatches",
                    seconds,
                    bar=bar if largest else None,
                    paper=paper,
                    source="thesis Table 2.3",
                    note=f"ours: all {nodes} node counts, exact; paper: one template",
                )


def composition_rows(runs: int) -> Iterator[Row]:
    templates = plan_templates(layer_table(96, 8, 0.02), range(2, 97), 8, 384)
    for nodes, kinds, bar in ((64, 57, 1e-3), (256, 23, None), (1024, 23, None), (4096, 23, 0.15), (4096, 95, 0.15)):
        chosen = {n: templates[n] for n in sorted(templates)[:kinds]}
        seconds = best_of(runs, compose_pipelines, chosen, nodes, 3, 8192)
        yield Row(f"composition of {nodes} nodes, {kinds} templates, 8192 microbatches, f = 3", seconds, bar=bar)
    chosen = {n: templates[n] for n in range(2, 25)}
    pipelines, following = [], 0
    for size, _ in compose_pipelines(chosen, 1024, 3, 8192).pipelines:
        pipelines.append(tuple(range(following, following + size)))
        following += size
    spans = {size: node_layers(template, size) for size, template in chosen.items()}
    broken = next(nodes for nodes in pipelines if 5 in nodes)
    others = {node: span for node, span in zip(broken, spans[len(broken)]) if node != 5}
    pipelines.remove(broken)
    seconds = best_of(runs, reinstantiate, chosen, pipelines, others, 3, 8192)
    yield Row("reinstantiation of 1024 nodes after a loss, up to 200 compositions", seconds)


def partition_rows(runs: int) -> Iterator[Row]:
    draw = np.random.default_rng(0)
    for layers, stages, bar in ((96, 8, None), (160, 16, None), (512, 64, 20e-6), (4096, 64, None)):
        costs = draw.random(layers)
        seconds = best_of(200 * runs, partition_layers, costs, stages)
        yield Row(f"partition of {layers} layers into {stages} stages", seconds, bar=bar)
    as_list = draw.random(512).tolist()
    seconds = best_of(200 * runs, partition_layers, as_list, 64)
    yield Row("partition of 512 layers into 64 stages, costs in a list", seconds)


def orchestration_rows(runs: int) -> Iterator[Row]:
    def module(name: str, layers: int, seconds: float) -> ModuleCost:
        by_degree = {tp: seconds / tp * (1 + 0.06 * math.log2(tp)) for tp in (1, 2, 4, 8)}
        return ModuleCost(name, layers, by_degree)

    encoder, language, generator = (module("vision", 63, 0.3), module("language", 80, 9.0), module("image", 48, 1.1))
    for gpus, batch, paper in ((112, 240, 0.133), (324, 480, 0.441), (648, 960, 0.641), (1296, 1920, 0.922)):
        seconds = best_of(runs, orchestrate, [encoder], language, [generator], gpus, batch)
        bar = 0.025 if gpus == 1296 else None
        yield Row(
            f"DistTrain orchestration of {gpus} GPUs, batch {batch}",
            seconds,
            bar=bar,
            paper=paper,
            source="DistTrain Table 2",
            note="ours: the integer optimum; paper: convex relaxation",
        )


def stable_batch_rows(runs: int) -> Iterator[Row]:
    draw = np.random.default_rng(0)
    vision, text = draw.lognormal(6.5, 0.8, 20_000), draw.lognormal(5.3, 1.0, 20_000)
    tokens = vision / 4 + text
    work = np.stack([vision * (1 + vision / 8000), tokens * (1 + tokens / 16000)], axis=1)
    allocations = feasible_allocations([range(2, 16, 2)] * 2, 16)
    for method, find in (("delta", minimum_stable_batch), ("trials", trial_batch)):
        seconds = best_of(runs, find, work, allocations)
        yield Row(f"minimum stable batch of 20,000 samples, {method}", seconds)


def searched(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    samples: Workload,
    batch: int,
    zeros: Sequence[Zero],
    rescored: Sequence[Zero] = (),
) -> SearchResult:
    """Search for a plan and its sharing of optimizer state (ZeRO), as `dilatant plan` does."""
    rules = {zero: replace(BF16, zero=zero, ranks_per_node=8) for zero in (*zeros, *rescored)}
    score = {zero: PlanSimulator(model, costs, cluster, samples, batch, rules=own) for zero, own in rules.items()}
    return search(
        SearchProblem(model, costs, cluster, samples, batch, rules[zeros[0]]),
        score[zeros[0]],
        others={zero: score[zero] for zero in zeros[1:]},
        rescored={zero: score[zero] for zero in rescored},
    )


def sharing(found: SearchResult) -> str:
    """Describe the best simulated step for each sharing of optimizer state."""
    steps = {zero: "does not fit" if s is None else f"{s:.4g} s" for zero, s in found.by_zero.items()}
    return f"zero {found.winner.zero}; " + ", ".join(f"{zero} {step}" for zero, step in steps.items())


def search_rows() -> Iterator[Row]:
    """Time whole searches for a vision-language model; finalists are simulated on two steps of synthetic samples."""
    degrees = [Degrees(tp) for tp in (1, 2, 4, 8)]

    def cost(per_token: float, tp: int) -> LayerCost:
        share = (1 + 0.05 * (tp - 1)) / tp
        one = Quadratic(2e-10 * share, per_token * share, 2e-4)
        return LayerCost(one, one, one, one, activation_bytes=Quadratic(0.0, 6e4 / tp, 0.0))

    def layers(kind: str, count: int, parameters: int, trainable: bool) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(f"{kind}.{k}", kind, parameters, trainable) for k in range(count))

    model = ModelSpec(
        (
            UnitSpec("vision", layers("vision", 24, 12_000_000, False), ("language",)),
            UnitSpec("language", layers("language", 28, 60_000_000, True)),
        )
    )
    seconds = {"vision": 2e-6, "language": 6e-6}
    costs = CostModel(
        "synthetic", "synthetic", "bfloat16",
        {kind: {one: cost(value, one.tp) for one in degrees} for kind, value in seconds.items()},
    )  # fmt: skip
    draw = np.random.default_rng(0)
    vision, text = draw.lognormal(6.5, 0.8, 4000).round(), draw.lognormal(5.3, 1.0, 4000).round()
    samples = Workload({"vision": vision, "language": np.round(vision / 4 + text)})
    for nodes, batch, bar in ((1, 128, None), (2, 256, None), (4, 512, 2.0), (162, 1920, 10.0)):
        if nodes > 4:  # a model for so many devices
            model = ModelSpec((model.units[0], UnitSpec("language", layers("language", 80, 850_000_000, True))))
            of_its_size = {degree: cost(8e-5, degree[0]) for degree in degrees}
            costs = replace(costs, layers={**costs.layers, "language": of_its_size})
        cluster = Cluster(nodes, 8, 80 * 2.0**30, Link(2e11, 5e-6), Link(4e11, 1e-5), 8)
        drawn = _global_batches(samples, batch, 2)
        zeros = (("node", "all"), ("none",)) if nodes > 2 else (("node", "none", "all"), ())
        began = time.process_time()  # one thread: what else runs on the machine does not count
        found = searched(model, costs, cluster, drawn, batch, *zeros)
        yield Row(
            f"search on {8 * nodes} devices, batch {batch}, on one core",
            time.process_time() - began,
            bar=bar,
            note=f"{found.simulated} of {found.candidates} candidates simulated; {sharing(found)}",
        )
        yield Row(
            f"search on {8 * nodes} devices: its plan above the bound that no plan beats",
            0.0 if found.proven else 100.0 * (found.seconds / found.lower_bound - 1.0),
            "%",
            bar=5.0 if nodes <= 4 else None,
        )
        if nodes >= 4:
            yield from _unlike_rows(model, costs, cluster, drawn, batch)


def _global_batches(samples: Workload, batch: int, steps: int) -> Workload:
    """Draw global batches from these samples, without repetition while there are enough samples."""
    draw, have = np.random.default_rng(0), samples.num_samples
    rows = np.concatenate([draw.permutation(have) for _ in range(-(-batch * steps // have))])[: batch * steps]
    return Workload({unit: np.asarray(tokens)[rows] for unit, tokens in samples.tokens.items()})


def quality_rows(runs: int) -> Iterator[Row]:
    """Compare the search with enumeration of all plans; without times, so the rows do not depend on the load."""
    found = small_cases(50 if runs == 1 else 200)
    name = f"search on {found.cases} small cases"
    yield Row(f"{name}: most that its plan is slower than the best", 100.0 * found.worst_gap, "%", bar=0.0)
    yield Row(f"{name}: bounds above the best", float(found.wrong_bounds), "", bar=0.0)


def _unlike_rows(model: ModelSpec, costs: CostModel, cluster: Cluster, samples: Workload, batch: int) -> Iterator[Row]:
    """Repeat a search with slower devices in half of the nodes: twice as slow at vision, four times at language, with
    less memory and slower links."""

    def slower(cost: LayerCost, times: float) -> LayerCost:
        curve = cost.forward.scaled(times)
        return replace(cost, forward=curve, input_gradient=curve, weight_gradient=curve, first_trainable=curve)

    slow = replace(
        costs,
        layers={
            kind: {degree: slower(cost, 2.0 if kind == "vision" else 4.0) for degree, cost in own.items()}
            for kind, own in costs.layers.items()
        },
    )
    half = replace(cluster, nodes=cluster.nodes // 2, name="fast", device="fast")
    links = {"inside": Link(2.5e10, 1e-5), "between": Link(2.5e10, 2e-5), "ports": 1}
    other = replace(half, bytes_per_device=48 * 2.0**30, name="slow", device="slow", **links)
    together = cluster_of_groups([half, other])
    both = replace(costs, groups={"fast": costs, "slow": slow})
    began = time.process_time()
    found = searched(model, both, together, samples, batch, ("node", "all"), ("none",))
    name = f"search on {cluster.num_devices} devices in two groups of unlike ones"
    yield Row(
        f"{name}, batch {batch}",
        time.process_time() - began,
        bar=2.0 if cluster.nodes <= 4 else 10.0,
        note=f"{found.simulated} of {found.candidates} candidates simulated; {sharing(found)}",
    )
    alone = searched(model, costs, half, samples, batch, ("node", "all"), ("none",))
    yield Row(f"{name}: its step beside that of the faster group alone", found.seconds / alone.seconds, "x", bar=1.0)


def first_use_rows() -> Iterator[Row]:
    """Time the first calls in a fresh process: with nothing compiled yet, and with everything cached."""
    program = (
        "import time; began = time.perf_counter();"
        "from dilatant.plan import *; imported = time.perf_counter();"
        "partition_layers([1.0, 2.0], 2);"
        "t = plan_templates({1: [1.0, 2.0]}, [1, 2], 1, 8);"
        "compose_pipelines(t, 3, 0, 8);"
        "print(imported - began, time.perf_counter() - imported)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for state in ("nothing compiled", "compiled code cached"):
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            run = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
            )
            imported, called = map(float, run.stdout.split())
            yield Row(f"first use of four planners in a process, {state}", called)
        yield Row("import of dilatant.plan", imported, bar=1.0)
    program = "from dilatant.cli.app import main; main()"
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", program, "plan", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    yield Row("dilatant plan --help, from start to end", min(times), bar=1.0)


def schedule_rows(runs: int) -> Iterator[Row]:
    """Yield the rows of the simulator and of the microbatch policies, if their benchmark lies beside this one."""
    try:
        from benchmarks.planning.planning_schedule import all_rows
    except ImportError:
        return
    for row in all_rows(quick=runs == 1):
        yield Row(row.name, row.value, row.unit, row.bar, note=row.note)


def show(row: Row) -> str:
    bar = "" if row.bar is None else f"{_figure(row.bar, row.unit)} {'yes' if row.held else 'NO'}"
    paper = "" if row.paper is None else _figure(row.paper, row.unit)
    ratio = "" if row.paper is None else f"{row.paper / row.value:,.0f}x"
    return (
        f"{row.name:<92} {_figure(row.value, row.unit):>10} {bar:>14} {paper:>10} {ratio:>9}  "
        f"{'; '.join(filter(None, (row.source, row.note)))}"
    )


def _figure(value: float, unit: str) -> str:
    scales = {"s": 1.0, "ms": 1e-3}
    if unit not in scales:
        return f"{value:.4g} {unit}"
    seconds = value * scales[unit]
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


GROUPS: dict[str, Callable[[int], Iterator[Row]]] = {
    "partition": partition_rows,
    "templates": template_rows,
    "composition": composition_rows,
    "orchestration": orchestration_rows,
    "stable-batch": stable_batch_rows,
    "quality": quality_rows,
    "search": lambda _: search_rows(),
    "first-use": lambda _: first_use_rows(),
    "schedule": schedule_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[*GROUPS], help="what to run")
    parser.add_argument("--json", type=Path, help="write the rows as JSON here as well")
    parser.add_argument("--quick", action="store_true", help="one run each")
    options = parser.parse_args()
    runs = 1 if options.quick else 5
    print(f"{'':<92} {'ours':>10} {'bar, held':>14} {'paper':>10} {'ratio':>9}  source")
    rows, groups = [], []
    for group in options.only:
        for row in GROUPS[group](runs):
            rows.append(row)
            groups.append(group)
            print(show(row), flush=True)
    bars = [row for row in rows if row.bar is not None]
    print(f"\n{'bars':<92} {'ours':>10} {'bar, held':>14} {'bar/ours':>10}")
    for row in bars:
        bar = f"{_figure(row.bar, row.unit)} {'yes' if row.held else 'NO'}"
        times = f"{row.bar / row.value:.3g}x" if row.value > 0 else ""
        print(f"{row.name:<92} {_figure(row.value, row.unit):>10} {bar:>14} {times:>10}")
    print(f"{sum(row.held for row in bars)} of {len(bars)} bars are held")
    if options.json:
        kept = []
        if options.json.exists():  # groups that were not run again stay
            kept = [
                row
                for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]
                if row["group"] not in options.only
            ]
        ran = [{"group": group, **asdict(row)} for group, row in zip(groups, rows, strict=True)]
        document = {**machine(), "rows": sorted([*kept, *ran], key=lambda row: [*GROUPS].index(row["group"]))}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
