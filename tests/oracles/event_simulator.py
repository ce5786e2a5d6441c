"""An event-driven simulator of a step, written from the rules alone: slow and plain.

A rank starts its next action when it is free, every other rank of the stage has come to the same action, and all rows
and gradients it needs are there. What it needs is found by looking at samples: a forward needs its rows from the stage
before, or from every action of the feeding units that ran one of its samples; a backward needs its own forward and the
gradients that come back the same ways; W needs its I.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from dilatant.plan import Plan
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


class Deadlock(Exception):
    pass


@dataclass
class Result:
    seconds: float
    start: dict[Action, float]
    end: dict[Action, float]
    arrival: dict[tuple[Action, Action], float]


def samples_of(plan: Plan, assignment: Assignment, action: Action) -> set[int]:
    placed = plan.stages()[action.stage]
    if action.samples is not None:
        return set(action.samples)
    return set(assignment.microbatches[placed.unit][placed.replica][action.microbatch])


def needs(plan: Plan, assignment: Assignment, actions: list[Action]) -> dict[Action, list[Action]]:
    """For every action, the actions on other stages whose rows or gradients it consumes."""
    placed = plan.stages()
    work = {action: samples_of(plan, assignment, action) for action in actions}
    on_stage: dict[int, list[Action]] = defaultdict(list)
    for action in actions:
        on_stage[action.stage].append(action)
    found: dict[Action, list[Action]] = {action: [] for action in actions}
    for below in placed:
        for above in placed:
            inside = (above.unit, above.replica, above.position) == (below.unit, below.replica, below.position + 1)
            across = below.is_last and above.is_first and above.unit in plan.unit(below.unit).feeds
            if not (inside or across):
                continue
            for low in on_stage[below.index]:
                for high in on_stage[above.index]:
                    if not work[low] & work[high]:
                        continue
                    if low.kind == F and high.kind == F:
                        found[high].append(low)
                    elif low.kind in (B, I) and high.kind in (B, I):
                        found[low].append(high)
    return found


def simulate(
    plan: Plan,
    assignment: Assignment,
    schedule: Schedule,
    seconds: dict[Action, float],
    lag: dict[tuple[Action, Action], float] | Callable[[Action, Action, float], float] | None = None,
) -> Result:
    """Messages travel `lag` seconds, of a function: of producer, consumer and the moment when they are ready."""
    placed = plan.stages()
    actions = list(dict.fromkeys(action for rank in schedule.actions for action in schedule.actions[rank]))
    needed = needs(plan, assignment, actions)
    users: dict[Action, list[Action]] = defaultdict(list)
    for action, sources in needed.items():
        for source in sources:
            users[source].append(action)
    index = {action: number for number, action in enumerate(actions)}
    waiting_for = {action: len(sources) for action, sources in needed.items()}
    position = dict.fromkeys(schedule.actions, 0)
    busy = dict.fromkeys(schedule.actions, False)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    arrival: dict[tuple[Action, Action], float] = {}
    events: list[tuple[float, int, int, str, object]] = []
    tick = count()
    now = 0.0

    def try_start() -> None:
        for rank, actions_here in schedule.actions.items():
            if busy[rank] or position[rank] == len(actions_here):
                continue
            action = actions_here[position[rank]]
            if waiting_for[action] or action in start:
                continue
            group = placed[action.stage].stage.ranks
            if any(
                busy[member]
                or position[member] == len(schedule.actions[member])
                or schedule.actions[member][position[member]] != action
                for member in group
            ):
                continue
            start[action] = now
            for member in group:
                busy[member] = True
            heapq.heappush(events, (now + seconds[action], index[action], next(tick), "end", action))

    try_start()
    while events:
        now, _, _, what, subject = heapq.heappop(events)
        if what == "end":
            action = subject
            end[action] = now
            for member in placed[action.stage].stage.ranks:
                busy[member] = False
                position[member] += 1
            for user in sorted(users[action], key=index.__getitem__):
                edge = (action, user)
                travels = lag(*edge, now) if callable(lag) else lag[edge] if lag is not None else 0.0
                arrival[edge] = now + travels
                heapq.heappush(events, (arrival[edge], -1, next(tick), "arrive", user))
        else:
            waiting_for[subject] -= 1
        if not events or events[0][0] > now:
            try_start()
    if len(end) < len(actions):
        raise Deadlock(f"{len(actions) - len(end)} of {len(actions)} actions never ran")
    return Result(max(end.values(), default=0.0), start, end, arrival)
