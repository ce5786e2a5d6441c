"""Frame durations of animations that Pillow reads, from blocks and chunks of the file, without decoding if possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from dilatant.data.media.image_file import png_chunks, read_at

ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF")
"""Formats of Pillow that may be animated."""
MAX_FRAMES = 1_000_000
"""Frames of a clip; a header that claims more is refused."""
UNSAID = 100
"""Milliseconds that viewers show a frame whose file gives no duration or zero."""


def first_frame(image: Any) -> int:
    """Return the index of the first frame: an APNG may begin with a still picture for viewers without animation."""
    return int(bool(image.info.get("default_image")))


def milliseconds(image: Any, stream: BinaryIO) -> list[float]:
    """Return the duration in milliseconds of each frame of an opened animation; at most `MAX_FRAMES` + 1 values. The
    stream position is restored."""
    count, place = min(getattr(image, "n_frames", 1) - first_frame(image), MAX_FRAMES + 1), stream.tell()
    read = {"GIF": _gif, "PNG": _png, "WEBP": _webp}.get(image.format)
    said = _by_decoding(image, count) if read is None else read(stream)
    waits = [wait or UNSAID for _, wait in zip(range(count), said)]
    stream.seek(place)
    return waits + [UNSAID] * (count - len(waits))


def _gif(stream: BinaryIO) -> Iterator[float]:
    def colours(flags: int) -> int:
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    at, wait = 13 + colours(read_at(stream, 10, 1)[0]), 0
    while len(head := read_at(stream, at, 10)) == 10 and head[:1] in (b"!", b","):
        at += 2 if head[:1] == b"!" else 11 + colours(head[9])
        if head[:2] == b"!\xf9":
            wait = 10 * int.from_bytes(head[4:6], "little")
        elif head[:1] == b",":
            yield wait
            wait = 0
        while (length := read_at(stream, at, 1)) not in (b"", b"\0"):
            at += 1 + length[0]
        at += 1


def _png(stream: BinaryIO) -> Iterator[float]:
    for name, at, _ in png_chunks(stream):
        if name == b"fcTL":
            numbers = read_at(stream, at + 28, 4)
            yield 1000 * int.from_bytes(numbers[:2], "big") / (int.from_bytes(numbers[2:], "big") or 100)


def _webp(stream: BinaryIO) -> Iterator[float]:
    at = 12
    while len(head := read_at(stream, at, 23)) == 23:
        if head[:4] == b"ANMF":
            yield int.from_bytes(head[20:23], "little")
        length = int.from_bytes(head[4:8], "little")
        at += 8 + length + length % 2


def _by_decoding(image: Any, count: int) -> Iterator[float]:
    for frame in range(count if count > 1 else 0):
        image.seek(frame)
        image.load()
        yield image.info.get("duration")
