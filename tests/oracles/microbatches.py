"""Plain versions of what the microbatch policies compute, for small cases."""

from __future__ import annotations

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
