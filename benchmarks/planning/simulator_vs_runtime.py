"""The simulator held against the real runtime: how far its step is from the measured one.

    python -m benchmarks.planning.simulator_vs_runtime [--steps N] [--json FILE]

Real pipelines train in processes of one thread each, over Gloo, and every action is clocked by the runtime's own
recorder. The measured step is the recorder's: from the first action's start to the last one's end, over all ranks.
It is compared with three predictions of the same Schedule:

    same step     simulate() fed with the seconds that each action took in that very step: what the engine leaves out
    other steps   simulate() fed with each action's median over all other steps: adds how unlike the steps of this
                  machine are
    fitted        the cost model of `dilatant profile`, measured on single layers before any pipeline was started

Messages take what the link between two such processes took, measured beforehand too. Only ranks that have a core of
their own are compared with fitted costs: where ranks share cores, no cost of one layer alone can be right, and the
action times that were measured hold the sharing already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.planning.small_pipelines import (
    IMAGE_TOKENS,
    small_model,
    small_samples,
    target_share,
    this_machine,
    unit_tokens,
)
from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker, launch_local
from dilatant.cost.model import CostModel
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.workload import Workload
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.planning.measuring.layer_costs import costs_in_use, measure_layers
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.planning.problem.describe_model import describe_model
from dilatant.planning.problem.planned_hardware import Target
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.simulator.contention import travel
from dilatant.schedule.simulator.graph import ScheduleGraph, build
from dilatant.schedule.simulator.predict import message_bytes, message_sums, op_sums, piece_sums, predict, step_bytes
from dilatant.schedule.simulator.simulate import action_array
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import trainability_of

HIDDEN, LAYERS, VISION_LAYERS = 256, 8, 6
SAME, OTHER, FITTED = "same step", "other steps", "fitted"
TARGETS = {SAME: 0.03, FITTED: 0.10}


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline. `cuts[unit]` are the first layers of its stages, on ranks in the order of units; `lengths[k]` are
    the text tokens of the samples in microbatch k, `images[k]` how many each of them has. `on_block_tables`: our
    attention instead of transformers', whose rows of several samples are dense."""

    name: str
    cuts: Mapping[str, tuple[int, ...]]
    family: str
    lengths: tuple[tuple[int, ...], ...]
    images: tuple[tuple[int, ...], ...] = ()
    frozen: tuple[str, ...] = ()
    on_block_tables: bool = False

    @property
    def ranks(self) -> int:
        return sum(len(cuts) for cuts in self.cuts.values())


def cases() -> list[Case]:
    """Chains and graphs, equal and unequal microbatches, all kinds of actions."""
    draw = np.random.default_rng(0)
    equal = ((256,),) * 8
    ragged = tuple((int(n),) for n in np.clip(draw.lognormal(5.5, 0.6, 8), 32, 900))
    images = tuple((int(n),) for n in draw.integers(0, 5, 8))
    pairs = tuple(tuple(int(n) for n in np.clip(draw.lognormal(5.2, 0.6, 2), 32, 600)) for _ in range(8))
    two = {"language": (0, 5)}
    both = {"vision": (0,), "language": (0,)}
    return [
        Case("2 stages, equal microbatches", two, "1f1b", equal),
        Case("2 stages, unequal microbatches", two, "gpipe", ragged),
        Case("2 stages, unequal microbatches", two, "1f1b", ragged),
        Case("2 stages, unequal microbatches", two, "eager", ragged),
        Case("2 stages, unequal microbatches", two, "zb-h1", ragged),
        Case("2 stages, uneven cut, language frozen below", {"language": (0, 4)}, "1f1b", ragged,
             frozen=("language.layers.0", "language.layers.1", "language.embedding")),
        Case("encoder and language model", both, "1f1b", ragged, images),
        Case("frozen encoder and language model", both, "eager", ragged, images, frozen=("vision.encoder",)),
        Case("2 stages, two samples in a row", two, "1f1b", pairs),
        Case("2 stages, two samples, on block tables", two, "1f1b", pairs, on_block_tables=True),
        Case("encoder and 3 stages", {"vision": (0,), "language": (0, 4, 7)}, "1f1b", ragged, images),
    ]  # fmt: skip


def build_model(case: Case) -> MultimodalModel:
    vision = VISION_LAYERS if "vision" in case.cuts else 0
    return small_model(HIDDEN, LAYERS, vision, case.frozen, case.on_block_tables)


