"""Decoding cost: processor seconds per sample, measured here, and how many processors keep up with a plan."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from dilatant.config.errors import UserError
from dilatant.data.order.blend import Blend
from dilatant.data.text.encoding import TOKENS
from dilatant.data.workers.ordered_map import WorkerError
from dilatant.data.workers.pool import SampleRequest, make
from dilatant.planning.assemble import Samples

MEASURED = 16
"""Most samples that are decoded; the first one, with which libraries are loaded, does not count."""
LONGEST_SECONDS = 2.0
"""Seconds spent on measuring; one sample is measured at least."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost of decoding a sample with all its parts. seconds: of one processor, the mean of `samples`."""

    seconds: float
    samples: int

    def processors(self, samples_per_second: float) -> int:
        """Return how many processors must decode for a trainer that takes samples at this rate: at least one."""
        return max(1, math.ceil(self.seconds * samples_per_second))


def decode_cost(samples: Samples, seed: int, batch: int) -> DecodeCost | None:
    """Measure the samples that training takes first; None if none of them can be decoded, or if they are streamed. Time
    of a disk or a file server is not included."""
    blend, encoding = samples.train, samples.encoding
    if not isinstance(blend, Blend):
        return None
    sampler = blend.sampler(seed, batch)
    indices, _ = sampler.take(sampler.start(), min(MEASURED + 1, len(blend)))
    parts, datasets = frozenset([TOKENS, *encoding.unit_names[1:]]), {"train": blend}
    seconds: list[float] = []
    began, is_warm = time.perf_counter(), False
    for draw, index in enumerate(indices.tolist()):
        if seconds and time.perf_counter() - began > LONGEST_SECONDS:
            break
        before = time.thread_time()
        try:
            make(SampleRequest(draw, index, parts), datasets, encoding)
        except (UserError, WorkerError):
            continue
        if is_warm or len(indices) == 1:
            seconds.append(time.thread_time() - before)
        is_warm = True
    return DecodeCost(sum(seconds) / len(seconds), len(seconds)) if seconds else None
