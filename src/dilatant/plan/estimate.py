"""The step of a candidate in closed form: what it should take, and what no schedule of it beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.option import Option
from dilatant.plan.sides import Side
from dilatant.plan.space import Space
from dilatant.plan.sync_time import least_sync

GAPS = 1.08
"""What interleaved steps take more in simulations than by these sums."""


def estimate(
    space: Space,
    samples: int,
    replicas: int,
    microbatches: int,
    fill: float,
    slowest: float,
    options: Sequence[Option],
) -> float:
    """Seconds of a step of `replicas` pipelines with so many microbatches of `samples`, of which the first takes `fill`
    and each of the others `slowest`. The heaviest delays those behind it on its way through the stages, by about half
    in simulations. Gradients are summed beside the last backward, and after it what that leaves."""
    heavy = (space.heaviest(samples) - 1.0) / 2 * (fill - slowest)
    rounds = GAPS if any(option.chunks > 1 for option in options) else 1.0
    exposed = max(_exposed_sync(space, replicas, option) for option in options)
    return rounds * (fill + (microbatches - 1) * slowest) + heavy + exposed


def bound(
    space: Space, replicas: int, microbatches: int, option: Option, before: Side, language: Option
) -> float:
    """Seconds that no schedule of a candidate with this chain beats: each stage's work, after the least that comes
    before its first microbatch and before the least that comes after its last; the way of the heaviest sample; and the
    sum of a stage's gradients, which nothing precedes but its forwards."""
    ahead = (
        max((float(one.light.sum()) for one in before.options), default=0.0) if option is language else 0.0
    )
    busy = microbatches * option.work
    if option.chunks == 1:
        busy = busy + np.cumsum(option.light) - option.light
    if option.ep > 1:  # of experts there may be no other holder
        return max(ahead + float(busy.max()), option.heavy)
    held = option.gradient_bytes
    sums = least_sync(held, replicas * option.cp, option.tp, space.cluster, space.table.units.rules)
    alone = ahead + microbatches * option.forward + sums
    last = sums * _last_bucket(held)
    return float(max((ahead + busy + last).max(), alone.max(), option.heavy + last.min()))


def _exposed_sync(space: Space, replicas: int, option: Option) -> float:
    """Seconds that a rank sums gradients after its last backward, on rings over replicas that lie side by side."""
    cluster, group = space.cluster, replicas * option.cp
    bandwidth = cluster.inside.bandwidth
    if group * option.tp > cluster.gpus_per_node:
        near = min(group, max(1, cluster.gpus_per_node // option.tp))
        bandwidth = min(bandwidth, near * cluster.between.bandwidth / cluster.gpus_per_node)
    held = option.gradient_bytes
    seconds = 2 * (group - 1) / group * held / bandwidth
    groups = len(held)
    backward = option.backward[:groups]  # of the chunk that comes last
    return float(np.maximum(seconds - backward, seconds * _last_bucket(held)).max())


def _last_bucket(held: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of gradients that is there only when the backward is over."""
    return np.asarray(1.0 / np.maximum(1.0, np.ceil(held / BUCKET_BYTES)))
