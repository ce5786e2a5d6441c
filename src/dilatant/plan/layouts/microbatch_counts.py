"""The numbers of microbatches that a search gives so many pipelines: by samples, and by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilatant.plan.layouts.space import Space
from dilatant.plan.modes import Mode

MANY = 128
"""On more devices than this fewer plans are simulated than were asked for, but no fewer than a handful; and
microbatches by tokens are tried only where no number of samples divides the batch."""


def microbatch_counts(
    space: Space, mode: Mode, replicas: int, sizes: Sequence[int], microbatches: int | None
) -> Mapping[int, int | None]:
    """Microbatches of each of `replicas` pipelines → most tokens of the language model in one, None where they are cut
    by samples. sizes: samples in a microbatch; microbatches: the only number, if asked for."""
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
    """On many devices, of the numbers of pipelines with as many devices each the largest."""
    devices = space.cluster.num_devices
    return devices <= MANY or (divides_none and devices // replicas > devices // (replicas + 1))
