"""Generation plans: rank 0 derives a generation's plan from the previous one, and the others read it from the store."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dilatant.comm.store.store import Store
from dilatant.config import Config, UserError
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan
from dilatant.plan.templates.copies import Redundancy, copies_on_nodes, copies_on_unlike_nodes
from dilatant.plan.templates.membership import MembershipPlanner, pipelines_of, ranks_of
from dilatant.plan.templates.node_groups import equal_groups, regroup
from dilatant.planning.layout import FRUGAL, INTERLEAVED, SCHEDULE, TrainingPlan
from dilatant.report.text.wording import bytes_text, counted
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import FAILS_AGAIN, GOES_ON, NO_STATE, too_few
from dilatant.resilience.worker.worker_link import Fenced, WorkerLink
from dilatant.training.prepare import PreparedRun, with_costs

LOOK = timedelta(seconds=0.2)
"""Interval at which a rank that waits for the plan checks if its generation has ended."""


TOO_LARGE = "resilience/too_large"
"""Store key: `generation:rank` of each rank that ran out of memory, followed by a space; later plans need less."""


FAILED = "resilience/failed"
"""Store key: a line of JSON for each failure, `[generation, committed steps, error]`; a layout that failed twice with
one error is not tried again."""


class CannotGoOn(RuntimeError):
    """This generation has no plan with which the run can go on; it may be resumed."""


class NothingFits(CannotGoOn):
    """The nodes of this generation cannot hold the model; the run may go on with more."""


class FailsAgain(CannotGoOn):
    """The only plan of this generation has failed twice with the same error."""


_FAILURES: dict[type[Exception], str] = {NothingFits: "nothing_fits", FailsAgain: "fails_again", UserError: "mistake"}
"""Errors of planning → the key that has their text in the store, in place of the plan's document."""


def after_saving(error: CannotGoOn | UserError, saved: str) -> CannotGoOn | UserError:
    """Return the error of a generation without a plan, with what its ranks have saved. Where they saved their state it
    is no mistake of the user: the run may be resumed with more nodes or memory."""
    return (CannotGoOn if GOES_ON in saved else type(error))(f"{error}; {saved}")


