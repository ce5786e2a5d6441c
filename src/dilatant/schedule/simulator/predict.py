"""Prediction of a step from costs: seconds of actions, bytes of messages, memory, and gradient sync.

The planner uses it, and training for the step that it runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.cost.dense import DenseRows
from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stage_costs import StageCosts
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.workload import Workload
from dilatant.plan.plan import Plan
from dilatant.schedule.packed import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Pieces, PlanArrays
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.simulator.contention import travel
from dilatant.schedule.simulator.graph import Ops, ScheduleGraph, build
from dilatant.schedule.simulator.simulate import StepBytes, least_peak_bytes, op_ends, run
from dilatant.schedule.timeline import Timeline

Tokens = Mapping[str, ArrayLike]


def predict(
    plan: Plan,
    assignment: Assignment,
    schedule: Schedule,
    costs: StageCosts,
    tokens: Tokens,
    cluster: Cluster | None = None,
    *,
    squares: Tokens | None = None,
    dense: Mapping[str, DenseRows] | None = None,
) -> Timeline:
    """Predict the timeline and peak memory of a step in which sample s brings `tokens[unit][s]` tokens to each unit.

    `squares[unit][s]` replaces tokens² in the quadratic term, for samples of several images that do not attend to each
    other; `dense` is for packed rows whose samples do (`Workload.dense`). With `cluster`, messages take the time of its
    links and queue where they share ports. Raises ScheduleError for a schedule that cannot run.
    """
    own, other = (
        {unit: np.asarray(one, dtype=np.float64) for unit, one in (values or {}).items()}
        for values in (tokens, squares)
    )
    graph = build(plan, assignment, schedule)
    return time_step(graph, StepCosts(costs, cluster=cluster), Workload(own, other, dense or {})).timeline()


@dataclass(frozen=True, slots=True, eq=False)
class TimedStep:
    """A compiled schedule of one batch with the inputs of its simulation.

    `pieces` and `sums` are as in `piece_sums` and `op_sums`; `durations` [ops] seconds; `message` [messages] bytes;
    `lag` [messages] travel seconds, None without links. `seconds` lasts until the last action, `seconds_synced` until
    every rank has its summed gradients and all updated weights.
    """

    graph: ScheduleGraph
    costs: StepCosts
    pieces: NDArray[np.float64]
    sums: NDArray[np.float64]
    durations: NDArray[np.float64]
    lag: NDArray[np.float64] | None
    message: NDArray[np.float64]
    seconds: float
    seconds_synced: float

    def timeline(self) -> Timeline:
        """Return the whole simulated step, with idle time by cause and the memory sweep."""
        size = step_bytes(self.graph, self.costs.stages, self.sums, self.message)
        return run(self.graph, self.durations, lag=self.lag, size=size)


def time_step(graph: ScheduleGraph, costs: StepCosts, samples: Workload) -> TimedStep:
    """Time the step of `graph` on these samples."""
    pieces = piece_sums(graph, samples)
    sums = op_sums(graph, costs.stages, pieces, samples)
    message = message_bytes(graph, costs.stages, message_sums(graph, samples))
    durations = action_seconds(graph, costs.stages, sums)
    lag = None
    if costs.cluster is None:
        ends = op_ends(graph, durations)
    else:
        ends, lag = travel(graph, durations, message, costs.cluster)
    seconds = float(ends.max(initial=0.0))
    synced = max(seconds, synced_seconds(graph, costs, durations, ends))
    return TimedStep(graph, costs, pieces, sums, durations, lag, message, seconds, synced)


def least_peaks(ops: Ops, costs: StepCosts, samples: Workload) -> NDArray[np.float64]:
    """Return a lower bound of each rank's peak bytes that holds whenever the actions start: [ranks]."""
    sums = op_sums(ops, costs.stages, piece_sums(ops, samples), samples)
    size = step_bytes(ops, costs.stages, sums, np.empty(0))
    return least_peak_bytes(ops, size, action_seconds(ops, costs.stages, sums))


