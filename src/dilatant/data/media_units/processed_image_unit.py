"""Processed images: a pretrained model's own processor prepares them, and a blank image of the same size is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import MediaMarkup, MediaSize

SHAPE = ".shape"
"""Suffix of the keyword for the shapes of an item's array, int64 [items, 6], padded with -1. The arrays themselves are
flattened, so that items of different shapes can be concatenated."""
_MOST_DIMENSIONS = 6

Arrays = Mapping[str, NDArray]


class CountsTokens(Protocol):
    """Interface of functions that count the tokens of an item. They are hashable and picklable."""

    def __call__(self, item: Arrays) -> tuple[int, int]:
        """Return the number of tokens of the item in the encoder's blocks, and in the language model."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ProcessedImageUnit(ImageUnitBase):
    """Media unit of images prepared by a model's own processor; an item is everything that the processor returns. Its
    layout need not be known: a blank image of the same size has the same shapes and the same integers."""

    name: str
    placeholder_id: int
    processor: HuggingFaceImageProcessor
    count: CountsTokens
    marker: str = "<image>"
    written: MediaMarkup | None = None

    def encoder_tokens(self, size: MediaSize) -> int:
        return _counted(self.processor, self.count, size.height, size.width)[0]

    def merged_tokens(self, size: MediaSize) -> int:
        return _counted(self.processor, self.count, size.height, size.width)[1]

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        blank = _blank(self.processor, size.height, size.width)
        return {
            name: array
            for name, array in flatten(blank).items()
            if name.endswith(SHAPE) or is_layout(blank[name])
        }

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        item = self.processor(pixels)
        blank = _blank(self.processor, *pixels.shape[:2])
        if any(
            array.shape != blank[name].shape or (is_layout(array) and (array != blank[name]).any())
            for name, array in item.items()
        ):
            raise ValueError("its processor makes other shapes of it than of a blank image of its size")
        return flatten(item)


def is_layout(array: NDArray) -> bool:
    """Return True for an array of integers, which describes an item; floating-point arrays hold its content."""
    return not np.issubdtype(array.dtype, np.floating)


def flatten(item: Arrays) -> dict[str, EncoderInput]:
    """Return the arrays of an item, flattened to one dimension, and their shapes."""
    shapes = {name: [*each.shape, *[-1] * (_MOST_DIMENSIONS - each.ndim)] for name, each in item.items()}
    return {
        **{name: np.ravel(each) for name, each in item.items()},
        **{name + SHAPE: np.array([shape], np.int64) for name, shape in shapes.items()},
    }


@lru_cache(maxsize=4096)
def _counted(
    processor: HuggingFaceImageProcessor, count: CountsTokens, height: int, width: int
) -> tuple[int, int]:
    return count(_blank(processor, height, width))


@lru_cache(maxsize=16)
def _blank(processor: HuggingFaceImageProcessor, height: int, width: int) -> Arrays:
    return processor(np.full((height, width, processor.channels), 128, np.uint8))