def build_plan(case: Case, model: MultimodalModel) -> Plan:
    units, rank = [], 0
    for name, cuts in case.cuts.items():
        ends = (*cuts[1:], len(model.units[name].layers))
        stages = tuple(Stage(a, b, (rank + k,)) for k, (a, b) in enumerate(zip(cuts, ends)))
        rank += len(stages)
        units.append(UnitPlan(name, (Replica(stages),), () if name == "language" else ("language",)))
    return Plan(tuple(units))


def build_batch(case: Case) -> tuple[list[EncodedSample], Assignment]:
    """Samples of random tokens and images, and the microbatches of the case; a sample without images is absent from
    the encoder's."""
    texts = [length for lengths in case.lengths for length in lengths]
    images = [case.images[k][at] if case.images else 0 for k, row in enumerate(case.lengths) for at in range(len(row))]
    samples = small_samples(texts, images, seed=1)
    language: list[tuple[int, ...]] = []
    for lengths in case.lengths:
        first = sum(map(len, language))
        language.append(tuple(range(first, first + len(lengths))))
    vision = [tuple(s for s in row if "vision" in samples[s].sizes) for row in language]
    microbatches = {"language": (tuple(language),)}
    return samples, Assignment({"vision": (tuple(vision),), **microbatches} if case.images else microbatches)


def build_schedule(case: Case, plan: Plan, model: MultimodalModel, assignment: Assignment) -> Schedule:
    trainability = trainability_of(plan, trainable_layers(model.units))
    return FAMILIES[case.family](plan, assignment, trainability)


def train(worker: Worker, chosen: Sequence[Case], steps: int) -> list[list[dict[str, Any]]]:
    """On every rank: each case's steps, as rows of measured actions and the seconds of the whole call."""
    found = []
    for number, case in enumerate(chosen):
        comm = Comm(worker.store, worker.rank, worker.size, generation=number)
        model = build_model(case)
        plan = build_plan(case, model)
        samples, assignment = build_batch(case)
        schedule = build_schedule(case, plan, model, assignment)
        runtime = Runtime(model, plan, comm)
        prepared = runtime.prepare(samples, assignment, schedule)
        taken = []
        for step in range(steps + 2):
            comm.world.barrier()
            began = time.perf_counter()
            runtime.execute(samples, prepared)
            comm.world.barrier()
            whole = time.perf_counter() - began
            for parameter in runtime.parameters.values():
                parameter.grad = None
            rows = runtime.measured()
            if step >= 2:  # the first two allocate and compile
                taken.append({"rows": rows, "whole": whole})
        runtime.close()
        comm.close()
        found.append(taken)
    return found


def kind_of(case: Case) -> tuple[Any, ...]:
    """Cases of one kind have the same layers."""
    return tuple(case.cuts), case.on_block_tables


