"""Closed forms of a step: an estimate of its seconds, and a lower bound for every schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.sync_time import least_sync
from dilatant.plan.layouts.option import ChainTimes, Option, ParallelChains
from dilatant.plan.layouts.space import Space

Seconds = TypeVar("Seconds", float, NDArray[np.float64])

GAPS = 1.08
"""Simulated interleaved steps take this multiple of the closed-form time."""
FILLING, DELAY = 0.75, 0.4
"""Fractions that remain where weight gradients of all layers fill the bubbles, in simulations.

FILLING is of the first microbatch's forwards, DELAY of the delay by the heaviest microbatch.
"""


def chain_times(space: Space, replicas: int, microbatches: int, option: Option) -> ChainTimes:
    """Return lower bounds and exposed sync of one option in `replicas` pipelines of `microbatches` microbatches each.

    A stage takes at least its work plus the gradient sync after its last microbatch, and at least its forwards plus the
    sync of all its gradients. With split backwards, a stage waits for forwards only and syncs all gradients after its
    work. Replicas share the work, but one with fewer samples than microbatches has fewer calls; some replica has all.
    """
    key = option, replicas, microbatches
    if key not in space.times:
        space.times[key] = _chain_times(space, *key)
    return space.times[key]


def _chain_times(space: Space, option: Option, replicas: int, microbatches: int) -> ChainTimes:
    from dilatant.plan.layouts._chain_kernel import chain_times as kernel

    chain, costs, cluster = option.chain, option.costs, space.cluster
    degrees = chain.degrees
    holders = replicas * degrees.copies
    ring = 2 * (holders - 1) / holders
    waits = chain.chunks == 1
    shared = sorted([0, *map(len, chain.cuts.values())])[-2] if waits else len(costs.work)
    sums = (
        _ring_bandwidth(cluster, holders, degrees.tp),
        *least_sync(holders, degrees.tp, cluster, space.table.units.rules),
    )

    def times(lightest: NDArray[np.float64], heaviest: float, sync_at_end: bool) -> tuple[float, float, float, float]:
        busiest, longest, last, exposed = kernel(
            costs.work + costs.calls / replicas, costs.work_host, costs.forward, lightest, costs.lightest_split,
            costs.gradient, costs.backward, microbatches, waits, ring, *sums, float(BUCKET_BYTES), sync_at_end, shared,
        )  # fmt: skip
        if degrees.ep > 1:  # experts may have no other holder
            return busiest, 0.0, heaviest, exposed
        return busiest, longest, heaviest + last, exposed

    stages, synced, path, exposed = times(costs.lightest, option.heaviest, False)
    if not space.settings.splits_backward or not waits:
        return ChainTimes(stages, synced, path, math.inf, math.inf, exposed)
    busiest, longest, path_split, _ = times(costs.lightest_split, option.heaviest_split, True)
    return ChainTimes(stages, synced, path, max(busiest, longest), path_split, exposed)


def exposed_seconds(option: Option, sums: NDArray[np.float64]) -> float:
    """Return the sync seconds after the last backward, maximum over device groups. sums: seconds of gradient sync
    [groups]."""
    backward = option.costs.backward[: len(sums)]  # of the last chunk
    last_bucket = 1.0 / np.maximum(1.0, np.ceil(option.costs.gradient / BUCKET_BYTES))  # its share of the gradients
    return float(np.maximum(sums - backward, sums * last_bucket).max())


def estimate(
    space: Space,
    pipelines: int,
    microbatches: int,
    fill: float,
    slowest: float,
    options: Sequence[Option],
    times: Sequence[ChainTimes],
) -> float:
    """Estimate the seconds of a step of equal pipelines: `computed_seconds` plus exposed gradient sync."""
    computed = computed_seconds(space, pipelines, microbatches, fill, slowest, options)
    return float(computed + max(one.exposed_sync for one in times))


def computed_seconds(
    space: Space, pipelines: int, microbatches: int, fill: Seconds, slowest: Seconds, options: Sequence[Option]
) -> Seconds:
    """Estimate the compute seconds of a step: the first microbatch takes `fill`, each further one `slowest`.
    The heaviest microbatch delays those behind it by about half of its excess in simulations. Where backwards may be
    split, weight gradients fill bubbles in proportion to their share of the work."""
    heaviest = heaviest_split = forwards = total = 0.0
    for option in options:
        if option.chain.chunks > 1:
            return chunked_seconds(space, pipelines, microbatches, fill, slowest)
        heaviest += option.heaviest
        heaviest_split += option.heaviest_split
        forwards += option.forwards
        total += option.total
    work = Work(forwards, total, heaviest, heaviest_split)
    return unchunked_seconds(space, pipelines, microbatches, fill, slowest, work)


def chunked_seconds(space: Space, pipelines: int, microbatches: int, fill: Seconds, slowest: Seconds) -> Seconds:
    """Return `computed_seconds` of pipelines with a chain in interleaved chunks."""
    excess = space.heaviest(pipelines * microbatches) - 1.0
    return GAPS * (fill + microbatches * slowest - slowest) + excess * (fill - slowest) / 2


class Work(NamedTuple):
    """Seconds in all stages of some chains, or arrays of them: forwards, and all, of the mean microbatch; the heaviest
    sample's, with whole backwards and with split ones."""

    forwards: Any
    total: Any
    heaviest: Any
    heaviest_split: Any


