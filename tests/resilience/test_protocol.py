"""What the coordinator decides in single situations, and what an agent does for it."""

from __future__ import annotations

from dataclasses import replace as with_values

import pytest
from msgspec.structs import replace

from dilatant.resilience.protocol.agent import (
    Activate,
    Agent,
    Apply,
    Broken,
    Computing,
    Died,
    Done,
    End,
    Fence,
    HandOver,
    Made,
    Prepared,
    Rebuild,
    SaveAndEnd,
    Stopped,
)
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import Effect, Order, Persist, Phase, Settings, Status, Task

SETTINGS = Settings(initial=3, attempts=1, join_seconds=0.0, accuse_seconds=0.0)


class CountingCoordinator(Coordinator):
    """Counts how often it looks at the statuses of all members."""

    looks = 0

    def _of_members(self) -> list[Status]:
        self.looks += 1
        return super()._of_members()


def running(members: int, settings: Settings = SETTINGS) -> tuple[CountingCoordinator, dict[str, Status]]:
    """A coordinator whose first generation runs, with no step done."""
    coordinator = CountingCoordinator(with_values(settings, initial=members), None, 0.0)
    coordinator.start()
    nodes = {f"n{index}": Status(f"n{index}", 1) for index in range(members)}
    for status in nodes.values():
        coordinator.hear(status, 0.0)
    for phase in (Phase.FENCED, Phase.READY, Phase.RUNNING):
        say(coordinator, nodes, *nodes, generation=1, phase=phase, ready_at=0 if phase is Phase.READY else None)
        if phase is Phase.RUNNING:
            say(coordinator, nodes, *nodes, base=1)
    assert coordinator.task is Task.RUN
    return coordinator, nodes


def say(coordinator: Coordinator, nodes: dict[str, Status], *who: str, **values: object) -> list[Effect]:
    effects: list[Effect] = []
    for node in who:
        nodes[node] = replace(nodes[node], serial=nodes[node].serial + 1, **values)  # type: ignore[arg-type]
        effects += coordinator.hear(nodes[node], 0.0)
    return effects


def test_step_commits_when_the_last_member_prepared_it() -> None:
    coordinator, nodes = running(3)
    assert not say(coordinator, nodes, "n0", "n1", prepared=0)
    orders = say(coordinator, nodes, "n2", prepared=0)
    assert [(o.node, o.task, o.committed) for o in orders if isinstance(o, Order)] == [
        ("n0", Task.RUN, 1),
        ("n1", Task.RUN, 1),
        ("n2", Task.RUN, 1),
    ]


def test_a_membership_is_written_down_before_anybody_hears_of_it() -> None:
    coordinator, _ = running(3)
    effects = coordinator.lost(["n1"], 1.0)
    first_persist = next(i for i, effect in enumerate(effects) if isinstance(effect, Persist))
    first_fence = next(i for i, e in enumerate(effects) if isinstance(e, Order) and e.task is Task.FENCE)
    assert first_persist < first_fence
    record = effects[first_persist]
    assert isinstance(record, Persist)
    assert record.record.members == ("n0", "n2")


def test_unlike_gradients_are_not_applied_and_repeat_evicts_node() -> None:
    coordinator, nodes = running(3)
    say(coordinator, nodes, "n0", "n1", prepared=0, hashes={"layer": 1})
    say(coordinator, nodes, "n2", prepared=0, hashes={"layer": 2})
    assert coordinator.committed == 0
    assert coordinator.members == ("n0", "n1", "n2")
    assert coordinator.generation == 2
    say(coordinator, nodes, *nodes, generation=2, phase=Phase.FENCED, prepared=None)
    say(coordinator, nodes, *nodes, phase=Phase.READY, ready_at=0)
    say(coordinator, nodes, *nodes, phase=Phase.RUNNING, base=2)
    say(coordinator, nodes, "n0", "n1", prepared=0)
    say(coordinator, nodes, "n2", prepared=0)
    assert coordinator.members == ("n0", "n1")


def test_replicas_that_differ_do_not_commit_in_recovery_either() -> None:
    coordinator, nodes = running(3)
    say(coordinator, nodes, "n0", prepared=0, hashes={"layer": 1})
    say(coordinator, nodes, "n1", prepared=0, hashes={"layer": 2})
    coordinator.lost(["n2"], 0.0)
    say(coordinator, nodes, "n0", "n1", generation=2, phase=Phase.FENCED)
    assert (coordinator.task, coordinator.committed) == (Task.REBUILD, 0)
    assert all(e.doubted for e in coordinator.tick(1.0) if isinstance(e, Order) and e.task is Task.REBUILD)


