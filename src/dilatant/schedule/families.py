"""Schedule families on a graph of units: GPipe, 1F1B, eager and interleaved 1F1B.

All of them are one construction. Every action gets a *virtual time*; a rank runs its actions in that order. Units
that nothing consumes (the sinks) set the clock: microbatch i of a sink replica runs forward on its last stage at slot
i and backward half a slot later. Upstream, a forward takes the earliest virtual time of its consumers less a lead, a
backward the latest plus the same lead. So the virtual time grows along every edge between actions, hence no order of
this kind deadlocks, whatever the replicas, microbatch borders and parts are; and on a plain chain the leads of a
half and of a whole slot per stage give exactly 1F1B and eager 1F1B.

The *depth* of a stage is how many sink microbatches' worth of forwards it runs before the first backward: the
number of its in-flight microbatches. Depths may be chosen freely; one smaller than a later stage's on the same path
makes a schedule that deadlocks, which `validate` reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.depth import eager_depths, half_eager_depths, path_depths
from dilatant.plan.plan import Plan
from dilatant.schedule.layout import Layout, layout_of
from dilatant.schedule.packed import BACKWARD, FORWARD, PackedActions, Pieces
from dilatant.schedule.pairs import unit_pairs
from dilatant.schedule.parts import cut_pieces
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import Trainability, all_trainable


def depths_within(wanted: Sequence[int], limits: Sequence[int], plan: Plan) -> tuple[int, ...]:
    """The largest depths below `wanted` and `limits` that cannot deadlock: no stage deeper than one before it."""
    layout = layout_of(plan)
    depth = np.minimum(wanted, limits)
    for unit in range(len(layout.units)):
        chains = layout.chains_of(unit)
        for chain in chains:
            first, end = layout.stages_of[chain]
            depth[first:end] = np.minimum.accumulate(depth[first:end])
        smallest = min(int(depth[layout.stages_of[chain, 1] - 1]) for chain in chains)
        for source, target in layout.feeds:
            if source == unit:
                for chain in layout.chains_of(target):
                    first = layout.stages_of[chain, 0]
                    depth[first] = min(depth[first], smallest)
    return tuple(depth.tolist())


def one_f_one_b(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """1F1B: every stage has as many microbatches in flight as there are stages to the end of its path."""
    return pipelined(plan, assignment, path_depths(plan), trainability)


def eager(
    plan: Plan,
    assignment: Assignment,
    trainability: Trainability | None = None,
    depths: Sequence[int] | None = None,
) -> Schedule:
    """Eager 1F1B: twice as far ahead as 1F1B, which hides transfers and uneven microbatches (planning notes 0.3);
    or any `depths`, by stage number."""
    return pipelined(plan, assignment, eager_depths(plan) if depths is None else depths, trainability)


def half_eager(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Halfway between 1F1B and eager 1F1B, for memory that holds no more."""
    return pipelined(plan, assignment, half_eager_depths(plan), trainability)


