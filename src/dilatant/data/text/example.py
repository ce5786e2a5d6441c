"""Examples for reports: the model's input of a sample, and the part that the model learns to write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExampleSpan:
    """A run of tokens: text, or one media item of the encoder `unit`.

    carries_loss: the model learns to write these tokens. picture: a small JPEG of an image. peaks: loudness of a sound
    over time, in [0, 1]. text: for a media item, its name.
    """

    text: str
    tokens: int
    carries_loss: bool = False
    unit: str = ""
    picture: bytes = b""
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """An example for reports. name: place of the sample. why: its purpose. problem: why it cannot be shown, if so."""

    name: str
    why: str
    spans: tuple[ExampleSpan, ...] = ()
    problem: str = ""
