"""Exponential moving averages of trained weights: part of the optimizer's state, shared and stored as that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

AVERAGE = "ema"
"""What the average of a weight is called beside its moments."""


class Averages:
    """Of `masters`, by their keys, beginning with what they are. decay: the share that an update keeps; in the first
    ones less, `(1 + n) / (10 + n)` after `n` updates, so that the weights of the start are soon forgotten."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.tensors = {key: master.detach().clone() for key, master in masters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, masters: Mapping[str, Tensor], updates: int) -> None:
        """After update number `updates`, from 1 on."""
        if self.tensors:
            share = 1.0 - min(self._decay, (1 + updates) / (10 + updates))
            torch._foreach_lerp_(
                [*self.tensors.values()], [masters[key].detach() for key in self.tensors], share
            )

    @torch.no_grad()
    def begin(self, masters: Mapping[str, Tensor], keys: set[str]) -> None:
        """Begin anew with some of the weights."""
        for key in keys:
            self.tensors[key].copy_(masters[key])

    @contextmanager
    def in_place_of(self, masters: Mapping[str, Tensor]) -> Iterator[None]:
        """The masters are the averages meanwhile."""
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