class GenerationPlans:
    """Plan the generations of a run. initial: the run's first plan, whose settings later plans keep if possible."""

    def __init__(self, config: Config, prepared: PreparedRun, initial: TrainingPlan) -> None:
        self._config = config
        self._prepared = prepared
        self._initial = initial
        assert initial.chain is not None  # `prepare` adds it to plans that were made without
        self.planner = MembershipPlanner(initial.chain)

    def warm_up(self) -> None:
        """Search the pipeline templates for the loss of a node ahead of time, so that recovery is faster."""
        plan, devices = self._initial.plan, self.planner.costs.devices
        survivors = {rank: rank for rank in range(len(plan.ranks) - devices)}
        with contextlib.suppress(PlanError):
            self.planner.next(plan, survivors, [rank // devices for rank in survivors])

    def of(self, order: Rebuild, rank: int, store: Store, link: WorkerLink) -> TrainingPlan:
        """Return the plan of the generation and its costs; rank 0 makes it, others wait for it.

        Raises, on all ranks, CannotGoOn, or UserError if a restart would not help; Fenced.
        """
        key = _plan_key(order.generation)
        if rank == 0:
            try:
                planned = self._replan(order, store)
                self._require_new(order, planned, store)
            except (CannotGoOn, UserError) as error:
                store.set(key, json.dumps({_FAILURES[type(error)]: str(error)}))
                raise
            publish_plan(store, order, planned)
            return planned
        while True:
            if link.is_fenced:
                raise Fenced
            with contextlib.suppress(TimeoutError):
                store.wait([key], LOOK)
                break
        document = json.loads(store.get(key))
        for kind, name in _FAILURES.items():
            if name in document:
                raise kind(document[name])
        return TrainingPlan.from_json(document["plan"])

    def redundancy(self, order: Rebuild, planned: TrainingPlan, store: Store) -> Redundancy:
        """Return the copies of layers in the generation, and in the one whose state continues."""
        wanted = self._config.resilience.fault_tolerance + 1
        copies = copies_on_unlike_nodes(planned.plan, nodes_of(order.workers))
        if min(copies.values()) >= wanted:
            return Redundancy(copies, wanted, wanted)
        if order.base == NO_STATE:
            before = copies_on_nodes(self._initial.plan, self._config.resilience.ranks_per_node)
        else:
            document = json.loads(store.get(_plan_key(order.base)))
            plan = TrainingPlan.from_json(document["plan"]).plan
            before = copies_on_unlike_nodes(plan, nodes_of(document["workers"]))
        return Redundancy(copies, wanted, min(before.values()))

    def _replan(self, order: Rebuild, store: Store) -> TrainingPlan:
        initial, size = self._initial, sum(order.workers)
        too_large = store.get(TOO_LARGE).decode().split() if store.check([TOO_LARGE]) else []
        if order.base == NO_STATE and size == len(initial.plan.ranks) and not too_large:
            return initial
        published = None if order.base == NO_STATE else store.get(_plan_key(order.base)).decode()
        for generation, _, rank in (entry.partition(":") for entry in too_large):
            key = _plan_key(int(generation))
            # The store of a new leader has only the plan of the state that goes on.
            document = json.loads(store.get(key)) if store.check([key]) else {}
            if "plan" in document:
                plan = TrainingPlan.from_json(document["plan"]).plan
                self.planner = self.planner.below(plan, int(rank))
        try:
            planned = next_plan(self.planner, initial, published, order.members, order.workers)
        except PlanError as error:
            smallest = self.planner.smallest(self.planner.costs.devices)
            is_too_large = smallest is None or smallest > len(order.members)
            if is_too_large and size >= len(initial.plan.ranks):  # a start with as many would end here again
                raise UserError(f"{self._what_fits()}: {error}") from None
            needed = f"number that the model needs ({error})"
            raise NothingFits(too_few(len(order.members), needed)) from None
        return with_costs(self._config, self._prepared.samples, self._prepared.model, planned)

    def _require_new(self, order: Rebuild, planned: TrainingPlan, store: Store) -> None:
        """Raise FailsAgain, or UserError where nothing is to be saved, if this layout failed with the same error in two
        generations of these members, and no step was committed since."""
        lines = store.get(FAILED).decode().splitlines() if store.check([FAILED]) else []
        layout = _layout(planned, order.members, order.workers)
        failed: dict[str, set[int]] = {}
        for generation, committed, error in dict.fromkeys(tuple(json.loads(line)) for line in lines):
            key = _plan_key(generation)
            document = json.loads(store.get(key)) if committed == order.committed and store.check([key]) else {}
            if "plan" in document:
                plan = TrainingPlan.from_json(document["plan"])
                if _layout(plan, document["members"], document["workers"]) == layout:
                    failed.setdefault(error, set()).add(generation)
        for error, generations in failed.items():
            if len(generations) > 1:
                text = f"{FAILS_AGAIN} with {error}"
                raise UserError(text) if order.base == NO_STATE else FailsAgain(text)

    def _what_fits(self) -> str:
        units, memory = self._prepared.model.units.items(), self.planner.costs.memory
        names = ", ".join(f"{name}: {unit.family}" for name, unit in units)
        why = ", for a rank ran out of memory with more" if self.planner.is_strict else ""
        fits = bytes_text(memory.capacity_bytes)
        return f"the model ({names}) does not fit devices of whose memory plans may fill {fits}{why}"


def next_plan(
    planner: MembershipPlanner,
    initial: TrainingPlan,
    published: str | None,
    members: Sequence[str],
    workers: Sequence[int],
) -> TrainingPlan:
    """Return the plan of a generation of these members, without costs: as `dilatant simulate --failures` predicts it,
    or, for a run that shards weights, that of `regroup`. Raises PlanError if there is none.

    published: document of `publish_plan` for the generation whose state continues; None if no state continues.
    """
    size, before, old, earlier = sum(workers), initial, dict[int, int](), members
    node_before = [rank // planner.costs.devices for rank in range(initial.plan.ranks[-1] + 1)]
    if published is not None:
        document = json.loads(published)
        before, earlier = TrainingPlan.from_json(document["plan"]), document["members"]
        node_before = nodes_of(document["workers"])
        was, now = _ranks_of(document["members"], document["workers"]), _ranks_of(members, workers)
        old = {rank: now[seat] for seat, rank in was.items() if seat in now}
    elif planner.costs.keeps_layout:
        old = {rank: rank for rank in range(min(size, len(initial.plan.ranks)))}
    if initial.shard:
        return _regrouped(planner, initial, before.plan, node_before, old, workers)
    costs, node_of = before.chain or planner.costs, nodes_of(workers)
    domains = costs.domains_of(earlier, members)
    found = planner.next(before.plan, old, node_of, [domains[node] for node in node_of] if domains else ())
    schedule, count = initial.schedule, found.num_microbatches
    if found.kept and planner.costs.keeps_layout:  # its memory was not planned for less
        count = max(count, initial.num_microbatches)
    if len(found.plan.ranks) == 1:
        schedule = "serial"
    elif not found.early or (found.kept and before.schedule == FRUGAL):
        schedule = FRUGAL
    elif schedule == "serial" or (schedule == INTERLEAVED and not found.plan.is_interleaved):
        schedule = SCHEDULE
    return replace(
        initial,
        plan=found.plan,
        schedule=schedule,
        num_microbatches=count,
        costs=None,
        predicted_seconds=found.seconds,
        chain=initial.chain and replace(initial.chain, domains=domains),
    )


def _regrouped(
    planner: MembershipPlanner,
    initial: TrainingPlan,
    before: Plan,
    node_before: Sequence[int],
    survivors: Mapping[int, int],
    workers: Sequence[int],
) -> TrainingPlan:
    """Return the plan of a generation of a run that shards weights; see `regroup`. Raises PlanError."""
    if planner.is_strict:
        raise PlanError("a rank ran out of memory, and with train.shard there is one plan for these nodes")
    devices = planner.costs.devices
    pattern, begun = equal_groups(initial.plan, devices)
    plan = regroup(pattern, before, node_before, survivors, workers, devices)
    count = len(plan.units[0].replicas) // len(pattern.units[0].replicas)
    most = max(initial.num_microbatches, -(-initial.num_microbatches * begun // count))
    return replace(initial, plan=plan, num_microbatches=most, costs=None, predicted_seconds=None)


def report_failure(store: Store, order: Rebuild, error: str) -> None:
    """Record that the generation failed with this error; see `FAILED`. Addresses of objects in it do not count."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", error)
    store.append(FAILED, json.dumps([order.generation, order.committed, text]) + "\n")


def idle_ranks(plan: Plan, members: Sequence[str], workers: Sequence[int]) -> dict[str, int]:
    """Return node → its ranks in no pipeline, for nodes that have some."""
    busy = {*plan.ranks}
    return dict(Counter(members[node] for rank, node in enumerate(nodes_of(workers)) if rank not in busy))


def pipelines_text(plan: Plan) -> str:
    """Return the pipelines of a plan by their length, such as `1 of 3 ranks, 2 of 2 ranks`."""
    sizes = Counter(len(ranks_of(one)) for one in pipelines_of(plan))
    return ", ".join(f"{count} of {counted(size, 'rank')}" for size, count in sorted(sizes.items(), reverse=True))


def _layout(planned: TrainingPlan, members: Sequence[str], workers: Sequence[int]) -> tuple[Any, ...]:
    return planned.plan, planned.schedule, planned.num_microbatches, (*members,), (*workers,)


def nodes_of(workers: Sequence[int]) -> list[int]:
    """Return the node of each rank. workers: of each node."""
    return [node for node, count in enumerate(workers) for _ in range(count)]


def publish_plan(store: Store, order: Rebuild, planned: TrainingPlan) -> None:
    """Publish the plan of a generation in the store, for the planning of the next one."""
    document = {"plan": planned.to_json(indent=None), "members": order.members, "workers": order.workers}
    store.set(_plan_key(order.generation), json.dumps(document))


def _plan_key(generation: int) -> str:
    return f"resilience/plan/{generation}"


def _ranks_of(members: Sequence[str], workers: Sequence[int]) -> dict[tuple[str, int], int]:
    """Return (node, index of the worker) → rank."""
    seats = [(node, index) for node, count in zip(members, workers) for index in range(count)]
    return {seat: rank for rank, seat in enumerate(seats)}
