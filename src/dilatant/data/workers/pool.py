"""Samples in the parts that a rank's own actions use: asked for ahead, taken when they are due.

`InlineSource` makes them in the caller; `pool_owner` and `pool_source` in processes that all ranks of a machine share.
Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.sample import EncodedSample, Sample
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import WithheldError

T = TypeVar("T")

IO_TRIES = 3
"""How often a file is read before an I/O error is taken for lasting."""
IO_PAUSE_SECONDS = 0.1
"""Before the second try; ten times as long before the third."""


class Dataset(Protocol):
    """Undecoded samples by index; picklable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to make, or parts of it.

    draw: unique among those of its data set that are asked for and not yet taken. index: in its data set. parts:
    `encode.TOKENS` (ids and labels) and names of media units to decode. dataset: key into the pool's data sets. nbytes:
    an estimate of what it will take, by which reading ahead is bounded; 0 where nothing is known.
    """

    draw: int
    index: int
    parts: frozenset[str]
    dataset: str = "train"
    nbytes: int = 0

    @property
    def name(self) -> str:
        """What messages call a sample whose record was not read yet."""
        return f"sample {self.index} of {self.dataset!r} (counted from 0 through all sources)"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What somebody waits for in `Source.take`. place: the worker that is at it, "" where it is in nobody's hands.
    attempt: 1, or more after a worker died at it."""

    sample: str
    seconds: float
    attempt: int = 1
    place: str = ""

    def __str__(self) -> str:
        more = [f"try {self.attempt}"] if self.attempt > 1 else []
        more += [self.place] if self.place else []
        return f"{self.seconds:.0f} s for {self.sample}" + (f" ({', '.join(more)})" if more else "")


class Source(Protocol):
    """What a rank gets its samples from. Threads may share it."""

    def ask(self, requests: Sequence[Request]) -> None:
        """Queue requests, which are made in their order as memory permits. Never blocks. Raises ValueError for a draw
        that is asked for already."""
        ...

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        """The sample once it is there; a UserError is the refusal of a bad one. Each draw is taken once.

        A sample that is waited for goes ahead of the others and of the bound on memory. Raises WorkerError where it
        cannot be made for a reason that is no fault of the sample, and ValueError for a draw that was not asked for.
        """
        ...

    def forget(self, dataset: str) -> None:
        """Drop what was asked for of a data set and not taken."""
        ...

    def close(self) -> None: ...


class InlineSource:
    """Makes each sample in `take`, in the calling process."""

    def __init__(self, datasets: Mapping[str, Dataset], encoding: Encoding) -> None:
        self._datasets, self._encoding = datasets, encoding
        self._asked: dict[tuple[str, int], Request] = {}

    def ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            add_once(self._asked, request, request)

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        request = self._asked.pop((dataset, draw), None)
        if request is None:
            raise not_asked(dataset, draw)
        try:
            return make(request, self._datasets, self._encoding)
        except WithheldError:
            raise
        except UserError as refusal:
            return refusal

    def forget(self, dataset: str) -> None:
        for key in [key for key in self._asked if key[0] == dataset]:
            del self._asked[key]

    def close(self) -> None:
        self._asked.clear()


def add_once(known: dict[tuple[str, int], T], request: Request, value: T) -> None:
    """Keep `value` under the request's draw. Raises ValueError where that is taken."""
    key = (request.dataset, request.draw)
    if key in known:
        raise ValueError(f"draw {request.draw} of {request.dataset!r} is asked for already")
    known[key] = value


def not_asked(dataset: str, draw: int) -> ValueError:
    return ValueError(f"draw {draw} of {dataset!r} was not asked for, or was taken already")


def make(
    request: Request,
    datasets: Mapping[str, Dataset],
    encoding: Encoding,
    read: Callable[[Sample], None] = lambda sample: None,
) -> EncodedSample:
    """The sample in the parts asked for. read: told of the record, before its media are decoded.

    Raises UserError for a bad sample, and WithheldError for a file that cannot be read, after several tries.
    """
    name, began = request.name, time.perf_counter()
    for attempt in range(1, IO_TRIES + 1):
        try:
            sample = datasets[request.dataset][request.index]
            name = sample.id
            read(sample)
            encoded = encode_sample(sample, encoding, request.parts)
            return replace(encoded, draw=request.draw, made_seconds=time.perf_counter() - began)
        except (OSError, SampleError) as error:
            if isinstance(error, SampleError) and not error.may_pass:
                raise
            if isinstance(error, FileNotFoundError) or attempt == IO_TRIES:
                times = f", {attempt} times" if attempt > 1 else ""
                why, remedy = str(error), ""
                if isinstance(error, SampleError):
                    why, remedy = error.problem, error.remedy
                remedy = remedy or "see to the disk or file server and resume the run"
                raise WithheldError(f"{name} cannot be read{times}: {why}; {remedy}") from None
            time.sleep(IO_PAUSE_SECONDS * 10 ** (attempt - 1))
    raise AssertionError
