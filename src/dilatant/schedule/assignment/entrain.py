"""Entrain's hierarchical microbatch assignment (the thesis, 4.5, Alg. 4): encoder balance, then pairwise deferral.

Samples are first spread over encoder microbatches by encoder seconds. Then each microbatch with much language work is
paired with a light one that runs right after it, and defers to it the samples that make the two most equal.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dilatant.schedule.assignment.pipeline_shape import ByUnit, MicrobatchProblem, PipelineShape, shape_seconds
from dilatant.schedule.schedule import Microbatch

RESOLUTION = 1024
"""Subset sums are rounded to this many parts of an overloaded microbatch."""


def entrain(problem: MicrobatchProblem) -> ByUnit:
    """Return Entrain's microbatches at the wanted number and at K_eff, whichever simulates faster. Samples are deferred
    in the unit that the others feed; later units use its microbatches."""
    shape, count = problem.shape, problem.num_microbatches
    feeding = _encoders(shape)
    encoder, language = problem.seconds[:, feeding].sum(axis=1), problem.seconds[:, shape.anchor]
    found = []
    for wanted in sorted({count, effective_microbatches(encoder, count)}, reverse=True):
        sides = entrain_microbatches(encoder, language, wanted)
        padded = [tuple([*filter(None, side), *[()] * count][:count]) for side in sides]
        found.append(tuple(padded[unit not in feeding] for unit in range(shape.num_units)))
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda by_unit: shape_seconds(shape, problem.seconds, by_unit))


def _encoders(shape: PipelineShape) -> list[int]:
    """Return the units that feed the anchor, directly or not."""
    found: set[int] = set()
    for unit in reversed(range(shape.num_units)):
        if any(target == shape.anchor or target in found for target in shape.feeds[unit]):
            found.add(unit)
    return sorted(found)


def effective_microbatches(encoder: NDArray[np.float64], num_microbatches: int) -> int:
    """Return K_eff (line 3): the most microbatches, within 1 to K, each at least as long as the longest sample."""
    longest = float(encoder.max(initial=0.0))
    if longest <= 0:
        return num_microbatches
    return max(1, min(num_microbatches, int(encoder.sum() / longest)))


def entrain_microbatches(
    encoder: NDArray[np.float64], language: NDArray[np.float64], num_microbatches: int
) -> tuple[tuple[Microbatch, ...], tuple[Microbatch, ...]]:
    """Return encoder and language microbatches in execution order; `encoder`, `language`: `[samples]` seconds.

    A language microbatch holds the samples of the encoder microbatch in the same place, without those deferred to the
    next place, plus those deferred from the previous place. The seconds of several encoders are added up.
    """
    members = _stratified(encoder, language, num_microbatches)
    load = np.asarray([language[batch].sum() for batch in members])
    by_load = [int(number) for number in np.argsort(-load, kind="stable")]
    half = num_microbatches // 2
    heavy, light = by_load[:half], by_load[num_microbatches - half :]
    alone = by_load[half : num_microbatches - half]
    tables = [_SubsetSums.of(members[i], language, (load[i] - load[light]) / 2) for i in heavy]
    partner = _match(load, heavy, light, alone, tables)

    encoder_batches: list[Microbatch] = []
    language_batches: list[Microbatch] = []
    for row, i in enumerate(heavy):
        column, handed_over = partner[row]
        moved = tables[row].subset(column) if handed_over else set()
        j = light[column]
        encoder_batches += [tuple(members[i]), tuple(members[j])]
        language_batches.append(tuple(sample for sample in members[i] if sample not in moved))
        language_batches.append(tuple(members[j]) + tuple(sample for sample in members[i] if sample in moved))
    for number in alone:
        encoder_batches.append(tuple(members[number]))
        language_batches.append(tuple(members[number]))
    return tuple(encoder_batches), tuple(language_batches)


def _stratified(encoder: NDArray[np.float64], language: NDArray[np.float64], count: int) -> list[list[int]]:
    """Spread samples over encoder microbatches (lines 4-6). The samples with most language work come first, then the
    others; each set goes by descending encoder seconds to the microbatch with the least encoder load.

    The thesis gives no threshold between the two sets. Here the `count` samples with the most language work are the
    coarse set if at least `count` fine ones remain; else there is one set.
    """
    by_language = np.argsort(-language, kind="stable")
    coarse = by_language[:count] if len(encoder) >= 2 * count else by_language[:0]
    fine = by_language[len(coarse) :]
    heap = [(0.0, number) for number in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for group in (coarse, fine):
        for sample in sorted(group.tolist(), key=lambda sample: (-encoder[sample], sample)):
            load, number = heapq.heappop(heap)
            members[number].append(sample)
            heapq.heappush(heap, (load + float(encoder[sample]), number))
    return members


@dataclass(frozen=True, slots=True, eq=False)
class _SubsetSums:
    """All subset sums of one overloaded microbatch's samples, and the sum nearest to each partner's target.

    The table depends on the microbatch alone and serves all partners. Sums are rounded to `RESOLUTION` parts;
    `moved [partners]` are the exact seconds of the chosen samples.
    """

    batch: list[int]
    units: NDArray[np.int64]
    last: NDArray[np.int32]
    nearest: NDArray[np.int64]
    moved: NDArray[np.float64]

    @classmethod
    def of(cls, batch: list[int], language: NDArray[np.float64], targets: NDArray[np.float64]) -> _SubsetSums:
        seconds = language[batch]
        step = float(seconds.sum()) / RESOLUTION if batch else 0.0
        units = np.rint(seconds / step).astype(np.int64) if step > 0 else np.zeros(len(batch), dtype=np.int64)
        last = reachable_sums(units, int(units.sum()))
        scaled = targets / step if step > 0 else np.zeros(len(targets))
        nearest, moved = closest_sums(last, units, seconds, scaled)
        return cls(batch, units, last, nearest, moved)

    def subset(self, partner: int) -> set[int]:
        """Return the samples to defer to this partner."""
        chosen = set()
        total = int(self.nearest[partner])
        while total > 0:
            chosen.add(self.batch[self.last[total]])
            total -= int(self.units[self.last[total]])
        return chosen


def _match(
    load: NDArray[np.float64], heavy: list[int], light: list[int], alone: list[int], tables: list[_SubsetSums]
) -> list[tuple[int, bool]]:
    """Return, for every heavy microbatch, its light partner and whether samples are deferred to it (line 13).

    The smallest possible longest language microbatch (eq. 4.3) is found by bisection over its possible values, with a
    matching of the microbatches that must defer something. Among all pairings that reach it, the one with the least sum
    of squared loads is taken, so that pairs off the critical path are balanced too.
    """
    if not heavy:
        return []
    moved = np.stack([table.moved for table in tables])
    own, other = load[heavy], load[light]
    after = np.maximum(own[:, None] - moved, other[None, :] + moved)
    floor = max(float(other.max()), max((float(load[number]) for number in alone), default=0.0))
    values = np.unique(np.concatenate([after.ravel(), own, [floor]]))
    values = values[values >= floor]
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if pairs_within(after, own, values[middle]):
            high = middle
        else:
            low = middle + 1
    limit = values[low]
    keep = np.where((own <= limit)[:, None], own[:, None] ** 2 + other[None, :] ** 2, np.inf)
    give = np.where(after <= limit, (own[:, None] - moved) ** 2 + (other[None, :] + moved) ** 2, np.inf)
    cost = np.minimum(keep, give)
    impossible = 1.0 + float(cost[np.isfinite(cost)].max()) * (len(heavy) + 1)
    column = least_cost_matching(np.where(np.isfinite(cost), cost, impossible))
    return [(int(j), bool(give[i, j] < keep[i, j])) for i, j in enumerate(column)]


def pairs_within(after: NDArray[np.float64], own: NDArray[np.float64], limit: float) -> bool:
    """Return whether some pairing lets every heavy microbatch last at most `limit`. It lasts `own` by itself, and
    `after` once it has deferred samples to its partner (`[heavy, light]`, the longer of the two)."""
    too_long = (after > limit) & (own > limit)[:, None]
    column = least_cost_matching(too_long.astype(np.float64))
    return not too_long[np.arange(len(own)), column].any()


@njit(cache=True, nogil=True)
def reachable_sums(units, size):
    """Return `last[s]`: the sample that first reached sum s of `units`, -1 if unreached, -2 for the empty sum.

    Samples are added one by one, so following `last` downwards never uses a sample twice.
    """
    last = np.empty(size + 1, dtype=np.int32)
    for total in range(size + 1):
        last[total] = -1
    last[0] = -2
    for sample in range(len(units)):
        step = units[sample]
        if step == 0:
            continue
        for total in range(size, step - 1, -1):
            if last[total] == -1 and last[total - step] != -1:
                last[total] = sample
    return last


@njit(cache=True, nogil=True)
def closest_sums(last, units, seconds, targets):
    """Return, for each target, the nearest reached sum (the smaller of two) and the seconds of its samples."""
    nearest = np.zeros(len(targets), dtype=np.int64)
    moved = np.zeros(len(targets))
    for number in range(len(targets)):
        target = targets[number]
        if target <= 0.0:
            continue
        least = np.inf
        for total in range(len(last)):
            if last[total] != -1 and abs(total - target) < least:
                least, nearest[number] = abs(total - target), total
        total = nearest[number]
        while total > 0:
            moved[number] += seconds[last[total]]
            total -= units[last[total]]
    return nearest, moved


@njit(cache=True, nogil=True)
def least_cost_matching(cost):
    """Return each row's column in a perfect matching of least total cost (square; shortest augmenting paths)."""
    n = len(cost)
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    owner = np.zeros(n + 1, dtype=np.int64)
    way = np.zeros(n + 1, dtype=np.int64)
    slack = np.empty(n + 1)
    used = np.empty(n + 1, dtype=np.bool_)
    for row in range(1, n + 1):
        owner[0] = row
        column = 0
        for other in range(n + 1):
            slack[other], used[other] = np.inf, False
        while owner[column] != 0:
            used[column] = True
            current, least, following = owner[column], np.inf, 0
            for other in range(1, n + 1):
                if not used[other]:
                    reduced = cost[current - 1, other - 1] - row_price[current] - column_price[other]
                    if reduced < slack[other]:
                        slack[other], way[other] = reduced, column
                    if slack[other] < least:
                        least, following = slack[other], other
            for other in range(n + 1):
                if used[other]:
                    row_price[owner[other]] += least
                    column_price[other] -= least
                else:
                    slack[other] -= least
            column = following
        while column != 0:
            owner[column] = owner[way[column]]
            column = way[column]
    result = np.empty(n, dtype=np.int64)
    for column in range(1, n + 1):
        result[owner[column] - 1] = column - 1
    return result