def test_step_prepared_by_all_survivors_commits_after_a_loss() -> None:
    coordinator, nodes = running(3)
    say(coordinator, nodes, "n0", "n1", prepared=0)
    coordinator.lost(["n2"], 0.0)
    say(coordinator, nodes, "n0", "n1", generation=2, phase=Phase.FENCED)
    assert (coordinator.task, coordinator.committed) == (Task.REBUILD, 1)


def test_looks_at_all_members_do_not_grow_with_their_number() -> None:
    """Each look takes time in proportion to the members: one per status would make a loss quadratic."""
    looks = []
    for members in (8, 64):
        coordinator, nodes = running(members)
        before = coordinator.looks
        coordinator.lost(["n1", "n2"], 0.0)
        del nodes["n1"], nodes["n2"]
        for phase in (Phase.FENCING, Phase.FENCED, Phase.REBUILDING, Phase.READY, Phase.RUNNING):
            ready_at = 0 if phase is Phase.READY else None
            say(coordinator, nodes, *nodes, generation=2, phase=phase, ready_at=ready_at)
        say(coordinator, nodes, *nodes, base=2, prepared=0)
        assert (coordinator.task, coordinator.committed) == (Task.RUN, 1)
        looks.append(coordinator.looks - before)
    assert looks[0] == looks[1]


def test_step_unprepared_by_a_survivor_never_commits_after_loss() -> None:
    coordinator, nodes = running(3)
    say(coordinator, nodes, "n0", prepared=0)
    coordinator.lost(["n2"], 0.0)
    say(coordinator, nodes, "n0", "n1", generation=2, phase=Phase.FENCED)
    assert (coordinator.task, coordinator.committed) == (Task.REBUILD, 0)


def test_node_accused_by_most_others_is_evicted() -> None:
    coordinator, nodes = running(4)
    say(coordinator, nodes, "n0", accuses="n3")
    assert coordinator.generation == 1
    say(coordinator, nodes, "n1", accuses="n3")
    assert coordinator.members == ("n0", "n1", "n2")


@pytest.mark.parametrize("members", range(3, 9))
def test_more_than_half_of_the_others_put_a_node_out(members: int) -> None:
    coordinator, nodes = running(members, with_values(SETTINGS, accuse_seconds=10.0))
    *others, accused = nodes
    enough = next(count for count in range(members) if count > (members - 1) / 2)
    for node in others[: enough - 1]:
        say(coordinator, nodes, node, broken="waits", accuses=accused)
    assert (coordinator.generation, coordinator.members) == (1, (*others, accused))
    say(coordinator, nodes, others[enough - 1], broken="waits", accuses=accused)
    assert (coordinator.generation, coordinator.members) == (2, tuple(others))


def test_who_is_heard_but_does_not_hear_is_left_out() -> None:
    coordinator, nodes = running(3)
    coordinator.lost(["n0"], 1.0)
    left = {node: nodes[node] for node in ("n1", "n2")}
    say(coordinator, left, "n1", generation=2, phase=Phase.FENCED)
    patience = 2 * SETTINGS.lease_seconds
    for now in (1.0 + patience, 1.1 + patience):
        assert coordinator.members == ("n1", "n2")
        for node in left:
            left[node] = replace(left[node], serial=left[node].serial + 1)
            coordinator.hear(left[node], now)
        coordinator.tick(now)
    assert coordinator.members == ("n1",)


def test_who_does_not_hear_of_a_committed_step_is_left_out() -> None:
    coordinator, nodes = running(3)
    say(coordinator, nodes, *nodes, prepared=0)
    say(coordinator, nodes, "n0", "n1", applied=1, prepared=None)
    for now in (2 * SETTINGS.lease_seconds, 2 * SETTINGS.lease_seconds + 0.1):
        assert coordinator.members == ("n0", "n1", "n2")
        for node, status in nodes.items():
            nodes[node] = replace(status, serial=status.serial + 1)
            coordinator.hear(nodes[node], now)
        coordinator.tick(now)
    assert coordinator.members == ("n0", "n1")


def test_mutual_accusation_restarts_both_then_evicts_one() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, "n0", accuses="n1", broken="timeout")
    assert coordinator.members == ("n0", "n1")
    say(coordinator, nodes, *nodes, generation=2, phase=Phase.FENCED, accuses=None, broken="")
    say(coordinator, nodes, "n0", accuses="n1", broken="timeout")
    assert coordinator.members == ("n0",)


