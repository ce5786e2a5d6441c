"""Processed media: a pretrained model's own processor prepares them, and a blank item of the same size is counted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.processors import HuggingFaceImageProcessor, HuggingFaceSoundProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase, SoundUnitBase
from dilatant.data.sample import Media, MediaMarkup, MediaSize, MediaUnit

SHAPE = ".shape"
"""Suffix of the keyword for the shapes of an item's array, int64 [items, 6], padded with -1. The arrays themselves are
flattened, so that items of different shapes can be concatenated."""
_MOST_DIMENSIONS = 6
IS_CLIP = "is_clip"
"""Keyword for the kind of each item of an encoder that reads clips: 1 for a clip, whose arrays have "video" in their
names, and 0 for an image."""

Arrays = Mapping[str, NDArray]


class CountsTokens(Protocol):
    """Interface of functions that count the tokens of an item. They are hashable and picklable."""

    def __call__(self, item: Arrays) -> tuple[int, int]:
        """Return the number of tokens of the item in the encoder's blocks, and in the language model."""

    def __hash__(self) -> int: ...


class ProcessedUnit(MediaUnit):
    """Base class of media units whose items are prepared by a model's own processor; an item is everything that the
    processor returns. Its layout need not be known: a blank item of the same size has the same shapes and the same
    integers."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def count(self) -> CountsTokens: ...

    @abstractmethod
    def decoded_shape(self, size: MediaSize) -> tuple[int, ...]:
        """Return the shape of a decoded item of this size."""

    def counts(self, size: MediaSize) -> tuple[int, int]:
        """Return the number of tokens of an item in the encoder's blocks, and in the language model."""
        return _counted(self.processor, self.count, self.decoded_shape(size))

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.counts(size)[0]

    def merged_tokens(self, size: MediaSize) -> int:
        return self.counts(size)[1]

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        blank = _blank(self.processor, self.decoded_shape(size))
        flat = self.flat(blank).items()
        return {name: array for name, array in flat if name not in blank or is_layout(blank[name])}

    def flat(self, item: Arrays) -> dict[str, EncoderInput]:
        """Return the inputs of a processed item."""
        return flatten(item)

    def see(self, decoded: NDArray) -> dict[str, EncoderInput]:
        """Return the inputs of a decoded item: uint8 [height, width, channels], or float32 [samples]."""
        item = self.processor(decoded)
        blank = _blank(self.processor, decoded.shape)
        if any(
            array.shape != blank[name].shape or (is_layout(array) and (array != blank[name]).any())
            for name, array in item.items()
        ):
            raise ValueError("its processor makes other shapes of it than of a blank item of its size")
        return self.flat(item)


@dataclass(frozen=True, slots=True)
class ProcessedImageUnit(ProcessedUnit, ImageUnitBase):
    """Media unit of images that a model's own processor prepares. beside_clips: the encoder reads clips, too."""

    processor: HuggingFaceImageProcessor
    count: CountsTokens
    marker: str = "<image>"
    written: MediaMarkup | None = None
    beside_clips: bool = False

    def decoded_shape(self, size: MediaSize) -> tuple[int, ...]:
        return size.height, size.width, self.processor.channels

    def counts(self, size: MediaSize) -> tuple[int, int]:
        rule = _rules(self.processor, self.count)
        if rule is None:
            return ProcessedUnit.counts(self, size)
        measure = self.processor.measure(size.height, size.width)
        encoded, merged = (int(slope * measure) + constant for slope, constant in rule)
        return encoded, merged

    def flat(self, item: Arrays) -> dict[str, EncoderInput]:
        return flatten(item) | ({IS_CLIP: np.zeros(1, np.int64)} if self.beside_clips else {})


@dataclass(frozen=True, slots=True)
class ProcessedSoundUnit(ProcessedUnit, SoundUnitBase):
    """Media unit of sounds that a model's own processor prepares."""

    processor: HuggingFaceSoundProcessor
    count: CountsTokens
    marker: str = "<audio>"
    written: MediaMarkup | None = None

    def decoded_shape(self, size: MediaSize) -> tuple[int, ...]:
        return (max(1, round(size.seconds * self.processor.sampling_rate)),)

    def encoder_tokens(self, size: MediaSize) -> int:
        if not _hears_the_end(self.processor, *self.decoded_shape(size)):
            raise ValueError(f"{size.seconds:.2f} s is longer than its processor takes, which drops the end; cut it")
        return ProcessedUnit.encoder_tokens(self, size)

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        return self.see(self.decode(media, *self.decoded_shape(size)))


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


_PROBES = ((224, 224), (97, 331), (480, 640), (1080, 720), (60, 45), (512, 1408))
"""Heights and widths of images that show whether a rule holds for all sizes."""


_Rule = tuple[Fraction, int]
"""A number of tokens as a multiple of `HuggingFaceImageProcessor.measure`, and a constant; one of both is 0."""


@lru_cache(maxsize=16)
def _rules(processor: HuggingFaceImageProcessor, count: CountsTokens) -> tuple[_Rule, _Rule] | None:
    """Return how the tokens in the encoder's blocks, and in the language model, follow from an image's size. None if
    blank images have other numbers of tokens, so that each size must be tried."""
    measures = [processor.measure(height, width) for height, width in _PROBES]
    tokens = [count(_blank(processor, (height, width, processor.channels))) for height, width in _PROBES]
    encoded, merged = (_rule(measures, counts) for counts in zip(*tokens, strict=True))
    return None if encoded is None or merged is None else (encoded, merged)


def _rule(measures: Sequence[int], counts: Sequence[int]) -> _Rule | None:
    if len({*counts}) == 1:
        return Fraction(0), counts[0]
    slopes = {Fraction(tokens, measure) if measure else None for measure, tokens in zip(measures, counts, strict=True)}
    slope = slopes.pop()
    return None if slopes or slope is None else (slope, 0)


@lru_cache(maxsize=4096)
def _counted(processor: Any, count: CountsTokens, shape: tuple[int, ...]) -> tuple[int, int]:
    return count(_blank(processor, shape))


@lru_cache(maxsize=4096)
def _hears_the_end(processor: HuggingFaceSoundProcessor, samples: int) -> bool:
    """Return True if the last tenth of a second changes what a processor makes of a sound."""
    silence = np.zeros(samples, np.float32)
    ends = silence.copy()
    ends[-processor.sampling_rate // 10 :] = 1
    quiet, loud = processor(silence), processor(ends)
    return any(not np.array_equal(quiet[name], loud[name]) for name in quiet)


@lru_cache(maxsize=16)
def _blank(processor: Any, shape: tuple[int, ...]) -> Arrays:
    return processor(np.full(shape, 128, np.uint8) if len(shape) > 1 else np.zeros(shape, np.float32))
