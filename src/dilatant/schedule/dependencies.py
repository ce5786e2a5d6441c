"""What each action needs from others: the messages of a step, derived from Plan, Assignment and Schedule.

Nothing is written down about sends and receives. Both ends of a directed edge derive the same messages in the same
order from the same three values, and from the sample numbers each knows every shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from dilatant.plan.plan import Plan
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.simulator.graph import ScheduleGraph, build, message_order

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Rows of `samples` from `producer`'s stage to `consumer`'s; gradients of rows where the producer is B or I.

    Within a unit these are all samples of the piece; between units those that both actions share, in the order of
    the producer's microbatch.
    """

    producer: Action
    consumer: Action
    samples: tuple[int, ...]


def messages(plan: Plan, assignment: Assignment, schedule: Schedule) -> Mapping[Edge, tuple[Message, ...]]:
    """The messages of every directed edge (from stage, to stage), in the order they are sent and received.

    The order is the producer's, and for several consumers of one action theirs. A consumer that needs a later
    message first keeps the earlier ones, which have been sent already; so in-order receives cannot deadlock.
    Edges between stages on the same ranks are included: their rows stay where they are. Raises ScheduleError for a
    schedule that cannot run.
    """
    return graph_messages(build(plan, assignment, schedule))


def graph_messages(graph: ScheduleGraph) -> dict[Edge, tuple[Message, ...]]:
    """The messages of a compiled schedule, as `messages` gives them."""
    found: dict[Edge, list[Message]] = {}
    stages, pieces = graph.stage.tolist(), graph.piece.tolist()
    sources, targets = graph.edge_source.tolist(), graph.edge_target.tolist()
    action = cache(graph.action)
    whole = cache(graph.packed.pieces.samples_of)
    for number in message_order(graph).tolist():
        source, target = sources[number], targets[number]
        same = pieces[source] == pieces[target]
        samples = whole(pieces[source]) if same else shared_samples(graph, source, target)
        edge = stages[source], stages[target]
        found.setdefault(edge, []).append(Message(action(source), action(target), samples))
    return {edge: tuple(sent) for edge, sent in found.items()}


def shared_samples(graph: ScheduleGraph, source: int, target: int) -> tuple[int, ...]:
    """The samples whose rows, or their gradients, pass from one op to another."""
    pieces = graph.packed.pieces
    made, used = int(graph.piece[source]), int(graph.piece[target])
    if made == used:
        return pieces.samples_of(made)
    samples, others = pieces.samples_of(made), pieces.samples_of(used)
    wanted = set(others)
    return tuple(sample for sample in samples if sample in wanted)
