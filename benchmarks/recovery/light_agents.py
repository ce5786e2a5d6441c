"""Agents without workers: the recovery protocol's own state machine over real sockets, many in a few processes."""

from __future__ import annotations

import selectors
import time
from typing import Any

from dilatant.comm.wire.link import LinkClosed, WireLink
from dilatant.resilience.processes.messages import connect
from dilatant.resilience.protocol.agent import Activate, Agent, Apply, Fence, Made, Prepared, Rebuild, Stopped
from dilatant.resilience.protocol.values import NO_STATE, Order, Settings, Task

TOKEN = bytes(32)
DRIVERS = 4
"""Processes that the light agents share."""


class LightAgent:
    """An agent whose one worker answers at once: it stops, builds, and has the gradients of a step when it is asked."""

    def __init__(self, name: str, port: int, settings: Settings) -> None:
        self.link: WireLink = connect("127.0.0.1", port, TOKEN, 60.0)
        self._agent = Agent(name, settings)
        self._base, self._applied = NO_STATE, 0
        self._beat_seconds = settings.lease_seconds / 4
        self._due = 0.0

    def heed(self, order: Order, votes: int) -> None:
        """Obey an order; vote for steps below `votes`."""
        for command in self._agent.obey(order, time.monotonic()):
            if isinstance(command, Fence):
                self._tell(Stopped(command.generation, self._base, self._applied))
            elif isinstance(command, Rebuild):
                self._applied = command.committed
                self._tell(Made(command.generation, self._applied))
            elif isinstance(command, Activate):
                self._base = command.generation
                self.vote(votes)
            elif isinstance(command, Apply):
                self._applied += 1
                self.vote(votes)

    def vote(self, votes: int) -> None:
        if self._base == self._agent.generation and self._applied < votes:
            self._tell(Prepared(self._base, self._applied))

    def report(self, now: float) -> None:
        """Send what has changed, or a heartbeat that is due."""
        if self._agent.changed or now >= self._due:
            self._due = now + self._beat_seconds
            self.link.send(self._agent.status())

    def _tell(self, event: Any) -> None:
        self._agent.on_event(0, event)


def drive(first: int, count: int, port: int, settings: Settings, votes: Any, heard: Any, lost: Any, begin: Any) -> None:
    """Run light agents in this process. heard: gets (task, generation, committed, seconds) when the last of them has
    received an order of that kind. lost: number of an agent to close, which then is -1. begin: event to wait for."""
    begin.wait()
    agents = {number: LightAgent(f"n{number:05}", port, settings) for number in range(first, first + count)}
    selector = selectors.DefaultSelector()
    for agent in agents.values():
        selector.register(agent.link.socket, selectors.EVENT_READ, agent)
    reached: dict[tuple[str, int, int], set[int]] = {}  # orders are repeated
    wanted, swept, touched = 0, 0.0, dict[int, LightAgent]()
    while True:
        if lost.value in agents:
            gone = agents.pop(lost.value)
            selector.unregister(gone.link.socket)
            heard.put(("lost", 0, 0, time.monotonic()))
            gone.link.close()
            lost.value = -1
        if votes.value != wanted:
            wanted, touched = votes.value, dict(agents)
            for agent in agents.values():
                agent.vote(wanted)
        for key, _ in selector.select(settings.lease_seconds / 40):
            agent = touched[key.fd] = key.data
            try:
                orders = agent.link.receive_some()
            except LinkClosed:
                return
            for order in orders:
                agent.heed(order, wanted)
                at = order.task.value, order.generation, order.committed
                there = reached.setdefault(at, set())
                if len(there) < len(agents):
                    there.add(id(agent))
                    if len(there) == len(agents):
                        heard.put((*at, time.monotonic()))
        now = time.monotonic()
        if now > swept + settings.lease_seconds / 40:  # heartbeats; not after each of a thousand orders
            swept, touched = now, dict(agents)
        for agent in touched.values():
            agent.report(now)
        touched = {}


def last_of(heard: Any, task: Task, generation: int, committed: int | None = None) -> float:
    """Return when the last agent of all drivers had an order: the task of the generation, after `committed` steps."""
    seconds, left = 0.0, DRIVERS
    while left:
        what, number, done, at = heard.get(timeout=300.0)
        if (what, number) == (task.value, generation) and committed in (None, done):
            seconds, left = max(seconds, at), left - 1
    return seconds
