"""The simulator's inner loops, compiled by numba and cached on disk.

Importing this module imports numba, so it is imported only inside functions that need it. *Ops* (one per action,
however many ranks run it together) are numbered rank by rank in execution order.
"""

import numpy as np
from numba import njit

_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 0, 1, 2, 3

MOST_PROBLEMS = 4096
NO_PROBLEM, NO_INPUT, NO_GRADIENT, BEFORE_FORWARD, BEFORE_INPUT_GRADIENT, TWICE = range(6)


@njit(cache=True, nogil=True)
def fill_slots(kind, stage, piece, slot_base, num_pieces, first_piece, num_slots):
    """Return the op of every (stage, kind, piece), -1 if there is none; and the first duplicated op, or -1."""
    slots = np.empty(num_slots, dtype=np.int32)
    for slot in range(num_slots):
        slots[slot] = -1
    twice = -1
    for op in range(len(kind)):
        s = stage[op]
        slot = slot_base[s] + kind[op] * num_pieces[s] + piece[op] - first_piece[s]
        if slots[slot] >= 0 and twice < 0:
            twice = op
        slots[slot] = op
    return slots, twice


@njit(cache=True, nogil=True)
def _gradient_op(slots, slot_base, num_pieces, first_piece, stage, piece):
    """Return the op that makes the gradient of the stage's input for `piece`: I for a split backward, else B, else
    -1."""
    local = piece - first_piece[stage]
    base = slot_base[stage] + local
    op = slots[base + _INPUT_GRADIENT * num_pieces[stage]]
    if op >= 0:
        return op
    return slots[base + _BACKWARD * num_pieces[stage]]


@njit(cache=True, nogil=True)
def data_edges(
    kind,
    stage,
    piece,
    slots,
    slot_base,
    num_pieces,
    first_piece,
    before,
    after,
    pairs_from,
    pairs_to,
    last_of,
    first_of,
):
    """Find edges op → op that carry rows or gradients: along chains in op order, then between units in pair order.

    Returns sources, targets and their number; then problem codes, their ops and their number (at most `MOST_PROBLEMS`,
    more than any person reads).
    """
    n = len(kind)
    source = np.empty(n + 2 * len(pairs_from), dtype=np.int32)
    target = np.empty(n + 2 * len(pairs_from), dtype=np.int32)
    code = np.empty(MOST_PROBLEMS + 2, dtype=np.int8)
    culprit = np.empty(MOST_PROBLEMS + 2, dtype=np.int32)
    count, bad = 0, 0
    for op in range(n):
        bad = min(bad, MOST_PROBLEMS)
        s, p = stage[op], piece[op]
        base = slot_base[s] + p - first_piece[s]
        if kind[op] == _FORWARD:
            if before[s] >= 0:
                made = slots[slot_base[before[s]] + p - first_piece[s]]
                if made < 0:
                    code[bad], culprit[bad] = NO_INPUT, op
                    bad += 1
                else:
                    source[count], target[count] = made, op
                    count += 1
        elif kind[op] == _WEIGHT_GRADIENT:
            made = slots[base + _INPUT_GRADIENT * num_pieces[s]]
            if made < 0 or made > op:
                code[bad], culprit[bad] = BEFORE_INPUT_GRADIENT, op
                bad += 1
        else:
            made = slots[base]
            if made < 0 or made > op:
                code[bad], culprit[bad] = BEFORE_FORWARD, op
                bad += 1
            if after[s] >= 0:
                made = _gradient_op(slots, slot_base, num_pieces, first_piece, after[s], p)
                if made < 0:
                    code[bad], culprit[bad] = NO_GRADIENT, op
                    bad += 1
                else:
                    source[count], target[count] = made, op
                    count += 1
    for pair in range(len(pairs_from)):
        bad = min(bad, MOST_PROBLEMS)
        up, down = pairs_from[pair], pairs_to[pair]
        last, first = last_of[up], first_of[down]
        given = slots[slot_base[last] + up - first_piece[last]]
        taken = slots[slot_base[first] + down - first_piece[first]]
        if taken >= 0:
            if given < 0:
                code[bad], culprit[bad] = NO_INPUT, taken
                bad += 1
            else:
                source[count], target[count] = given, taken
                count += 1
        taken = _gradient_op(slots, slot_base, num_pieces, first_piece, last, up)
        if taken >= 0:
            given = _gradient_op(slots, slot_base, num_pieces, first_piece, first, down)
            if given < 0:
                code[bad], culprit[bad] = NO_GRADIENT, taken
                bad += 1
            else:
                source[count], target[count] = given, taken
                count += 1
    return source, target, count, code, culprit, bad


