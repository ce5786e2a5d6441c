"""Plain versions of what the microbatch policies compute, for small cases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations, product


def closest_subset_sum(values: list[float], target: float) -> float:
    """The sum of some of `values` that is nearest to `target`."""
    sums = [sum(chosen) for size in range(len(values) + 1) for chosen in combinations(values, size)]
    return min(sums, key=lambda total: abs(total - target))


def least_bottleneck(after: list[list[float]], own: list[float], floor: float) -> float:
    """The smallest longest microbatch over all pairings of rows with columns and choices of who hands over."""
    count = len(own)
    best = float("inf")
    for partner in permutations(range(count)):
        for gives in product((False, True), repeat=count):
            longest = max([floor, *(after[i][partner[i]] if gives[i] else own[i] for i in range(count))])
            best = min(best, longest)
    return best


def least_cost(cost: list[list[float]]) -> float:
    """The least total of a perfect matching."""
    count = len(cost)
    return min(sum(cost[i][p[i]] for i in range(count)) for p in permutations(range(count)))


def greedy(shares: list[list[float]], num_slots: int) -> list[list[float]]:
    """Loads `[slots][units]` of the greedy: largest sample first, to where the larger load grows least."""
    loads = [[0.0] * len(shares[0]) for _ in range(num_slots)]
    for share in sorted(shares, key=max, reverse=True):

        def score(slot: int, share: list[float] = share) -> float:
            after = [load + x for load, x in zip(loads[slot], share, strict=True)]
            return max(after) + 1e-3 * sum(after)

        best = min(range(num_slots), key=score)
        loads[best] = [load + x for load, x in zip(loads[best], share, strict=True)]
    return loads


def pipeline_seconds(loads: list[list[float]], stages: list[int], backward: float, extra: int) -> float:
    """Seconds of a chain of units under 1F1B with `extra` = 1, eager 1F1B with 2: `loads[unit][microbatch]` are
    seconds per stage, forward and backward. Relaxes start times until nothing changes."""
    unit_of = [unit for unit, count in enumerate(stages) for _ in range(count)]
    depth, count = len(unit_of), len(loads[0])
    orders = []
    for stage in range(depth):
        ahead = min(count, extra * (depth - stage) - (extra - 1))
        order = [("F", k) for k in range(ahead)]
        for k in range(count):
            order.append(("B", k))
            if ahead + k < count:
                order.append(("F", ahead + k))
        orders.append(order)
    end = {(stage, kind, k): 0.0 for stage in range(depth) for kind in "FB" for k in range(count)}
    while True:
        changed = False
        for stage, order in enumerate(orders):
            free = 0.0
            for kind, k in order:
                load = loads[unit_of[stage]][k]
                seconds = load / (1 + backward) * (1.0 if kind == "F" else backward)
                ready = free
                if kind == "F" and stage > 0:
                    ready = max(ready, end[stage - 1, "F", k])
                if kind == "B" and stage < depth - 1:
                    ready = max(ready, end[stage + 1, "B", k])
                free = ready + seconds
                if end[stage, kind, k] != free:
                    end[stage, kind, k] = free
                    changed = True
        if not changed:
            return max(end.values())


def placed(
    order: list[int], shares: list[list[float]], speeds: list[float], weights: list[float], capacity: float
) -> list[int] | None:
    """Slot of each sample by the greedy, trying every slot in order; None if a sample finds no room."""
    loads, free, slots = [[0.0] * len((shares or [[]])[0]) for _ in speeds], [capacity] * len(speeds), [0] * len(shares)
    for sample in order:
        best, least = -1, float("inf")
        for slot, speed in enumerate(speeds):
            after = [(load + x) / speed for load, x in zip(loads[slot], shares[sample], strict=True)]
            if weights[sample] <= free[slot] and max(after) + 1e-3 * sum(after) < least:
                best, least = slot, max(after) + 1e-3 * sum(after)
        if best < 0:
            return None
        loads[best] = [load + x for load, x in zip(loads[best], shares[sample], strict=True)]
        free[best] -= weights[sample]
        slots[sample] = best
    return slots


def evened(
    shares: list[list[float]], weights: list[float], capacity: float, slots: list[int], count: int, even: float
) -> list[int]:
    """Move or swap samples of the fullest slot, the best change first, until every load is at its limit or nothing
    helps."""
    units = range(len(shares[0]))
    limits = [(1 + even) * max(1.0, *(share[unit] for share in shares)) for unit in units]
    loads, filled = [[0.0 for _ in units] for _ in range(count)], [0.0] * count
    for share, weight, slot in zip(shares, weights, slots, strict=True):
        loads[slot] = [load + x for load, x in zip(loads[slot], share, strict=True)]
        filled[slot] += weight
    while True:
        worst, full = 1.0, -1
        for slot in range(count):
            for unit in units:
                if loads[slot][unit] > worst * limits[unit]:
                    worst, full = loads[slot][unit] / limits[unit], slot
        best, change = worst, None
        for one in [sample for sample, slot in enumerate(slots) if slot == full]:
            for back, slot in [*enumerate(slots), *((-1, slot) for slot in range(count))]:
                moved = weights[one] - (weights[back] if back >= 0 else 0.0)
                if slot == full or filled[slot] + moved > capacity or filled[full] - moved > capacity:
                    continue
                largest = 0.0
                for unit in units:
                    delta = shares[one][unit] - (shares[back][unit] if back >= 0 else 0.0)
                    after = (loads[full][unit] - delta) / limits[unit], (loads[slot][unit] + delta) / limits[unit]
                    largest = max(largest, *after)
                if largest < best:
                    best, change = largest, (one, back, slot)
        if change is None or best >= worst * (1.0 - 1e-9):
            return slots
        one, back, slot = change
        for unit in units:
            delta = shares[one][unit] - (shares[back][unit] if back >= 0 else 0.0)
            loads[full][unit] -= delta
            loads[slot][unit] += delta
        moved = weights[one] - (weights[back] if back >= 0 else 0.0)
        filled[full] -= moved
        filled[slot] += moved
        slots[one] = slot
        if back >= 0:
            slots[back] = full


def balanced(
    seconds: list[list[float]],
    weights: list[float],
    capacity: float,
    count: int,
    even: float,
    rows: Sequence[Sequence[int]],
) -> list[tuple[int, ...]]:
    """The `balanced` policy of one pipeline; `rows` are evened out where its samples fit only in them."""
    if not seconds:
        return [()] * count
    totals = [sum(column) for column in zip(*seconds, strict=True)]
    shares = [[x * (count / (total or 1.0)) for x, total in zip(row, totals, strict=True)] for row in seconds]
    tried = (
        placed(order, shares, [1.0] * count, weights, capacity)
        for keys in ([max(share) for share in shares], weights)
        for order in [sorted(range(len(seconds)), key=lambda sample: (keys[sample], sample), reverse=True)]
    )
    slots = next((found for found in tried if found is not None), None)
    if slots is None:
        filled = dict(zip([sample for row in rows for sample in row[1:]], range(len(rows), count)))
        slots = [
            filled.get(sample, number)
            for sample in range(len(seconds))
            for number, row in enumerate(rows)
            if sample in row
        ]
    slots = evened(shares, weights, capacity, slots, count, even)
    batches = [tuple(s for s, own in enumerate(slots) if own == slot) for slot in range(count)]
    return sorted(batches, key=lambda batch: not batch)
