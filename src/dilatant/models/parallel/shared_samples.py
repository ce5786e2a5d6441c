"""Context parallelism of packing encoders: ranks run whole samples, assigned by sizes alone, so that no rank decodes
media of another rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.data.sample import EncodedSample
from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.stage import Stage, StepData


class SampleParallel(Stage):
    """Mixin for a stage or unit: all items of a sample stay on one rank, and ranks get about equally many tokens."""

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return SampleLayout(True, tuple(data.samples[sample].sizes.get(self.unit, 0) for sample in samples))

    def items(self, sizes: Mapping[str, int]) -> int:
        return int(sizes.get(self.unit, 0) > 0)

    def element_of_row(self, other: str, sample: EncodedSample, rows: int) -> NDArray[np.int64]:
        return np.zeros(rows, np.int64)

    def item_owners(self, sizes: Sequence[Mapping[str, int]], size: int) -> list[NDArray[np.integer]]:
        return share_by_size([each.get(self.unit, 0) for each in sizes], size)

    def owners(self, data: StepData, samples: tuple[int, ...], size: int, groups: int = 1) -> list[NDArray[np.integer]]:
        return self.item_owners([data.samples[sample].sizes for sample in samples], size)

    def own(self, data: StepData, samples: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return the indices of the tokens that this rank runs; None for all of them."""
        if self.context.size == 1:
            return None
        mine = set(self.chosen(data, samples))
        lengths = [data.samples[sample].sizes.get(self.unit, 0) for sample in samples]
        return np.flatnonzero(np.repeat([sample in mine for sample in samples], lengths))

    def chosen(self, data: StepData, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Return the samples that this rank runs, except samples without items of this unit."""
        owners = self.owners(data, samples, self.context.size)
        return tuple(
            sample for sample, of_items in zip(samples, owners, strict=True) if (of_items == self.context.index).any()
        )


def share_by_size(tokens: Sequence[int], size: int) -> list[NDArray[np.integer]]:
    """Return the rank (of `size`) of each sample: int64 [1], or [0] for a sample without tokens. Longest first, each to
    the least loaded rank (Graham 1969)."""
    loads = [0] * size
    found: list[NDArray[np.integer]] = [np.empty(0, np.int64)] * len(tokens)
    for number in sorted(range(len(tokens)), key=lambda number: (-tokens[number], number)):
        if tokens[number]:
            rank = loads.index(min(loads))
            loads[rank] += tokens[number]
            found[number] = np.array([rank], np.int64)
    return found
