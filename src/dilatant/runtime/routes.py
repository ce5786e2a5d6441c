"""Routes: the messages that one rank receives before, and sends after, each of its actions.

Both ends of an edge derive the same messages from `schedule.dependencies`; this module selects those of one rank, and
omits gradients for stages that need none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import PlacedStage, Plan
from dilatant.schedule.dependencies import Message, shared_samples
from dilatant.schedule.schedule import Action, ActionKind
from dilatant.schedule.simulator.graph import ScheduleError, ScheduleGraph, message_order
from dilatant.schedule.simulator.simulate import op_ends

RouteLink = tuple[int, int, int, int]
"""A directed edge between two ranks: producer stage, consumer stage, source rank, target rank."""

K = TypeVar("K", Action, RouteLink)


@dataclass(frozen=True, slots=True)
class Routes:
    """The messages of one rank in one step.

    received, sent: by action of this rank. incoming, outgoing: by directed edge to or from this rank (also to itself);
    all in edge order. samples: by action, for this rank's actions and those at the other ends of its messages. turn:
    for each action in a message, a number that increases in the order of its rank's actions. after: for each message
    to this rank, the number of this rank's actions to launch before the receive is posted: those that end no later than
    the producer, by `derive_routes`' durations. Every posted receive then waits for a producer that ends earlier than
    the rank's next action: no cycle is possible, even if all hosts wait for their devices with all posted receives.

    Tensor-parallel ranks all have and need the same rows; context-parallel ranks have different rows. Each row is sent
    once, to one of the ranks that need it; they then all-gather (Narayanan et al. 2021, section 4.1).
    """

    received: Mapping[Action, tuple[Message, ...]]
    sent: Mapping[Action, tuple[Message, ...]]
    incoming: Mapping[RouteLink, tuple[Message, ...]]
    outgoing: Mapping[RouteLink, tuple[Message, ...]]
    samples: Mapping[Action, tuple[int, ...]]
    turn: Mapping[Action, int]
    after: Mapping[Message, int]


def boundary_of(message: Message) -> int:
    """Return the stage that computed the message's rows, or the rows to which its gradients belong."""
    forward = message.producer.kind == ActionKind.F
    return message.producer.stage if forward else message.consumer.stage


def stages_before(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return stage → the stages that send it rows. They are its predecessor in the replica or, for a first stage, the
    last stages of all replicas of the units that feed its unit."""
    stages = plan.stages()
    feeders: dict[str, list[int]] = defaultdict(list)
    for unit in plan.units:
        last = [placed.index for placed in stages if placed.unit == unit.name and placed.is_last]
        for fed in unit.feeds:
            feeders[fed] += last
    return {placed.index: tuple(feeders[placed.unit]) if placed.is_first else (placed.index - 1,) for placed in stages}


def derive_routes(
    graph: ScheduleGraph, rank: int, with_backward: Collection[int], durations: NDArray[np.float64] | None = None
) -> Routes:
    """Derive the routes of `rank`.

    with_backward: stages that train or follow a stage that trains; other stages get no gradients. durations: seconds of
    every op, the same on all ranks, from which `Routes.after` follows; any values are safe; None: all equal. Raises
    ScheduleError if a stage in `with_backward` has, on this rank, a forward without a backward.
    """
    stages = graph.plan.stages()
    is_own = np.asarray([rank in placed.stage.ranks for placed in stages])[graph.stage]
    own_ops = np.flatnonzero(is_own).tolist()
    actions = {op: graph.action(op) for op in own_ops}
    samples = {action: _samples(graph, op) for op, action in actions.items()}
    _check_backwards(graph, actions, with_backward)
    seconds = np.ones(graph.num_ops) if durations is None else durations
    # Every op ends strictly later than its causes.
    ends = op_ends(graph, seconds + 1e-9 * (1.0 + seconds.max(initial=0.0)))
    own_ends = sorted(ends[own_ops].tolist())

    source, target = graph.messages
    mine = message_order(graph, np.flatnonzero(is_own[source] | is_own[target]))
    source, target = graph.edge_source[mine], graph.edge_target[mine]
    received: dict[Action, list[Message]] = defaultdict(list)
    sent: dict[Action, list[Message]] = defaultdict(list)
    incoming: dict[RouteLink, list[Message]] = defaultdict(list)
    outgoing: dict[RouteLink, list[Message]] = defaultdict(list)
    turn: dict[Action, int] = {}
    after: dict[Message, int] = {}
    for made, used, end in zip(source.tolist(), target.tolist(), ends[source].tolist(), strict=True):
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
            after[message] = bisect_right(own_ends, end)
        giving, taking = stages[producer.stage], stages[consumer.stage]
        one_row = samples[producer] == samples[consumer]
        for _, having, _, takers in row_part_pairs(giving, taking, one_row):
            for giver, taker in transfer_pairs(having, takers):
                link = giving.index, taking.index, giver, taker
                if giver == rank:
                    outgoing[link].append(message)
                if taker == rank:
                    incoming[link].append(message)
    return Routes(
        _frozen(received), _frozen(sent), _frozen(incoming), _frozen(outgoing), samples, turn, after
    )  # fmt: skip


def row_part_pairs(
    giving: PlacedStage, taking: PlacedStage, one_row: bool
) -> Iterator[tuple[int, tuple[int, ...], int, tuple[int, ...]]]:
    """Yield (producer's part, its ranks, consumer's part, its ranks) for all parts of the two stages' microbatches
    between which rows of a message may be sent.

    one_row: both stages run the same samples; two stages of one unit with equally many parts, and groups, then split
    them identically, and rows pass between equal parts only.
    """
    one, other = giving.stage.degrees, taking.stage.degrees
    split, as_here = ((degrees.cp, degrees.groups) for degrees in (one, other))
    alike = one_row and giving.unit == taking.unit and split == as_here
    for place in range(other.row_parts):
        takers = other.ranks_of(taking.stage.ranks, place)
        for part in (place,) if alike else range(one.row_parts):
            yield part, one.ranks_of(giving.stage.ranks, part), place, takers


def transfer_pairs(having: Sequence[int], taking: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (sender, receiver) pairs for rows that all ranks in `having` have and all ranks in `taking` need."""
    both = [rank for rank in taking if rank in having]
    if both:
        yield from zip(both, both)
        return
    for number, giver in enumerate(having):
        for place, taker in enumerate(taking):
            end, begun = (number + 1) * len(taking), number * len(taking)
            if begun < (place + 1) * len(having) and place * len(having) < end:
                yield giver, taker


def divide_rows(
    rows: NDArray[np.int64], having: Sequence[int], taking: Sequence[int]
) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Return (sender, receiver) → the part of `rows` sent between them: an equal, consecutive slice for each. If the
    groups share ranks, nothing is sent: each shared rank keeps all rows if `having` contains `taking`, else a slice."""
    both = [rank for rank in taking if rank in having]
    if len(both) == len(taking):
        return {(rank, rank): rows for rank in both}
    number = np.arange(len(rows))
    giver, taker = (number * len(both or ranks) // max(1, len(rows)) for ranks in (having, taking))
    return {
        (one, other): rows[(giver == (both or having).index(one)) & (taker == (both or taking).index(other))]
        for one, other in transfer_pairs(having, taking)
    }


def _samples(graph: ScheduleGraph, op: int) -> tuple[int, ...]:
    return graph.packed.pieces.samples_of(int(graph.piece[op]))


def _check_backwards(graph: ScheduleGraph, actions: Mapping[int, Action], with_backward: Collection[int]) -> None:
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