@njit(cache=True, nogil=True)
def group_by_target(target, num_ops):
    """Return the edges by target in CSR form: `offsets [ops + 1]` and edge numbers, in edge order within a target."""
    offsets = np.zeros(num_ops + 1, dtype=np.int32)
    for edge in range(len(target)):
        offsets[target[edge] + 1] += 1
    fill = np.empty(num_ops, dtype=np.int32)
    for op in range(num_ops):
        offsets[op + 1] += offsets[op]
        fill[op] = offsets[op]
    edges = np.empty(len(target), dtype=np.int32)
    for edge in range(len(target)):
        at = fill[target[edge]]
        edges[at] = edge
        fill[target[edge]] = at + 1
    return offsets, edges


@njit(cache=True, nogil=True)
def topological_order(list_offsets, offsets, edges, source):
    """Find an order of all ops that respects every list and every edge (Kahn's algorithm over list heads).

    A list is the ops of one rank. Each list waits for at most one op at a time, so lists are woken from a linked list
    per op: O(ops + edges). Returns the order, its length (less than all ops if there is a cycle), where each list
    stopped, and the position of every op in the order (-1 if it has none).
    """
    num_lists = len(list_offsets) - 1
    num_ops = list_offsets[-1]
    order = np.empty(num_ops, dtype=np.int32)
    position = np.empty(num_ops, dtype=np.int32)
    scan = np.empty(num_ops, dtype=np.int32)
    waiting = np.empty(num_ops, dtype=np.int32)
    for op in range(num_ops):
        scan[op] = offsets[op]
        waiting[op] = position[op] = -1
    heads = np.empty(num_lists, dtype=np.int32)
    next_waiter = np.empty(num_lists, dtype=np.int32)
    ready = np.empty(num_lists, dtype=np.int32)
    num_ready, count = 0, 0
    for index in range(num_lists - 1, -1, -1):
        heads[index] = list_offsets[index]
        ready[num_ready] = index
        num_ready += 1
    while num_ready > 0:
        num_ready -= 1
        index = ready[num_ready]
        while heads[index] < list_offsets[index + 1]:
            op = heads[index]
            blocker = -1
            while scan[op] < offsets[op + 1]:
                before = source[edges[scan[op]]]
                if position[before] < 0:
                    blocker = before
                    break
                scan[op] += 1
            if blocker >= 0:
                next_waiter[index] = waiting[blocker]
                waiting[blocker] = index
                break
            position[op] = count
            order[count] = op
            count += 1
            heads[index] += 1
            waiter = waiting[op]
            while waiter >= 0:
                following = next_waiter[waiter]
                ready[num_ready] = waiter
                num_ready += 1
                waiter = following
    return order, count, heads, position


@njit(cache=True, nogil=True)
def renumber(order, position, list_of, offsets, edges, source, list_offsets):
    """Return the graph in topological positions: list predecessor, CSR offsets, source positions and edge numbers."""
    n = len(order)
    previous = np.empty(n, dtype=np.int32)
    new_offsets = np.empty(n + 1, dtype=np.int32)
    new_source = np.empty(len(edges), dtype=np.int32)
    new_edge = np.empty(len(edges), dtype=np.int32)
    count = 0
    for i in range(n):
        op = order[i]
        previous[i] = position[op - 1] if op > list_offsets[list_of[op]] else -1
        new_offsets[i] = count
        for at in range(offsets[op], offsets[op + 1]):
            new_source[count] = position[source[edges[at]]]
            new_edge[count] = edges[at]
            count += 1
    new_offsets[n] = count
    return previous, new_offsets, new_source, new_edge


@njit(cache=True, nogil=True)
def spans(order, previous, offsets, source, edge, seconds, lag, start, end):
    """Write start and end of every op, by op number, into `start` and `end`; return the latest end."""
    latest = 0.0
    lagged = len(lag) > 0
    for i in range(len(order)):
        op = order[i]
        time = 0.0
        if previous[i] >= 0:
            time = end[order[previous[i]]]
        for at in range(offsets[i], offsets[i + 1]):
            arrival = end[order[source[at]]]
            if lagged:
                arrival += lag[edge[at]]
            if arrival > time:
                time = arrival
        start[op] = time
        end[op] = time + seconds[op]
        if end[op] > latest:
            latest = end[op]
    return latest


