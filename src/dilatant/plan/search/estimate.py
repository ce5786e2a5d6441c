"""The step of a candidate in closed form: what it should take, and what no schedule of it beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.sync_time import least_sync
from dilatant.plan.layouts.option import ChainTimes, Option
from dilatant.plan.layouts.sides import Side
from dilatant.plan.layouts.space import Space

Seconds = TypeVar("Seconds", float, NDArray[np.float64])

GAPS = 1.08
"""What interleaved steps take more in simulations than by these sums."""
FILLING, DELAY = 0.75, 0.4
"""What is left in simulations of the first microbatch's forwards, and of the delay by the heaviest, where weight
gradients of all layers fill the rest."""


def chain_times(space: Space, replicas: int, microbatches: int, option: Option) -> ChainTimes:
    """The times of one option in `replicas` pipelines with so many microbatches.

    No schedule beats a stage's work, before the least that comes after its last microbatch; nor the sum of a stage's
    gradients, which nothing precedes but its forwards. Where backwards are split, a stage waits for forwards alone, and
    sums its gradients behind all of its work.
    """
    key = option, replicas, microbatches
    if key not in space.times:
        space.times[key] = _chain_times(space, *key)
    return space.times[key]


def _chain_times(space: Space, option: Option, replicas: int, microbatches: int) -> ChainTimes:
    from dilatant.plan.layouts._chain_kernel import chain_times as kernel

    holders, cluster = replicas * option.cp, space.cluster
    ring = 2 * (holders - 1) / holders
    waits = option.chunks == 1
    sums = (
        _ring_bandwidth(cluster, holders, option.tp),
        *least_sync(holders, option.tp, cluster, space.table.units.rules),
    )

    def times(light: NDArray[np.float64], heavy: float, behind: bool) -> tuple[float, float, float]:
        busiest, longest, last, exposed = kernel(
            option.work, option.forward, light, option.gradient_bytes, option.backward, microbatches, waits,
            ring, *sums, float(BUCKET_BYTES), behind,
        )  # fmt: skip
        if option.ep > 1:  # of experts there may be no other holder
            return busiest, heavy, exposed
        return longest, heavy + last, exposed

    stages, path, exposed = times(option.light, option.heavy, False)
    if not space.halves or not waits:
        return ChainTimes(stages, path, math.inf, math.inf, exposed)
    return ChainTimes(stages, path, *times(option.light_split, option.heavy_split, True)[:2], exposed)


def exposed_seconds(option: Option, sums: NDArray[np.float64]) -> float:
    """Seconds left after a last backward, the most of any group of devices, of `sums` [groups] of gradients."""
    backward = option.backward[: len(sums)]  # of the chunk that comes last
    return float(np.maximum(sums - backward, sums * _last_bucket(option)).max())


def estimate(
    space: Space,
    pipelines: int,
    microbatches: int,
    fill: float,
    slowest: float,
    options: Sequence[Option],
    times: Sequence[ChainTimes],
) -> float:
    """Seconds of a step of equal pipelines: `computed_seconds`, and the sums of gradients behind them."""
    computed = computed_seconds(space, pipelines, microbatches, fill, slowest, options)
    return float(computed + max(one.exposed_sync for one in times))


def computed_seconds(
    space: Space,
    pipelines: int,
    microbatches: int,
    fill: Seconds,
    slowest: Seconds,
    options: Sequence[Option],
) -> Seconds:
    """Seconds of so many microbatches of each pipeline, of which the first takes `fill` and each other one `slowest`.
    The heaviest delays those behind it on its way through the stages, by about half in simulations. Where backwards may
    be split, weight gradients fill what others leave, the more of them there are."""
    heavier = (space.heaviest(pipelines * microbatches) - 1.0) * (fill - slowest)
    steady = microbatches * slowest
    whole = fill + steady - slowest
    heavy = heavy_split = forwards = total = 0.0
    for option in options:
        if option.chunks > 1:
            return GAPS * whole + heavier / 2
        heavy += option.heavy
        heavy_split += option.heavy_split
        forwards += option.forwards
        total += option.total
    whole = whole + heavier / 2
    if not (space.halves and heavy):
        return whole
    late = 1.0 - heavy_split / heavy  # the share of weight gradients
    share = forwards / total
    last = FILLING * share * fill + steady  # whose stages wait for the first forward,
    first = (1.0 - late) * fill + (1.0 - share) * steady  # and for the first backward
    larger = max if isinstance(fill, float) else np.maximum  # of two numbers, a hundred thousand times
    split = larger(last, first) + DELAY * heavier
    return whole - larger(0.0, whole - split) * min(1.0, 3 * late)


def bound(before: Side, language: Option, options: Sequence[Option], times: Sequence[ChainTimes]) -> float:
    """Seconds that no schedule beats; the language model's stages wait for the lightest sample to come to them."""
    ahead = max((one.lightest for one in before.options), default=0.0)
    ahead_split = max((one.lightest_split for one in before.options), default=0.0)
    whole = split = 0.0
    for option, own in zip(options, times, strict=True):
        waits = option is language
        whole = max(whole, own.stages + ahead if waits else own.stages, own.path)
        split = max(split, own.stages_split + ahead_split if waits else own.stages_split, own.path_split)
    return min(whole, split)


def _last_bucket(option: Option) -> NDArray[np.float64]:
    """[groups]: the part of the gradients that leaves behind a backward."""
    return 1.0 / np.maximum(1.0, np.ceil(option.gradient_bytes / BUCKET_BYTES))


def _ring_bandwidth(cluster: Cluster, holders: int, tp: int) -> float:
    bandwidth = cluster.inside.bandwidth
    if holders * tp > cluster.gpus_per_node:
        near = min(holders, max(1, cluster.gpus_per_node // tp))
        bandwidth = min(bandwidth, near * cluster.between.bandwidth / cluster.gpus_per_node)
    return bandwidth