def test_generations_without_a_step_end_the_run_in_the_end() -> None:
    coordinator, nodes = running(2)
    for generation in range(2, 6):
        say(coordinator, nodes, "n0", broken="no link")
        say(coordinator, nodes, *nodes, generation=generation, phase=Phase.FENCED, broken="")
    assert "came to nothing" in coordinator.stopped


@pytest.mark.parametrize(
    ("early", "stopped"), [(("", ""), "finished"), (("", "it was asked to stop"), "it was asked to stop")]
)
def test_a_run_that_ended_before_its_last_step_is_not_finished(early: tuple[str, str], stopped: str) -> None:
    """Nobody but its workers was asked to stop, as by SIGTERM on one machine."""
    coordinator, nodes = running(2)
    for node, why in zip(nodes, early):
        agent = Agent(node, SETTINGS)
        agent.obey(Order(node, 1, 1, Task.FENCE, 1), 0.0)
        agent.on_event(0, Stopped(1, -1, 0))
        agent.obey(Order(node, 1, 2, Task.REBUILD, 1, tuple(nodes), (1, 1)), 0.0)
        agent.on_event(0, Made(1, 0))
        agent.obey(Order(node, 1, 3, Task.RUN, 1), 0.0)
        agent.on_event(0, Done(1, why))
        said = agent.status()
        say(coordinator, nodes, node, done=said.done, early=said.early)
    assert coordinator.stopped == stopped


def test_run_with_too_few_nodes_saves_before_it_stops() -> None:
    coordinator, nodes = running(3, with_values(SETTINGS, fewest=3))
    effects = coordinator.lost(["n0"], 1.0)
    told = {(o.task, o.ending[:22]) for o in effects if isinstance(o, Order) and o.node != "n0"}
    assert told == {(Task.FENCE, "2 nodes are left of th")}
    left = {node: nodes[node] for node in ("n1", "n2")}
    say(coordinator, left, *left, generation=2, phase=Phase.FENCED)
    say(coordinator, left, *left, phase=Phase.READY, ready_at=0)
    say(coordinator, left, *left, phase=Phase.RUNNING, base=2)
    assert not coordinator.stopped
    say(coordinator, left, *left, done=True)
    assert "2 nodes are left of the 3" in coordinator.stopped


def test_when_all_are_asked_to_leave_they_save_together() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, "n0", leaving=True)
    assert not coordinator.ending
    effects = say(coordinator, nodes, "n1", leaving=True)
    assert {(o.task, bool(o.ending)) for o in effects if isinstance(o, Order)} == {(Task.RUN, True)}
    say(coordinator, nodes, *nodes, prepared=0)
    assert (coordinator.committed, coordinator.members) == (1, ("n0", "n1"))
    back = Coordinator(coordinator.settings, coordinator._record(), 10.0)
    assert back.ending == coordinator.ending


def test_a_newcomer_waits_for_the_end_of_the_step() -> None:
    coordinator, nodes = running(2, with_values(SETTINGS, fewest=1))
    nodes["new"] = Status("new", 1)
    say(coordinator, nodes, "new")
    say(coordinator, nodes, "n0", prepared=0)
    assert coordinator.generation == 1
    say(coordinator, nodes, "n1", prepared=0)
    assert (coordinator.committed, coordinator.members) == (1, ("n0", "n1", "new"))


def test_who_leaves_goes_at_the_end_of_the_step_which_counts() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, "n0", leaving=True)
    assert coordinator.generation == 1
    effects = say(coordinator, nodes, "n0", "n1", prepared=0)
    assert (coordinator.committed, coordinator.members) == (1, ("n1",))
    assert Task.OUT in {o.task for o in effects if isinstance(o, Order) and o.node == "n0"}


def test_slowest_node_leaves_at_step_end_while_enough_remain() -> None:
    coordinator, nodes = running(3, with_values(SETTINGS, fewest=2))
    say(coordinator, nodes, "n0", slow=2.5)
    say(coordinator, nodes, "n2", slow=4.0)
    assert coordinator.generation == 1
    say(coordinator, nodes, *nodes, prepared=0)
    assert coordinator.members == ("n0", "n1")
    assert "n2 is 4.0 times slower" in coordinator.reason
    assert coordinator.task is Task.FENCE
    del nodes["n2"]
    say(coordinator, nodes, *nodes, generation=2, phase=Phase.FENCED, base=1, applied=1, prepared=None)
    say(coordinator, nodes, *nodes, phase=Phase.READY, ready_at=1)
    say(coordinator, nodes, *nodes, phase=Phase.RUNNING, base=2, applied=1, slow=4.0)
    say(coordinator, nodes, *nodes, prepared=1)
    assert coordinator.members == ("n0", "n1")


