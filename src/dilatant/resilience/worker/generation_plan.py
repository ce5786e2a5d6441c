"""Generation plans: rank 0 derives a generation's plan from the previous one, and the others read it from the store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from dilatant.comm.store.store import Store
from dilatant.config import Config
from dilatant.plan.plan import Plan
from dilatant.planning.layout import INTERLEAVED, SCHEDULE, TrainingPlan
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import NO_STATE
from dilatant.resilience.worker.layer_seconds import layer_seconds
from dilatant.resilience.worker.replan import replan
from dilatant.resilience.worker.worker_link import Fenced, WorkerLink
from dilatant.training.prepare import PreparedRun, with_costs

LOOK = timedelta(seconds=0.2)
"""Interval at which a rank that waits for the plan checks if its generation has ended."""


class GenerationPlans:
    """Plans the generations of a run. initial: the run's first plan, which later plans keep to if possible."""

    def __init__(self, config: Config, prepared: PreparedRun, initial: TrainingPlan) -> None:
        self._config = config
        self._prepared = prepared
        self._initial = initial
        self._layer_seconds = layer_seconds(config, prepared, initial.plan)

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
            publish_plan(store, order.generation, planned, order.members, order.workers)
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
            was, now = (
                _ranks_of(members, workers)
                for members, workers in (
                    (document["members"], document["workers"]),
                    (order.members, order.workers),
                )
            )
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


def publish_plan(
    store: Store, generation: int, planned: TrainingPlan, members: Sequence[str], workers: Sequence[int]
) -> None:
    """Publish a generation's plan in the store, for the planning of the next one."""
    document = {"plan": planned.to_json(), "members": members, "workers": workers}
    store.set(_plan_key(generation), json.dumps(document))


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
