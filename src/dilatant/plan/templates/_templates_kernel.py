"""Compiled search for the pipeline templates of all node counts at once.

Notation, with integer times: a plan is a chain of stages with times t_0..t_{S-1}, the slowest tau, and k* the last
stage that is as slow. The paper's T1 + T2 + T3 at Nb microbatches is

    sum(t) + (Nb - S + k* - 1) tau + sum(t_k for k >= k*)
  = sum(t_k for k < k*) + sum(2 t_k - tau for k >= k*) + (Nb - 1) tau

so for a fixed tau each stage adds a separate term, and the number of stages is not part of the state. tau is one of
the sums of consecutive layers, sorted in `candidates`.
"""

import numpy as np
from numba import njit

IMPOSSIBLE = np.int64(1) << 61


@njit(cache=True)
def _extend(rest, lowest, time, slope, per_stage, earliest, latest, top, row, choices, mark, queue_end, queue_cost):
    """Lower row[i], i <= top, to the minimum over ends of slope * (time of layers i..end) + per_stage + rest[end].

    Ends range from earliest[i] to latest[i]; choices[i] becomes mark + end. Returns the smallest i with such an end.
    Both ends of the window move left with i, so a monotone queue yields every minimum in amortized constant time.
    Entries of `rest` before `lowest` are impossible, so windows that end there end the loop.
    """
    head = 0
    tail = 0
    end = latest[top] + 1
    reached = rest.size
    for i in range(top, -1, -1):
        if latest[i] < lowest:
            break
        while end > earliest[i]:
            end -= 1
            if rest[end] < IMPOSSIBLE:
                cost = rest[end] + slope * time[end]
                while tail > head and queue_cost[tail - 1] >= cost:
                    tail -= 1
                queue_cost[tail] = cost
                queue_end[tail] = end
                tail += 1
        while head < tail and queue_end[head] > latest[i]:
            head += 1
        if head < tail:
            reached = i
            cost = queue_cost[head] - slope * time[i] + per_stage
            if cost < row[i]:
                row[i] = cost
                choices[i] = mark + queue_end[head]
    return reached


