"""The recurrence of the thesis' eq. 3.5, written down as it stands, with optional memory limits."""

from __future__ import annotations

import math


def best_bottleneck(costs, num_stages, fits=lambda stage, first, end: True):
    """The smallest possible largest stage sum over contiguous partitions into non-empty stages that fit."""
    layers = len(costs)
    best = [[math.inf] * (layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = -math.inf
    for stages in range(1, num_stages + 1):
        for end in range(stages, layers + 1):
            for first in range(stages - 1, end):
                if fits(stages - 1, first, end):
                    slowest = max(best[stages - 1][first], sum(costs[first:end]))
                    best[stages][end] = min(best[stages][end], slowest)
    return best[num_stages][layers]
