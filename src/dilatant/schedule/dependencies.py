"""Messages between stages: derived from Plan, Assignment and Schedule, never stored.

Both ends of a directed edge derive the same messages in the same order from the same three values, and compute every
shape from the sample numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dilatant.plan.plan import Plan
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.simulator.graph import ScheduleGraph, build, message_order

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Rows of `samples` sent from the producer's stage to the consumer's; gradients of rows if the producer is B or I.

    Within a unit the message holds all samples of the piece. Between units it holds the samples that both actions
    share, in the order of the producer's microbatch.
    """

    producer: Action
    consumer: Action
    samples: tuple[int, ...]


def messages(plan: Plan, assignment: Assignment, schedule: Schedule) -> dict[Edge, tuple[Message, ...]]:
    """Return the messages of every directed edge (from stage, to stage), in the order they are sent and received.

    Messages of an edge follow the producer's action order; several consumers of one action follow the consumers' order.
    A consumer that needs a later message first keeps the earlier ones, which have already been sent, so in-order
    receives cannot deadlock. Edges between stages on the same ranks are included, although their rows stay where they
    are. Raises ScheduleError if the schedule cannot run.
    """
    graph = build(plan, assignment, schedule)
    found: dict[Edge, list[Message]] = {}
    stages = graph.stage.tolist()
    sources, targets = graph.edge_source.tolist(), graph.edge_target.tolist()
    action = cache(graph.action)
    for number in message_order(graph).tolist():
        source, target = sources[number], targets[number]
        message = Message(action(source), action(target), shared_samples(graph, source, target))
        found.setdefault((stages[source], stages[target]), []).append(message)
    return {edge: tuple(sent) for edge, sent in found.items()}


def shared_samples(graph: ScheduleGraph, source: int, target: int) -> tuple[int, ...]:
    """Return the samples whose rows (or gradients of rows) pass from op `source` to op `target`."""
    pieces = graph.packed.pieces
    made, used = int(graph.piece[source]), int(graph.piece[target])
    if made == used:
        return pieces.samples_of(made)
    samples, others = pieces.samples_of(made), pieces.samples_of(used)
    wanted = set(others)
    return tuple(sample for sample in samples if sample in wanted)
