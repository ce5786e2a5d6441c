"""When gradients are summed: the closed form against buckets that wait in line one by one, on drawn steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cases.step_cases import random_step
from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.costs.step_costs import token_costs
from dilatant.plan.costs.sync_time import SyncSeconds
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.packed import BACKWARD, WEIGHT_GRADIENT
from dilatant.schedule.simulator.graph import ScheduleGraph, build
from dilatant.schedule.simulator.predict import synced_seconds


def line_of_buckets(
    graph: ScheduleGraph, durations: np.ndarray, ends: np.ndarray, held: np.ndarray, seconds: dict[int, float]
) -> float:
    """When the last rank has summed its last bucket: each rank sums one at a time, in the order of its stages' ends.
    Buckets of a backward are complete one after another, those of a weight-gradient half all at its end."""
    latest = 0.0
    for rank in graph.plan.ranks:
        last: list[tuple[float, float, float]] = []
        for placed in graph.plan.stages():
            ops = [
                op
                for op in range(graph.num_ops)
                if graph.stage[op] == placed.index and graph.kind[op] in (BACKWARD, WEIGHT_GRADIENT)
            ]
            if rank in placed.stage.ranks and ops:
                op = max(ops, key=lambda one: ends[one])
                takes = 0.0 if graph.kind[op] == WEIGHT_GRADIENT else durations[op]
                last.append((float(ends[op]), float(takes), float(held[placed.index])))
        total, free = sum(size for *_, size in last), 0.0
        for end, takes, size in sorted(last):
            buckets = math.ceil(size / BUCKET_BYTES)
            for number in range(1, buckets + 1):
                complete = end - takes + takes * number / buckets
                free = max(free, complete) + seconds[rank] * size / total / buckets
        latest = max(latest, free)
    return latest


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "gpipe"])
def test_sums_wait_for_their_gradients_and_for_each_other(family: str) -> None:
    several = 0
    for seed in range(40):
        step = random_step(seed)
        schedule = FAMILIES[family](step.plan, step.assignment, step.trainability)
        graph = build(step.plan, step.assignment, schedule)
        if not graph.num_ops:
            continue
        rng = np.random.default_rng(seed)
        durations = rng.uniform(0.1, 1.0, graph.num_ops)
        # In the order of a schedule that runs: each op behind all before it, with gaps.
        ends = np.empty(graph.num_ops)
        ends[graph.order] = np.cumsum(durations[graph.order] + rng.uniform(0.0, 0.5, graph.num_ops))
        held = rng.integers(1, 6, len(step.plan.stages())) * (BUCKET_BYTES * rng.choice([0.4, 1.0]))
        seconds = {rank: float(rng.uniform(0.0, 4.0)) for rank in step.plan.ranks}
        costs = token_costs(step.plan, step.trainability.backward)
        stages = replace(costs.stages, gradient_bytes=held)
        costs = replace(costs, stages=stages, sync=SyncSeconds(seconds, dict.fromkeys(seconds, 0.25)))
        expected = line_of_buckets(graph, durations, ends, held, seconds)
        found = synced_seconds(graph, costs, durations, ends)
        if expected:
            assert found == pytest.approx(expected + 0.25, rel=1e-9)  # the same sums in another order
        on_rank = [rank for placed in step.plan.stages() for rank in placed.stage.ranks]
        several += len(set(on_rank)) < len(on_rank)
    assert several > 5