def test_disputed_gradients_are_not_salvaged_until_next_commit() -> None:
    def is_doubted(effects: list[Effect]) -> bool:
        return any(isinstance(effect, Order) and effect.doubted for effect in effects)

    coordinator, nodes = running(3)
    assert not is_doubted(coordinator.lost(["n2"], 0.0))
    coordinator, nodes = running(3)
    say(coordinator, nodes, "n0", "n1", prepared=0, hashes={"layer": 1})
    assert is_doubted(say(coordinator, nodes, "n2", prepared=0, hashes={"layer": 2}))
    say(coordinator, nodes, *nodes, generation=2, phase=Phase.FENCED, base=1, prepared=None, hashes={})
    say(coordinator, nodes, *nodes, phase=Phase.READY, ready_at=0)
    say(coordinator, nodes, *nodes, phase=Phase.RUNNING, base=2, ready_at=None)
    assert not is_doubted(say(coordinator, nodes, *nodes, prepared=0))


def test_restarted_coordinator_resumes_an_unchanged_generation() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, *nodes, prepared=0)
    record = coordinator._record()
    back = Coordinator(coordinator.settings, record, 10.0)
    back.start()
    say(back, nodes, "n0", applied=1, prepared=None)
    orders = say(back, nodes, "n1")
    assert (back.generation, back.committed) == (1, 1)
    assert {o.term for o in orders if isinstance(o, Order)} == {2}


def test_a_mistake_of_the_user_ends_the_run_for_all() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, "n0", fatal="the loss became nan")
    assert coordinator.stopped == "the loss became nan"


def agent_in_generation(workers: int) -> Agent:
    agent = Agent("n0", SETTINGS, workers)
    agent.obey(Order("n0", 1, 1, Task.FENCE, 1, ("n0",)), 0.0)
    return agent


def test_an_agent_speaks_only_when_all_its_workers_did() -> None:
    agent = agent_in_generation(2)
    agent.on_event(0, Stopped(1, -1, 0))
    assert agent.phase is Phase.FENCING
    agent.on_event(1, Stopped(1, -1, 0))
    assert agent.phase is Phase.FENCED
    (rebuild,) = agent.obey(Order("n0", 1, 2, Task.REBUILD, 1, ("n0", "n1"), (2, 2)), 0.0)
    assert isinstance(rebuild, Rebuild)
    agent.on_event(0, Made(1, 0))
    agent.on_event(1, Made(1, 0))
    assert agent.phase is Phase.READY
    run = Order("n0", 1, 3, Task.RUN, 1, ("n0", "n1"), (), 1, 0)
    assert agent.obey(run, 0.0) == [Activate(1)]
    agent.on_event(0, Prepared(1, 0, {"a": 1}))
    assert agent.status().prepared is None
    agent.on_event(1, Prepared(1, 0, {"b": 2}))
    assert (agent.status().prepared, agent.status().hashes) == (0, {"a": 1, "b": 2})
    assert agent.obey(replace(run, serial=4, committed=1), 0.0) == [Apply(1, 0)]
    assert agent.obey(replace(run, serial=5, committed=1), 0.0) == []


def agent_that_runs() -> Agent:
    agent = agent_in_generation(1)
    agent.on_event(0, Stopped(1, -1, 0))
    agent.obey(Order("n0", 1, 2, Task.REBUILD, 1, ("n0",), (1,)), 0.0)
    agent.on_event(0, Made(1, 0))
    agent.obey(Order("n0", 1, 3, Task.RUN, 1, ("n0",), (), 1, 0), 0.0)
    return agent


def test_overdue_step_breaks_its_generation_unless_prepared() -> None:
    for prepared in (False, True):
        agent = agent_that_runs()
        agent.on_event(0, Computing(1, 0, 5.0))
        agent.tick(10.0)
        if prepared:
            agent.on_event(0, Prepared(1, 0))
        agent.tick(15.0)
        assert not agent.status().broken
        agent.tick(15.1)
        assert bool(agent.status().broken) is not prepared


def test_what_is_said_of_a_step_behind_its_end_is_no_deadline() -> None:
    agent = agent_that_runs()
    agent.on_event(0, Prepared(1, 0))
    agent.on_event(0, Computing(1, 0, 5.0))
    agent.tick(10.0)
    agent.tick(20.0)
    assert not agent.status().broken


