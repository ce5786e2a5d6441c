"""Rings of all-reduces, message by message: each step waits for its neighbour and for what it goes through."""

from __future__ import annotations

import heapq
import itertools


def all_reduce(rings, node_of, port_of, inside, port):
    """Seconds until every ring is done. `rings`: (bytes, ranks). In each of 2 (n - 1) rounds every rank passes an n-th
    of the bytes on to the next, between nodes in as many strands as the node has ports among the ring's members, each
    strand through the ports on its way that are free first come, first served; devices inside a node meet only
    themselves. No latency."""
    strands = []
    for size, ranks in rings:
        nodes = sorted({node_of(rank) for rank in ranks})
        ports = {node: sorted({port_of(rank) for rank in ranks if node_of(rank) == node}) for node in nodes}
        width = max(len(own) for own in ports.values()) if len(nodes) > 1 else 1
        for strand in range(width):
            order = sorted(ranks, key=node_of)
            hops = []
            for rank, following in zip(order, [*order[1:], order[0]]):
                near = node_of(rank) == node_of(following)
                through = ports[node_of(rank)]
                place = ("in", rank) if near else ("out", node_of(rank), through[strand % len(through)])
                hops.append((place, inside if near else port))
            strands.append((size / width / len(ranks), hops))
    free, counter = {}, itertools.count()
    ready = [[0.0] * len(hops) for _, hops in strands]
    queue = [(0.0, next(counter), s, r, 0) for s, (_, hops) in enumerate(strands) for r in range(len(hops))]
    heapq.heapify(queue)
    last = 0.0
    while queue:
        at, _, strand, rank, step = heapq.heappop(queue)
        size, hops = strands[strand]
        place, speed = hops[rank]
        start = max(at, free.get(place, 0.0), ready[strand][rank])
        if start > at:
            heapq.heappush(queue, (start, next(counter), strand, rank, step))
            continue
        end = start + size / speed
        free[place] = ready[strand][rank] = end
        last = max(last, end)
        following = (rank + 1) % len(hops)
        # What came in from behind is passed on in the next round.
        if step + 1 < 2 * (len(hops) - 1):
            heapq.heappush(queue, (end, next(counter), strand, following, step + 1))
    return last
