"""Coordinator: the one party that decides membership and commits steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from dilatant.resilience.protocol.values import (
    FINISHED,
    NO_STATE,
    Effect,
    Order,
    Persist,
    Phase,
    Record,
    Settings,
    Status,
    Task,
    too_few,
)

HEEDING_LEASES = 2
"""Leases within which agents must acknowledge an order, which is repeated meanwhile."""
RESEND_SECONDS = 1.0
"""Interval at which the last orders are sent again, since messages may be lost; agents ignore repetitions."""
STOPPED_PHASES = (Phase.FENCED, Phase.REBUILDING, Phase.READY)


class Coordinator:
    """Receives statuses, lost connections and the time; returns effects, to be carried out in order.

    saved: the predecessor's record, if there was one. Call `start` first. No method raises for a nonsensical status,
    which must be outdated.
    """

    def __init__(self, settings: Settings, saved: Record | None, now: float) -> None:
        before = saved or Record()
        self.settings = settings
        self.term = before.term + 1
        self.generation = before.generation
        self.members = before.members
        self._names = frozenset(before.members)  # the same, for fast lookup
        self.task = Task.WAIT
        self.base = NO_STATE
        self.committed = 0
        self.stopped = before.stopped
        self.ending = before.ending
        self.reason = ""
        self.statuses: dict[str, Status] = {}
        self._returned = bool(before.members)
        self._doubts = self._returned  # the predecessor may have seen unequal gradients
        self._since = now
        self._heard: dict[str, float] = {}
        self._gone: set[str] = set()
        self._handing_over: set[str] = set()
        self._serial = 0
        self._newcomer_since: float | None = None
        self._sent = now
        self._fruitless = 0
        self._obeyed: set[str] = set()  # members that have done what the current task waits for
        self._accused_since: float | None = None
        self._ordered_at = now
        if self.stopped:
            self.task = Task.STOP

    def start(self) -> list[Effect]:
        """Take over from the predecessor."""
        return [Persist(self._record())]

    def hear(self, status: Status, now: float) -> list[Effect]:
        """Handle a node's status."""
        is_new = status.phase is Phase.FRESH and status.generation == 0
        is_known = is_new or status.node in self._handing_over or status.node in self._names
        if status.node in self._gone or not is_known:
            return [self._order(status.node, Task.OUT)]
        if self.stopped:
            return [self._order(status.node, Task.STOP)]
        known = self.statuses.get(status.node)
        if known is not None and known.serial > status.serial:
            return []
        self._heard[status.node] = now
        if known is not None and known.serial == status.serial:
            return []
        self.statuses[status.node] = status
        if status.node in self._names and self._has_obeyed(status):
            self._obeyed.add(status.node)
        if self._is_quiet(status) and len(self._obeyed) < len(self.members):
            return []  # the cost of a step, or of a loss, must not be quadratic in the number of members
        return self._decide(now)

    def lost(self, nodes: Collection[str], now: float) -> list[Effect]:
        """Handle the loss of nodes whose connections were closed, all in one new generation."""
        known = {node for node in nodes if node in self._names or node in self.statuses} - self._gone
        if self.stopped or not known:
            return []
        return self._without(known, f"{', '.join(sorted(known))}: its agent is gone", now)

    def tick(self, now: float) -> list[Effect]:
        """Handle the passing of time; call it a few times per lease."""
        if self.stopped:
            return self._repeat(now)
        silent = {node for node, heard in self._heard.items() if now - heard > self.settings.lease_seconds}
        effects = self._without(silent, f"{', '.join(sorted(silent))}: silent", now) if silent else []
        late = not silent and now - self._ordered_at > HEEDING_LEASES * self.settings.lease_seconds
        if late and (unheeding := self._not_heeding()):
            effects += self._without(unheeding, f"{', '.join(unheeding)}: heard, but does not hear", now)
        return effects + self._decide(now) + self._repeat(now)

    def stop(self, reason: str, now: float) -> list[Effect]:
        """End the run."""
        if self.stopped:
            return []
        self.stopped, self.task = reason, Task.STOP
        return [Persist(self._record()), *self._orders()]

    def end(self, reason: str, now: float) -> list[Effect]:
        """Let all nodes save after the current step, and then end the run."""
        if self.stopped or self.ending:
            return []
        if self.task is Task.WAIT and not self._returned:
            return self.stop(reason, now)
        self.ending = reason
        return [Persist(self._record()), *self._orders()]

    @property
    def newcomers(self) -> list[str]:
        """Nodes that could become members, sorted by name: ranks must not depend on the order of arrival."""
        found = [
            node
            for node, status in self.statuses.items()
            if node not in self.members and status.phase is Phase.FRESH and not status.leaving and not status.failed
        ]
        return sorted(found, key=lambda node: (len(node), node))

    def _decide(self, now: float) -> list[Effect]:
        """Return the effects that follow from what is known now."""
        if self.stopped:
            return []
        if fatal := next((s.fatal for s in self.statuses.values() if s.fatal), ""):
            return self.stop(fatal, now)
        failed = {s.node: s.failed for s in self.statuses.values() if s.failed}
        if failed:
            return self._without(failed, "; ".join(f"{node}: {why}" for node, why in failed.items()), now)
        if handed_over := {node for node in self._handing_over if self.statuses[node].phase is Phase.HANDED_OVER}:
            return self._without(handed_over, "they have handed over", now)
        if self.task is Task.WAIT:
            return self._begin(now)
        own = self._of_members()
        if len(own) < len(self.members):
            return []
        broken = [s for s in own if s.generation == self.generation and (s.broken or s.accuses)]
        if broken and (blamed := self._blame(broken, now)) is not None:
            return self._without(blamed, self._why(broken), now)
        if self.task is Task.RUN:
            return self._while_running(own, now)
        if not all(self._has_obeyed(s) for s in own):
            return []
        if self.task is Task.REBUILD:
            return self._run(own, now)
        return [] if self._handing_over else self._rebuild(own, now)

    def _begin(self, now: float) -> list[Effect]:
        """Begin the run; after a coordinator's restart, continue if all members still run, else with those present."""
        if not self._returned:
            initial = self.settings.initial
            enough = len(self.statuses) >= initial and len(self.newcomers) >= initial
            return self._new_generation([], "the run begins", now) if enough else []
        own = self._of_members()
        complete = len(own) == len(self.members)
        if complete and all(s.generation == self.generation and s.phase is Phase.RUNNING for s in own):
            self.task, self._returned, self._ordered_at = Task.RUN, False, now
            self.base, self.committed = self.generation, max(s.applied for s in own)
            return [*self._orders(), *self._while_running(own, now)]
        missing = [node for node in self.members if node not in self.statuses and node not in self._gone]
        if missing and now - self._since < self.settings.return_seconds:
            return []
        self._gone.update(missing)
        return self._new_generation([s.node for s in own], "the coordinator is back", now)

    def _while_running(self, own: list[Status], now: float) -> list[Effect]:
        """Commit the step that all have prepared; no node computes at that moment, so nodes may join and leave."""
        if not all(s.generation == self.generation and s.phase is Phase.RUNNING for s in own):
            return []
        if all(s.done for s in own):
            return self.stop(self.ending or next((s.early for s in own if s.early), FINISHED), now)
        leaving = {s.node for s in own if s.leaving}
        if leaving and not self.ending and len(own) - len(leaving) < self.settings.fewest:
            return self.end(self._too_few(len(own) - len(leaving), f"{', '.join(sorted(leaving))} leave"), now)
        if not all(self._has_obeyed(s) for s in own):
            overdue = {s.node for s in own if s.overdue}
            return self._cut_short(overdue, now) if overdue and not self.ending else []
        if outliers := self._disagreeing(own):
            self._fruitless += 1
            self._doubts = True
            blamed = outliers if self._fruitless > self.settings.attempts else ()
            return self._without(blamed, f"gradients differ on {', '.join(sorted(outliers))}", now)
        self.committed, self._ordered_at = self.committed + 1, now
        self._fruitless = 0
        self._doubts = False
        self._obeyed.clear()
        joining = self._admitted(now)
        slowest = max(own, key=lambda s: (s.slow, s.node))
        evicts = bool(slowest.slow) and not leaving and len(own) > self.settings.fewest
        if self.ending or not (leaving or joining or evicts):
            return self._orders()
        why = [*(f"{node} leaves" for node in sorted(leaving)), *(f"{node} joins" for node in joining)]
        if evicts:
            why.append(f"{slowest.node} is {slowest.slow:.1f} times slower than others, and left out")
            leaving = {slowest.node}
        return self._without(leaving, "; ".join(why), now)

    def _cut_short(self, leaving: set[str], now: float) -> list[Effect]:
        """Continue without nodes that cannot wait for the end of the step, once they have exported their gradients."""
        self._handing_over |= leaving
        reason = "; ".join(f"{node} leaves before the end of the step" for node in sorted(leaving))
        return self._new_generation([n for n in self.members if n not in leaving], reason, now)

    def _admitted(self, now: float) -> list[str]:
        newcomers = self.newcomers
        if not newcomers:
            self._newcomer_since = None
            return []
        if self._newcomer_since is None:
            self._newcomer_since = now
        return newcomers if now - self._newcomer_since >= self.settings.join_seconds else []

    def _without(self, gone: Iterable[str], reason: str, now: float) -> list[Effect]:
        """Drop the nodes `gone`; form a new generation if `gone` contains a member or is empty (no node to blame)."""
        gone = set(gone)
        awaited = gone & self._handing_over
        self._gone |= gone
        self._handing_over -= gone
        for node in gone:
            self.statuses.pop(node, None)
            self._heard.pop(node, None)
        out: list[Effect] = [self._order(node, Task.OUT) for node in sorted(gone)]
        if self.task is Task.WAIT:
            # Before the first step a loss is more likely a mistake of the user than a fault.
            return out if self._returned else out + self.stop(reason, now)
        if gone and not gone & set(self.members):
            return out + self._decide(now) if awaited else out
        if self._fruitless > 2 * self.settings.attempts:
            return out + self.stop(f"{self._fruitless} generations in a row came to nothing; the last: {reason}", now)
        return out + self._new_generation([n for n in self.members if n not in gone], reason, now)

    def _new_generation(self, survivors: list[str], reason: str, now: float) -> list[Effect]:
        """Form a generation of the survivors and of all newcomers, since all nodes have to stop anyway."""
        members = [*survivors, *self.newcomers]
        if not members:
            return self.stop(self.ending or self._too_few(0, reason), now)
        if len(members) < self.settings.fewest and not self.ending:
            self.ending = self._too_few(len(members), reason)
        self.generation += 1
        self._obeyed.clear()
        self._accused_since = None
        self._ordered_at = now
        self.members = tuple(members)
        self._names = frozenset(members)
        self.task, self.reason, self._newcomer_since = Task.FENCE, reason, None
        return [Persist(self._record()), *self._orders()]

    def _too_few(self, left: int, reason: str) -> str:
        return too_few(left, f"{self.settings.fewest} that are needed ({reason})")

    def _rebuild(self, own: list[Status], now: float) -> list[Effect]:
        """Decide the state to continue from, once all members have stopped and reported what they hold.

        This is the state of the newest generation that any node ran: all its members were ready for it, so they hold
        its state, even those that never learned that it ran. A step is treated as committed if any node applied it, or
        if all remaining nodes have all its gradients, which is true of every step that was committed here.
        """
        base = max(s.base for s in own)
        holders = [s for s in own if s.base == base != NO_STATE]
        committed = max((s.applied for s in holders), default=0)
        ready = [s for s in holders if s.prepared == committed == s.applied]
        if self._disagreeing(ready):
            self._doubts = True
        elif len(ready) == len(holders) > 0:
            committed += 1
        self.base, self.committed, self.task, self._ordered_at = base, committed, Task.REBUILD, now
        self._obeyed.clear()
        return self._orders()

    def _not_heeding(self) -> list[str]:
        """Return the members whose agents have not acknowledged the last order, which a working agent does at once."""

        def heeds(s: Status) -> bool:
            if self.task is Task.RUN:
                return s.phase is Phase.RUNNING and s.applied >= self.committed
            return self.task is not Task.REBUILD or s.phase is not Phase.FENCED

        if self.task not in (Task.FENCE, Task.REBUILD, Task.RUN):
            return []
        own = {s.node for s in self._of_members() if s.generation == self.generation and heeds(s)}
        return [node for node in self.members if node not in own]

    def _is_quiet(self, status: Status) -> bool:
        """Return True if a status can have no other effect than to complete the task, with those of all other
        members."""
        if status.failed or status.fatal or status.broken or status.accuses or status.node not in self._names:
            return False
        if self.task is Task.RUN:
            is_running = (status.generation, status.phase) == (self.generation, Phase.RUNNING)
            return is_running and not (status.done or status.leaving)
        return self.task in (Task.FENCE, Task.REBUILD)

    def _has_obeyed(self, status: Status) -> bool:
        """Return True if a member has done its part of the current task: stopped, rebuilt, or prepared the step."""
        if self.task is Task.RUN:
            return status.prepared == self.committed == status.applied
        phases = STOPPED_PHASES if self.task is Task.FENCE else (Phase.READY, Phase.RUNNING)
        return status.generation == self.generation and status.phase in phases

    def _run(self, own: list[Status], now: float) -> list[Effect]:
        steps = {s.ready_at for s in own}
        step = next(iter(steps))
        if len(steps) > 1 or step is None:
            self._fruitless += 1
            return self._without((), f"nodes became ready at unlike steps: {sorted(map(str, steps))}", now)
        self.task, self.base, self.committed, self._ordered_at = Task.RUN, self.generation, step, now
        self._obeyed.clear()
        return self._orders()

    def _blame(self, broken: list[Status], now: float) -> set[str] | None:
        """Return the nodes to drop, at first an empty set, since a network may have failed briefly; None means wait.

        A node that most of the others report as unresponsive is cut off from them or hangs, and is dropped.
        """
        votes = Counter(s.accuses for s in broken if s.accuses in self.members and s.accuses != s.node)
        others = len(self.members) - 1
        for node, count in votes.most_common(1):
            if node is not None and 2 * count > others and others > 1:
                return {node}
        if not any(s.broken for s in broken):
            return None
        if votes and len(broken) < len(self.members):  # wait for reports of the others
            self._accused_since = now if self._accused_since is None else self._accused_since
            if now - self._accused_since < self.settings.accuse_seconds:
                return None
        self._fruitless += 1
        if self._fruitless > self.settings.attempts and votes:
            most = max(votes.values())
            return {max(node for node, count in votes.items() if count == most and node is not None)}
        return set()

    def _why(self, broken: list[Status]) -> str:
        reasons = [f"{s.node}: {s.broken or f'waits in vain for {s.accuses}'}" for s in broken]
        return "; ".join(reasons[:4])

    def _disagreeing(self, own: list[Status]) -> set[str]:
        """Return the nodes whose gradients of a layer differ from those of most of its holders."""
        if all(s.hashes == own[0].hashes for s in own):
            return set()
        first: dict[str, int] = {}
        if all(first.setdefault(layer, value) == value for s in own for layer, value in s.hashes.items()):
            return set()
        holders: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for s in own:
            for layer, value in s.hashes.items():
                holders[layer][value].append(s.node)
        outliers: set[str] = set()
        for by_value in holders.values():
            if len(by_value) > 1:
                most = max(map(len, by_value.values()))
                groups = list(by_value.values())
                sure = sum(len(group) == most for group in groups) == 1
                outliers.update(n for group in groups if not sure or len(group) < most for n in group)
        return outliers

    def _of_members(self) -> list[Status]:
        return [self.statuses[node] for node in self.members if node in self.statuses]

    def _record(self) -> Record:
        return Record(self.term, self.generation, self.members, self.stopped, self.ending)

    def _orders(self) -> list[Effect]:
        nodes = dict.fromkeys([*self.members, *self.statuses] if self.task is Task.STOP else self.members)
        handing_over = [] if self.task is Task.STOP else sorted(self._handing_over)
        members = self.members if self.task is Task.REBUILD else ()
        workers = tuple(self.statuses[member].workers for member in members)
        return [
            *(self._order(node, self.task, members, workers) for node in nodes),
            *(self._order(node, Task.HAND_OVER) for node in handing_over),
        ]

    def _order(self, node: str, task: Task, members: tuple[str, ...] = (), workers: tuple[int, ...] = ()) -> Order:
        self._serial += 1
        return Order(
            node,
            self.term,
            self._serial,
            task,
            self.generation,
            members,
            workers,
            self.base,
            self.committed,
            self.stopped or self.reason,
            self.ending,
            self._doubts,
        )

    def _repeat(self, now: float) -> list[Effect]:
        """Repeat orders, which may have been lost."""
        if self.task is Task.WAIT or now - self._sent < RESEND_SECONDS:
            return []
        self._sent = now
        return self._orders()
