"""A schedule compiled for timing: one op per action, its predecessors, and an order that respects them all.

`build` is done once per schedule; the same graph is then timed again and again with other durations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, list_problems
from dilatant.plan.plan import Plan
from dilatant.schedule.packed import KINDS, PackedActions, pack
from dilatant.schedule.pairs import unit_pairs
from dilatant.schedule.plan_arrays import PlanArrays, plan_arrays
from dilatant.schedule.schedule import Action, Assignment, Schedule


class ScheduleError(UserError):
    """A schedule that cannot run; the message lists the actions concerned."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleGraph:
    """Ops are numbered rank by rank, each on the first rank of its stage; `kind`, `stage`, `piece`: `[ops]`.

    `row_op[row]` is the op of a packed row, `list_offsets` bounds the ops of each rank. `edge_source` and
    `edge_target` (op numbers) are the edges that carry rows or gradients, the first `num_messages`, followed by
    order edges of ranks that help in a stage they do not lead. The last five arrays are the same graph by position
    in `order`.
    """

    plan: Plan
    assignment: Assignment
    schedule: Schedule
    arrays: PlanArrays
    packed: PackedActions
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    piece: NDArray[np.int32]
    row_op: NDArray[np.int32]
    list_offsets: NDArray[np.int32]
    edge_source: NDArray[np.int32]
    edge_target: NDArray[np.int32]
    num_messages: int
    order: NDArray[np.int32]
    previous: NDArray[np.int32]
    offsets: NDArray[np.int32]
    source: NDArray[np.int32]
    edge: NDArray[np.int32]

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    def action(self, op: int) -> Action:
        """The action of an op."""
        piece = int(self.piece[op])
        return Action(
            KINDS[self.kind[op]],
            int(self.stage[op]),
            int(self.packed.pieces.microbatch[piece]),
            self.packed.pieces.part[piece],
        )

    def describe(self, op: int) -> str:
        """The action in words, for messages to people."""
        placed = self.arrays.placed[int(self.stage[op])]
        action = self.action(op)
        part = "" if action.samples is None else f" samples {list(action.samples)}"
        return (
            f"{action.kind} of {placed.unit} replica {placed.replica} stage {placed.position} microbatch "
            f"{action.microbatch}{part} (rank {placed.stage.ranks[0]})"
        )


def build(
    plan: Plan, assignment: Assignment, schedule: Schedule, look_ahead: int | None = None
) -> ScheduleGraph:
    """Compile `schedule`. With `look_ahead`, an edge holds at most that many messages that were not yet consumed:
    its producer waits for room, as a runtime with bounded receive buffers does.

    Raises ScheduleError when an action lacks its input or its gradient, comes before what it needs on its own rank,
    or when the order deadlocks (the cycle is in the message). `validate` lists every problem instead.
    """
    graph, missing, disorder = try_build(plan, assignment, schedule, look_ahead)
    if graph is None:
        raise ScheduleError(str(list_problems("this schedule cannot run:", missing + disorder)))
    return graph


