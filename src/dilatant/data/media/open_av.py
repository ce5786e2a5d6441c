"""PyAV access to the streams of video and sound files (`pip install 'dilatant[video]'`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

from dilatant.data.errors import MediaError
from dilatant.data.media.open_media import REPLACE
from dilatant.data.sample import Media

_NEEDS = {
    "video": "needs PyAV",
    "audio": "is no whole WAV, FLAC, OGG or AIFF, and no MP3 that counts its frames; others need PyAV",
}


@contextmanager
def open_av(stream: BinaryIO, media: Media, kind: Literal["video", "audio"]) -> Iterator[Any]:
    """Open the first stream of a kind. Raises MediaError without such a stream or PyAV, and what PyAV raises."""
    try:
        import av
    except ImportError:
        raise MediaError(
            f"{media.kind} {media.name!r} {_NEEDS[kind]}", "install it: pip install 'dilatant[video]'"
        ) from None
    # Playlists may name other files and addresses; none is opened.
    options = {"protocol_whitelist": "none"}
    with av.open(stream, metadata_errors="ignore", options=options) as container:
        streams = getattr(container.streams, kind)
        if not streams:
            raise MediaError(
                f"{media.kind} {media.name!r} holds no {'pictures' if kind == 'video' else 'sound'}", REPLACE
            )
        yield streams[0]
