"""Keyed random numbers: the numbers of a sample depend on its key alone, not on its microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The layout of a microbatch's samples in the tensors of a stage. lengths: for each sample, its tokens in a row [1,
    tokens, ...] if `packed`, else its items in [items, ...]."""

    packed: bool
    lengths: tuple[int, ...]


class DoesNotFit(Exception):
    """Raised for a tensor whose shape does not show which part belongs to which sample."""


class Shards(Protocol):
    """The slice of hidden states that one tensor-parallel rank holds (see `sequence_parallel.TokenShards`)."""

    def is_share(self, shape: tuple[int, ...]) -> bool: ...
    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]: ...
    def own(self, whole: Tensor) -> Tensor: ...


class KeyedDraws:
    """Uniform random numbers for the tensors of one microbatch.

    seed: the run's. keys: one per sample, all different; the key of each item is derived from it. own: the tokens or
    items in the tensors; None for all. shards: recognises tensors that hold a tensor-parallel slice of them.
    """

    def __init__(
        self,
        seed: int,
        keys: Sequence[str],
        spread: SampleLayout,
        own: NDArray[np.int64] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._shards = shards
        self.packed = spread.packed
        self._seed = seed
        if spread.packed:
            self.segments = tuple(zip(keys, spread.lengths))
        else:
            self.segments = tuple(
                (f"{key} item {item}", 1) for key, items in zip(keys, spread.lengths) for item in range(items)
            )
            if own is not None:
                self.segments = tuple(self.segments[item] for item in own)
        self.total = sum(length for _, length in self.segments)
        # A rank without tokens of the row computes one dummy token.
        self._own = (
            torch.from_numpy(own if own.size else np.zeros(1, np.int64)) if spread.packed and own is not None else None
        )

    def uniform(self, place: str, shape: Sequence[int], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        """Return float32 numbers in [0, 1) of `shape`, and the shape of one token's or item's numbers. place: layer and
        index of the call in it. Raises DoesNotFit."""
        if self._shards is not None and self._shards.is_share(tuple(shape)):
            numbers, each = self._uniform(place, self._shards.whole(tuple(shape)), device)
            return self._shards.own(numbers), each
        return self._uniform(place, shape, device)

    def _uniform(self, place: str, shape: Sequence[int], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        tokens = self.total if self._own is None else len(self._own)
        if not self.packed:
            if not shape or shape[0] % self.total:
                raise DoesNotFit
            each = (shape[0] // self.total, *shape[1:])
        elif len(shape) >= 3 and shape[0] == 1 and shape[1] == tokens:
            each = tuple(shape[2:])
        elif shape and shape[0] == tokens:
            each = tuple(shape[1:])
        else:
            raise DoesNotFit
        numbers = torch.empty(self.total * prod(each), device=device)
        sizes = [length * prod(each) for _, length in self.segments]
        for (key, _), part in zip(self.segments, numbers.split(sizes)):
            # One generator per segment, so that a segment's numbers are independent of the other segments.
            generator = torch.Generator(part.device)
            generator.manual_seed(seed_of(self._seed, key, place))
            part.uniform_(generator=generator)
        if self._own is not None:
            numbers = numbers.view(self.total, -1)[to_device(self._own, device)]
        return numbers.view(*shape), each


def seed_of(seed: int, key: str, place: str) -> int:
    """Return a 64-bit seed for torch's generators: CUDA's Philox uses all bits, the CPU's generator the lower 32."""
    return int.from_bytes(blake2b(f"{seed}/{key}/{place}".encode(), digest_size=8).digest(), "little")


def draws_of(samples: Sequence[EncodedSample], step: int) -> tuple[str, ...]:
    """Return the random-number keys of a global batch's samples: their draw numbers or, if no sample has one, the step
    and the sample's position in it. Raises UserError if two samples have the same draw."""
    if not any(sample.draw for sample in samples):
        return tuple(f"step {step} place {place}" for place in range(len(samples)))
    draws = [sample.draw for sample in samples]
    if len(set(draws)) != len(draws):
        twice = next(draw for draw in draws if draws.count(draw) > 1)
        names = ", ".join(repr(sample.id) for sample in samples if sample.draw == twice)
        raise UserError(
            f"samples {names} of one batch have the same draw, {twice}, and would drop the same numbers; number all "
            "samples in the order of training, or none"
        )
    return tuple(f"draw {draw}" for draw in draws)