def try_build(
    plan: Plan, assignment: Assignment, schedule: Schedule, look_ahead: int | None = None
) -> tuple[ScheduleGraph | None, list[str], list[str]]:
    """The compiled schedule, or None; then which actions lack another one, and which come in an impossible order."""
    from dilatant.schedule import graph_kernels as kernels

    arrays = plan_arrays(plan)
    packed = pack(arrays, assignment, schedule)
    pieces = packed.pieces
    number = {rank: index for index, rank in enumerate(packed.ranks)}
    lead = np.asarray([number.get(placed.stage.ranks[0], -1) for placed in arrays.placed], dtype=np.int32)
    simple = kernels.all_lead(packed.offsets, packed.stage, lead) and all(
        len(placed.stage.ranks) == 1 for placed in arrays.placed
    )
    if simple:
        kind, stage, piece = packed.kind, packed.stage, packed.piece
        list_offsets = packed.offsets.astype(np.int32)
    else:
        row_rank = np.repeat(np.arange(len(packed.ranks), dtype=np.int32), np.diff(packed.offsets))
        leads = lead[packed.stage] == row_rank
        kind, stage, piece = packed.kind[leads], packed.stage[leads], packed.piece[leads]
        list_offsets = np.concatenate([[0], np.cumsum(leads)])[packed.offsets].astype(np.int32)

    num_pieces = np.diff(pieces.first)[arrays.chain].astype(np.int32)
    first_piece = pieces.first[arrays.chain].astype(np.int32)
    slot_base = np.concatenate([[0], np.cumsum(4 * num_pieces)]).astype(np.int32)
    slots, twice = kernels.fill_slots(
        kind, stage, piece, slot_base, num_pieces, first_piece, int(slot_base[-1])
    )

    def describe(op: int) -> str:
        return ScheduleGraph.describe(partial, op)

    pairs_from, pairs_to = unit_pairs(arrays, pieces)
    piece_chain = np.repeat(np.arange(arrays.num_chains), np.diff(pieces.first))
    last_of = (arrays.stages_of[piece_chain, 1] - 1).astype(np.int32)
    first_of = arrays.stages_of[piece_chain, 0].astype(np.int32)
    source, target, num_messages, codes, culprits, num_wrong = kernels.data_edges(
        kind,
        stage,
        piece,
        slots,
        slot_base,
        num_pieces,
        first_piece,
        arrays.before,
        arrays.after,
        pairs_from,
        pairs_to,
        last_of,
        first_of,
    )
    source, target = source[:num_messages], target[:num_messages]
    empty = np.empty(0, dtype=np.int32)
    partial = ScheduleGraph(
        plan, assignment, schedule, arrays, packed, kind, stage, piece,
        empty, list_offsets, source, target, num_messages, empty, empty, empty, empty, empty,
    )  # fmt: skip
    missing = [f"{describe(twice)} appears twice"] if twice >= 0 else []
    disorder: list[str] = []
    reasons = {
        kernels.NO_INPUT: (missing, "no action makes its input"),
        kernels.NO_GRADIENT: (missing, "no action makes the gradient it needs"),
        kernels.BEFORE_FORWARD: (disorder, "its forward does not come before it on the same rank"),
        kernels.BEFORE_INPUT_GRADIENT: (
            disorder,
            "its input-gradient half does not come before it on the same rank",
        ),
    }
    for code, op in zip(codes[:num_wrong].tolist(), culprits[:num_wrong].tolist(), strict=True):
        problems, reason = reasons[code]
        problems.append(f"{describe(op)}: {reason}")

    if simple:
        row_op = np.arange(len(kind), dtype=np.int32)
    else:
        stages = packed.stage
        row_op = slots[
            slot_base[stages] + packed.kind * num_pieces[stages] + packed.piece - first_piece[stages]
        ]
        for row in np.flatnonzero(row_op < 0).tolist():
            rank = packed.ranks[row_rank[row]]
            action = packed[rank][row - int(packed.offsets[row_rank[row]])]
            missing.append(f"rank {rank} runs {action}, which the first rank of its stage does not run")
        inner = np.flatnonzero((row_rank[1:] == row_rank[:-1]) & (row_op[1:] >= 0) & (row_op[:-1] >= 0))
        earlier, later = row_op[inner], row_op[inner + 1]
        list_of = lead[stage]
        implied = (earlier == later - 1) & (list_of[earlier] == list_of[later])
        codes_of_pairs = np.unique(earlier[~implied].astype(np.int64) * len(kind) + later[~implied])
        source = np.concatenate([source, codes_of_pairs // max(len(kind), 1)]).astype(np.int32)
        target = np.concatenate([target, codes_of_pairs % max(len(kind), 1)]).astype(np.int32)
    if look_ahead is not None:
        room_source, room_target = _room_edges(partial, look_ahead)
        source, target = np.concatenate([source, room_source]), np.concatenate([target, room_target])

    offsets, edges = kernels.group_by_target(target, len(kind))
    order, count, heads, position = kernels.topological_order(list_offsets, offsets, edges, source)
    if count < len(kind):
        order = order[:count]
        disorder.append(_cycle(partial, lead, heads, offsets, edges, source, order))
    if missing or disorder:
        return None, missing, disorder
    previous, new_offsets, new_source, new_edge = kernels.renumber(
        order, position, lead[stage], offsets, edges, source, list_offsets
    )
    graph = ScheduleGraph(
        plan, assignment, schedule, arrays, packed, kind, stage, piece,
        row_op, list_offsets, source, target, num_messages, order, previous, new_offsets, new_source, new_edge,
    )  # fmt: skip
    return graph, [], []


def _room_edges(graph: ScheduleGraph, look_ahead: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Edges consumer of message i → producer of message i + look_ahead, for every directed edge between stages."""
    if look_ahead < 1:
        raise ValueError(f"look_ahead must be at least 1 message, got {look_ahead}")
    order = message_order(graph)
    source, target = graph.edge_source[order], graph.edge_target[order]
    same = (graph.stage[source][look_ahead:] == graph.stage[source][:-look_ahead]) & (
        graph.stage[target][look_ahead:] == graph.stage[target][:-look_ahead]
    )
    at = np.flatnonzero(same)
    freed, awaited = target[at], source[at + look_ahead]
    other = freed != awaited
    return freed[other], awaited[other]


def message_order(graph: ScheduleGraph) -> NDArray[np.int64]:
    """Message numbers sorted by directed edge, and within one in the producer's, then the consumer's order."""
    source, target = graph.edge_source[: graph.num_messages], graph.edge_target[: graph.num_messages]
    return np.lexsort((target, source, graph.stage[target], graph.stage[source]))


def _cycle(
    graph: ScheduleGraph,
    lead: NDArray[np.int32],
    heads: NDArray[np.int32],
    offsets: NDArray[np.int32],
    edges: NDArray[np.int32],
    source: NDArray[np.int32],
    order: NDArray[np.int32],
) -> str:
    """The circle of waits in words: every stuck rank's next action waits for one behind another's next action."""
    done = np.zeros(graph.num_ops, dtype=bool)
    done[order] = True
    op = next(int(head) for index, head in enumerate(heads) if head < graph.list_offsets[index + 1])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while op not in seen:
        seen[op] = len(steps)
        needed = next(int(source[e]) for e in edges[offsets[op] : offsets[op + 1]] if not done[source[e]])
        head = int(heads[lead[graph.stage[needed]]])
        behind = "" if head == needed else f", which comes after {graph.describe(head)}"
        steps.append(f"{graph.describe(op)} waits for {graph.describe(needed)}{behind}")
        op = head
    return "deadlock: " + "; ".join(steps[seen[op] :])
