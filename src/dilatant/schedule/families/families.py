"""Schedule families on a graph of units: GPipe, 1F1B, eager and interleaved 1F1B, and zero-bubble.

All families are one construction. Every action gets a *virtual time*; a rank runs its actions in that order. Units that
nothing consumes (the sinks) set the clock: microbatch i of a sink replica runs forward on its last stage at slot i and
backward half a slot later. Upstream, a forward takes the earliest virtual time of its consumers minus a lead, a
backward the latest plus the same lead. So the virtual time grows along every edge between actions, and no such order
deadlocks, whatever the replicas, microbatch borders and parts are; and on a plain chain, leads of half a slot and of a
whole slot per stage give exactly 1F1B and eager 1F1B.

The *depth* of a stage is how many sink microbatches' worth of forwards it runs before the first backward: the number of
its in-flight microbatches. Depths may be chosen freely; one smaller than a later stage's on the same path makes a
schedule that deadlocks, which `validate` reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import Plan
from dilatant.schedule.packed import (
    BACKWARD,
    FORWARD,
    PackedActions,
    Pieces,
    PlanArrays,
    cut_pieces,
    pack,
    plan_arrays,
    unit_pairs,
)
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import Trainability, all_trainable


@lru_cache(maxsize=4)  # many schedules share one plan
def path_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number the number of stages from it to the end of its path, itself included (S - s on a chain).

    For a stage on several paths the longest is used. The result is 1F1B's number of in-flight microbatches (Cornstarch
    v3 4.4: each encoder forms a separate pipeline with the language model).
    """
    behind: dict[str, int] = {}
    for unit in reversed(plan.units):
        after = max((behind[name] for name in unit.feeds), default=0)
        behind[unit.name] = after + max(len(replica.stages) for replica in unit.replicas)
    depths = []
    for placed in plan.stages():
        unit = plan.unit(placed.unit)
        after = max((behind[name] for name in unit.feeds), default=0)
        depths.append(after + len(unit.replicas[placed.replica].stages) - placed.position)
    return tuple(depths)


def eager_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number 2(S - s) - 1 along the stage's own path: the default depth of eager 1F1B."""
    return tuple(2 * depth - 1 for depth in path_depths(plan))


def half_eager_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number the mean of the depths of 1F1B and of eager 1F1B, rounded down."""
    return tuple((least + most) // 2 for least, most in zip(path_depths(plan), eager_depths(plan)))


Depths = Sequence[int] | Callable[[Plan], Sequence[int]]
"""In-flight microbatches by stage number, or their function of the plan."""
ScheduleFamily = Callable[[Plan, Assignment, Trainability], Schedule]


def pipelined(
    plan: Plan,
    assignment: Assignment,
    trainability: Trainability | None = None,
    *,
    depths: Depths,
    forward_first: bool = False,
    interleave: bool = False,
) -> Schedule:
    """Build the schedule of these depths. With `forward_first`, backwards run only after all forwards; with
    `interleave`, replicas whose ranks hold several stages process microbatches in rounds.

    Raises ValueError if `depths` does not name every stage, or one is less than 1.
    """
    arrays, deep = plan_arrays(plan), depths(plan) if callable(depths) else depths
    if len(deep) != len(arrays.placed) or min(deep, default=1) < 1:
        raise ValueError(f"depths needs {len(arrays.placed)} numbers of at least 1, got {list(deep)}")
    trainability = trainability or all_trainable(plan)
    pieces = cut_pieces(arrays, assignment, trainability)
    rows = _Rows.of(arrays, pieces)
    times = _virtual_times(arrays, pieces, rows, np.asarray(deep, dtype=np.float64), forward_first, interleave)
    return _order_by_time(arrays, pieces, rows, times, trainability)


one_f_one_b = partial(pipelined, depths=path_depths)
"""1F1B: every stage has as many microbatches in flight as there are stages to the end of its path."""
eager = partial(pipelined, depths=eager_depths)
"""Eager 1F1B, or any `depths`. Twice 1F1B's depth hides transfers and uneven microbatches."""
half_eager = partial(pipelined, depths=half_eager_depths)
"""Halfway between 1F1B and eager 1F1B, for memory too small for eager."""
serial = partial(pipelined, depths=lambda plan: (1,) * len(plan.stages()))
"""Each microbatch forward and backward before the next begins: a single rank gains nothing by pipelining."""
gpipe = partial(pipelined, depths=path_depths, forward_first=True)
"""GPipe: every rank runs all its forwards, then all its backwards."""
interleaved = partial(pipelined, depths=eager_depths, interleave=True)
"""Interleaved 1F1B for replicas whose ranks hold several stages each (stage c * p + r on the r-th of p groups); eager
1F1B for the others. With equal stages its bubble is that of 1F1B over the number of stages per rank. Microbatches pass
each of a rank's stages in rounds of p, in Megatron-Core's order; the last round may be short. Raises ValueError if a
replica's ranks do not repeat with one period."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A row for every piece in every stage, by stage: those of a stage begin at `first[stage]`."""

    first: NDArray[np.int64]
    stage: NDArray[np.int64]
    piece: NDArray[np.int64]

    @classmethod
    def of(cls, arrays: PlanArrays, pieces: Pieces) -> _Rows:
        counts = np.diff(pieces.first)[arrays.chain]
        first = np.append(0, np.cumsum(counts))
        stage = np.repeat(np.arange(len(counts)), counts)
        piece = np.arange(first[-1]) - (first[:-1] - pieces.first[arrays.chain])[stage]
        return cls(first, stage, piece)


