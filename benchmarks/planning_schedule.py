"""How fast schedules are made, timed and filled with samples, against the bars that this project set itself.

    python benchmarks/planning_schedule.py [--json FILE] [--quick]

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from machine import machine

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule import (
    Assignment,
    assign_microbatches,
    build,
    messages,
    one_f_one_b,
    run,
    step_seconds,
    validate,
)
from dilatant.schedule.pipeline_shape import default_shape, shape_seconds, step_bound


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
    for stages, microbatches, whole, again in (
        (8, 64, None, 0.01),
        (16, 128, None, None),
        (64, 512, 5.0, 0.5),
    ):
        plan, assignment = chain(stages, microbatches)
        schedule = one_f_one_b(plan, assignment)
        graph = build(plan, assignment, schedule)
        seconds = np.random.default_rng(0).random(graph.num_ops)
        size = f"{stages} stages x {microbatches} microbatches ({graph.num_ops} actions)"

        def build_and_run(plan=plan, assignment=assignment, schedule=schedule, seconds=seconds) -> float:
            return step_seconds(build(plan, assignment, schedule), seconds)

        yield Row(f"simulate with build, {size}", best_of(runs, build_and_run), "ms", whole)
        yield Row(
            f"re-score with other seconds, {size}",
            best_of(5 * runs, step_seconds, graph, seconds),
            "ms",
            again,
        )
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
        yield Row(f"balanced, {size}: above the bound", 100 * found.gap, "%", 0.5)
    shape = default_shape(2)
    for samples, count, bar in ((128, 32, 1.15), (512, 128, 1.07)):
        data = [vlm(samples, seed) for seed in range(seeds)]
        bound = float(np.mean([step_bound(shape, seconds) for seconds in data]))
        for policy in ("random", "disttrain", "entrain", "balanced", "searched"):
            steps = []
            for seed, seconds in enumerate(data):
                found = assign_microbatches(seconds, count, policy, seed)
                steps.append(shape_seconds(shape, seconds, tuple(found.microbatches.values())))
            note = f"modelled; mean of {seeds} seeds, worst {max(steps):.3f}, bound {bound:.3f}"
            searched = policy == "searched"
            name = f"{policy}, vlm {samples} samples x {count}"
            yield Row(f"{name}: T / work", float(np.mean(steps)), "", bar if searched else None, note)
            took = best_of(2 if searched else runs, assign_microbatches, data[0], count, policy)
            yield Row(f"{name}: time", took, "ms", 250.0 if searched else None)


FIRST_USE = """
import time, numpy as np
began = time.perf_counter()
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule import Assignment, assign_microbatches, build, one_f_one_b, run
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
            for what, value in zip(
                ("import", "first simulation", "first search"), result.stdout.split(), strict=True
            ):
                yield Row(
                    f"{what}, fresh process, {when}", float(value), "s", 1.0 if what == "import" else None
                )


def all_rows(quick: bool = False) -> list[Row]:
    """Every row of this benchmark."""
    runs = 3 if quick else 20
    return [*simulator_rows(runs), *assignment_rows(runs, 2 if quick else 5), *first_use_rows()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
