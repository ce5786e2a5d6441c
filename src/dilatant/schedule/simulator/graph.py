"""A schedule compiled for timing: one op per action, its predecessors, and a topological order.

`build` runs once per schedule; the same graph is then timed many times with other durations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, list_problems
from dilatant.plan.plan import Plan
from dilatant.schedule.packed import KINDS, PackedActions, PlanArrays, pack, plan_arrays, unit_pairs
from dilatant.schedule.schedule import Action, Assignment, Schedule


class ScheduleError(UserError):
    """Error for a schedule that cannot run; the message lists the actions concerned."""


@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """Each action of a schedule once: numbered rank by rank, on the first rank of its stage.

    `kind`, `stage`, `piece`: `[ops]`. `list_offsets` bounds the ops of each rank; `lead` is the first rank of each
    stage, as an index of ranks: [stages].
    """

    plan: Plan
    assignment: Assignment
    schedule: Schedule
    arrays: PlanArrays
    packed: PackedActions
    lead: NDArray[np.int32]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    piece: NDArray[np.int32]
    list_offsets: NDArray[np.int32]

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    def action(self, op: int) -> Action:
        """Return the action of an op."""
        piece = int(self.piece[op])
        return Action(
            KINDS[self.kind[op]],
            int(self.stage[op]),
            int(self.packed.pieces.microbatch[piece]),
            self.packed.pieces.part[piece],
        )

    def describe(self, op: int) -> str:
        """Describe the action in words, for error messages."""
        placed = self.arrays.placed[int(self.stage[op])]
        action = self.action(op)
        part = "" if action.samples is None else f" samples {list(action.samples)}"
        return (
            f"{action.kind} of {placed.unit} replica {placed.replica} stage {placed.position} microbatch "
            f"{action.microbatch}{part} (rank {placed.stage.ranks[0]})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleGraph(Ops):
    """Ops with their predecessors.

    `row_op[row]` is the op of a packed row. `edge_source` and `edge_target` (op numbers) are first the `num_messages`
    edges that carry rows or gradients, then order edges of ranks that are not the first rank of a stage they run. The
    last five arrays are the same graph by position in `order`.
    """

    row_op: NDArray[np.int32]
    edge_source: NDArray[np.int32]
    edge_target: NDArray[np.int32]
    num_messages: int
    order: NDArray[np.int32]
    previous: NDArray[np.int32]
    offsets: NDArray[np.int32]
    source: NDArray[np.int32]
    edge: NDArray[np.int32]

    @property
    def messages(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ops that produce and that consume each message."""
        return self.edge_source[: self.num_messages], self.edge_target[: self.num_messages]


def build(plan: Plan, assignment: Assignment, schedule: Schedule) -> ScheduleGraph:
    """Compile `schedule`.

    Raises ScheduleError if an action lacks its input or its gradient, comes before what it needs on its own rank, or if
    the order deadlocks (the message contains the cycle). `validate` lists every problem instead.
    """
    graph, missing, disorder = try_build(plan, assignment, schedule)
    if graph is None:
        raise ScheduleError(str(list_problems("this schedule cannot run:", missing + disorder)))
    return graph


def try_build(
    plan: Plan, assignment: Assignment, schedule: Schedule
) -> tuple[ScheduleGraph | None, list[str], list[str]]:
    """Return the compiled schedule or None, then the missing actions, then the actions in an impossible order."""
    from dilatant.schedule.simulator import graph_kernels as kernels

    ops = ops_of(plan, assignment, schedule)
    arrays, packed, lead = ops.arrays, ops.packed, ops.lead
    slots = _Slots.of(ops)
    source, target, missing, disorder = _data_edges(ops, slots)
    num_messages = len(source)
    row_op = np.arange(ops.num_ops, dtype=np.int32)
    if len(packed.kind) > ops.num_ops:
        row_op = slots.op(packed.kind, packed.stage, packed.piece)
        missing += _unled_rows(packed, row_op)
        more_source, more_target = _order_edges(ops, row_op)
        source, target = np.concatenate([source, more_source]), np.concatenate([target, more_target])

    offsets, edges = kernels.group_by_target(target, ops.num_ops)
    order, count, heads, position = kernels.topological_order(ops.list_offsets, offsets, edges, source)
    if count < ops.num_ops:
        disorder.append(_cycle(ops, heads, offsets, edges, source, order[:count]))
    if missing or disorder:
        return None, missing, disorder
    previous, new_offsets, new_source, new_edge = kernels.renumber(
        order, position, lead[ops.stage], offsets, edges, source, ops.list_offsets
    )
    graph = ScheduleGraph(
        plan, assignment, schedule, arrays, packed, lead, ops.kind, ops.stage, ops.piece, ops.list_offsets,
        row_op, source, target, num_messages, order, previous, new_offsets, new_source, new_edge,
    )  # fmt: skip
    return graph, [], []


def ops_of(plan: Plan, assignment: Assignment, schedule: Schedule) -> Ops:
    """Return the ops of `schedule` alone: enough for what does not depend on when an action starts."""
    arrays = plan_arrays(plan)
    packed = pack(arrays, assignment, schedule)
    number = {rank: index for index, rank in enumerate(packed.ranks)}
    lead = np.asarray([number.get(rank, -1) for rank in arrays.ranks], dtype=np.int32)[arrays.lead]
    leads = lead[packed.stage] == _rank_of_row(packed)
    offsets = np.concatenate([[0], np.cumsum(leads)])[packed.offsets].astype(np.int32)
    rows = packed.kind[leads], packed.stage[leads], packed.piece[leads]
    return Ops(plan, assignment, schedule, arrays, packed, lead, *rows, offsets)


