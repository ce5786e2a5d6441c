"""Frame texts: what each model family writes around the frames of a clip, which are images in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media_units.frame_choice import moments
from dilatant.data.sample import MediaSize

FrameTexts = Callable[[MediaSize, NDArray[np.int64]], list[tuple[str, str]]]
"""Function of a clip and its selected frames: the texts before and after each frame."""


def counted(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return InternVL's texts: one numbered line per frame."""
    count = len(frames)
    return [(f"Frame{number}: ", "\n" if number < count else "") for number in range(1, count + 1)]


def timed(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return Gemma 4's texts: minutes and seconds before each frame."""
    count = len(frames)
    return [
        (f"{_clock(moment)} ", " " if number < count else "")
        for number, moment in enumerate(moments(size, frames).tolist(), 1)
    ]


def introduced(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return SmolVLM's texts: number of frames and duration of the clip, then minutes and seconds before each frame."""
    at = moments(size, frames).tolist()
    length = timedelta(seconds=int(size.seconds or at[-1]))
    head = f"You are provided the following series of {in_words(len(at))} frames from a {length} [H:MM:SS] video.\n"
    texts = [(f"\nFrame from {_clock(moment)}:", "") for moment in at]
    (first, _), (last, _) = texts[0], texts[-1]
    texts[0] = (head + first, "")
    texts[-1] = (texts[-1][0] if len(texts) == 1 else last, "\n\n")
    return texts


FRAME_TEXTS: Mapping[str, FrameTexts] = {"counted": counted, "timed": timed, "introduced": introduced}
"""Frame texts by the name that families use for them."""

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """Write a number from 0 to thousands in English: 121 is "one hundred and twenty-one"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    many, rest = divmod(number, 100 if number < 1000 else 1000)
    joint = " and " if rest < 100 else ", "
    unit = "hundred" if number < 1000 else "thousand"
    return f"{in_words(many)} {unit}" + (joint + in_words(rest) if rest else "")


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