def piece_sums(graph: Ops, samples: Workload) -> NDArray[np.float64]:
    """Return, per piece, Σ tokens² (with several samples in a unit of `dense`: (Σ tokens)² times its fraction), Σ
    tokens, and 1 (0 for a piece without tokens): `[pieces, 3]`."""
    pieces = graph.packed.pieces
    piece, unit_of_piece = pieces.of_samples, graph.arrays.unit_of[pieces.chain]
    unit = unit_of_piece[piece]
    linear, square = _by_sample(graph, unit, pieces.samples, samples)
    sums = _sums(piece, linear, square, len(pieces.microbatch))
    several = np.bincount(piece, linear > 0, len(pieces.microbatch)) > 1
    for number, name in enumerate(graph.arrays.units):
        if name in samples.dense:
            rows = several & (unit_of_piece == number)
            sums[rows, 0] = samples.dense[name].at(sums[rows, 1]) * sums[rows, 1] ** 2
    return sums


def message_sums(graph: ScheduleGraph, samples: Workload) -> NDArray[np.float64]:
    """Return each message's sums, `[messages, 3]` as in `piece_sums` without `dense`, for the unit whose stage made its
    rows.

    A gradient has the rows of the forward message in the other direction.
    """
    pieces, arrays = graph.packed.pieces, graph.arrays
    source, target = graph.messages
    forward = graph.kind[source] == FORWARD
    made = np.where(forward, graph.piece[source], graph.piece[target])
    used = np.where(forward, graph.piece[target], graph.piece[source])
    whole = piece_sums(graph, replace(samples, dense={}))
    result = whole[made]
    chain = pieces.chain
    across = np.flatnonzero(chain[made] != chain[used])
    if len(across):
        counts = np.diff(pieces.offsets)[made[across]]
        message = np.repeat(np.arange(len(across)), counts)
        nth = np.arange(len(message)) - np.repeat(np.cumsum(counts) - counts, counts)
        sample = pieces.samples[pieces.offsets[made[across]][message] + nth]
        owner = pieces.owners(arrays)
        unit = arrays.unit_of[chain[made[across]]][message]
        shared = owner[arrays.unit_of[chain[used[across]]][message], sample] == used[across][message]
        linear, square = _by_sample(graph, unit[shared], sample[shared], samples)
        result[across] = _sums(message[shared], linear, square, len(across))
    return result


def op_sums(graph: Ops, costs: StageCosts, sums: NDArray[np.float64], samples: Workload) -> NDArray[np.float64]:
    """Return, per op, the factors of its costs, `[ops, 3]`: the `piece_sums` of its piece. If ranks share indivisible
    items, tokens and squares are scaled by the fullest rank's load over the mean."""
    found = sums[graph.piece]
    found[:, :2] *= unevenness(graph, costs.items_per_token, samples)[:, None]
    return found


