"""Wire protocol between a rank and a data worker: MessagePack frames, and the layout of a sample's arrays.

A rank sends Hello (with the descriptor of its arena), then Ask. A worker answers Hello with Greeting, and each Ask with
Encoded, Refused or Failed. The worker notes its current ticket in the arena, where the rank can read it after the
worker's death. Only the undecoded samples of streams are pickled, and only their few classes are unpickled.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import tempfile
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterator
from pathlib import PosixPath
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from dilatant.comm.wire.link import FrameError, framed
from dilatant.config.files.remote_files import RemotePath
from dilatant.data.media.pixels import EncoderInput, Pixels
from dilatant.data.sample import EncodedSample, FileSlice, Frames, Media, Sample, Turn

ALIGNMENT = 64
"""Alignment of every slot in bytes: one cache line."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """An allocator in `nbytes` of shared memory, of which only written pages use RAM. Others map it by descriptor `fd`.

    The first `reserved` bytes belong to no slot; a slot is placed in the first gap that fits. Not thread-safe.
    """

    def __init__(self, nbytes: int, reserved: int = 0) -> None:
        self.nbytes = max(aligned(nbytes), aligned(reserved), mmap.PAGESIZE)
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self._free = [(aligned(reserved), self.nbytes)]  # (start, end), in order, never touching
        self._taken: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new slot, or None if no gap is long enough."""
        wanted = max(aligned(nbytes), ALIGNMENT)
        for number, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                self._free[number : number + 1] = [(start + wanted, end)] if end - start > wanted else []
                self._taken[start] = start + wanted
                return start
        return None

    def release(self, offset: int) -> None:
        """Free a slot. Raises KeyError if no slot starts at `offset`."""
        start, end = offset, self._taken.pop(offset)
        at = bisect_right(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of a byte range; the caller must release the view before `close`."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap the memory and close its descriptor. Idempotent."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dilatant-samples")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


MAX_FRAME_BYTES = 1 << 31
MAX_ASK_BYTES = 1 << 20
IDS, LABELS, BRANCH = "ids", "labels", "branch"
NOTE_BYTES = 1024
_COPY_BYTES = NOTE_BYTES // 2
_CHECKSUM = struct.Struct("<I")
_NOTE = struct.Struct("<QqdH")
"""Number of the note, ticket, since, bytes of the name that follows."""
_READ_TRIES = 8


Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Non-negative integer that fits an address and a note's field."""


class PoolHello(Struct, tag="hello"):
    """First message of a rank. note: offset in the arena of the worker's note."""

    arena_bytes: Count
    note: Count


class PoolAsk(Struct, tag="ask"):
    """Request for a sample. offset, space: the arena slot for the answer's arrays; they come inside the message if too
    large. packed: bytes of the slot in which the undecoded sample stands; 0 to read it by index."""

    ticket: Count
    dataset: str
    index: Count
    draw: int
    parts: list[str]
    offset: int
    space: int
    packed: Count = 0


class Death(Struct, array_like=True):
    """Cause of a worker's death. is_slow: it exceeded the time limit of a sample."""

    pid: int
    how: str
    is_slow: bool


class Greeting(Struct, tag="greeting"):
    """Answer to Hello. deaths: of the former workers in the same place, most recent last."""

    pid: int
    decode_seconds: float
    deaths: list[Death]


class ArrayPlace(Struct, array_like=True):
    """Location of an array in the answer's bytes. unit: "" for ids, labels and branch. normalization: see `Pixels`."""

    unit: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    normalization: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None


class Encoded(Struct, tag="encoded"):
    """An encoded sample. nbytes: of all arrays. seconds: see `EncodedSample.made_seconds`. inline: the arrays' bytes if
    they are not in the slot."""

    ticket: int
    sample: str
    sizes: dict[str, int]
    places: list[ArrayPlace]
    nbytes: int
    seconds: float = 0.0
    inline: bytes | None = None


class PoolRefused(Struct, tag="refused"):
    """A bad sample; sample and remedy as in SampleError, or sample "" for another UserError."""

    ticket: int
    problem: str
    sample: str = ""
    remedy: str = ""


class Failed(Struct, tag="failed"):
    """A failure other than a bad sample. problem: message, or stack trace if unexpected. is_withheld: no file could be
    read."""

    ticket: int
    problem: str
    is_withheld: bool = False


ToWorker = PoolHello | PoolAsk
ToRank = Greeting | Encoded | PoolRefused | Failed

to_worker = msgspec.msgpack.Decoder(ToWorker)
to_rank = msgspec.msgpack.Decoder(ToRank)
encoder = msgspec.msgpack.Encoder()


def to_frame(message: Struct) -> bytes:
    """Return the message with its length prefix. Raises FrameError if it is too large."""
    return framed(encoder.encode(message), MAX_FRAME_BYTES)


class _SampleUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        for known in (Sample, Turn, Media, FileSlice, Frames, PosixPath, RemotePath):
            if (module, name) == (known.__module__, known.__qualname__):
                return known
        raise FrameError(f"{module}.{name} is no part of an undecoded sample")


def pack_undecoded(sample: Sample) -> bytes:
    return pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)


def unpack_undecoded(packed: bytes) -> Sample:
    """Return the sample of `pack_undecoded`. Raises FrameError for any other content."""
    try:
        sample = _SampleUnpickler(io.BytesIO(packed)).load()
    except Exception as error:  # the unpickler raises anything for bytes that are not a pickle
        raise FrameError(f"what should be a sample cannot be read: {error}") from None
    if not isinstance(sample, Sample):
        raise FrameError("what should be a sample is none")
    return sample