def unchunked_seconds(
    space: Space, pipelines: int, microbatches: int, fill: Seconds, slowest: Seconds, work: Work
) -> Seconds:
    """Return `computed_seconds` of pipelines without interleaved chunks."""
    heavier = (space.heaviest(pipelines * microbatches) - 1.0) * (fill - slowest)
    steady = microbatches * slowest
    whole = fill + steady - slowest + heavier / 2
    if not (space.settings.splits_backward and np.all(work.heaviest)):
        return whole
    larger, smaller = (max, min) if isinstance(fill, float) else (np.maximum, np.minimum)  # the first for two floats
    late = 1.0 - work.heaviest_split / work.heaviest  # fraction of weight gradients
    share = work.forwards / work.total
    last = FILLING * share * fill + steady  # last stages wait for the first forward,
    first = (1.0 - late) * fill + (1.0 - share) * steady  # first stages for the first backward
    split = larger(last, first) + DELAY * heavier
    return whole - larger(0.0, whole - split) * smaller(1.0, 3 * late)


def bend_of(microbatches: int, fill: NDArray[np.float64], work: Work) -> NDArray[np.float64]:
    """Return the slowest stages from which on the last stages, not the first, decide `unchunked_seconds` with split
    backwards; 0 for chains that take no time."""
    forwards, total = microbatches * np.maximum(work.forwards, 1e-300), np.maximum(work.total, 1e-300)
    early = work.heaviest_split / np.maximum(work.heaviest, 1e-300)
    return np.asarray(fill * (early - FILLING * work.forwards / total) * total / forwards * (work.total > 0.0))


def bound(before: ParallelChains, language: Option, options: Sequence[Option], times: Sequence[ChainTimes]) -> float:
    """Return seconds that no schedule beats; the language model waits at least for the encoders' lightest sample."""
    ahead = max((one.lightest for one in before.options), default=0.0)
    ahead_split = max((one.lightest_split for one in before.options), default=0.0)
    whole = split = 0.0
    for option, own in zip(options, times, strict=True):
        waits = option is language
        whole = max(whole, own.stages + ahead * waits, own.synced + ahead_split * waits, own.path)
        split = max(split, own.stages_split + ahead_split * waits, own.path_split)
    return min(whole, split)


def _ring_bandwidth(cluster: Cluster, holders: int, tp: int) -> float:
    on_node = min(holders, max(1, cluster.reach // tp))
    bandwidth = cluster.inside.among(on_node).bandwidth
    if holders * tp > cluster.reach:
        bandwidth = min(bandwidth, on_node * cluster.between.bandwidth / cluster.gpus_per_node)
    return bandwidth
