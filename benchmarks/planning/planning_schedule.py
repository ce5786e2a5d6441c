"""How fast schedules are made, timed and filled with samples, against the bars that this project set itself.

    python -m benchmarks.planning.planning_schedule [--json FILE] [--quick]

Times are the best of several runs in this process, compiled code loaded; compiling on first use is measured apart, in
a fresh process with an empty cache. Step times (T / work) are modelled, not measured: the exact simulator on synthetic
seconds. "vlm" draws vision tokens log-normal(6.5, 0.8) and text tokens log-normal(5.3, 1.0); an encoder and a language
model of four stages each, backward twice the forward, eager 1F1B; work is the busiest stage's seconds, so 1 is a step
without any bubble, and the bound no assignment of these samples beats stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.papers.disttrain.order import disttrain
from benchmarks.planning.planning_quality import grouped_bound, step_bound
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.costs.stage_costs import StageCosts
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.schedule.assignment.assign import POLICIES, assign_microbatches
from dilatant.schedule.assignment.pipeline_shape import default_shape, shape_seconds
from dilatant.schedule.assignment.step_assignment import Microbatching, sample_seconds
from dilatant.schedule.dependencies import messages
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.simulate import run, step_seconds
from dilatant.schedule.validate import validate


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `value` in `unit`, `bar` what we ask of ourselves (None: nothing)."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    note: str = ""


def best_of(runs: int, function: Callable[..., object], *arguments: object) -> float:
    """Milliseconds of the fastest of some runs of a call, after one that is not counted."""
    function(*arguments)
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def chain(stages: int, microbatches: int) -> tuple[Plan, Assignment]:
    """A language model of that many stages, one rank each."""
    plan = Plan((UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s,)) for s in range(stages))),)),))
    return plan, Assignment({"language": (tuple((k,) for k in range(microbatches)),)})


def vlm(samples: int, seed: int) -> np.ndarray:
    """Seconds `[samples, 2]` of encoder and language model, each unit's sum 1."""
    rng = np.random.default_rng(seed)
    vision, text = np.exp(rng.normal(6.5, 0.8, samples)), np.exp(rng.normal(5.3, 1.0, samples))
    tokens = vision / 4 + text
    cost = np.stack([vision * (1 + vision / 8e3), tokens * (1 + tokens / 16e3)], axis=1)
    return cost / cost.sum(axis=0)


