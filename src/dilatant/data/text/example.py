"""A sample as a reader sees it: what the model is given, and which of it the model learns to write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExampleSpan:
    """A run of tokens: text, or one media item of the encoder `unit`.

    carries_loss: the model learns to write these. picture: a small JPEG of an image. peaks: loudness of a sound in
    [0, 1], from its beginning to its end. text: of a media item, what it is called.
    """

    text: str
    tokens: int
    carries_loss: bool = False
    unit: str = ""
    picture: bytes = b""
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """name: where the sample was read from. why: what it is an example of. problem: why it cannot be shown, if so."""

    name: str
    why: str
    spans: tuple[ExampleSpan, ...] = ()
    problem: str = ""
