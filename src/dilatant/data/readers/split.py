"""Held-out split: samples of a source chosen by a seed, independent of other data, ranks and machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.permutation import permute

_STREAM = (0x5EED, 1)
"""Stream of the permutation, distinct from those that order training."""


@dataclass(frozen=True, slots=True)
class HeldOutSplit:
    """One side of a source: the held-out samples or the rest. size: number of held-out samples (1 or more) or their
    fraction (below 1); at least one sample in either case. seed: selects the samples."""

    size: float
    seed: int
    held_out: bool

    def count(self, total: int) -> int:
        """Count this side's samples in a source of `total` samples. Raises UserError if the other side gets none."""
        away = round(total * self.size) if self.size < 1 else int(self.size)
        away = max(1, away)
        if away >= total:
            raise UserError(
                f"data.val_size {self.size:g} would hold out all of a data set of {total} samples; hold out less"
            )
        return away if self.held_out else total - away

    def numbers(self, total: int) -> NDArray[np.int64]:
        """Return the numbers of the samples on this side, ascending: int64 [count]."""
        count = self.count(total)
        away = count if self.held_out else total - count
        places = permute(np.arange(total), total, self.seed, _STREAM)
        return np.flatnonzero((places < away) == self.held_out)
