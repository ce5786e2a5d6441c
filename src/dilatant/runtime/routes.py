"""Routes: which rows one rank receives before, and sends after, each of its actions.

The messages are those of `schedule.messages`, which both ends of an edge derive alike; here they are sorted for one
rank, and gradients for stages that need none are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dilatant.plan.plan import PlacedStage, Plan
from dilatant.schedule.dependencies import Message, shared_samples
from dilatant.schedule.graph import ScheduleError, ScheduleGraph, message_order
from dilatant.schedule.schedule import Action, ActionKind

Link = tuple[int, int, int, int]
"""A directed edge between two ranks: stages, then ranks, of its two ends."""

K = TypeVar("K", Action, Link)


@dataclass(frozen=True, slots=True)
class Routes:
    """The messages of one rank in one step.

    received, sent: by own action, in edge order. incoming, outgoing: by directed edge from or to a rank, this one
    included, in the order of the edge. samples: of each own action, and of those that these exchange messages with.
    turn: for each action in a message, a number that grows along the actions of its rank.

    Tensor-parallel ranks all need, and all have, the same rows; context-parallel ranks have their own. So each row
    travels once to each rank that needs it, from the rank in the same place, where both stages have as many.
    """

    received: Mapping[Action, tuple[Message, ...]]
    sent: Mapping[Action, tuple[Message, ...]]
    incoming: Mapping[Link, tuple[Message, ...]]
    outgoing: Mapping[Link, tuple[Message, ...]]
    samples: Mapping[Action, tuple[int, ...]]
    turn: Mapping[Action, int]


def boundary_of(message: Message) -> int:
    """The stage whose output the rows of a message are, or the gradients in it belong to."""
    forward = message.producer.kind == ActionKind.F
    return message.producer.stage if forward else message.consumer.stage


def stages_before(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Stage → the stages whose rows it takes: its predecessor in the replica, or the last stages of all replicas of
    the units that feed it."""
    stages = plan.stages()
    feeders: dict[str, list[int]] = defaultdict(list)
    for unit in plan.units:
        last = [placed.index for placed in stages if placed.unit == unit.name and placed.is_last]
        for fed in unit.feeds:
            feeders[fed] += last
    return {
        placed.index: tuple(feeders[placed.unit]) if placed.is_first else (placed.index - 1,)
        for placed in stages
    }


def derive_routes(graph: ScheduleGraph, rank: int, with_backward: Collection[int]) -> Routes:
    """The routes of `rank`.

    with_backward: stages that something trainable is in or before; others get no gradient. Raises ScheduleError when
    such a stage of this rank has a forward without a backward.
    """
    stages = graph.plan.stages()
    is_own = np.asarray([rank in placed.stage.ranks for placed in stages])[graph.stage]
    own_ops = np.flatnonzero(is_own).tolist()
    actions = {op: graph.action(op) for op in own_ops}
    samples = {action: _samples(graph, op) for op, action in actions.items()}
    _check_backwards(graph, actions, with_backward)

    order = message_order(graph)
    source, target = graph.edge_source[order], graph.edge_target[order]
    mine = is_own[source] | is_own[target]
    received: dict[Action, list[Message]] = defaultdict(list)
    sent: dict[Action, list[Message]] = defaultdict(list)
    incoming: dict[Link, list[Message]] = defaultdict(list)
    outgoing: dict[Link, list[Message]] = defaultdict(list)
    turn: dict[Action, int] = {}
    for made, used in zip(source[mine].tolist(), target[mine].tolist(), strict=True):
        producer = actions.get(made) or graph.action(made)
        consumer = actions.get(used) or graph.action(used)
        message = Message(producer, consumer, shared_samples(graph, made, used))
        if producer.kind != ActionKind.F and boundary_of(message) not in with_backward:
            continue
        turn[producer], turn[consumer] = made, used
        for op, action in ((made, producer), (used, consumer)):
            if action not in samples:
                samples[action] = _samples(graph, op)
        if made in actions:
            sent[producer].append(message)
        if used in actions:
            received[consumer].append(message)
        giving, taking = stages[producer.stage], stages[consumer.stage]
        one_row = samples[producer] == samples[consumer]
        for giver, taker in _pairs(giving, taking, one_row):
            link = giving.index, taking.index, giver, taker
            if giver == rank:
                outgoing[link].append(message)
            if taker == rank:
                incoming[link].append(message)
    return Routes(_frozen(received), _frozen(sent), _frozen(incoming), _frozen(outgoing), samples, turn)


def _pairs(giving: PlacedStage, taking: PlacedStage, one_row: bool) -> Iterator[tuple[int, int]]:
    """(giver, taker): from whom each rank of a stage takes its rows of a message, which another stage has in parts.

    one_row: both stages run the same samples in one row; of one unit, they then part it alike.
    """
    made, taken = giving.stage, taking.stage
    alike = one_row and giving.unit == taking.unit and made.cp == taken.cp
    for place, taker in enumerate(taken.ranks):
        for part in (place // taken.tp,) if alike else range(made.cp):
            having = made.ranks[part * made.tp : (part + 1) * made.tp]
            yield taker if taker in having else having[place % made.tp], taker


def _samples(graph: ScheduleGraph, op: int) -> tuple[int, ...]:
    return graph.packed.pieces.samples_of(int(graph.piece[op]))


def _check_backwards(
    graph: ScheduleGraph, actions: Mapping[int, Action], with_backward: Collection[int]
) -> None:
    wanted = {
        (action.stage, action.microbatch, action.samples): op
        for op, action in actions.items()
        if action.kind == ActionKind.F and action.stage in with_backward
    }
    for action in actions.values():
        if action.kind in (ActionKind.B, ActionKind.W):
            wanted.pop((action.stage, action.microbatch, action.samples), None)
    if wanted:
        listed = "; ".join(graph.describe(op) for op in list(wanted.values())[:4])
        raise ScheduleError(
            f"{len(wanted)} forwards on stages that train, or that something trainable comes before, have no "
            f"backward: {listed}. Give the schedule family the model's trainability"
        )


def _frozen(lists: Mapping[K, list[Message]]) -> dict[K, tuple[Message, ...]]:
    return {key: tuple(messages) for key, messages in lists.items()}