def simulator_rows(runs: int) -> Iterator[Row]:
    """Making, compiling and timing schedules."""
    for stages, microbatches, whole, again in ((8, 64, None, 0.01), (16, 128, None, None), (64, 512, 5.0, 0.5)):
        plan, assignment = chain(stages, microbatches)
        schedule = one_f_one_b(plan, assignment)
        graph = build(plan, assignment, schedule)
        seconds = np.random.default_rng(0).random(graph.num_ops)
        size = f"{stages} stages x {microbatches} microbatches ({graph.num_ops} actions)"

        def build_and_run(plan=plan, assignment=assignment, schedule=schedule, seconds=seconds) -> float:
            return step_seconds(build(plan, assignment, schedule), seconds)

        yield Row(f"simulate with build, {size}", best_of(runs, build_and_run), "ms", whole)
        yield Row(f"re-score with other seconds, {size}", best_of(5 * runs, step_seconds, graph, seconds), "ms", again)
        yield Row(f"timeline with idle causes, {size}", best_of(runs, run, graph, seconds), "ms")
        yield Row(f"make the schedule (1F1B), {size}", best_of(runs, one_f_one_b, plan, assignment), "ms")
        yield Row(f"validate, {size}", best_of(max(1, runs // 4), validate, plan, assignment, schedule), "ms")
    plan, assignment = chain(16, 128)
    schedule = one_f_one_b(plan, assignment)
    yield Row("messages of every edge, 16 x 128", best_of(3, messages, plan, assignment, schedule), "ms")


def assignment_rows(runs: int, seeds: int = 5) -> Iterator[Row]:
    """Grouping samples into microbatches: time, balance, and the simulated step."""
    for samples, count, bar in ((8192, 128, 2.0), (65536, 128, 20.0)):
        seconds = vlm(samples, 0)
        found = assign_microbatches(seconds, count)
        size = f"{samples} samples x {count}"
        yield Row(f"balanced, {size}", best_of(runs, assign_microbatches, seconds, count), "ms", bar)
        largest = np.max([seconds[list(batch)].sum(axis=0) for batch in found[0]], axis=0)
        gap = (largest / np.maximum(seconds.sum(axis=0) / count, seconds.max(axis=0))).max() - 1
        yield Row(f"balanced, {size}: above the bound", 100 * float(gap), "%", 0.5)
    shape = default_shape(2)
    for samples, count, bar in ((128, 32, 1.15), (512, 128, 1.07)):
        data = [vlm(samples, seed) for seed in range(seeds)]
        bound = float(np.mean([step_bound(shape, seconds) for seconds in data]))
        for policy in (*POLICIES, disttrain):
            steps = []
            for seed, seconds in enumerate(data):
                found = assign_microbatches(seconds, count, policy, seed)
                steps.append(shape_seconds(shape, seconds, found))
            note = f"modelled; mean of {seeds} seeds, worst {max(steps):.3f}, bound {bound:.3f}"
            searched = policy == "searched"
            called = policy.__name__ if callable(policy) else policy
            name = f"{called}, vlm {samples} samples x {count}"
            yield Row(f"{name}: T / work", float(np.mean(steps)), "", bar if searched else None, note)
            took = best_of(2 if searched else runs, assign_microbatches, data[0], count, policy)
            yield Row(f"{name}: time", took, "ms", 250.0 if searched else None)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sample as far as steps are planned from it, and its digest as a sizes index knows it."""

    sizes: dict[str, int]
    draw: int
    content_digest: int = 7

    @property
    def key(self) -> str:
        return f"draw {self.draw}"


def drawn_run(microbatches: int) -> tuple[Plan, StepCosts, list[Drawn]]:
    """64 ranks: eight pipelines of two vision and six language stages, vision without backward, and a global batch of
    which each microbatch has sixteen samples on average, none longer than 8192 vision tokens. Seconds are made up;
    attention's squares are a seventh of them."""
    step = 8
    units = []
    for name, stages, first in (("vision", 2, 0), ("language", 6, 2)):
        chains = [
            Replica(tuple(Stage(s, s + 1, (step * pipeline + first + s,)) for s in range(stages)))
            for pipeline in range(8)
        ]
        units.append(UnitPlan(name, tuple(chains), ("language",) if name == "vision" else ()))
    plan = Plan(tuple(units))
    placed = plan.stages()
    seconds = np.zeros((len(placed), 4, 3))
    seconds[:, 0] = [1e-9, 1e-5, 1e-3]
    trains = np.asarray([one.unit == "language" for one in placed], dtype=float)
    seconds[:, 1] = 2 * seconds[:, 0] * trains[:, None]
    seconds[:, 2:] = seconds[:, 1:2] / 2
    none = np.zeros((len(placed), 3))
    each = np.zeros((4, len(placed)))
    late, items = np.zeros((len(placed), 2, 3)), np.ones(len(placed))
    host, gathers = 0 * seconds[..., 0], np.zeros((len(seconds), 2))
    table = StageCosts(seconds, none, none, none, none, none, *each, late, items, host, late, gathers)
    rng = np.random.default_rng(0)
    samples = []
    for draw in range(8 * 16 * microbatches):
        vision, text = min(8192, int(np.exp(rng.normal(6.5, 0.8)))), int(np.exp(rng.normal(5.3, 1.0)))
        samples.append(Drawn({"vision": vision, "language": vision // 4 + text + 1}, draw))
    return plan, StepCosts(table, origin="made up"), samples


def step_rows(runs: int, microbatches: int = 16) -> Iterator[Row]:
    """Planning a step of 64 ranks: what is done ahead of it, what is left in it, and how even the work is."""
    from dilatant.runtime.step.cost_correction import CostCorrection
    from dilatant.runtime.step.step_planner import StepPlanner
    from dilatant.schedule.assignment.assign import POLICIES
    from dilatant.schedule.trainability import Trainability

    plan, costs, samples = drawn_run(microbatches)
    backward = tuple(placed.unit == "language" for placed in plan.stages())
    graph: Any = SimpleNamespace(anchor="language", behind_anchor=())
    for policy in POLICIES:
        planner = StepPlanner(
            plan,
            Trainability(backward, backward),
            graph,
            Microbatching(microbatches, FAMILIES["eager"], policy),
            CostCorrection(plan, costs),
            13,
        )
        step = planner.plan_step(samples, 0)
        name = f"64 ranks, {len(samples)} samples, {policy}"
        again = 1 if policy == "searched" else runs
        yield Row(f"{name}: planned ahead", best_of(again, planner.plan_step, samples, 0), "ms")
        if policy == "balanced":
            yield Row(f"{name}: left in the step", best_of(runs, step.agreed, samples, 0), "ms", 1.0)
        seconds = sample_seconds(plan, costs.stages, costs.workload(arrays(step.tokens)))
        for unit, replicas in step.assignment.microbatches.items():
            loads = [[seconds[unit][list(batch)].sum() for batch in replica] for replica in replicas]
            bound = max(seconds[unit].sum() / (8 * microbatches), seconds[unit].max())
            above = 100 * (max(map(max, loads)) / bound - 1)
            shares = [sum(replica) for replica in loads]
            note = f"largest replica {100 * (max(shares) / np.mean(shares) - 1):.3f} % above the mean one"
            yield Row(f"{name}: largest {unit} microbatch above its bound", above, "%", None, note)
        if policy == "balanced":
            yield _above_bound_of_both(name, seconds, step.assignment)
        bound = step_bound_of(plan, costs, step.tokens)
        yield Row(
            f"{name}: step / bound",
            step.prediction.timed.seconds / bound,
            "",
            None,
            "modelled; bound: work of the busiest rank",
        )


def _above_bound_of_both(name: str, seconds: Mapping[str, np.ndarray], assignment: Assignment) -> Row:
    """The largest microbatch of either unit beside a bound of both together, given each replica's samples."""
    work = np.stack([*seconds.values()], axis=1)
    largest, bound = 0.0, 1.0
    for batches in assignment.microbatches["language"]:
        own = work[[sample for batch in batches for sample in batch]]
        alone = np.maximum(own.sum(axis=0) / len(batches), own.max(axis=0))
        largest = max([largest, *((work[list(batch)].sum(axis=0) / alone).max() for batch in batches)])
        bound = max(bound, grouped_bound(own, len(batches)))
    everywhere = grouped_bound(work, sum(map(len, assignment.microbatches["language"])))
    return Row(
        f"{name}: largest microbatch above the bound of both units",
        100 * (largest / bound - 1),
        "%",
        1.0,
        f"bound {bound:.4f} of the mean microbatch; {everywhere:.4f} were samples divided otherwise among replicas",
    )


def arrays(tokens: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {unit: np.asarray(counts, dtype=float) for unit, counts in tokens.items()}


def step_bound_of(plan: Plan, costs: StepCosts, tokens: Mapping[str, tuple[int, ...]]) -> float:
    """The work of the busiest stage, were it spread evenly over its replicas; without what microbatches cost beyond
    their samples."""
    work = sample_seconds(plan, costs.stages, costs.workload(arrays(tokens)))
    return max(float(seconds.sum()) / len(plan.unit(unit).replicas) for unit, seconds in work.items())


FIRST_USE = """
import time, numpy as np
began = time.perf_counter()
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.assign import assign_microbatches
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.simulate import run
loaded = time.perf_counter()
plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)), Stage(1, 2, (1,)))),)),))
assignment = Assignment({"language": (((0,), (1,)),)})
run(build(plan, assignment, one_f_one_b(plan, assignment)), 1.0)
simulated = time.perf_counter()
assign_microbatches(np.random.default_rng(0).random((8, 2)), 4, "searched", evaluations=10)
print(loaded - began, simulated - loaded, time.perf_counter() - simulated)
"""


def first_use_rows() -> Iterator[Row]:
    """What a fresh process pays: once to compile, afterwards to load the cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        for when in ("empty cache (compiling)", "warm cache"):
            result = subprocess.run(
                [sys.executable, "-c", FIRST_USE], env=environment, check=True, capture_output=True, text=True
            )
            for what, value in zip(("import", "first simulation", "first search"), result.stdout.split(), strict=True):
                yield Row(f"{what}, fresh process, {when}", float(value), "s", 1.0 if what == "import" else None)


def all_rows(quick: bool = False) -> list[Row]:
    """Every row of this benchmark."""
    runs = 3 if quick else 20
    return [*simulator_rows(runs), *assignment_rows(runs, 2 if quick else 5), *step_rows(runs), *first_use_rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--quick", action="store_true", help="fewer runs and seeds")
    arguments = parser.parse_args()
    rows = all_rows(arguments.quick)
    print(f"{'':66} {'ours':>10} {'bar':>8}  {'ours/bar':>8} held")
    for row in rows:
        held = "yes " if row.bar and row.value <= row.bar else "NO  "
        bar = f"{row.bar:8.3g}  {row.value / row.bar:8.2f} {held}" if row.bar else f"{'':23}"
        print(f"{row.name:66} {row.value:10.4g} {bar} {row.unit:3} {row.note}")
    if arguments.json:
        document = {**machine(), "rows": list(map(asdict, rows))}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