def profile(alike: Sequence[Case], target: Target) -> CostModel:
    """What `dilatant profile` measures for the model of these cases, up to their longest sample."""
    model = describe_model(build_model(replace(alike[0], frozen=())))
    longest = max(sample.sizes["language"] for case in alike for sample in build_batch(case)[0])
    return measure_layers(model, target, [max(1, longest // part) for part in (1, 2, 4, 8)])


def fitted_timeline(case: Case, costs: CostModel, cluster: Cluster) -> Timeline:
    """The step as `dilatant simulate` predicts it from the cost model."""
    model = build_model(case)
    description = describe_model(model)
    plan = build_plan(case, model)
    samples, assignment = build_batch(case)
    schedule = build_schedule(case, plan, model, assignment)
    tokens = unit_tokens(samples, list(case.cuts))
    language = tokens["language"]
    row = max(sum(language[s] for s in row) for rows in assignment.microbatches["language"] for row in rows)
    used = costs_in_use(costs, description, target_share(samples), row, model.language.loss_chunk)
    table = stage_costs(plan, description.spec, used)
    squares = {unit: tokens[unit] * IMAGE_TOKENS for unit in tokens if unit != "language"}
    return predict(
        plan, assignment, schedule, table, tokens, cluster, squares=squares, dense=dense_rows(description, used)
    )


def step_of(case: Case, costs: CostModel) -> tuple[ScheduleGraph, np.ndarray]:
    """The case's step, and the bytes of its messages."""
    model = build_model(case)
    plan = build_plan(case, model)
    samples, assignment = build_batch(case)
    schedule = build_schedule(case, plan, model, assignment)
    tokens = Workload(unit_tokens(samples, list(case.cuts)))
    graph = build(plan, assignment, schedule)
    table = stage_costs(plan, describe_model(model).spec, costs)
    message = message_bytes(graph, table, message_sums(graph, tokens))
    sums = op_sums(graph, table, piece_sums(graph, tokens), tokens)
    size = step_bytes(graph, table, sums, message)
    return graph, size.message


def compare(
    case: Case, taken: Sequence[Mapping[str, Any]], costs: CostModel, cluster: Cluster, cores: int
) -> dict[str, Any]:
    """Measured and predicted seconds of every step, and mean errors."""
    graph, size = step_of(case, costs)

    def step(seconds: Callable[[Action], float]) -> float:
        return float(travel(graph, action_array(graph, seconds), size, cluster)[0].max())

    seconds = [{row.action: row.seconds for row in one["rows"]} for one in taken]
    measured = [max(row.end for row in one["rows"]) - min(row.start for row in one["rows"]) for one in taken]
    predicted: dict[str, list[float]] = {SAME: [step(own.__getitem__) for own in seconds], OTHER: []}
    for number in range(len(taken)):
        others = [own for index, own in enumerate(seconds) if index != number]
        median = {action: statistics.median(own[action] for own in others) for action in others[0]}
        predicted[OTHER].append(step(median.__getitem__))
    if case.ranks <= cores:
        predicted[FITTED] = [fitted_timeline(case, costs, cluster).seconds] * len(taken)
    return {
        "case": case.name,
        "family": case.family,
        "ranks": case.ranks,
        "measured_seconds": measured,
        "whole_seconds": [one["whole"] for one in taken],
        "predicted_seconds": predicted,
        "mean_error": {
            name: statistics.fmean(abs(p / m - 1) for p, m in zip(values, measured))
            for name, values in predicted.items()
        },
        "work": _work(case, seconds, costs, cluster),
    }


def _work(
    case: Case, measured: Sequence[Mapping[Action, float]], costs: CostModel, cluster: Cluster
) -> dict[str, dict[str, float]]:
    """Seconds of all actions of a kind and unit in a step: the median measured, and fitted."""
    timeline = fitted_timeline(case, costs, cluster)
    placed = timeline.plan.stages()
    sums: dict[str, dict[str, float]] = {}
    for rank in timeline.ranks:
        for action, start, end in timeline.of_rank(rank):
            name = f"{placed[action.stage].unit} {action.kind}"
            entry = sums.setdefault(name, {"measured": 0.0, "fitted": 0.0})
            entry["fitted"] += end - start
            entry["measured"] += statistics.median(own[action] for own in measured)
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures as JSON here as well")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    chosen = cases()
    target, cluster = this_machine(max(case.ranks for case in chosen))
    link = cluster.inside
    print(f"link between two processes: {link.bandwidth / 1e9:.2f} GB/s, {link.latency * 1e6:.0f} us")
    print(f"{len(chosen)} pipelines, {options.steps} steps each, on {cores} cores\n")
    names = (SAME, OTHER, FITTED)
    head = f"{'pipeline':46}{'order':>8}{'ranks':>6}{'step':>9}"
    print(head + "".join(f"{name:>13}" for name in names) + "   mean error of the predicted step")
    results = []
    costs: dict[tuple[Any, ...], CostModel] = {}
    for case in chosen:
        if kind_of(case) not in costs:
            costs[kind_of(case)] = profile([one for one in chosen if kind_of(one) == kind_of(case)], target)
    for ranks in sorted({case.ranks for case in chosen}):
        own = [case for case in chosen if case.ranks == ranks]
        for case, taken in zip(own, launch_local(train, ranks, own, options.steps)[0]):
            result = compare(case, taken, costs[kind_of(case)], cluster, cores)
            results.append(result)
            errors = result["mean_error"]
            cells = [f"{errors[name]:.1%}" if name in errors else "" for name in names]
            step = statistics.median(result["measured_seconds"])
            print(
                f"{case.name:46}{case.family:>8}{ranks:6}{step * 1e3:6.0f} ms"
                + "".join(f"{cell:>13}" for cell in cells),
                flush=True,
            )
    print()
    mean = {}
    for name in names:
        mean[name] = statistics.fmean(r["mean_error"][name] for r in results if name in r["mean_error"])
        target_held = ""
        if name in TARGETS:
            target_held = f"target {TARGETS[name]:.0%}: {'held' if mean[name] <= TARGETS[name] else 'MISSED'}"
        print(f"mean error, {name:12} {mean[name]:6.2%}   {target_held}")
    around = statistics.fmean(w / m - 1 for r in results for w, m in zip(r["whole_seconds"], r["measured_seconds"]))
    print(f"outside the timeline (agreement, routes, gradient sync, commit): {around:.1%} of a step more")
    if options.json:
        document = {**machine(), "link": {"bandwidth": link.bandwidth, "latency": link.latency},
                    "mean_error": mean, "outside_the_timeline": around, "pipelines": results}  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
