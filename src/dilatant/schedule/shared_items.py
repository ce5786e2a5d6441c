"""Context-parallel load imbalance: the fullest rank's load of a microbatch if ranks share indivisible items."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.packed import Pieces
from dilatant.schedule.simulator.graph import ScheduleGraph


def unevenness(
    graph: ScheduleGraph, items_per_token: NDArray[np.float64], tokens: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64] | None:
    """Return, per op, the fullest rank's load over the mean load of its stage's ranks, [ops]; None if it is 1
    everywhere. `items_per_token` [stages] is as in `UnitSpec`; `tokens` holds one array [samples] per unit."""
    arrays, pieces = graph.arrays, graph.packed.pieces
    cp = np.asarray([placed.stage.cp for placed in arrays.placed])
    uneven = np.flatnonzero((cp > 1) & (items_per_token < 1.0))
    if not len(uneven):
        return None
    times = np.ones(graph.num_ops)
    known: dict[tuple[int, int], NDArray[np.float64]] = {}
    for stage in uneven.tolist():
        chain = int(arrays.chain[stage])
        if (chain, int(cp[stage])) not in known:
            own = tokens[arrays.unit_of[chain]]
            known[chain, int(cp[stage])] = _of_chain(
                pieces, chain, own, float(items_per_token[stage]), int(cp[stage])
            )
        ops = np.flatnonzero(graph.stage == stage)
        times[ops] = known[chain, int(cp[stage])][graph.piece[ops] - pieces.first[chain]]
    return times


def _of_chain(
    pieces: Pieces, chain: int, tokens: NDArray[np.float64], items_per_token: float, cp: int
) -> NDArray[np.float64]:
    """Return the fullest rank's load over the mean load for every piece of a chain."""
    found = []
    for piece in range(int(pieces.first[chain]), int(pieces.first[chain + 1])):
        samples = pieces.samples[pieces.offsets[piece] : pieces.offsets[piece + 1]]
        found.append(fullest_share(tokens[samples], items_per_token, cp) * cp)
    return np.asarray(found)


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