def serial(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Each microbatch forward and backward before the next begins: one rank gains nothing by more in flight."""
    return pipelined(plan, assignment, (1,) * len(plan.stages()), trainability)


def gpipe(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """GPipe: every rank runs all its forwards, then all its backwards."""
    return pipelined(plan, assignment, path_depths(plan), trainability, forward_first=True)


def interleaved(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Interleaved 1F1B for replicas whose ranks hold several stages each (stage c * p + r on the r-th of p groups);
    eager 1F1B for the others. With equal stages its bubble is that of 1F1B over the number of stages per rank.

    Microbatches pass each of a rank's stages in rounds of p, as Megatron-Core orders them; the last round may be
    short. Raises ValueError when a replica's ranks do not repeat with one period.
    """
    return pipelined(plan, assignment, eager_depths(plan), trainability, interleave=True)


def pipelined(
    plan: Plan,
    assignment: Assignment,
    depths: Sequence[int],
    trainability: Trainability | None = None,
    *,
    forward_first: bool = False,
    interleave: bool = False,
) -> Schedule:
    """The schedule of these depths by stage number; with `forward_first`, backwards only after all forwards; with
    `interleave`, replicas that come round to their first rank again pass microbatches in rounds.

    Raises ValueError when `depths` does not name every stage, or one is less than 1.
    """
    layout = layout_of(plan)
    if len(depths) != len(layout.placed) or min(depths, default=1) < 1:
        raise ValueError(f"depths needs {len(layout.placed)} numbers of at least 1, got {list(depths)}")
    trainability = trainability or all_trainable(plan)
    pieces = cut_pieces(layout, assignment, trainability)
    times = _virtual_times(layout, pieces, np.asarray(depths, dtype=np.float64), forward_first, interleave)
    return order_by_time(layout, pieces, times, trainability)


Times = list[tuple[NDArray[np.float64], NDArray[np.float64]]]


def _virtual_times(
    layout: Layout, pieces: Pieces, depths: NDArray[np.float64], forward_first: bool, interleave: bool
) -> Times:
    """For every chain, virtual forward and backward times `[stages, pieces]`. One slot of the longest sink is 2."""
    pairs_from, pairs_to = unit_pairs(layout, pieces)
    chain_of_piece = np.repeat(np.arange(layout.num_chains), np.diff(pieces.first))
    counts = np.diff(pieces.first)
    fed = {source for source, _ in layout.feeds}
    sinks = [unit for unit in range(len(layout.units)) if unit not in fed]
    longest = max((int(counts[chain]) for unit in sinks for chain in layout.chains_of(unit)), default=0)
    nudge = 0.25 / (len(layout.placed) + 1)
    half = np.ones(layout.num_chains)
    forward = np.zeros(len(chain_of_piece))
    backward = np.zeros(len(chain_of_piece))
    for unit in sinks:
        for chain in layout.chains_of(unit):
            rows = slice(int(pieces.first[chain]), int(pieces.first[chain + 1]))
            half[chain] = longest / max(int(counts[chain]), 1)
            forward[rows] = 2 * half[chain] * np.arange(counts[chain])
            backward[rows] = forward[rows] + half[chain] + (2 * longest if forward_first else 0)
    times: Times = [(np.empty(0), np.empty(0))] * layout.num_chains
    for unit in reversed(range(len(layout.units))):
        for chain in layout.chains_of(unit):
            first, end = (int(bound) for bound in layout.stages_of[chain])
            rows = slice(int(pieces.first[chain]), int(pieces.first[chain + 1]))
            if unit in fed:
                _from_consumers(
                    layout, chain, rows, pairs_from, pairs_to, chain_of_piece, depths, half, nudge, times,
                    pieces, forward, backward,
                )  # fmt: skip
            groups = _period(layout, first, end) if interleave else end - first
            if groups < end - first:
                times[chain] = _in_rounds(
                    groups, end - first, half[chain], forward[rows], backward[rows], unit in fed
                )
                continue
            lead = (depths[first:end] - depths[end - 1]) * half[chain] + nudge * np.arange(
                end - first - 1, -1, -1
            )
            times[chain] = (
                forward[None, rows] - lead[:, None],
                backward[None, rows] + lead[:, None],
            )
    return times


def _period(layout: Layout, first: int, end: int) -> int:
    """After how many stages a replica comes round to its first ranks again; its length where it never does."""
    ranks = [layout.placed[stage].stage.ranks for stage in range(first, end)]
    groups = len(set(ranks))
    if any(ranks[stage] != ranks[stage % groups] for stage in range(len(ranks))) or len(ranks) % groups:
        entry = layout.placed[first]
        raise ValueError(
            f"{entry.unit} replica {entry.replica} cannot be interleaved: its {len(ranks)} stages do not go round "
            f"its {groups} rank groups in one order"
        )
    return groups


def _in_rounds(
    groups: int,
    num_stages: int,
    half: float,
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    fed: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interleaved virtual times `[stages, pieces]`; `forward` and `backward` are those that consumers allow.

    The clock ticks once per stage of a rank, so `half` is shared by the `num_stages / groups` of them. Rounds are
    counted as if they were full: a short last one then leaves gaps in the clock, not cycles in the order.
    """
    per_rank = num_stages // groups
    tick = 2 * half / per_rank
    piece = np.arange(len(forward))
    chunk, rank = np.divmod(np.arange(num_stages), groups)
    turn = (piece // groups) * groups * per_rank + piece % groups
    ahead = tick * (turn[None, :] + (groups * chunk + rank)[:, None])
    behind = tick * (turn[None, :] + (groups * (per_rank - 1 - chunk) + groups - 1 - rank)[:, None])
    behind += ahead[-1, 0] + tick / 2 if len(piece) else 0.0
    if fed and len(piece):
        ahead += (forward - ahead[-1]).min()
        behind += (backward - behind[-1]).max()
    return ahead, behind


def _from_consumers(
    layout: Layout,
    chain: int,
    rows: slice,
    pairs_from: NDArray[np.int32],
    pairs_to: NDArray[np.int32],
    chain_of_piece: NDArray[np.int64],
    depths: NDArray[np.float64],
    half: NDArray[np.float64],
    nudge: float,
    times: Times,
    pieces: Pieces,
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
) -> None:
    """Set the times of a chain's last stage from its consumers' first stages, in place."""
    mine = (pairs_from >= rows.start) & (pairs_from < rows.stop)
    made, used = pairs_from[mine], pairs_to[mine]
    consumer = chain_of_piece[used]
    last = int(layout.stages_of[chain, 1]) - 1
    lead = (depths[last] - depths[layout.stages_of[consumer, 0]]) * half[consumer] + nudge
    ahead, behind = np.empty(len(used)), np.empty(len(used))
    for other in np.unique(consumer).tolist():
        chosen = consumer == other
        local = used[chosen] - pieces.first[other]
        ahead[chosen], behind[chosen] = times[other][0][0, local], times[other][1][0, local]
    forward[rows], backward[rows] = np.inf, -np.inf
    np.minimum.at(forward, made, ahead - lead)
    np.maximum.at(backward, made, behind + lead)
    half[chain] = half[consumer].max() if len(consumer) else 1.0
    unused = np.isinf(forward[rows])
    if unused.any():
        forward[rows][unused] = backward[rows][unused] = 0.0
    forward[rows] = np.minimum.accumulate(forward[rows][::-1])[::-1]


def order_by_time(layout: Layout, pieces: Pieces, times: Times, trainability: Trainability) -> Schedule:
    """The schedule in which every rank runs the actions of its stages by virtual time."""
    on_rank: dict[int, list[int]] = {rank: [] for rank in layout.ranks}
    for placed in layout.placed:
        for rank in placed.stage.ranks:
            on_rank[rank].append(placed.index)
    made: dict[tuple[int, ...], tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.int32]]] = {}
    kinds, stages, numbers, offsets = [], [], [], [0]
    for rank in layout.ranks:
        key = tuple(on_rank[rank])
        if key not in made:
            made[key] = _order_of_stages(layout, pieces, times, trainability, key)
        kind, stage, piece = made[key]
        kinds.append(kind)
        stages.append(stage)
        numbers.append(piece)
        offsets.append(offsets[-1] + len(kind))
    packed = PackedActions(
        layout.ranks,
        np.asarray(offsets, dtype=np.int64),
        np.concatenate(kinds),
        np.concatenate(stages),
        np.concatenate(numbers),
        pieces,
    )
    return Schedule(packed)


def _order_of_stages(
    layout: Layout, pieces: Pieces, times: Times, trainability: Trainability, stages: tuple[int, ...]
) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.int32]]:
    when, kind, stage, piece = [], [], [], []
    for number in stages:
        chain = int(layout.chain[number])
        local = number - int(layout.stages_of[chain, 0])
        own = np.arange(pieces.first[chain], pieces.first[chain + 1], dtype=np.int32)
        for code in (FORWARD, BACKWARD) if trainability.backward[number] else (FORWARD,):
            when.append(times[chain][code][local])
            kind.append(np.full(len(own), code, dtype=np.int8))
            stage.append(np.full(len(own), number, dtype=np.int32))
            piece.append(own)
    order = np.argsort(np.concatenate(when), kind="stable")
    return np.concatenate(kind)[order], np.concatenate(stage)[order], np.concatenate(piece)[order]
