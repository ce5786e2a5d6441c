"""Media streams: open images, sounds and clips from files, slices of files or memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

from dilatant.config.files.own_files import FETCH_LFS, LFS_POINTER
from dilatant.config.files.remote_files import open_data
from dilatant.data.errors import MediaError, may_pass
from dilatant.data.sample import FileSlice, Frames, Media

REPLACE = "replace the file or remove the sample"
"""Remedy for a file that cannot be used."""


@contextmanager
def open_media(media: Media) -> Iterator[BinaryIO]:
    """Open the encoded bytes as a stream. Raises MediaError for a missing file, or one that is no regular file."""
    source = media.source
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    if isinstance(source, Frames):
        raise MediaError(f"{media.kind} {media.name!r} is a list of frames, not a file", REPLACE)
    path = source.path if isinstance(source, FileSlice) else source
    end = source.offset + source.length if isinstance(source, FileSlice) else None
    try:
        stream = open_data(path, end)
        is_pointer = path is source and stream.read(len(LFS_POINTER)) == LFS_POINTER
        stream.seek(0)
    except FileNotFoundError:
        raise MediaError(
            f"{media.kind} {str(path)!r} does not exist",
            "put it there, or correct the path (relative to the data file)",
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"{media.kind} {str(path)!r} cannot be opened: {reason}"
        raise MediaError(problem, REPLACE, may_pass(error)) from None
    with stream:
        if is_pointer:
            raise MediaError(f"{media.kind} {media.name!r} {FETCH_LFS}")
        if isinstance(source, FileSlice):
            yield io.BufferedReader(_Slice(stream, source.offset, source.length))
        else:
            yield stream


@contextmanager
def as_media_error(media: Media, problem: str) -> Iterator[None]:
    """Context manager that converts every error to a MediaError: decoders raise any exception on unexpected bytes."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        reason = getattr(error, "error_string", error)  # soundfile's text would name our stream object
        raise MediaError(f"{media.kind} {media.name!r} {problem}: {reason}", REPLACE, may_pass(error)) from None


class _Slice(io.RawIOBase):
    """File-like view of a slice of a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._position))
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


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