class Note(NamedTuple):
    """The request that a worker is making: ticket (-1 for another rank's), its start by `time.monotonic`, and the
    sample's name once known."""

    ticket: int
    since: float
    sample: str


def write_note(buffer: memoryview, ticket: int, since: float, sample: str = "") -> None:
    """Write a note into `buffer` of NOTE_BYTES, which holds two copies. The older copy is replaced, so that the other
    copy stays intact if the writer is interrupted or killed."""
    number = 1 + max((number for number, _ in _copies(buffer)), default=0)
    name = sample.encode("utf-8", "replace")[: _COPY_BYTES - _CHECKSUM.size - _NOTE.size]
    body = _NOTE.pack(number, ticket, since, len(name)) + name
    copy = _CHECKSUM.pack(zlib.crc32(body)) + body
    start = number % 2 * _COPY_BYTES
    buffer[start : start + len(copy)] = copy


def read_note(buffer: memoryview) -> Note | None:
    """Return the newest note, or None if none was written yet or the writer overtook every read. No later call returns
    an older note.

    May run while another process is in `write_note`. If that process is killed there, the previous note is returned.
    """
    before = b""
    for _ in range(_READ_TRIES):
        now = bytes(buffer[:NOTE_BYTES])
        copies = _copies(now)
        # One whole copy may be older than what the other held: it is the newest only if nothing was written meanwhile.
        if len(copies) == 2 or (copies and now == before):
            return max(copies)[1]
        before = now
    return None


def _copies(now: bytes | memoryview) -> list[tuple[int, Note]]:
    """Return the copies of a note whose checksums are right, with their numbers."""
    whole = []
    for copy in (now[:_COPY_BYTES], now[_COPY_BYTES:NOTE_BYTES]):
        body = copy[_CHECKSUM.size :]
        number, ticket, since, length = _NOTE.unpack_from(body)
        end = _NOTE.size + length
        if _CHECKSUM.unpack_from(copy) == (zlib.crc32(body[:end]),):
            whole.append((number, Note(ticket, since, bytes(body[_NOTE.size : end]).decode("utf-8", "replace"))))
    return whole


def lay_out(sample: EncodedSample) -> tuple[list[ArrayPlace], list[np.ndarray], int]:
    """Return the places of a sample's arrays, the arrays, and their total bytes. Raises TypeError for object arrays."""
    places: list[ArrayPlace] = []
    arrays: list[np.ndarray] = []
    end = 0
    for unit, name, value in _values(sample):
        given = value.values if isinstance(value, Pixels) else value
        array = np.ascontiguousarray(given).reshape(np.shape(given))  # a scalar's shape became [1]
        if array.dtype.hasobject:
            raise TypeError(f"{unit} {name} is an array of Python objects")
        normalization = value.normalization if isinstance(value, Pixels) else None
        places.append(ArrayPlace(unit, name, array.dtype.str, array.shape, end, normalization))
        arrays.append(array)
        end += aligned(array.nbytes)
    return places, arrays, end


def _values(sample: EncodedSample) -> Iterator[tuple[str, str, EncoderInput]]:
    yield "", IDS, sample.input_ids
    yield "", LABELS, sample.labels
    if sample.branch is not None:
        yield "", BRANCH, np.array(sample.branch)
    for unit, inputs in sample.media.items():
        for name, value in inputs.items():
            yield unit, name, value


def write(buffer: memoryview, places: list[ArrayPlace], arrays: list[np.ndarray]) -> None:
    for place, array in zip(places, arrays, strict=True):
        if array.nbytes:
            into = np.frombuffer(buffer, np.uint8, array.nbytes, place.offset)
            into[:] = array.reshape(-1).view(np.uint8)


def pack_arrays(answer: Encoded, arrays: list[np.ndarray]) -> bytes:
    """Return the bytes of a sample's arrays, laid out by its places."""
    held = bytearray(answer.nbytes)
    write(memoryview(held), answer.places, arrays)
    return bytes(held)


def unpack_sample(answer: Encoded, draw: int, buffer: memoryview) -> EncodedSample:
    """Return the sample whose arrays are in `buffer`, copied. Raises FrameError if they are not valid."""
    if answer.nbytes > len(buffer):
        raise FrameError(f"{answer.sample} takes {answer.nbytes} bytes of {len(buffer)}")
    held = np.array(buffer[: answer.nbytes], np.uint8)  # one copy, of which all arrays are views
    tokens: dict[str, Any] = {}
    media: dict[str, dict[str, EncoderInput]] = {}
    for place in answer.places:
        dtype = np.dtype(place.dtype)
        if dtype.hasobject:
            raise FrameError(f"{place.unit} {place.name} is an array of Python objects")
        array: np.ndarray = (
            np.ndarray(place.shape, dtype, held, place.offset) if all(place.shape) else np.empty(place.shape, dtype)
        )
        if place.unit:
            value = Pixels(array, *place.normalization) if place.normalization else array
            media.setdefault(place.unit, {})[place.name] = value
        else:
            tokens[place.name] = array
    branch: Any = tuple(tokens[BRANCH].tolist()) if BRANCH in tokens else None
    ids, labels, seconds = tokens[IDS], tokens[LABELS], answer.seconds
    return EncodedSample(answer.sample, ids, labels, media, answer.sizes, draw, made_seconds=seconds, branch=branch)
