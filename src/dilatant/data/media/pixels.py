"""Pixels: images as uint8 values with their normalisation, which is applied where an encoder uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """Uint8 images and their normalisation. values: [items, channels, height, width]. An encoder gets (values * rescale
    - mean) / std in float32 (4x the bytes), each step rounded; one mean and std per channel or one for all."""

    values: NDArray[np.uint8]
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def normalization(self) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """The tuple (rescale, mean, std)."""
        return self.rescale, self.mean, self.std

    def normalized(self) -> NDArray[np.float32]:
        """Return the encoder's input: float32 [items, channels, height, width]."""
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (self.mean, self.std))
        values: NDArray[np.float32] = self.values.astype(np.float32)
        values *= np.float32(self.rescale)
        values -= mean
        values /= std
        return values


EncoderInput = NDArray | Pixels
"""An input of an encoder; the first dimension is items."""


def concatenate_inputs(inputs: Sequence[EncoderInput]) -> EncoderInput:
    """Concatenate inputs along items; images stay uint8 if all have the same normalisation."""
    if len(inputs) == 1:
        return inputs[0]
    alike = {each.normalization if isinstance(each, Pixels) else None for each in inputs}
    if len(alike) == 1 and None not in alike:
        first, *_ = pixels = [each for each in inputs if isinstance(each, Pixels)]
        return Pixels(np.concatenate([each.values for each in pixels]), *first.normalization)
    return np.concatenate([as_array(each) for each in inputs])


def as_array(value: EncoderInput) -> NDArray:
    """Return the values that an encoder gets."""
    return value.normalized() if isinstance(value, Pixels) else value
