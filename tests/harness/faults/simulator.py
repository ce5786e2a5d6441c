"""The protocol under a virtual clock and network: a seed decides what is lost, late or doubled, and who crashes when.

`python -m harness.faults.simulator SEED` replays one seed and prints what happened.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from typing import Any

from dilatant.resilience.protocol.agent import Agent, Command, End, Event, Rebuild
from dilatant.resilience.protocol.candidate import LeaderCandidate
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import (
    FINISHED,
    GOES_ON,
    TOO_FEW,
    Effect,
    Persist,
    Record,
    Settings,
    Status,
    Task,
)
from harness.faults.simulated_worker import Violated, Weights, Worker

SAVED_EVERY = 3

NO_LEADER = "most members are gone with who led them"


class World:
    """Nodes, a coordinator, a network, and what must hold."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        draw = self.random = random.Random(seed)
        self.trace = trace
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.events = 0
        self.steps = draw.randint(2, 5)
        self.size = draw.choice((1, 2, 2, 3, 3, 4, 5))
        self.settings = Settings(
            lease_seconds=3.5,
            fence_seconds=5.0,
            join_seconds=draw.choice((0.0, 1.0)),
            return_seconds=4.0,
            initial=self.size,
            fewest=draw.choice((1, 1, 1, self.size)),
            drain_seconds=draw.choice((1.0, 3.0, 30.0)),
        )
        self.drop = draw.choice((0.0, 0.02, 0.15))
        self.double = draw.choice((0.0, 0.1))
        self.slow = draw.choice((0.05, 0.5, 1.5))
        self.crashes = sorted(draw.randint(1, 60 * self.size) for _ in range(draw.choice((0, 1, 1, 2, 3))))
        self.coordinator_crashes = sorted(draw.randint(3, 60 * self.size) for _ in range(draw.choice((0, 0, 1, 2))))
        self.leaves = draw.random() < 0.2
        self.flaky = draw.choice((0.0, 0.0, 0.0, 0.05))
        self.messages = self.coordinator_messages = 0
        self.deaf: tuple[str, float, float] = ("", 0.0, 0.0)
        """A node that hears nothing between two times, and is heard."""
        if draw.random() < 0.15 and self.size > 1:
            begins = draw.uniform(2.0, 20.0)
            self.deaf = (
                f"n{draw.randint(1, self.size)}",
                begins,
                draw.choice((begins + draw.uniform(1.0, 40.0), 385.0)),
            )
        self.needed = min(self.size, random.Random(-1 - seed).choice((1, 1, 1, 2, 3)))
        """Nodes that hold the model together; with fewer of them, these save what they have, and the run ends."""
        self.idle = 0
        self.record: Record | None = None
        self.coordinator: Coordinator | None = None
        self.candidate: LeaderCandidate | None = None
        self.gone_for_good = False
        self.agents: dict[str, Agent] = {}
        self.workers: dict[str, Worker] = {}
        self.born = 0
        self.meetings: dict[Any, dict[str, Any]] = {}
        self.memberships: dict[int, tuple[str, ...]] = {}
        self.histories: dict[tuple[int, int], Any] = {}
        self.saved: tuple[tuple[int, int, int], ...] = ()
        self.rollbacks = self.generations = self.crashed = self.handed_over = 0
        self.newest_applied_in = 0
        self.ended_at: dict[int, int] = {}
        self.ended = ""

    def samples_of(self, step: int) -> int:
        return 1000 + step

    def log(self, *what: object) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:8.3f}  {' '.join(map(str, what))}")

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.events += 1
        heapq.heappush(self.queue, (self.now + seconds, self.events, call))

    def run(self) -> None:
        self.start_coordinator()
        for _ in range(self.size):
            self.start_node()
        while self.queue and not self.over():
            self.now, _, call = heapq.heappop(self.queue)
            if self.now > 400:
                raise Violated("the run does not end")
            call()
        self.check_end()

    def over(self) -> bool:
        return bool(self.ended) and not self.agents

    def start_node(self) -> None:
        self.born += 1
        node = f"n{self.born}"
        self.workers[node] = Worker(self, node)
        self.agents[node] = Agent(node, self.settings)
        self.log(node, "starts")
        self.tick_agent(node)

    def start_coordinator(self) -> None:
        coordinator = self.coordinator = Coordinator(self.settings, self.record, self.now)
        self.log("coordinator of term", coordinator.term, "starts with", self.record)
        self.carry_out(coordinator.start())
        self.tick_coordinator(coordinator)

    def tick_agent(self, node: str) -> None:
        agent = self.agents.get(node)
        if agent is not None:
            agent.tick(self.now)
            self.report(agent)
            self.after(1.0, lambda: self.tick_agent(node))

    def tick_coordinator(self, coordinator: Coordinator) -> None:
        if coordinator is self.coordinator:
            self.carry_out(coordinator.tick(self.now))
            self.after(0.9, lambda: self.tick_coordinator(coordinator))

    def report(self, agent: Agent) -> None:
        status = agent.status()
        self.send(lambda: self.hear(status), status)
        self.count_message(agent.node)

    def count_message(self, node: str) -> None:
        self.messages += 1
        if self.crashes and self.messages >= self.crashes[0] and self.agents:
            self.crashes.pop(0)
            if self.memberships:  # a loss before the beginning ends the run
                self.crash(node, self.random.random() < 0.7)

    def crash(self, node: str, heard: bool) -> None:
        self.log(node, "crashes")
        self.crashed += 1
        self.workers.pop(node)
        self.agents.pop(node)
        if self.candidate is not None:
            self.candidate.lost(node)
        if heard:  # its connection closes
            self.after(self.random.uniform(0, 0.3), lambda: self.lose(node))
        if self.random.random() < 0.5:
            self.after(self.random.uniform(0.5, 5), self.start_node)

    def lose(self, node: str) -> None:
        if self.coordinator is not None:
            self.carry_out(self.coordinator.lost([node], self.now))

    def send(self, deliver: Callable[[], None], what: object) -> None:
        draw = self.random.random
        if draw() < self.drop:
            self.log("lost:", what)
            return
        self.after(self.slow * draw(), deliver)
        if self.double and draw() < self.double:
            self.after(2 * self.slow * draw(), deliver)

    def leader_is_gone(self) -> None:
        """For good, perhaps with the machine of a member; another one leads, if most members are left to it."""
        self.gone_for_good = True
        member = next((node for node in self.agents if self.random.random() < 0.5), None)
        if member is not None and self.memberships:
            self.crash(member, heard=False)
        self.after(self.random.uniform(4, 12), self.stand_for_leader)

    def stand_for_leader(self) -> None:
        if self.record is not None:
            candidate = self.candidate = LeaderCandidate(self.record)
            self.after(20.0, lambda: self.give_up_leading(candidate))

    def give_up_leading(self, candidate: LeaderCandidate) -> None:
        if self.candidate is candidate:
            left = sum(node in self.agents for node in candidate.record.members)
            if not self.ended and 2 * left > len(candidate.record.members):
                raise Violated(f"{left} members are there, and nobody leads them")
            self.log("nobody leads")
            self.candidate, self.ended = None, self.ended or NO_LEADER
            self.agents.clear()

    def hear(self, status: Status) -> None:
        if self.candidate is not None and status.node in self.agents:
            self.candidate.hear(status)
            if self.candidate.is_elected:
                here = [node for node in self.candidate.record.members if node in self.agents]
                if 2 * len(here) <= len(self.candidate.record.members):
                    raise Violated(f"{here} are led without a majority")
                self.candidate = None
                self.start_coordinator()
        if self.coordinator is not None:
            self.log("hears", status)
            self.carry_out(self.coordinator.hear(status, self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.coordinator_messages += 1
            if self.coordinator_crashes and self.coordinator_messages >= self.coordinator_crashes[0]:
                self.coordinator_crashes.pop(0)
                self.log("coordinator crashes")
                self.coordinator = None
                if self.record is not None and self.record.generation and self.random.random() < 0.3:
                    self.leader_is_gone()
                else:
                    self.after(self.random.uniform(0.1, 6), self.start_coordinator)
                return
            if isinstance(effect, Persist):
                self.record = effect.record
                self.check_record(effect.record)
            else:
                order = effect
                self.send(lambda order=order: self.obey(order), order)  # type: ignore[misc]

    def obey(self, order: Any) -> None:
        agent = self.agents.get(order.node)
        node, begins, ends = self.deaf
        if agent is None or (order.node == node and begins < self.now < ends):
            return
        if order.task is Task.REBUILD:
            known = self.memberships.setdefault(order.generation, order.members)
            if known != order.members:
                raise Violated(f"generation {order.generation} has members {known} and {order.members}")
        commands = agent.obey(order, self.now)
        if self.leaves and order.task is Task.RUN and order.committed == 2 and len(self.agents) > 1:
            self.leaves = False
            agent.leave()
        self.give(agent, commands)

    def event(self, node: str, event: Event) -> None:
        agent = self.agents.get(node)
        if agent is not None:
            self.give(agent, agent.on_event(0, event))

    def give(self, agent: Agent, commands: list[Command]) -> None:
        node = agent.node
        for command in commands:
            self.log(node, "does", command)
            if isinstance(command, End):
                self.agents.pop(node)
                worker = self.workers.pop(node)
                if not command.is_out:
                    self.check_stop(command, worker)
                elif self.random.random() < 0.5:
                    self.after(self.random.uniform(0.5, 5), self.start_node)
                return
            self.workers[node].do(command)
        if agent.changed:
            self.report(agent)

    def meet(self, key: Any, node: str, value: Any, members: tuple[str, ...]) -> dict[str, Any] | None:
        """What all members brought, when the last one comes."""
        here = self.meetings.setdefault(key, {})
        here[node] = value
        return here if len(here) == len(members) else None

    def save_what_is_left(self, order: Rebuild, layers: dict[int, Any]) -> None:
        """Save the state that members of a generation without a plan hold together, if it is whole."""
        if layers and len(layers[0]) != order.committed:
            raise Violated(f"{len(layers[0])} steps are saved of {order}")
        self.saved = max(self.saved, layers.get(0, ()), key=len)

    def check_record(self, record: Record) -> None:
        self.generations = max(self.generations, record.generation)
        if record.members and not record.stopped:
            known = self.memberships.setdefault(record.generation, record.members)
            if known != record.members:
                raise Violated(f"generation {record.generation} has members {known} and {record.members}")
        if record.stopped:
            self.ended = record.stopped
            committed = 0 if self.coordinator is None else self.coordinator.committed
            if GOES_ON in record.stopped and len(self.saved) < committed:
                raise Violated(f"{len(self.saved)} of {committed} steps are saved")

    def check_held(self, weights: Weights, what: str) -> None:
        """No step twice or left out, its own samples, and the same for all who run a generation."""
        for updates in weights.layers.values():
            if [step for step, _, _ in updates] != list(range(len(updates))):
                raise Violated(f"{what} {updates}")
            if any(samples != self.samples_of(step) for step, samples, _ in updates):
                raise Violated(f"{what} wrong samples {updates}")
            known = self.histories.setdefault((weights.base, len(updates)), updates)
            if known != updates:
                raise Violated(f"{what} {updates} in generation {weights.base} where others have {known}")
            if what == "applied":
                # Of all generations at most one can commit. The state of an older one may still be brought up to date.
                if updates[-1][2] < self.newest_applied_in and len(updates) > len(self.saved):
                    later = [held for (base, _), held in self.histories.items() if base > weights.base]
                    if any(len(h) >= len(updates) and h[: len(updates)] != updates for h in later):
                        raise Violated(f"generation {weights.base} commits after a later one")
                self.newest_applied_in = max(self.newest_applied_in, updates[-1][2])
                if len(updates) % SAVED_EVERY == 0 and len(updates) > len(self.saved):
                    self.saved = updates

    def check_copied(self, order: Rebuild) -> None:
        """Nothing that a member holds is forgotten."""
        for node in order.members:
            worker = self.workers.get(node)
            for weights in () if worker is None else (worker.held, worker.pending):
                if weights is None:
                    continue
                newer = weights is worker.held and weights.base > order.base  # type: ignore[union-attr]
                if newer or (weights.base == order.base and weights.applied > order.committed):
                    raise Violated(f"{node} holds {weights}, and {order} does not go on from it")

    def check_stop(self, command: End, worker: Worker) -> None:
        if worker.ends and worker.held.layers and worker.said:
            known = self.ended_at.setdefault(worker.generation, worker.held.applied)
            if known != worker.held.applied:
                raise Violated(f"some ended after {known} steps, {worker.node} after {worker.held.applied}")
        if command.reason == FINISHED and worker.held.layers and worker.held.applied != self.steps:
            raise Violated(f"{worker.node} finished after {worker.held.applied} of {self.steps} steps")

    def check_end(self) -> None:
        if not self.ended and self.agents:
            raise Violated("nothing happens any more")
        fewest = max(self.needed, self.settings.fewest)
        if TOO_FEW in self.ended and (fewest > 1 or self.ended.startswith("0 nodes")):
            return
        if self.flaky and "came to nothing" in self.ended:
            return
        if self.ended == NO_LEADER and self.gone_for_good:
            return
        if self.ended and self.ended != FINISHED:
            raise Violated(f"the run stopped: {self.ended}")
        if not self.ended and self.crashed == 0:
            raise Violated("all nodes are gone")


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> World:
    """Run one seed to its end. Raises Violated, naming the seed."""
    world = World(seed, trace)
    try:
        world.run()
    except Violated as error:
        raise Violated(f"seed {seed}: {error}") from None
    return world


if __name__ == "__main__":
    simulate(int(sys.argv[1]), print)