def _virtual_times(
    arrays: PlanArrays, pieces: Pieces, rows: _Rows, depths: NDArray[np.float64], forward_first: bool, interleave: bool
) -> NDArray[np.float64]:
    """Return the virtual forward and backward times: `[2, rows]`. A slot of the longest sink is 2."""
    fed = {source for source, _ in arrays.feeds}
    sinks = [unit for unit in range(len(arrays.units)) if unit not in fed]
    slots = _slots(pieces)
    longest = max((int(slots[chain]) for unit in sinks for chain in arrays.chains_of(unit)), default=0)
    nudge = 0.25 / (len(arrays.placed) + 1)
    clock = _Clock.of(arrays, pieces, depths, nudge)
    half, times, (begins, ends) = clock.half, np.empty((2, len(rows.stage))), arrays.stages_of.T
    for unit in reversed(range(len(arrays.units))):
        chains = arrays.chains_of(unit)
        own = clock.pieces_of(chains)
        chain = clock.chain[own]
        if unit in fed:
            forward, backward = clock.before_consumers(chains)
        else:
            half[chains] = longest / np.maximum(slots[chains], 1)
            forward = 2 * half[chain] * pieces.microbatch[own]
            backward = forward + half[chain] + (2 * longest if forward_first else 0)
        here = slice(rows.first[begins[chains[0]]], rows.first[ends[chains[-1]]])
        stage, piece = rows.stage[here], rows.piece[here] - own.start
        last = ends[chain[piece]] - 1
        lead = (depths[stage] - depths[last]) * half[chain[piece]] + nudge * (last - stage)
        times[:, here] = forward[piece] - lead, backward[piece] + lead
        for number in chains if interleave else ():
            first, end = arrays.stages_of[number].tolist()
            if (groups := _period(arrays, first, end)) < end - first:
                alone = chain == number
                rounds = _in_rounds(groups, end - first, half[number], forward[alone], backward[alone], unit in fed)
                times[:, rows.first[first] : rows.first[end]] = np.reshape(rounds, (2, -1))
        firsts = rows.first[begins[chain]] + np.arange(own.start, own.stop) - pieces.first[chain]
        clock.first_stage[:, own] = times[:, firsts]
    return times