def action_seconds(graph: Ops, costs: StageCosts, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of every op, `[ops]`: the device's, or the host's if it takes longer. `sums` is as in
    `op_sums`."""
    device = np.einsum("ij,ij->i", costs.seconds[graph.stage, graph.kind], sums)
    seconds = np.maximum(device, costs.host_seconds[graph.stage, graph.kind] * sums[:, 2])
    if costs.gather_seconds.any():
        first = ends_of(graph, FORWARD)[0]
        more, least = costs.gather_seconds[graph.stage[first]].T
        seconds[first] = np.maximum(seconds[first] + more, least)
    return seconds


def message_bytes(graph: ScheduleGraph, costs: StageCosts, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each message's bytes on a rank of the stage that makes its rows, `[messages]`; `sums` as
    `message_sums`."""
    source, target = graph.messages
    maker = np.where(graph.kind[source] == FORWARD, graph.stage[source], graph.stage[target])
    return np.einsum("ij,ij->i", costs.output_bytes[maker], sums)


def step_bytes(graph: Ops, costs: StageCosts, sums: NDArray[np.float64], message: NDArray[np.float64]) -> StepBytes:
    """Return the input of the memory sweep. `sums` and `message` are as returned by `op_sums` and `message_bytes`."""
    kept = np.einsum("ij,ij->i", costs.kept_bytes[graph.stage], sums)
    weight = np.einsum("ij,ij->i", costs.weight_bytes[graph.stage], sums)
    running = np.stack([costs.transient_bytes, costs.forward_bytes])[(graph.kind == FORWARD) * 1, graph.stage]
    transient = np.einsum("ij,ij->i", running, sums)
    first, last = ends_of(graph, BACKWARD, WEIGHT_GRADIENT)
    transient[graph.kind == WEIGHT_GRADIENT] = 0.0
    rows = [(costs.late_bytes[:, 0], first[graph.kind[first] == BACKWARD])]
    rows.append((costs.late_bytes[:, 1], np.flatnonzero(graph.kind == INPUT_GRADIENT)))
    if costs.shard_bytes.any():
        for row, kind in enumerate((BACKWARD, BACKWARD, WEIGHT_GRADIENT)):
            rows.append((costs.shard_bytes[:, row], np.flatnonzero(graph.kind == kind)))
    for late, ops in rows:
        transient[ops] = np.maximum(transient[ops], np.einsum("ij,ij->i", late[graph.stage[ops]], sums[ops]))
    transient[last] = np.maximum(transient[last], costs.sum_bytes[graph.stage[last]])
    has_backward = _has(graph, BACKWARD, INPUT_GRADIENT)
    split = _has(graph, WEIGHT_GRADIENT)
    weight = np.where(split, weight, 0.0)  # exceeds `kept` under recomputation
    allocate = np.where((graph.kind == FORWARD) & has_backward, kept, 0.0)
    release = np.select(
        [graph.kind == BACKWARD, graph.kind == INPUT_GRADIENT, graph.kind == WEIGHT_GRADIENT],
        [kept, kept - weight, weight],
        0.0,
    )
    release[first] -= costs.gradient_bytes[graph.stage[first]]  # gradients stay
    release[last] -= costs.own_gradient_bytes[graph.stage[last]]
    return StepBytes(costs.static_bytes - costs.gradient_bytes, allocate, release, transient, message)


def _by_sample(
    graph: Ops, unit: NDArray[np.int64], sample: NDArray[np.int64], samples: Workload
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return tokens and their squares for pairs of unit and sample."""
    linear, square = np.zeros(len(sample)), np.zeros(len(sample))
    for number, name in enumerate(graph.arrays.units):
        mine = unit == number
        squares, tokens = samples.of_samples(name)
        linear[mine], square[mine] = tokens[sample[mine]], squares[sample[mine]]
    return linear, square


def _sums(
    group: NDArray[np.int64], linear: NDArray[np.float64], square: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    total = np.bincount(group, linear, count)
    return np.stack([np.bincount(group, square, count), total, (total > 0).astype(np.float64)], axis=1)


def ends_of(graph: Ops, *kinds: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last op of these kinds of each stage that has any."""
    ops = np.flatnonzero(np.isin(graph.kind, kinds))  # all of a stage are on one rank, in its order
    first, last = np.full((2, len(graph.arrays.placed)), -1)
    first[graph.stage[ops[::-1]]] = ops[::-1]  # duplicates: the last write wins
    last[graph.stage[ops]] = ops
    return first[first >= 0], last[last >= 0]


def _has(graph: Ops, *kinds: int) -> NDArray[np.bool_]:
    """Return, per op, whether its stage runs any action of these kinds."""
    there = np.zeros(len(graph.arrays.placed), dtype=bool)
    there[graph.stage[np.isin(graph.kind, kinds)]] = True
    return there[graph.stage]


def synced_seconds(
    graph: ScheduleGraph, costs: StepCosts, durations: NDArray[np.float64], ends: NDArray[np.float64]
) -> float:
    """Return the seconds from the start of a step until every rank has its summed gradients and all updated weights; 0
    if nothing is summed. `durations`, `ends`: [ops].

    A rank sums gradients in the order in which they are complete: spread evenly over a stage's last backward, or all
    after it if it is split. The last bucket is sent when the backward is over. A rank's sync seconds are divided among
    its stages in proportion to their gradients.
    """
    last = ends_of(graph, BACKWARD, WEIGHT_GRADIENT)[1]
    if not len(last):
        return 0.0
    stage_of = graph.stage[last]
    end = ends[last]
    begin = np.where(graph.kind[last] == WEIGHT_GRADIENT, end, end - durations[last])
    held = np.maximum(costs.stages.gradient_bytes[stage_of], 1.0)
    ranks = [graph.arrays.placed[stage].stage.ranks for stage in stage_of.tolist()]
    pair = np.repeat(np.arange(len(last)), [*map(len, ranks)])  # one per (stage, rank)
    rank = np.array([*itertools.chain(*ranks)])
    beside, after = (
        np.asarray([seconds.get(one, 0.0) for one in rank.tolist()])
        for seconds in (costs.sync.beside, costs.sync.after)
    )
    order = np.lexsort((end[pair], rank))
    pair, rank, beside = pair[order], rank[order], beside[order]
    firsts = np.flatnonzero(np.diff(rank, prepend=rank[0] - 1))
    of_rank = np.add.reduceat(held[pair], firsts)
    sizes = np.diff(np.append(firsts, len(rank)))
    own = beside * held[pair] / np.repeat(of_rank, sizes)
    until = np.cumsum(own)
    behind = np.repeat(until[np.append(firsts[1:], len(rank)) - 1], sizes) - until  # of the rank's later stages
    buckets = np.ceil(held[pair] / BUCKET_BYTES)
    first = begin[pair] + (end - begin)[pair] / buckets
    sums = np.maximum(first + own, end[pair] + own / buckets) + behind
    return float(sums.max() + after.max())


def unevenness(graph: Ops, items_per_token: NDArray[np.float64], samples: Workload) -> NDArray[np.float64]:
    """Return, per op, the fullest rank's load over the mean load of its stage's ranks, [ops]. `items_per_token`
    [stages] is as in `UnitSpec`."""
    first, times = _unevenness(graph.arrays, graph.packed.pieces, tuple(items_per_token.tolist()), samples)
    return times[np.where(first[graph.stage] < 0, 0, first[graph.stage] + graph.piece)]


@lru_cache(maxsize=8)  # a few steps under several families
def _unevenness(
    arrays: PlanArrays, pieces: Pieces, items_per_token: tuple[float, ...], samples: Workload
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return `first` [stages] and `times`: those of piece p in stage s are `times[first[s] + p]`, or 1 if `first[s]` is
    negative."""
    firsts = np.full(len(arrays.placed), -1)
    known: dict[tuple[int, int], int] = {}
    found = [1.0] * (len(pieces.microbatch) + 1)
    for stage in np.flatnonzero(np.asarray(items_per_token) < 1.0).tolist():
        items, wide = arrays.placed[stage].stage.degrees.dealt(items_per_token[stage])
        if wide == 1:
            continue
        chain = int(arrays.chain[stage])
        first, end = pieces.first[chain : chain + 2].tolist()
        if (chain, wide) not in known:
            known[chain, wide] = len(found) - first
            own = samples.of_samples(arrays.units[arrays.unit_of[chain]])[1]
            parts = np.split(pieces.samples, pieces.offsets[first : end + 1])[1:-1]
            found += [fullest_share(own[part], items, wide) * wide for part in parts]
        firsts[stage] = known[chain, wide]
    return firsts, np.asarray(found)


def fullest_share(tokens: NDArray[np.float64], items_per_token: float, ranks: int) -> float:
    """Return the fraction of all tokens on the fullest of `ranks` ranks. There are `items_per_token` items per token,
    rounded, dealt evenly; with 0, whole samples are dealt largest first (as in `models.parallel.shared_samples`)."""
    total = float(tokens.sum())
    if not total:
        return 1.0 / ranks
    if items_per_token:
        items = max(1.0, np.round(total * items_per_token))
        return float(np.ceil(items / ranks) / items)
    loads = [0.0] * ranks
    for one in sorted(tokens.tolist(), reverse=True):
        heapq.heapreplace(loads, loads[0] + one)
    return max(loads) / total
