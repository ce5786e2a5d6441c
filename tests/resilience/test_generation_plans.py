"""Ranks of a generation adopt one plan, the simulated one, or learn that there is none and whether to try again."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.config import UserError
from dilatant.plan.errors import PlanError
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.plan.templates.membership import MembershipPlanner, pipelines_of, ranks_of
from dilatant.planning.failures import from_planner
from dilatant.planning.layout import TrainingPlan
from dilatant.resilience.protocol.agent import Rebuild
from dilatant.resilience.protocol.values import GOES_ON, NO_STATE, Task, may_resume
from dilatant.resilience.worker import generation_plan
from dilatant.resilience.worker.generation_plan import (
    TOO_LARGE,
    CannotGoOn,
    FailsAgain,
    GenerationPlans,
    NothingFits,
    after_saving,
    idle_ranks,
    next_plan,
    report_failure,
)
from harness.memberships import FEEDS, LAYERS, PLANS, planner_like, require_fit


class Entries(dict[str, bytes]):
    """A store of one process."""

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert self.check(keys)

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def append(self, key: str, value: str) -> None:
        self[key] = self.get(key, b"") + value.encode()


def begun(planner: MembershipPlanner, nodes: int) -> tuple[GenerationPlans, Any, tuple[str, ...]]:
    """Return the plans of a run whose first generation has published its plan, its store and its members."""
    store, units = Entries(), {name: SimpleNamespace(family=f"{name}-family") for name in LAYERS}
    prepared: Any = SimpleNamespace(model=SimpleNamespace(units=units), samples=None)
    initial = TrainingPlan(planner.first(nodes).plan, 4, "1f1b", "balanced", chain=planner.costs)
    config: Any = None
    plans, stored = GenerationPlans(config, prepared, initial), cast("Any", store)
    members = tuple(f"n{node}" for node in range(nodes))
    first = Rebuild("n0", 1, 1, Task.REBUILD, 1, members, (1,) * nodes)
    assert plans.of(first, 0, stored, cast("Any", None)) is initial
    return plans, stored, members


def test_too_few_nodes_for_any_pipeline_are_no_mistake() -> None:
    """Every layer needs a node of its own, and one of nine is lost. All ranks learn that there is no plan."""
    plans, store, members = begun(planner_like(PLANS["copies"], capacity=2.0), 9)
    order = Rebuild("n0", 1, 2, Task.REBUILD, 2, members[:8], (1,) * 8, base=1)
    link = cast("Any", SimpleNamespace(is_fenced=False))
    for rank in (0, 4):
        with pytest.raises(NothingFits, match=r"8 nodes are left of the .* the smallest takes 9"):
            plans.of(order, rank, store, link)


@pytest.mark.parametrize("base", [NO_STATE, 1])
def test_a_layout_that_failed_twice_alike_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    """Other errors, other members and steps committed in between do not count. With state, it is saved."""
    monkeypatch.setattr(generation_plan, "with_costs", lambda config, samples, model, planned: planned)
    plans, store, members = begun(planner_like(PLANS["copies"]), 4)

    def tried(generation: int, committed: int, error: str, size: int = 4) -> None:
        now = members[:size], (1,) * size
        order = Rebuild("n0", 1, generation, Task.REBUILD, generation, *now, base=base, committed=committed)
        plans.of(order, 0, store, cast("Any", None))
        if error:
            report_failure(store, order, error)

    tried(2, 7, "ValueError: <a.B object at 0x7f31> is torn")
    tried(3, 7, "ValueError: no room")
    tried(4, 7, "ValueError: <a.B object at 0x7f31> is torn", size=3)
    tried(5, 8, "ValueError: <a.B object at 0x7f31> is torn")
    tried(6, 8, "ValueError: <a.B object at 0x9c00> is torn")
    tried(7, 9, "")
    error = UserError if base == NO_STATE else FailsAgain
    with pytest.raises(error, match=r"failed twice with ValueError: <a\.B"):
        tried(8, 8, "")
    other = Rebuild("n1", 1, 8, Task.REBUILD, 8, members, (1,) * 4, base=base)
    with pytest.raises(error, match="failed twice"):
        plans.of(other, 1, store, cast("Any", SimpleNamespace(is_fenced=False)))


@pytest.mark.parametrize(
    ("saved", "kind"), [(f"step 4 is saved, and {GOES_ON}", CannotGoOn), ("it is lost", UserError)]
)
def test_a_layout_that_fits_no_more_is_no_mistake_once_the_state_is_saved(saved: str, kind: type[Exception]) -> None:
    found = after_saving(UserError("no pipeline fits"), saved)
    assert (type(found), str(found)) == (kind, f"no pipeline fits; {saved}")
    assert may_resume(str(found)) == (kind is CannotGoOn)


@pytest.mark.parametrize("nodes", [1, 2])
def test_where_nothing_fits_only_lost_nodes_are_worth_a_restart(nodes: int) -> None:
    """With all its nodes a run would run out of memory again: it ends with what the user may do."""
    plans, store, members = begun(planner_like(PLANS["copies"], capacity=6.0), 2)
    link = cast("Any", SimpleNamespace(is_fenced=False))
    store.set(TOO_LARGE, "1:0 ")
    order = Rebuild("n0", 1, 2, Task.REBUILD, 2, members[:nodes], (1,) * nodes, base=1)
    error, says = (
        (UserError, r"vision: vision-family, language: language-family\) .* B, for a rank ran .* more memory,")
        if nodes == 2
        else (NothingFits, "1 node is left of the number that the model needs")
    )
    for rank in (0, 1):
        with pytest.raises(error, match=says):
            plans.of(order, rank, store, link)


def published(planned: TrainingPlan, members: list[str], devices: int = 1) -> str:
    """Return the document that a generation of these members publishes."""
    return json.dumps({"plan": planned.to_json(), "members": members, "workers": [devices] * len(members)})


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_run_adopts_what_its_simulation_predicts(seed: int) -> None:
    """For random models, memories and histories, workers adopt the plans, times and ends of `simulate --failures`."""
    draw = random.Random(seed)
    layers = {"vision": draw.randint(1, 4), "language": draw.randint(2, 8)}
    total, devices = sum(layers.values()), draw.choice((1, 1, 2))
    specs = {name: ParallelSpec(tp=devices) for name in layers}
    model = plan_from_specs(layers, specs, FEEDS, {"vision": "language"})
    planner = planner_like(
        model,
        draw.choice((0, 1, 2)),
        draw.randint(1, 24),
        {name: [draw.choice((0.5, 1.0, 2.0)) for _ in range(count)] for name, count in layers.items()},
        draw.choice((float("inf"), 1.2 * total / draw.randint(1, 4) + 0.3)),
        devices,
        draw.choice((float("inf"), 1.0)),
    )
    alive = list(range(draw.randint(1, 9)))
    domains = draw.choice(([], [node // 3 for node in alive]))
    planner = MembershipPlanner(replace(planner.costs, domains=domains))
    following = itertools.count(len(alive))
    reaction = from_planner(planner)
    predicted = reaction(None, frozenset(alive))
    if not predicted.pipelines:
        with pytest.raises(PlanError):
            planner.first(len(alive))
        return
    initial = TrainingPlan(planner.first(len(alive)).plan, 4, "1f1b", "balanced", chain=planner.costs)
    adopted, members = initial, list(alive)
    for _ in range(draw.randint(1, 8)):
        stored = published(adopted, [f"n{n}" for n in members], devices)
        assert predicted.plan == adopted.plan
        assert predicted.members == tuple(members)
        require_fit(adopted.plan, planner)
        assert {*adopted.plan.ranks} <= {*range(devices * len(members))}
        lost = set(draw.sample(members, draw.randint(0, len(members) - 1)))
        joined = [next(following) for _ in range(draw.choice((0, 0, 1, 2)))]
        members = [*(node for node in members if node not in lost), *joined]
        predicted = reaction(predicted, frozenset(members))
        # A worker reads the costs from the plan file and the previous plan from the store.
        worker = MembershipPlanner(TrainingPlan.from_json(initial.to_json()).chain or planner.costs)
        names, workers = [f"n{node}" for node in members], [devices] * len(members)
        if not predicted.pipelines:
            with pytest.raises(PlanError):
                next_plan(worker, initial, stored, names, workers)
            return
        adopted = next_plan(worker, initial, stored, names, workers)
        assert adopted.predicted_seconds == predicted.step_seconds
        pipelines = {frozenset(nodes) for nodes in predicted.pipelines}
        busy = {f"n{node}" for nodes in pipelines for node in nodes}
        idle = idle_ranks(adopted.plan, names, workers)
        assert busy == {name for name in names if idle.get(name) != devices}
        if len(members) >= len(pipelines) > 1:
            copies = copies_on_nodes(adopted.plan, devices)
            assert set(copies.values()) == {len(pipelines)}
        # The same number of nodes, restarted without state.
        assert next_plan(worker, initial, None, names, workers).plan == planner.first(len(members)).plan


def domains_of_groups(planned: TrainingPlan, members: list[str], of: dict[str, int]) -> list[set[int]]:
    """The domains in which each tensor-parallel group of nodes of two ranks lies."""
    return [{of[members[rank // 2]] for rank in placed.stage.ranks} for placed in planned.plan.stages()]


@pytest.mark.parametrize("joins", [False, True])
def test_groups_wider_than_a_node_stay_in_an_nvlink_domain(joins: bool) -> None:
    """Groups of four ranks on pairs of nodes: lost nodes leave others without partners in each of two domains. A node
    that joins is in a domain that nobody knows."""
    both = ParallelSpec(replicas=4, tp=4)
    plan = plan_from_specs(LAYERS, dict.fromkeys(LAYERS, both), FEEDS, {"vision": "language"})
    planner, members = planner_like(plan, 0, devices=2), [f"n{node}" for node in range(8)]
    of = {**dict(zip(members, [0, 0, 0, 0, 1, 1, 1, 1])), "new": 2}
    found = []
    for domains in ([], [of[node] for node in members]):
        chain = replace(planner.costs, keeps_layout=True, narrowest=dict.fromkeys(LAYERS, 4), domains=domains)
        planner = MembershipPlanner(chain)
        planned, before = TrainingPlan(plan, 4, "1f1b", "balanced", chain=chain), members
        for lost in ({"n1"} if joins else {"n1", "n4"}, {"n7"}):
            now = [node for node in before if node not in lost]
            now += ["new"] if joins and "new" not in now else []
            text = published(planned, before, 2)
            planned, before = next_plan(planner, planned, text, now, [2] * len(now)), now
            found.append(domains_of_groups(planned, now, of))
    apart, _, first, second = found
    assert any(len(own) > 1 for own in apart)
    assert all(len(own) == 1 for own in (*first, *second))
    wide = [placed.stage for placed in planned.plan.stages() if len(placed.stage.ranks) == 4]
    assert len(wide) == 4  # of both units: without joins n5 and n6, whose partners were lost, are one group


def test_a_pipeline_without_memory_for_more_than_1f1b_keeps_that_schedule() -> None:
    """The schedule stays 1F1B even next to a new pipeline with memory for an eager schedule."""
    planner = planner_like(PLANS["colocated"], capacity=7.0)
    planned = TrainingPlan(planner.first(4).plan, 4, "eager", "balanced", chain=planner.costs)
    initial, members = planned, ["n0", "n1", "n2", "n3"]
    for now in (["n0", "n1", "n2", "n4"], ["n0", "n1", "n2", "n4", "n5", "n6", "n7"]):
        planned = next_plan(planner, initial, published(planned, members), now, [1] * len(now))
        assert planned.schedule == "1f1b"
        members = now
    assert [len(ranks_of(one)) for one in pipelines_of(planned.plan)] == [2, 2, 3]


def test_a_run_that_begins_on_one_rank_is_pipelined_when_others_join() -> None:
    """With the microbatches that were planned, and not with as many in each pipeline as the one had."""
    planner = planner_like(PLANS["copies"], num_microbatches=16)
    alone = TrainingPlan(planner.first(1).plan, 16, "serial", "balanced", chain=planner.costs)
    joined = next_plan(planner, alone, published(alone, ["n0"]), ["n0", "n1"], [1, 1])
    assert (joined.schedule, joined.num_microbatches) == ("eager", 8)


def test_costs_of_another_model_are_refused() -> None:
    planner = planner_like(PLANS["copies"])
    text = TrainingPlan(planner.first(2).plan, 4, "1f1b", "balanced", chain=planner.costs).to_json()
    document = json.loads(text)
    document["step"]["chain"]["layers"] = {"vision": 4, "language": 5}
    with pytest.raises(ValueError, match=r"step\.chain: its units have .*; without that entry"):
        TrainingPlan.from_json(json.dumps(document))
