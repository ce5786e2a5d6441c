"""Exponential moving averages (EMA) of trained weights, sharded and stored like the rest of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

AVERAGE = "ema"
"""Key of a weight's average, beside those of its moments."""


class Averages:
    """EMA of `masters` by key, starting from their values. decay: the share that an update keeps, at most `(1 + n) /
    (10 + n)` after `n` updates, so that the initial weights are soon forgotten."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.tensors = {key: master.detach().clone() for key, master in masters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor], updates: int) -> None:
        """Update the averages after optimizer update number `updates`, counted from 1."""
        if self.tensors:
            share = 1.0 - min(self._decay, (1 + updates) / (10 + updates))
            torch._foreach_lerp_(
                [*self.tensors.values()], [masters[key].detach() for key in self.tensors], share
            )

    @torch.no_grad()
    def begin(self, masters: Mapping[str, Tensor], keys: set[str]) -> None:
        """Reset the averages of `keys` to the masters."""
        for key in keys:
            self.tensors[key].copy_(masters[key])

    @contextmanager
    def in_place_of(self, masters: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the masters by the averages inside this context."""
        with torch.no_grad():
            trained = {key: masters[key].detach().clone() for key in self.tensors}
            for key, average in self.tensors.items():
                masters[key].copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, weight in trained.items():
                    masters[key].copy_(weight)
