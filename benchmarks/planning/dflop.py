"""DFLOP's two planners (SIGMOD'26) against ours, on the same statistics, under our exact simulator.

    python -m benchmarks.planning.dflop [--seconds S] [--untimed] [--json FILE]

Online it forms microbatches by an integer program: every sample in exactly one of dp x K microbatches, none of them
empty, so that the largest load of a microbatch in any unit is least; its code allows CP-SAT 10 s and takes the best
that was found. Here CP-SAT solves it where ortools is installed, else HiGHS (scipy), one thread; the limit is processor
time, so that a busy machine does not spoil the answer. Offline it chooses tp, pp and dp of encoder and LLM by the least
max(encoder, LLM) with work / (devices of the unit) * (all stages - 1) / microbatches, samples of one a microbatch.

Read from its published code (Apr 2026); rebuilt from those statements, nothing of it is copied.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks import ROOT
from benchmarks.machine import machine
from benchmarks.papers.datasets import Sizes, entrain_sizes
from benchmarks.papers.entrain.stability import work
from benchmarks.papers.entrain.systems import shallowest_depths
from benchmarks.papers.models import PaperUnit, llama, qwen_vision
from benchmarks.papers.planner import Case, layout_text
from benchmarks.papers.tables import Outcome, PaperTable, spread
from dilatant.config.degrees import Degrees
from dilatant.cost.hardware import load_hardware
from dilatant.plan import Workload
from dilatant.plan.cluster import cluster_of
from dilatant.plan.rank_mapping import Chain
from dilatant.schedule.assignment.assign import assign_microbatches
from dilatant.schedule.assignment.pipeline_shape import PipelineShape, shape_seconds
from dilatant.schedule.families import families

STAGES, TENSOR, BACKWARD = (4, 4), 2, 2.0
SIZES = ((1, 128, 32), (4, 512, 32))
"""Replicas, samples of a global batch, microbatches of a replica; the larger on one data set only."""
LARGER_ON = "ChartQA"

TIMES = ("DFLOP planning s", "balanced ms", "searched ms", "planning s")
"""Columns of times of this machine."""

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Solved:
    """Microbatches of the integer program (None: none was found), the processor seconds that it took, and
    its solver."""

    groups: Groups | None
    seconds: float
    solver: str


def integer_program(load: NDArray[np.float64], count: int, limit: float) -> Solved:
    """The program for `load` [samples, units] and so many microbatches, within `limit` seconds of processor time."""
    started = time.process_time()
    try:
        groups, solver = _cp_sat(load, count, limit), "CP-SAT"
    except ImportError:
        groups, solver = _highs(load, count, limit * _wall_per_processor_second()), "HiGHS"
    return Solved(groups, time.process_time() - started, solver)


def _wall_per_processor_second() -> float:
    wall, processor = time.perf_counter(), time.process_time()
    while time.process_time() - processor < 0.05:
        pass
    return (time.perf_counter() - wall) / (time.process_time() - processor)


def _cp_sat(load: NDArray[np.float64], count: int, limit: float) -> Groups | None:
    from ortools.sat.python import cp_model

    units = np.round(load / load.sum(axis=0).max() * 1e8).astype(np.int64)
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(count)] for _ in range(len(load))]
    for row in inside:
        model.add_exactly_one(row)
    largest = model.new_int_var(0, int(units.sum()), "")
    for slot in range(count):
        column = [row[slot] for row in inside]
        model.add_at_least_one(column)
        for unit in range(load.shape[1]):
            model.add(sum(int(own) * one for own, one in zip(units[:, unit], column, strict=True)) <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    begun, ended = time.process_time(), threading.Event()

    def stop() -> None:
        while not ended.wait(0.05):
            if time.process_time() - begun > limit:
                solver.stop_search()

    watch = threading.Thread(target=stop, daemon=True)
    watch.start()
    answer = solver.solve(model)
    ended.set()
    watch.join()
    if answer not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found: Groups = [[] for _ in range(count)]
    for sample, row in enumerate(inside):
        found[next(slot for slot, one in enumerate(row) if solver.value(one))].append(sample)
    return found


def _highs(load: NDArray[np.float64], count: int, limit: float) -> Groups | None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack, kron, vstack

    samples, units = load.shape
    ones, slots = np.ones((1, count)), np.eye(count)
    scaled = load / load.sum(axis=0).max()
    once = hstack([kron(np.eye(samples), ones), csr_array((samples, 1))])
    filled = hstack([kron(np.ones((1, samples)), slots), csr_array((count, 1))])
    fits = vstack(
        [hstack([kron(scaled[:, [unit]].T, slots), csr_array(-np.ones((count, 1)))]) for unit in range(units)]
    )
    variables = samples * count
    found = milp(
        np.r_[np.zeros(variables), 1.0],
        integrality=np.r_[np.ones(variables), 0.0],
        bounds=Bounds(0.0, np.r_[np.ones(variables), np.inf]),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(filled, 1, np.inf),
            LinearConstraint(fits, -np.inf, 0),
        ],
        options={"time_limit": limit},
    )
    if found.x is None:
        return None
    chosen = found.x[:variables].reshape(samples, count).argmax(axis=1)
    return [np.flatnonzero(chosen == slot).tolist() for slot in range(count)]


def largest_over_bound(load: NDArray[np.float64], groups: Groups) -> float:
    """The largest load of a microbatch in any unit over the least that it could be."""
    bound = max(float((load.sum(axis=0) / len(groups)).max()), float(load.max()))
    return max(float(load[group].sum(axis=0).max()) for group in groups) / bound


def online(data: dict[str, Sizes], limit: float) -> PaperTable:
    """Microbatches of the same batches: the integer program's, Entrain's and ours, on the same stages."""
    rows: list[tuple[Any, ...]] = []
    solver = ""
    plain = PipelineShape(STAGES, ((1,), ()), (BACKWARD, BACKWARD), (0.0, 0.0))
    one_f_one_b = replace(plain, family=families.one_f_one_b)
    for name, sizes in data.items():
        seconds = work(sizes, "1b", load_hardware("A40"), TENSOR) * (1.0 + BACKWARD) / np.asarray(STAGES)
        for replicas, batch, count in SIZES if name == LARGER_ON else SIZES[:1]:
            load = seconds[np.random.default_rng(3).integers(len(seconds), size=batch)]
            solved = integer_program(load, replicas * count, limit)
            solver = solved.solver
            theirs = None
            if solved.groups is not None:
                theirs = max(
                    shape_seconds(one_f_one_b, load, (tuple(map(tuple, own)),) * 2)
                    for own in (solved.groups[replica::replicas] for replica in range(replicas))
                )
            steps: dict[str, float] = {}
            spent: dict[str, float] = {}
            gap = 0.0
            for policy, shape in (("balanced", one_f_one_b), ("searched", one_f_one_b), ("searched, eager", plain)):
                began = time.process_time()
                dealt = assign_microbatches(
                    load, replicas, "balanced", weight=np.ones(batch), capacity=float(batch // replicas)
                )[0]
                times = []
                for group in dealt:
                    own = load[list(group)]
                    found = assign_microbatches(own, count, policy.partition(",")[0], shape=shape)  # type: ignore[arg-type]
                    used = shape
                    if policy == "searched, eager":
                        depths = shallowest_depths(shape, own, found)
                        used = replace(shape, family=partial(families.eager, depths=depths))
                    times.append(shape_seconds(used, own, found))
                    if policy == "balanced":
                        gap = max(gap, largest_over_bound(own, [list(one) for one in found[0]]))
                spent[policy], steps[policy] = time.process_time() - began, max(times)
            rows.append(
                (sizes.basis, batch, replicas * count, solved.seconds,
                 None if solved.groups is None else largest_over_bound(load, solved.groups), gap,
                 1e3 * spent["balanced"],
                 1e3 * spent["searched"], *(None if theirs is None else theirs / step for step in steps.values()))
            )  # fmt: skip
    none = sum(row[4] is None for row in rows)

    def over(column: int, what: str, note: str = "") -> Outcome:
        own = [row[column] for row in rows if row[column] is not None]
        verdict = "beats" if min(own) > 1.005 else "agrees" if min(own) > 0.98 else "falls short"
        return Outcome(what, "1.00", f"{spread(own)}", verdict, "predicted", note)  # type: ignore[arg-type]

    slowest = max(max(row[6], row[7]) for row in rows)
    return PaperTable(
        "DFLOP, online",
        "microbatches of the same batches: its integer program against ours, 4 + 4 stages, Qwen2.5-VL's encoder and "
        "Llama 3.2 1b",
        f"predicted: shipped analytic A40 at tp {TENSOR}, exact simulation of 1F1B unless it says eager; {solver}, one "
        f"thread, {limit:.0f} s of processor time allowed",
        (
            "data",
            "samples",
            "microbatches",
            "DFLOP planning s",
            "DFLOP largest / bound",
            "ours largest / bound",
            "balanced ms",
            "searched ms",
            "DFLOP / balanced",
            "DFLOP / searched",
            "DFLOP / searched, eager",
        ),
        tuple(rows),
        (
            over(8, "step of its microbatches over our balanced ones, both 1F1B"),
            over(
                9,
                "step of its microbatches over our searched ones, both 1F1B",
                "the search optimises the simulator that scores both",
            ),
            Outcome(
                "processor seconds to plan a batch",
                f"{limit:.0f} allowed",
                f"{slowest / 1e3:.2f} at most",
                "beats" if slowest / 1e3 < limit else "falls short",
                "measured",
            ),
        ),
        (
            f"The solver found nothing within its limit in {none} of {len(rows)} cells. It used "
            f"{spread((row[3] for row in rows), 1)} s of processor time with its set-up.",
        ),
    )


def offline(data: dict[str, Sizes]) -> PaperTable:
    """Layouts for the same data: its rule's, and our search's."""
    hardware = load_hardware("A40")
    cluster = cluster_of(hardware, 4, 8)
    parts = {"vision": qwen_vision(2048), "language": llama(16, 2048, 8192, 32, 8, 128_256)}
    batch = 256
    units = (
        PaperUnit("vision", parts["vision"], ("language",), None, ((1, 1), (2, 1), (4, 1))),
        PaperUnit("language", parts["language"], (), None, ((1, 1), (2, 1), (4, 1))),
    )
    rows: list[tuple[Any, ...]] = []
    for sizes in data.values():
        drawn = np.random.default_rng(4).integers(len(sizes.vision), size=batch)
        tokens = {"vision": 4.0 * sizes.vision[drawn], "language": sizes.language[drawn].astype(np.float64)}
        case = Case(units, hardware, cluster, Workload(tokens), batch)
        began = time.process_time()
        seconds = {tp: work(sizes, "1b", hardware, tp)[drawn].sum(axis=0) for tp in (1, 2, 4)}
        chosen = _chosen(
            seconds, cluster.num_devices, batch, {unit: sum(part.count for part in own) for unit, own in parts.items()}
        )
        theirs_took = time.process_time() - began
        (v_tp, v_pp, v_dp), (l_tp, l_pp, l_dp) = chosen
        layers = {unit: sum(part.count for part in own) for unit, own in parts.items()}
        chains = [
            Chain(dp, Degrees(tp), {unit: tuple(layers[unit] * stage // pp for stage in range(pp))})
            for unit, tp, pp, dp in (("vision", v_tp, v_pp, v_dp), ("language", l_tp, l_pp, l_dp))
        ]
        theirs = case.score(case.plans(chains), batch // l_dp, schedule="1f1b")
        began = time.process_time()
        ours = case.search(sizes=(1, 2, 4, 8))
        took = time.process_time() - began
        assert ours is not None
        text = f"vision {v_dp} x tp{v_tp} x pp{v_pp}, language {l_dp} x tp{l_tp} x pp{l_pp}"
        rows.append(
            (sizes.basis, text, theirs.seconds, theirs_took, max(theirs.peak_bytes) / hardware.memory,
             layout_text(ours.winner.plan),
             ours.seconds, took, theirs.seconds / ours.seconds)
        )  # fmt: skip
    gains = [row[8] for row in rows]
    return PaperTable(
        "DFLOP, offline",
        f"layouts for the same data on {cluster.num_devices} A40s, batch {batch}",
        "predicted: shipped analytic costs, exact simulation with gradient sync; its layout with 1F1B and balanced "
        "microbatches of one sample, encoder replicas that divide the LLM's (ours needs that); nothing is frozen",
        (
            "data",
            "DFLOP's layout",
            "s",
            "planning s",
            "peak / memory",
            "our layout",
            "s ",
            "planning s ",
            "DFLOP / ours",
        ),
        tuple(rows),
        (
            Outcome(
                "step of its layout over our search's",
                "1.00",
                f"{spread(gains)}",
                "beats" if min(gains) > 1.0 else "agrees" if min(gains) > 0.98 else "falls short",
                "predicted",
                "the search optimises the simulator that scores both",
            ),
            Outcome(
                "processor seconds to plan",
                f"{max(row[3] for row in rows):.2f} at most",
                f"{max(row[7] for row in rows):.1f} at most",
                "falls short" if max(row[7] for row in rows) > max(row[3] for row in rows) else "beats",
                "measured",
                "ours simulates its finalists",
            ),
        ),
    )


Allocation = tuple[int, int, int]


def _chosen(
    seconds: dict[int, NDArray[np.float64]], devices: int, batch: int, layers: dict[str, int]
) -> tuple[Allocation, Degrees]:
    """(tp, pp, dp) of encoder and LLM by the published rule, on all devices."""

    def degrees(number: int, deepest: int) -> Iterator[Allocation]:
        for tp in seconds:
            for pp in range(1, min(number // tp, deepest) + 1):
                if number % (tp * pp) == 0:
                    yield tp, pp, number // (tp * pp)

    best = (math.inf, (1, 1, 1), (1, 1, 1))
    for own in range(1, devices):
        sides = degrees(own, layers["vision"]), degrees(devices - own, layers["language"])
        for vision, language in itertools.product(*map(list, sides)):
            if batch % language[2] or language[2] % vision[2]:
                continue
            factor = max(vision[1] + language[1] - 1, 1) / (batch // language[2])
            slowest = max(
                float(seconds[tp][unit]) / (pp * dp) * factor for unit, (tp, pp, dp) in enumerate((vision, language))
            )
            best = min(best, (slowest, vision, language))
    return best[1], best[2]


def without_times(table: PaperTable) -> PaperTable:
    """The table with what was modelled only."""
    kept = [index for index, column in enumerate(table.columns) if column.strip() not in TIMES]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
        outcomes=tuple(one for one in table.outcomes if one.basis != "measured"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time of the integer program")
    parser.add_argument("--untimed", action="store_true", help="leave out times: the machine is busy")
    parser.add_argument("--json", type=Path, help="write the tables as JSON here as well")
    options = parser.parse_args()
    shared = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared"))
    data = entrain_sizes(shared)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    found = [online(data, options.seconds), offline(data)]
    if options.untimed:
        found = [without_times(one) for one in found]
    for one in found:
        one.show(console)
    if options.json:
        document = {**machine(), "tables": [one.to_plain() for one in found]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