@njit(cache=True)
def _chain(prefix, widths, fits, node, gpus, low, high, after, tau, best, choice):
    """Fill best[part, level, r, i]: the least cost of running layers i.. on exactly the last r GPUs of a pipeline.

    Part 1 follows k*: stages of at most `after` that cost 2 t - tau. Part 0 still contains k* (between `low` and
    `high`, cost 2 t - tau), preceded by stages of at most `high` that cost t. `prefix[w, k]` is the time of the first k
    layers on widths[w] GPUs. No stage crosses a node of `node` GPUs, which depends on r alone, so one table serves
    every node count up to `gpus`. A stage at `level` that begins at layer i ends at fits[w, level, i] at the latest.
    With several levels, levels count stages from the end (their memory differs); a single level does not number them.
    choice encodes the first stage as ((next part * widths) + w) * (layers + 1) + end. Entries that no pipeline can
    reach stay IMPOSSIBLE: more layers before them than the other GPUs can run.
    """
    layers = prefix.shape[1] - 1
    levels = fits.shape[1]
    step = 1 if levels > 1 else 0
    one = np.empty(layers, np.int64)  # earliest and latest ends of a stage that begins at i
    until_after = np.empty((widths.size, levels, layers), np.int64)
    from_low = np.empty((widths.size, layers), np.int64)
    until_high = np.empty((widths.size, levels, layers), np.int64)
    reach = np.empty((widths.size, layers), np.int64)
    for w in range(widths.size):
        a = h = e = layers
        for i in range(layers - 1, -1, -1):
            while prefix[w, a] - prefix[w, i] > after and a > i:
                a -= 1
            while prefix[w, h] - prefix[w, i] > high and h > i:
                h -= 1
            while e > i + 1 and prefix[w, e - 1] - prefix[w, i] >= low:
                e -= 1
            one[i] = i + 1
            reach[w, i] = h
            from_low[w, i] = e if prefix[w, e] - prefix[w, i] >= low else layers + 1
            for level in range(levels):
                until_after[w, level, i] = min(a, fits[w, level, i])
                until_high[w, level, i] = min(h, fits[w, level, i])
    farthest = np.zeros(gpus + 1, np.int64)  # the most layers that the first g GPUs can run
    for g in range(1, gpus + 1):
        for w in range(widths.size):
            if widths[w] <= (g - 1) % node + 1:
                i = farthest[g - widths[w]]
                farthest[g] = max(farthest[g], reach[w, i] if i < layers else layers)
    lowest = np.full((2, levels, gpus + 1), layers + 1, np.int64)
    lowest[1, 0, 0] = layers
    for level in range(levels):
        for i in range(layers + 1):
            best[0, level, 0, i] = IMPOSSIBLE
            best[1, level, 0, i] = IMPOSSIBLE
    best[1, 0, 0, layers] = 0
    queue_end = np.empty(layers + 2, np.int64)
    queue_cost = np.empty(layers + 2, np.int64)
    for r in range(1, gpus + 1):
        for level in range(levels):
            for i in range(layers + 1):
                best[0, level, r, i] = IMPOSSIBLE
                best[1, level, r, i] = IMPOSSIBLE
        nodes = (r + node - 1) // node  # every node runs at least one stage, every stage one layer
        top = min(layers - nodes, farthest[gpus - r])
        for level in range(nodes if step else 0, min(levels, r + 1)):
            for w in range(widths.size):
                if widths[w] > (r - 1) % node + 1:
                    continue
                until = r - widths[w]
                head = w * (layers + 1)
                tail = (widths.size + w) * (layers + 1)
                behind = _extend(
                    best[1, level - step, until], lowest[1, level - step, until], prefix[w], np.int64(2), -tau,
                    one, until_after[w, level], top, best[1, level, r], choice[1, level, r], tail,
                    queue_end, queue_cost,
                )  # fmt: skip
                at = _extend(
                    best[1, level - step, until], lowest[1, level - step, until], prefix[w], np.int64(2), -tau,
                    from_low[w], until_high[w, level], top, best[0, level, r], choice[0, level, r], tail,
                    queue_end, queue_cost,
                )  # fmt: skip
                ahead = _extend(
                    best[0, level - step, until], lowest[0, level - step, until], prefix[w], np.int64(1), np.int64(0),
                    one, until_high[w, level], top, best[0, level, r], choice[0, level, r], head,
                    queue_end, queue_cost,
                )  # fmt: skip
                lowest[1, level, r] = min(lowest[1, level, r], behind)
                lowest[0, level, r] = min(lowest[0, level, r], at, ahead)


@njit(cache=True)
def _follow(prefix, widths, choice, level, gpus, stages, times):
    """Write stages (first, end, width index) and times of the chain in best[0, level, gpus, 0]; return their count."""
    layers = prefix.shape[1] - 1
    step = 1 if choice.shape[1] > 1 else 0
    part = 0
    first = 0
    count = 0
    while first < layers:
        code = choice[part, level, gpus, first]
        end = code % (layers + 1)
        code //= layers + 1
        w = code % widths.size
        part = code // widths.size
        stages[count, 0] = first
        stages[count, 1] = end
        stages[count, 2] = w
        times[count] = prefix[w, end] - prefix[w, first]
        count += 1
        gpus -= widths[w]
        level -= step
        first = end
    return count


@njit(cache=True)
def _pipeline_time(times, num_stages, num_microbatches):
    """Return T1 + T2 + T3 of a chain; of equally slow stages the last is k*."""
    total = 0
    slowest = -1
    tail = 0
    position = 0
    for k in range(num_stages):
        total += times[k]
        if times[k] >= slowest:
            slowest = times[k]
            position = k
            tail = 0
        tail += times[k]
    return total + (num_microbatches - num_stages + position - 1) * slowest + tail