def _rank_of_row(packed: PackedActions) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(packed.ranks), dtype=np.int32), np.diff(packed.offsets))


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """The op of every (kind, stage, piece), -1 if there is none; `twice` is the first duplicated op, or -1. A stage has
    `num_pieces[stage]` pieces, numbered from `first_piece[stage]`."""

    ops: NDArray[np.int32]
    base: NDArray[np.int32]
    num_pieces: NDArray[np.int32]
    first_piece: NDArray[np.int32]
    twice: int

    @classmethod
    def of(cls, ops: Ops) -> _Slots:
        from dilatant.schedule.simulator import graph_kernels as kernels

        pieces, chain = ops.packed.pieces, ops.arrays.chain
        num_pieces = np.diff(pieces.first)[chain].astype(np.int32)
        first_piece = pieces.first[chain].astype(np.int32)
        base = np.concatenate([[0], np.cumsum(4 * num_pieces)]).astype(np.int32)
        slots, twice = kernels.fill_slots(ops.kind, ops.stage, ops.piece, base, num_pieces, first_piece, int(base[-1]))
        return cls(slots, base, num_pieces, first_piece, int(twice))

    def op(self, kind: NDArray[np.int8], stage: NDArray[np.int32], piece: NDArray[np.int32]) -> NDArray[np.int32]:
        return self.ops[self.base[stage] + kind * self.num_pieces[stage] + piece - self.first_piece[stage]]


def _data_edges(ops: Ops, slots: _Slots) -> tuple[NDArray[np.int32], NDArray[np.int32], list[str], list[str]]:
    """Return (sources, targets) of the edges that carry rows or gradients, then problems: missing actions, and actions
    that come before what they need on their own rank."""
    from dilatant.schedule.simulator import graph_kernels as kernels

    arrays, pieces = ops.arrays, ops.packed.pieces
    pairs_from, pairs_to = unit_pairs(arrays, pieces)
    piece_chain = pieces.chain
    last_of = (arrays.stages_of[piece_chain, 1] - 1).astype(np.int32)
    first_of = arrays.stages_of[piece_chain, 0].astype(np.int32)
    source, target, count, codes, culprits, num_wrong = kernels.data_edges(
        ops.kind, ops.stage, ops.piece, slots.ops, slots.base, slots.num_pieces, slots.first_piece,
        arrays.before, arrays.after, pairs_from, pairs_to, last_of, first_of,
    )  # fmt: skip
    missing = [f"{ops.describe(slots.twice)} appears twice"] if slots.twice >= 0 else []
    disorder: list[str] = []
    reasons = {
        kernels.NO_INPUT: (missing, "no action makes its input"),
        kernels.NO_GRADIENT: (missing, "no action makes the gradient it needs"),
        kernels.BEFORE_FORWARD: (disorder, "its forward does not come before it on the same rank"),
        kernels.BEFORE_INPUT_GRADIENT: (disorder, "its input-gradient half does not come before it on the same rank"),
    }
    for code, op in zip(codes[:num_wrong].tolist(), culprits[:num_wrong].tolist(), strict=True):
        problems, reason = reasons[code]
        problems.append(f"{ops.describe(op)}: {reason}")
    return source[:count], target[:count], missing, disorder


def _unled_rows(packed: PackedActions, row_op: NDArray[np.int32]) -> list[str]:
    """List rows whose action is missing on the first rank of the stage."""
    row_rank = _rank_of_row(packed)
    problems = []
    for row in np.flatnonzero(row_op < 0).tolist():
        rank = packed.ranks[row_rank[row]]
        action = packed[rank][row - int(packed.offsets[row_rank[row]])]
        problems.append(f"rank {rank} runs {action}, which the first rank of its stage does not run")
    return problems


def _order_edges(ops: Ops, row_op: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return (sources, targets) of the order on ranks that are not the first of all their stages, without edges that
    the orders of first ranks imply."""
    row_rank = _rank_of_row(ops.packed)
    inner = np.flatnonzero((row_rank[1:] == row_rank[:-1]) & (row_op[1:] >= 0) & (row_op[:-1] >= 0))
    earlier, later = row_op[inner], row_op[inner + 1]
    list_of = ops.lead[ops.stage]
    implied = (earlier == later - 1) & (list_of[earlier] == list_of[later])
    count = max(ops.num_ops, 1)
    codes = np.unique(earlier[~implied].astype(np.int64) * count + later[~implied])
    return (codes // count).astype(np.int32), (codes % count).astype(np.int32)


def message_order(graph: ScheduleGraph, numbers: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return message numbers (by default all) sorted by directed edge, then in the producer's, then in the consumer's
    order."""
    numbers = np.arange(graph.num_messages) if numbers is None else numbers
    source, target = graph.edge_source[numbers], graph.edge_target[numbers]
    return numbers[np.lexsort((target, source, graph.stage[target], graph.stage[source]))]


def _cycle(
    ops: Ops,
    heads: NDArray[np.int32],
    offsets: NDArray[np.int32],
    edges: NDArray[np.int32],
    source: NDArray[np.int32],
    order: NDArray[np.int32],
) -> str:
    """Describe the cycle of waits: every stuck rank's next action waits for one queued behind another's next action."""
    done = np.zeros(ops.num_ops, dtype=bool)
    done[order] = True
    op = next(int(head) for index, head in enumerate(heads) if head < ops.list_offsets[index + 1])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while op not in seen:
        seen[op] = len(steps)
        needed = next(int(source[e]) for e in edges[offsets[op] : offsets[op + 1]] if not done[source[e]])
        head = int(heads[ops.lead[ops.stage[needed]]])
        behind = "" if head == needed else f", which comes after {ops.describe(head)}"
        steps.append(f"{ops.describe(op)} waits for {ops.describe(needed)}{behind}")
        op = head
    return "deadlock: " + "; ".join(steps[seen[op] :])
