"""Rounds of sharded units: all peers run the same collectives in one order, and no order of waiting deadlocks."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from cases.drawn_steps import cases
from cases.engine_case import Case
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.dependencies import messages
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.schedule import Action, ActionKind, Assignment
from dilatant.schedule.shard_rounds import shard_rounds
from dilatant.schedule.simulator.graph import build

F, B = ActionKind.F, ActionKind.B


def runs(case: Case, how: str) -> None:
    """Execute every rank's list, its joins included, where rounds wait for all peers and actions for their rows."""
    plan, schedule = case.plan, case.schedule
    alike = {u.name for u in plan.units if len({r.shape for r in u.replicas}) == 1}
    joins = shard_rounds(build(plan, case.assignment, schedule), dict.fromkeys(alike, how))
    placed = plan.stages()
    peers = defaultdict(set)
    for stage in placed:
        peers[stage.unit, stage.position] |= {*stage.stage.ranks}
    lists: dict[int, list[tuple[Action | None, int, ActionKind]]] = {}
    for rank, actions in schedule.actions.items():
        own = lists[rank] = []
        for index in range(len(actions) + 1):
            own += [(None, stage, kind) for stage, kind in joins.get(rank, {}).get(index, ())]
            own += [(one, one.stage, one.kind) for one in actions[index : index + 1]]
    needs = defaultdict(set)
    for edge in messages(plan, case.assignment, schedule).values():
        for message in edge:
            needs[message.consumer].add(message.producer)
    shared = {F: how == "weights", ActionKind.I: how == "weights", B: True, ActionKind.W: True}
    at, done = dict.fromkeys(lists, 0), set()
    while any(at[rank] < len(own) for rank, own in lists.items()):
        moved = False
        for rank, own in lists.items():
            if at[rank] == len(own):
                continue
            _, number, kind = own[at[rank]]
            stage = placed[number]
            together = {*stage.stage.ranks}
            if stage.unit in alike and shared[kind]:
                together = peers[stage.unit, stage.position]
            heads = [lists[other][at[other]] if at[other] < len(lists[other]) else None for other in together]
            if not all(
                head is not None
                and head[2] == kind
                and placed[head[1]].unit == stage.unit
                and placed[head[1]].position == stage.position
                and (head[0] is None or needs[head[0]] <= done)
                for head in heads
            ):
                continue
            assert any(head[0] is not None for head in heads if head)
            for other in together:
                at[other] += 1
            done |= {head[0] for head in heads if head and head[0] is not None}
            moved = True
        assert moved, "deadlock"


@settings(max_examples=15, deadline=None)
@given(case=cases(alike=True), how=st.sampled_from(["weights", "gradients"]))
def test_every_drawn_step_runs_its_rounds_to_the_end(case: Case, how: str) -> None:
    runs(case, how)


def case_of(counts: tuple[int, ...], family: str) -> tuple[Plan, Assignment]:
    replicas = tuple(
        Replica((Stage(0, 1, (2 * number,)), Stage(1, 2, (2 * number + 1,)))) for number in range(len(counts))
    )
    numbers = iter(range(sum(counts)))
    batches = tuple(tuple((next(numbers),) for _ in range(count)) for count in counts)
    return Plan((UnitPlan("language", replicas),)), Assignment({"language": batches})


def test_replicas_with_equal_steps_never_only_take_part() -> None:
    for family in ("gpipe", "1f1b", "eager", "zb-h1", "zb-h2"):
        plan, assignment = case_of((4, 4, 4), family)
        graph = build(plan, assignment, FAMILIES[family](plan, assignment))
        assert shard_rounds(graph, {"language": "weights"}) == {}


def test_a_replica_joins_the_rounds_of_longer_ones() -> None:
    plan, assignment = case_of((3, 2), "1f1b")
    graph = build(plan, assignment, FAMILIES["1f1b"](plan, assignment))
    found = shard_rounds(graph, {"language": "weights"})
    assert {rank: sum(len(rounds) for rounds in joins.values()) for rank, joins in found.items()} == {2: 2, 3: 2}
    kinds = sorted(kind for joins in found.values() for rounds in joins.values() for _, kind in rounds)
    assert kinds == [B, B, F, F]
    assert shard_rounds(graph, {}) == {}