@njit(cache=True)
def search(prefix, widths, fits, node, node_counts, num_microbatches, candidates):
    """Find the best plan of every node count, over all stage counts, cuts and GPU splits; exact.

    `widths` ascend; `fits[w, level, i]` bounds the end of a stage from layer i on widths[w] GPUs, see `_chain`.

    Returns (cost, stages[n, :, (first, end, width index)], number of stages, tables filled); cost is IMPOSSIBLE where
    no plan exists.

    The search is branch and bound over intervals of candidates for tau, the slowest stage time. For a plan whose tau
    lies in an interval, its cost with tau replaced is linear in tau, so the smaller value at the interval's two ends is
    a lower bound; the lower end suffices where no plan can have as many stages as microbatches. The plan behind a bound
    is a real plan: it is evaluated, and usually becomes the incumbent. With one tau left, stages after k* must be
    faster than tau, and the table is exact.
    """
    layers = prefix.shape[1] - 1
    num_counts = node_counts.size
    most_gpus = node_counts.max() * node
    levels = fits.shape[1]
    table = np.empty((2, levels, most_gpus + 1, layers + 1), np.int64)
    choice = np.zeros((2, levels, most_gpus + 1, layers + 1), np.int64)
    best_cost = np.full(num_counts, IMPOSSIBLE)
    best_count = np.zeros(num_counts, np.int64)
    best_stages = np.zeros((num_counts, layers, 3), np.int64)
    stages = np.zeros((layers, 3), np.int64)
    times = np.zeros(layers, np.int64)
    least = np.empty(num_counts, np.int64)
    tables = 0
    thinnest = widths[0]

    probes = 32
    depth_limit = probes + 140  # enough to bisect 2**64 candidates
    interval = np.empty((depth_limit, 2), np.int64)
    bound = np.empty((depth_limit, num_counts), np.int64)
    for k in range(probes + 1):
        for n in range(num_counts):
            bound[k, n] = -IMPOSSIBLE
    interval[0, 0] = 0
    interval[0, 1] = candidates.size
    depth = 1
    if min(layers, most_gpus // thinnest) >= num_microbatches:
        # With few microbatches a slow first stage can be best: probe candidates of every size for incumbents.
        for probe in range(probes):
            interval[depth, 0] = candidates.size * (probe + 1) // (probes + 1)
            interval[depth, 1] = interval[depth, 0] + 1
            depth += 1
    while depth > 0:
        depth -= 1
        low = interval[depth, 0]
        high = interval[depth, 1]
        gpus = np.int64(0)  # a literal 0 would compile the callee once more
        for n in range(num_counts):
            if bound[depth, n] < best_cost[n]:
                gpus = max(gpus, node_counts[n] * node)
        if gpus == 0:
            continue
        leaf = high - low == 1
        for n in range(num_counts):
            least[n] = IMPOSSIBLE
        ends = 2 if not leaf and min(layers, gpus // thinnest) >= num_microbatches else 1
        for upper in range(ends):
            tau = candidates[high - 1] if upper else candidates[low]
            after = tau - 1 if leaf else candidates[high - 1]
            _chain(prefix, widths, fits, node, gpus, candidates[low], candidates[high - 1], after, tau, table, choice)
            tables += 1
            for n in range(num_counts):
                own = node_counts[n] * node
                level = 0
                for k in range(1, levels):
                    if table[0, k, own, 0] < table[0, level, own, 0]:
                        level = k
                if bound[depth, n] >= best_cost[n] or table[0, level, own, 0] >= IMPOSSIBLE:
                    continue
                cost = table[0, level, own, 0] + (num_microbatches - 1) * tau
                least[n] = min(least[n], cost)
                if cost < best_cost[n]:
                    count = _follow(prefix, widths, choice, level, own, stages, times)
                    cost = _pipeline_time(times, count, num_microbatches)
                    if cost < best_cost[n]:
                        best_cost[n] = cost
                        best_count[n] = count
                        for k in range(count):
                            for column in range(3):
                                best_stages[n, k, column] = stages[k, column]
        if leaf:
            continue
        active = False
        for n in range(num_counts):
            bound[depth, n] = max(bound[depth, n], least[n])
            active = active or bound[depth, n] < best_cost[n]
        if active:
            middle = (low + high) // 2
            for n in range(num_counts):
                bound[depth + 1, n] = bound[depth, n]
            interval[depth, 0] = middle
            interval[depth + 1, 0] = low
            interval[depth + 1, 1] = middle
            depth += 2
    return best_cost, best_stages, best_count, tables
