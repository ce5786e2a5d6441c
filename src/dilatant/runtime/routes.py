"""Routes: which rows one rank receives before, and sends after, each of its actions.

The messages are those of `schedule.messages`, which both ends of an edge derive alike; here they are sorted for one
rank, and gradients for stages that need none are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dilatant.plan.plan import Plan
from dilatant.schedule.dependencies import Message, shared_samples
from dilatant.schedule.graph import ScheduleError, ScheduleGraph, message_order
from dilatant.schedule.schedule import Action, ActionKind

Link = tuple[int, int, int, int]
"""A directed edge between two ranks: stages, then ranks, of its two ends."""

K = TypeVar("K", Action, Link)


@dataclass(frozen=True, slots=True)
class Routes:
    """The messages of one rank in one step.

    received, sent: by own action, in edge order. incoming, outgoing: by directed edge from or to another rank, in the
    order of the edge. samples: of each own action. turn: for each action in a message, a number that grows along the
    actions of its rank.

    Every rank of a stage needs all rows that the stage takes, and every rank of a stage has all rows that it makes. So
    each row travels once to each rank that needs it, from the rank in the same place, where both stages have as many.
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
    placed = graph.plan.stages()
    ranks_of = [stage.stage.ranks for stage in placed]
    is_own = np.asarray([rank in ranks for ranks in ranks_of])[graph.stage]
    own_ops = np.flatnonzero(is_own).tolist()
    actions = {op: graph.action(op) for op in own_ops}
    samples = {action: graph.packed.pieces.samples_of(int(graph.piece[op])) for op, action in actions.items()}
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
        givers, takers = ranks_of[producer.stage], ranks_of[consumer.stage]
        turn[producer], turn[consumer] = made, used
        if made in actions:
            sent[producer].append(message)
            if used not in actions:
                for taker in takers[givers.index(rank) :: len(givers)]:
                    outgoing[producer.stage, consumer.stage, rank, taker].append(message)
        if used in actions:
            received[consumer].append(message)
            if made not in actions:
                giver = givers[takers.index(rank) % len(givers)]
                incoming[producer.stage, consumer.stage, giver, rank].append(message)
    return Routes(_frozen(received), _frozen(sent), _frozen(incoming), _frozen(outgoing), samples, turn)


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