def test_who_cannot_leave_in_time_is_given_up() -> None:
    agent = agent_that_runs()
    agent.settings = with_values(SETTINGS, drain_seconds=30.0)
    agent.leave()
    agent.tick(100.0)
    agent.tick(122.5)
    assert not agent.status().overdue
    agent.tick(122.6)
    assert agent.status().overdue
    assert not agent.status().failed
    give = Order("n0", 1, 4, Task.HAND_OVER, 2)
    assert agent.obey(give, 122.7) == [HandOver(2)]
    assert agent.obey(replace(give, serial=5, generation=3), 122.8) == []
    agent.tick(130.1)
    assert agent.status().failed  # so that nobody waits for it any longer


def test_overdue_leaver_hands_over_before_the_others_rebuild() -> None:
    for ends in ("given", "lost", "failed"):
        coordinator, nodes = running(3)
        say(coordinator, nodes, "n0", leaving=True)
        assert coordinator.task is Task.RUN
        tasks = {e.node: e.task for e in say(coordinator, nodes, "n0", overdue=True) if isinstance(e, Order)}
        assert tasks == {"n0": Task.HAND_OVER, "n1": Task.FENCE, "n2": Task.FENCE}
        say(coordinator, nodes, "n1", "n2", generation=2, phase=Phase.FENCED, base=1)
        say(coordinator, nodes, "n0", generation=2, phase=Phase.HANDING_OVER)
        assert coordinator.task is Task.FENCE
        if ends == "given":
            effects = say(coordinator, nodes, "n0", phase=Phase.HANDED_OVER)
        elif ends == "lost":
            effects = coordinator.lost(["n0"], 0.0)
        else:
            effects = say(coordinator, nodes, "n0", failed="its time is over")
        tasks = {e.node: e.task for e in effects if isinstance(e, Order)}
        assert tasks == {"n0": Task.OUT, "n1": Task.REBUILD, "n2": Task.REBUILD}
        assert coordinator.members == ("n1", "n2")


def test_fully_prepared_step_commits_before_the_leaver_goes() -> None:
    coordinator, nodes = running(2)
    say(coordinator, nodes, "n0", prepared=0, leaving=True)
    say(coordinator, nodes, "n1", prepared=0)
    assert coordinator.committed == 1
    assert coordinator.members == ("n1",)


def test_agent_orders_save_and_end_once_before_anything_else() -> None:
    agent = agent_that_runs()
    agent.on_event(0, Prepared(1, 0))
    order = Order("n0", 1, 4, Task.RUN, 1, ("n0",), (), 1, 1, ending="too few")
    assert agent.obey(order, 0.0) == [SaveAndEnd("too few"), Apply(1, 0)]
    assert agent.obey(replace(order, serial=5), 0.0) == []


def test_an_order_of_an_older_coordinator_is_not_obeyed() -> None:
    agent = agent_in_generation(1)
    assert agent.obey(Order("n0", 2, 1, Task.FENCE, 2, ("n0",)), 0.0) == [Fence(2)]
    assert agent.obey(Order("n0", 1, 9, Task.FENCE, 3, ("n0",)), 0.0) == []


def test_workers_that_do_not_stop_are_given_up() -> None:
    agent = agent_in_generation(1)
    agent.tick(SETTINGS.fence_seconds + 1)
    assert agent.status().failed


def test_workers_that_are_being_built_have_longer_to_stop() -> None:
    """They read weights, perhaps: a node that is lost meanwhile must not take all others along."""
    agent = Agent("n0", SETTINGS)
    agent.obey(Order("n0", 1, 1, Task.FENCE, 1), 0.0)
    agent.on_event(0, Stopped(1, -1, 0))
    agent.obey(Order("n0", 1, 2, Task.REBUILD, 1, ("n0", "n1"), (1, 1)), 0.0)
    for serial, generation in ((3, 2), (4, 3)):  # n1 is lost, and n2 soon after
        agent.obey(Order("n0", 1, serial, Task.FENCE, generation), 0.0)
    agent.tick(SETTINGS.build_seconds - 1)
    assert not agent.status().failed
    agent.tick(SETTINGS.build_seconds + 1)
    assert "do not stop" in agent.status().failed


def test_dead_worker_loses_the_node_but_broken_worker_does_not() -> None:
    agent = agent_in_generation(1)
    agent.on_event(0, Stopped(1, -1, 0))
    agent.obey(Order("n0", 1, 2, Task.REBUILD, 1, ("n0",), (1,)), 0.0)
    agent.on_event(0, Broken(1, "lost its peer", "n1"))
    assert (agent.status().broken, agent.status().accuses) == ("lost its peer", "n1")
    agent.on_event(0, Died("killed"))
    assert agent.status().failed == "killed"
    (end,) = agent.obey(Order("n0", 1, 3, Task.OUT), 0.0)
    assert isinstance(end, End)
    assert end.is_out
