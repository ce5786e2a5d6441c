"""Samples held out of a source: chosen by a key, so that no other choice of data, ranks or machines moves any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.permutation import permute

_STREAM = (0x5EED, 1)
"""Of the permutation, apart from those that order training."""


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a source of some samples: those held out, or the rest. size: how many are held out (from 1 on), or
    which share (below 1); at least one either way. seed: which ones."""

    size: float
    seed: int
    held_out: bool

    def count(self, total: int) -> int:
        """Samples on this side, of a source of `total`. Raises UserError where nothing is left for the other."""
        away = round(total * self.size) if self.size < 1 else int(self.size)
        away = max(1, away)
        if away >= total:
            raise UserError(
                f"data.val_size {self.size:g} would hold out all of a data set of {total} samples; hold out less"
            )
        return away if self.held_out else total - away

    def numbers(self, total: int) -> NDArray[np.int64]:
        """Which ones, ascending: int64 [count]."""
        count = self.count(total)
        away = count if self.held_out else total - count
        places = permute(np.arange(total), total, self.seed, _STREAM)
        return np.flatnonzero((places < away) == self.held_out)
