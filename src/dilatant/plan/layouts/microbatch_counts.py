"""Microbatch counts that a search tries for a number of pipelines, by samples or tokens per microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilatant.plan.layouts.space import Space
from dilatant.plan.modes import Mode

LARGE_CLUSTER = 128
"""Number of devices above which the search does less.

It simulates fewer plans than requested, but at least a handful, and cuts microbatches by tokens only where no number of
samples divides the batch.
"""


def microbatch_counts(
    space: Space, mode: Mode, replicas: int, sizes: Sequence[int], microbatches: int | None
) -> Mapping[int, int | None]:
    """Map microbatches per pipeline to the maximum language-model tokens in one, None for microbatches cut by samples.
    sizes: samples in a microbatch; microbatches: the only number of microbatches to try, if given."""
    counts: dict[int, int | None] = {}
    for size in sizes:
        count, rest = divmod(space.global_batch, replicas * size)
        if rest == 0 and microbatches in (None, count):
            counts[count] = None
    if mode is Mode.BEST and microbatches is None and _is_tried_by_tokens(space, replicas, not counts):
        by_tokens = {space.microbatches_of(most, replicas): most for most in space.row_tokens}
        counts.update((count, most) for count, most in by_tokens.items() if count and count not in counts)
    return counts


def _is_tried_by_tokens(space: Space, replicas: int, divides_none: bool) -> bool:
    """Return True if token budgets are tried for this number of pipelines.

    On many devices this requires that no size divides the batch, and the most pipelines of this size in devices.
    """
    devices = space.cluster.num_devices
    return devices <= LARGE_CLUSTER or (divides_none and devices // replicas > devices // (replicas + 1))
