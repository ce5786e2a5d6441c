"""Generation plans: rank 0 derives a generation's plan from the previous one, and the others read it from the store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from dilatant.comm.store.store import Store
from dilatant.config import Config
from dilatant.config.degrees import ONE, Degrees
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan
from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner
from dilatant.planning.layout import FRUGAL, INTERLEAVED, SCHEDULE, TrainingPlan
from dilatant.planning.memberships import chain_costs
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import NO_STATE, TOO_FEW
from dilatant.resilience.worker.worker_link import Fenced, WorkerLink
from dilatant.training.prepare import PreparedRun, known_tokens, target_share, with_costs
from dilatant.training.run_costs import local_costs

LOOK = timedelta(seconds=0.2)
"""Interval at which a rank that waits for the plan checks if its generation has ended."""


TOO_LARGE = "resilience/too_large"
"""Store key: generations in which a rank ran out of memory, each followed by a space; later plans need less memory."""


class NothingFits(RuntimeError):
    """The nodes of this generation cannot hold the model; the run may go on with more."""


class GenerationPlans:
    """Plan the generations of a run. initial: the run's first plan, whose settings later plans keep if possible."""

    def __init__(self, config: Config, prepared: PreparedRun, initial: TrainingPlan) -> None:
        self._config = config
        self._prepared = prepared
        self._initial = initial
        self._planner = MembershipPlanner(_chain_costs(config, prepared, initial))

    def warm_up(self) -> None:
        """Search the pipeline templates for the loss of a node ahead of time, so that recovery is faster."""
        plan, devices = self._initial.plan, self._planner.costs.devices
        survivors = {rank: rank for rank in range(len(plan.ranks) - devices)}
        with contextlib.suppress(PlanError):
            self._planner.next(plan, survivors, [rank // devices for rank in survivors])

    def of(self, order: Rebuild, rank: int, store: Store, link: WorkerLink) -> TrainingPlan:
        """Return the plan of the generation and its costs; rank 0 makes it, others wait for it. Raises Fenced."""
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
        initial, planner = self._initial, self._planner
        too_large = store.get(TOO_LARGE).split() if store.check([TOO_LARGE]) else []
        if order.base == NO_STATE and sum(order.workers) == len(initial.plan.ranks) and not too_large:
            return initial
        published = None if order.base == NO_STATE else store.get(_plan_key(order.base)).decode()
        for key in dict.fromkeys(_plan_key(int(generation)) for generation in too_large):
            if store.check([key]):  # the store of a new leader has only the plan of the state that goes on
                document = json.loads(store.get(key))
                planner = planner.below(TrainingPlan.from_json(document["plan"]).plan)
        try:
            planned = next_plan(planner, initial, published, order.members, order.workers)
        except PlanError as error:
            raise NothingFits(
                f"{len(order.members)} {TOO_FEW} number that the model needs ({error})"
            ) from None
        return with_costs(self._config, self._prepared.samples, self._prepared.model, planned)


def next_plan(
    planner: MembershipPlanner,
    initial: TrainingPlan,
    published: str | None,
    members: Sequence[str],
    workers: Sequence[int],
) -> TrainingPlan:
    """Return the plan of a generation of these members, as `dilatant simulate --failures` predicts it, without costs.

    published: document of `publish_plan` for the generation whose state continues; None if no state continues.
    """
    size, before, old = sum(workers), initial, dict[int, int]()
    if published is not None:
        document = json.loads(published)
        before = TrainingPlan.from_json(document["plan"])
        was, now = _ranks_of(document["members"], document["workers"]), _ranks_of(members, workers)
        old = {rank: now[seat] for seat, rank in was.items() if seat in now}
    elif initial.chain is None:  # keep to the user's layout
        old = {rank: rank for rank in range(min(size, len(initial.plan.ranks)))}
    found = planner.next(before.plan, old, [node for node, count in enumerate(workers) for _ in range(count)])
    schedule, count = initial.schedule, found.num_microbatches
    if found.kept and initial.chain is None:  # memory of a layout of the user's own was not planned for less
        count = max(count, initial.num_microbatches)
    if size == 1:
        schedule = "serial"
    elif not found.early or (found.kept and before.schedule == FRUGAL):
        schedule = FRUGAL
    elif schedule == "serial" or (schedule == INTERLEAVED and not _goes_round(found.plan)):
        schedule = SCHEDULE
    return replace(
        initial,
        plan=found.plan,
        schedule=schedule,
        num_microbatches=count,
        costs=None,
        predicted_seconds=found.seconds,
    )


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


def _chain_costs(config: Config, prepared: PreparedRun, planned: TrainingPlan) -> ChainCosts:
    """Return the costs from which memberships are planned: the plan's, else those that the run assigns samples by."""
    if planned.chain is not None:
        return planned.chain
    plan, model, anchor = planned.plan, prepared.model, prepared.model.graph.anchor
    own: dict[str, dict[int, Degrees]] = {unit.name: {1: ONE} for unit in plan.units}
    for placed in plan.stages():
        own[placed.unit].setdefault(len(placed.stage.ranks), placed.stage.degrees)
    others = {
        width: one.without_experts for each in (*own.values(), own[anchor]) for width, one in each.items()
    }
    degrees = {name: {**others, **each} for name, each in own.items()}
    here = local_costs(config, model, plan, target_share(prepared.samples), planned.zero, others.values())
    units, tokens = here.unit_layers(known_tokens(prepared.samples, model), config.row_tokens)
    count = planned.num_microbatches * len(plan.unit(anchor).replicas)
    samples = min(
        config.train.global_batch_size / count,
        max(1.0, config.row_tokens / max(1.0, float(tokens[anchor].mean()))),
    )
    limits = config.resilience
    lost = limits.ranks_per_node, limits.fault_tolerance
    recompute = {unit.name: unit.recompute for unit in plan.units}
    return chain_costs(units, here.target.cluster, lost, degrees, recompute, samples, count)