def _slots(pieces: Pieces) -> NDArray[np.int64]:
    """Return each chain's last microbatch with a piece, plus one: earlier empty microbatches keep their clock slots."""
    chain = pieces.chain
    slots = np.zeros(len(pieces.first) - 1, dtype=np.int64)
    np.maximum.at(slots, chain, pieces.microbatch + 1)
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class _Clock:
    """Consumers' virtual times, from which producers' are derived. `made` and `used` are the pieces that share samples
    on an edge between units, sorted by `made`; `lead` is how many half slots the producer's last stage runs before the
    consumer's first: `[pairs]` each. A chain's pairs begin at `at[chain]`, its pieces at `first[chain]`.

    `half` is half a slot, by chain. `first_stage` holds forward and backward times of pieces in their chain's first
    stage. Both are filled for a unit once its consumers are done.
    """

    first: NDArray[np.int64]
    chain: NDArray[np.int64]
    made: NDArray[np.int32]
    used: NDArray[np.int32]
    lead: NDArray[np.float64]
    at: NDArray[np.int64]
    nudge: float
    half: NDArray[np.float64]
    first_stage: NDArray[np.float64]

    @classmethod
    def of(cls, arrays: PlanArrays, pieces: Pieces, depths: NDArray[np.float64], nudge: float) -> _Clock:
        made, used = unit_pairs(arrays, pieces)
        order = np.argsort(made, kind="stable")
        made, used = made[order], used[order]
        chain = pieces.chain
        begins, ends = arrays.stages_of.T
        lead = depths[ends[chain[made]] - 1] - depths[begins[chain[used]]]
        at = np.searchsorted(made, pieces.first)
        return cls(
            pieces.first, chain, made, used, lead, at, nudge, np.ones(arrays.num_chains), np.empty((2, len(chain)))
        )  # fmt: skip

    def pieces_of(self, chains: Sequence[int]) -> slice:
        """Return the pieces of all replicas of a unit."""
        return slice(self.first[chains[0]], self.first[chains[-1] + 1])

    def before_consumers(self, chains: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (forward, backward) `[pieces]` times of the last stage of a unit's `chains` from their consumers'
        first stages. Sets `half` of these chains."""
        own, pairs = self.pieces_of(chains), slice(self.at[chains[0]], self.at[chains[-1] + 1])
        made, used = self.made[pairs], self.used[pairs]
        half = self.half[self.chain[used]]
        leads = self.lead[pairs] * half + self.nudge
        forward, backward = np.full((2, own.stop - own.start), [[np.inf], [-np.inf]])
        np.minimum.at(forward, made - own.start, self.first_stage[0, used] - leads)
        np.maximum.at(backward, made - own.start, self.first_stage[1, used] + leads)
        self.half[chains] = 0.0
        np.maximum.at(self.half, self.chain[made], half)
        for chain in chains:
            here = slice(self.first[chain] - own.start, self.first[chain + 1] - own.start)
            self.half[chain] = self.half[chain] or 1.0  # no consumer
            if np.isinf(forward[here]).any():
                forward[here], backward[here] = _between_used(forward[here], backward[here], self.half[chain])
            forward[here] = np.minimum.accumulate(forward[here][::-1])[::-1]
        return forward, backward


def _between_used(
    forward: NDArray[np.float64], backward: NDArray[np.float64], half: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fill in times of pieces that nothing consumes (texts without an image before a generator): interpolated between
    their neighbours, and one slot each before the first and after the last."""
    piece = np.arange(len(forward), dtype=np.float64)
    used = np.flatnonzero(np.isfinite(forward))
    if not len(used):
        slots: NDArray[np.float64] = 2.0 * half * piece
        return slots, slots + half
    beyond = 2 * half * (np.minimum(piece - used[0], 0) + np.maximum(piece - used[-1], 0))

    def everywhere(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.interp(piece, used, times[used]) + beyond, dtype=np.float64)

    return everywhere(forward), everywhere(backward)


def _period(arrays: PlanArrays, first: int, end: int) -> int:
    """Return the number of stages after which a replica's ranks repeat; the replica's length if they never do."""
    ranks = [arrays.placed[stage].stage.ranks for stage in range(first, end)]
    groups = len(set(ranks))
    if any(ranks[stage] != ranks[stage % groups] for stage in range(len(ranks))) or len(ranks) % groups:
        entry = arrays.placed[first]
        raise ValueError(
            f"{entry.unit} replica {entry.replica} cannot be interleaved: its {len(ranks)} stages do not go round "
            f"its {groups} rank groups in one order"
        )
    return groups


def _in_rounds(
    groups: int, num_stages: int, half: float, forward: NDArray[np.float64], backward: NDArray[np.float64], fed: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return interleaved virtual times `[stages, pieces]`; `forward` and `backward` are the times that consumers allow.
    Rounds are counted as if full: a short last round leaves gaps in the clock, not cycles in the order."""
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


def _order_by_time(
    arrays: PlanArrays, pieces: Pieces, rows: _Rows, times: NDArray[np.float64], trainability: Trainability
) -> Schedule:
    """Build the schedule in which every rank runs the actions of its stages by virtual time."""
    from dilatant.schedule.rank_kernels import order_within

    group_of, group, stage, code = _runs(arrays, trainability)
    counts = np.diff(rows.first)[stage]
    code = np.repeat(code, counts)
    row = np.arange(len(code)) + np.repeat(rows.first[stage] - (np.cumsum(counts) - counts), counts)
    sizes = np.bincount(group, counts).astype(np.int64)
    firsts, offsets = np.cumsum(np.append(0, sizes)), np.cumsum(np.append(0, sizes[group_of]))
    order = order_within(firsts, times[code, row])
    order = order[np.arange(offsets[-1]) + np.repeat(firsts[group_of] - offsets[:-1], sizes[group_of])]
    actions = PackedActions(
        arrays.ranks,
        offsets,
        code[order].astype(np.int8),
        rows.stage[row[order]].astype(np.int32),
        rows.piece[row[order]].astype(np.int32),
        pieces,
    )
    return Schedule(actions)


@lru_cache(maxsize=1)  # many schedules share one plan
def _runs(
    arrays: PlanArrays, trainability: Trainability
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the group of each rank, and (group, stage, kind) of all runs of actions: ranks with the same stages form a
    group, which runs the same actions."""
    on_rank: dict[int, list[int]] = {rank: [] for rank in arrays.ranks}
    for placed in arrays.placed:
        for rank in placed.stage.ranks:
            on_rank[rank].append(placed.index)
    groups: dict[tuple[int, ...], int] = {}
    group_of = [groups.setdefault(tuple(own), len(groups)) for own in on_rank.values()]
    runs = [
        (group, stage, code)
        for stages, group in groups.items()
        for stage in stages
        for code in ((FORWARD, BACKWARD) if trainability.backward[stage] else (FORWARD,))
    ]
    group, stage, code = np.array(runs, dtype=np.int64).T
    return np.array(group_of, dtype=np.int64), group, stage, code


def zero_bubble_h1(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Build ZB-H1: 1F1B with delayed weight gradients, where no stage holds more than 1F1B's first stage does."""
    limit = max(path_depths(plan), default=1)
    schedule = one_f_one_b(plan, assignment, trainability)
    return split_backward(plan, assignment, schedule, trainability, [limit] * len(plan.stages()))


def zero_bubble_h2(plan: Plan, assignment: Assignment, trainability: Trainability | None = None) -> Schedule:
    """Build ZB-H2: eager 1F1B with delayed weight gradients; twice 1F1B's memory, no bubble between equal stages."""
    limit = 2 * max(path_depths(plan), default=1) - 1
    schedule = eager(plan, assignment, trainability)
    return split_backward(plan, assignment, schedule, trainability, [limit] * len(plan.stages()))


def split_backward(
    plan: Plan, assignment: Assignment, schedule: Schedule, trainability: Trainability | None, limits: Sequence[int]
) -> Schedule:
    """Split every backward of `schedule` that has weight gradients into halves.

    A rank runs pending weight gradients, oldest first: before a forward that would leave more than `limits[stage]`
    pieces without their weight or input gradient; one after each input gradient once the rank has no more forwards; and
    the rest at the end. Backwards without weight gradients stay whole.
    """
    from dilatant.schedule.rank_kernels import split_rows

    trainability = trainability or all_trainable(plan)
    packed = pack(plan_arrays(plan), assignment, schedule)
    offsets, kind, stage, piece = split_rows(
        packed.offsets,
        packed.kind,
        packed.stage,
        packed.piece,
        np.asarray(trainability.weight_gradient),
        np.asarray(limits, dtype=np.int64),
    )
    return Schedule(PackedActions(packed.ranks, offsets, kind, stage, piece, packed.pieces))
