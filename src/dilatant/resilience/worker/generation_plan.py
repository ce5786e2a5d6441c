"""Generation plans: rank 0 derives a generation's plan from the previous one, and the others read it from the store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np

from dilatant.comm.store.store import Store
from dilatant.config import Config
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.planning.layout import INTERLEAVED, SCHEDULE, TrainingPlan
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import NO_STATE
from dilatant.resilience.worker.replan import replan
from dilatant.resilience.worker.worker_link import Fenced, WorkerLink
from dilatant.training.prepare import PreparedRun, with_costs
from dilatant.training.run_costs import costs_of_run

LOOK = timedelta(seconds=0.2)
"""Interval at which a rank that waits for the plan checks if its generation has ended."""


class GenerationPlans:
    """Plans the generations of a run. initial: the run's first plan, which later plans keep to if possible."""

    def __init__(self, config: Config, prepared: PreparedRun, initial: TrainingPlan) -> None:
        self._config = config
        self._prepared = prepared
        self._initial = initial
        self._layer_seconds = _layer_seconds(config, prepared, initial.plan)

    def warm_up(self) -> None:
        """Search the pipeline templates for the loss of a rank ahead of time, so that recovery is faster."""
        plan = self._initial.plan
        survivors = {rank: rank for rank in range(len(plan.ranks) - 1)}
        if survivors:
            self._replanned(plan, survivors, ())

    def of(self, order: Rebuild, rank: int, store: Store, link: WorkerLink) -> TrainingPlan:
        """Return the plan of the generation, with its costs: made by rank 0, awaited by the others. Raises Fenced."""
        key = _plan_key(order.generation)
        if rank == 0:
            planned = self._replan(order, store)
            publish_plan(store, order, planned)
            return planned
        while True:
            if link.is_fenced:
                raise Fenced
            with contextlib.suppress(TimeoutError):
                store.wait([key], LOOK)
                return TrainingPlan.from_json(json.loads(store.get(key))["plan"])

    def _replan(self, order: Rebuild, store: Store) -> TrainingPlan:
        initial, size = self._initial, sum(order.workers)
        if order.base == NO_STATE:
            known = min(size, len(initial.plan.ranks))
            before, old = initial.plan, {rank: rank for rank in range(known)}
            if size == len(before.ranks):
                return initial
        else:
            document = json.loads(store.get(_plan_key(order.base)))
            before = TrainingPlan.from_json(document["plan"]).plan
            was = _ranks_of(document["members"], document["workers"])
            now = _ranks_of(order.members, order.workers)
            old = {rank: now[seat] for seat, rank in was.items() if seat in now}
        plan = self._replanned(before, old, sorted({*range(size)} - {*old.values()}))
        schedule = initial.schedule
        if size == 1:
            schedule = "serial"
        elif schedule == INTERLEAVED and not _goes_round(plan):
            schedule = SCHEDULE
        planned = replace(initial, plan=plan, schedule=schedule, costs=None, predicted_seconds=None)
        return with_costs(self._config, self._prepared.samples, self._prepared.model, planned)

    def _replanned(self, before: Plan, survivors: Mapping[int, int], joined: Sequence[int]) -> Plan:
        anchor, initial = self._prepared.model.graph.anchor, self._initial
        total = initial.num_microbatches * len(initial.plan.unit(anchor).replicas)
        tolerance = self._config.resilience.fault_tolerance
        return replan(before, anchor, survivors, joined, tolerance, total, self._layer_seconds)


def publish_plan(store: Store, order: Rebuild, planned: TrainingPlan) -> None:
    """Publish the plan of a generation in the store, for the planning of the next one."""
    document = {"plan": planned.to_json(), "members": order.members, "workers": order.workers}
    store.set(_plan_key(order.generation), json.dumps(document))


def _plan_key(generation: int) -> str:
    return f"resilience/plan/{generation}"


def _ranks_of(members: Sequence[str], workers: Sequence[int]) -> dict[tuple[str, int], int]:
    """Return (node, index of the worker) → rank."""
    seats = [(node, index) for node, count in zip(members, workers) for index in range(count)]
    return {seat: rank for rank, seat in enumerate(seats)}


def _goes_round(plan: Plan) -> bool:
    return any(
        len({stage.ranks for stage in replica.stages}) < len(replica.stages)
        for unit in plan.units
        for replica in unit.replicas
    )


def _layer_seconds(config: Config, prepared: PreparedRun, plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return unit → seconds of each layer, forward plus backward, for a typical microbatch of `plan` on one rank."""
    layers = {unit.name: unit.replicas[0].stages[-1].end for unit in plan.units}
    feeds = {unit.name: unit.feeds for unit in plan.units}
    apart = plan_from_specs(layers, {name: ParallelSpec(pp=count) for name, count in layers.items()}, feeds)
    costs = costs_of_run(config, prepared.model, apart)
    found: dict[str, list[float]] = {name: [] for name in layers}
    for number, placed in enumerate(apart.stages()):
        tokens = _tokens(config, prepared, placed.unit, len(plan.unit(placed.unit).replicas))
        powers = np.array([tokens * tokens, tokens, 1.0])
        found[placed.unit].append(float((costs.stages.seconds[number, :2] @ powers).sum()))
    return {name: tuple(seconds) for name, seconds in found.items()}


def _tokens(config: Config, prepared: PreparedRun, unit: str, replicas: int) -> float:
    """Return the mean tokens of one replica's microbatch; the token budget of a row where sizes are unknown."""
    sizes = prepared.samples.train_sizes
    if sizes is None or unit not in sizes.units or not len(sizes.of(unit)):
        return float(config.row_tokens)
    samples = config.train.global_batch_size / (prepared.planned.num_microbatches * replicas)
    return max(1.0, float(sizes.of(unit).mean()) * samples)