@njit(cache=True, nogil=True)
def port_contention(list_offsets, offsets, edges, target, seconds, size, rest, pair, way_offsets, way, load, num_ways):
    """Return ends of all ops and, by message, the seconds from its op's end until it arrives.

    Ops are processed in the order of their ends, when their messages join queues: on each link (`way`) of its stage
    pair a message waits for earlier ones, then takes `size * load`. `offsets`, `edges`: CSR of edges by source. `size`,
    `rest`, `pair`: by message (messages are the first edges). A message arrives `rest` seconds after its last link.
    """
    num_ops = len(seconds)
    num_messages = len(size)
    waiting = np.ones(num_ops, dtype=np.int32)
    for index in range(len(list_offsets) - 1):
        if list_offsets[index] < list_offsets[index + 1]:
            waiting[list_offsets[index]] = 0
    for edge in range(len(target)):
        waiting[target[edge]] += 1
    follows = np.ones(num_ops, dtype=np.int32)  # 1 unless the op is its rank's last
    for index in range(len(list_offsets) - 1):
        if list_offsets[index] < list_offsets[index + 1]:
            follows[list_offsets[index + 1] - 1] = 0
    end = np.zeros(num_ops)
    lag = np.zeros(num_messages)
    free = np.zeros(num_ways)
    heap = np.empty(num_ops, dtype=np.int32)
    count = np.int64(0)
    for op in range(num_ops):
        if waiting[op] == 0:
            end[op] = seconds[op]
            count = _push(heap, count, end, op)
    while count > 0:
        op = heap[0]
        count = _pop(heap, count, end)
        now = end[op]
        for at in range(offsets[op], offsets[op + 1] + follows[op]):
            arrival = now
            if at < offsets[op + 1]:
                edge = edges[at]
                after = target[edge]
                if edge < num_messages:
                    p = pair[edge]
                    if size[edge] > 0.0:
                        for k in range(way_offsets[p], way_offsets[p + 1]):
                            passed = max(now, free[way[k]]) + size[edge] * load[k]
                            free[way[k]] = passed
                            arrival = max(arrival, passed)
                    arrival += rest[edge]
                    lag[edge] = arrival - now
            else:
                after = op + 1
            end[after] = max(end[after], arrival)
            waiting[after] -= 1
            if waiting[after] == 0:
                end[after] += seconds[after]
                count = _push(heap, count, end, after)
    return end, lag


@njit(cache=True, nogil=True)
def _before(end, op, other):
    return end[op] < end[other] or (end[op] == end[other] and op < other)


@njit(cache=True, nogil=True)
def _push(heap, count, end, op):
    at = count
    while at > 0 and _before(end, op, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = op
    return count + 1


@njit(cache=True, nogil=True)
def _pop(heap, count, end):
    count -= 1
    op = heap[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(end, heap[child + 1], heap[child]):
            child += 1
        if not _before(end, heap[child], op):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = op
    return count


@njit(cache=True, nogil=True)
def binding(order, previous, offsets, source, end, start, arrival_of_edge, edge):
    """Return, for every op (by op number), the op whose end decided its start, -1 at time zero or without predecessors.
    On ties the list predecessor wins: an op that did not have to wait is bound by its own rank."""
    n = len(order)
    binder = np.empty(n, dtype=np.int32)
    for i in range(n):
        op = order[i]
        binder[op] = -1
        if previous[i] >= 0 and end[order[previous[i]]] >= start[op]:
            binder[op] = order[previous[i]]
            continue
        for at in range(offsets[i], offsets[i + 1]):
            if arrival_of_edge[edge[at]] >= start[op]:
                binder[op] = order[source[at]]
                break
    return binder


@njit(cache=True, nogil=True)
def idle_by_cause(
    row_offsets, row_op, row_drain, row_warm, unit, start, end, binder, chain_end, num_units, latest, idle
):
    """Add every idle second of every rank to `idle[rank, cause]`.

    Causes: 0 warm-up, 1 drain, 2 communication, 3 imbalance, 4 + u waiting for unit u. A gap is explained by the chain
    of ops that decided its end: each second belongs to the op, or the lag between two ops, that was in progress on that
    chain. `row_warm[rank]` is the row whose start ends the rank's warm-up, `row_drain[rank]` the last row before its
    drain, `chain_end[rank]` when the last pipeline it belongs to is done.
    """
    for rank in range(len(row_offsets) - 1):
        before = 0.0
        for row in range(row_offsets[rank], row_offsets[rank + 1]):
            op = row_op[row]
            phase = -1
            if row <= row_warm[rank]:
                phase = 0
            elif row > row_drain[rank]:
                phase = 1
            upper = start[op]
            late = op
            while upper > before and binder[late] >= 0:
                made = binder[late]
                lag = min(upper, start[late]) - max(before, end[made])
                if lag > 0.0:
                    idle[rank, 2] += lag
                    upper -= lag
                busy = upper - max(before, start[made])
                if busy > 0.0:
                    if phase >= 0:
                        idle[rank, phase] += busy
                    elif unit[made] == unit[op]:
                        idle[rank, 3] += busy
                    else:
                        idle[rank, 4 + unit[made]] += busy
                    upper -= busy
                late = made
            if upper > before:
                idle[rank, max(phase, 0)] += upper - before
            before = max(before, end[op])
        idle[rank, 1] += max(0.0, chain_end[rank] - before)
        idle[rank, 3] += latest - max(before, chain_end[rank])
