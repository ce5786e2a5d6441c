"""Sample sources: a rank requests parts of samples in advance and takes them when they are due.

`InlineSource` makes samples in the caller; `pool_owner` and `pool_source` use worker processes that all ranks of a
machine share. Imports no torch.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.sample import Dataset, EncodedSample, Sample
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import UnreadableFileError, WorkerError
from dilatant.data.workers.pool_wire import Encoded, Failed, PoolRefused, lay_out

T = TypeVar("T")

IO_TRIES = 3
"""Number of tries to read a file before an I/O error is considered permanent."""
IO_PAUSE_SECONDS = 0.1
"""Pause before the second try; ten times as long before the third."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for a sample, or for parts of it.

    draw: unique among the open requests of its data set. index: in its data set. parts: `TOKENS` (ids, labels)
    and names of media units to decode. dataset: key into the pool's data sets. nbytes: estimated size of the encoded
    sample, which bounds reading ahead; 0 if unknown. sample: the undecoded sample itself, if it comes from a stream.
    """

    draw: int
    index: int
    parts: frozenset[str]
    dataset: str = "train"
    nbytes: int = 0
    sample: Sample | None = None

    @property
    def name(self) -> str:
        """Return the name of the sample in messages, for use before its record has been read."""
        if self.sample is not None:
            return self.sample.id
        return f"sample {self.index} of {self.dataset!r} (counted from 0 through all sources)"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Status of a sample that a thread waits for in `SampleSource.take`. place: the worker that makes it, "" if none.
    attempt: 1, or more after a worker died while making it."""

    sample: str
    seconds: float
    attempt: int = 1
    place: str = ""

    def __str__(self) -> str:
        more = [f"try {self.attempt}"] if self.attempt > 1 else []
        more += [self.place] if self.place else []
        return f"{self.seconds:.0f} s for {self.sample}" + (f" ({', '.join(more)})" if more else "")


class SampleSource(Protocol):
    """Source of a rank's samples. Thread-safe."""

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; they are processed in order as memory permits. Never blocks. Raises ValueError for a draw
        that is already requested."""

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        """Wait for a sample and return it, or a UserError if the sample is bad. Each draw can be taken once.

        A sample that is waited for has priority over all others and may exceed the memory budget. Raises WorkerError if
        the sample is not the cause of a failure, and ValueError for a draw that was not requested.
        """

    def forget(self, dataset: str) -> None:
        """Drop all requests and samples of a data set that have not been taken."""

    def close(self) -> None: ...


class InlineSource:
    """Make each sample in `take`, in the calling process."""

    def __init__(self, datasets: Mapping[str, Dataset], encoding: Encoding) -> None:
        self._datasets, self._encoding = datasets, encoding
        self._requests: dict[tuple[str, int], SampleRequest] = {}

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            add_once(self._requests, request, request)

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        request = self._requests.pop((dataset, draw), None)
        if request is None:
            raise unknown_request(dataset, draw)
        try:
            return make(request, self._datasets, self._encoding)
        except UnreadableFileError:
            raise
        except UserError as refusal:
            return refusal

    def forget(self, dataset: str) -> None:
        for key in [key for key in self._requests if key[0] == dataset]:
            del self._requests[key]

    def close(self) -> None:
        self._requests.clear()


def add_once(known: dict[tuple[str, int], T], request: SampleRequest, value: T) -> None:
    """Store `value` under the request's draw. Raises ValueError if the draw is already requested."""
    key = (request.dataset, request.draw)
    if key in known:
        raise ValueError(f"draw {request.draw} of {request.dataset!r} is asked for already")
    known[key] = value


def unknown_request(dataset: str, draw: int) -> ValueError:
    return ValueError(f"draw {draw} of {dataset!r} was not asked for, or was taken already")


def make(
    request: SampleRequest,
    datasets: Mapping[str, Dataset],
    encoding: Encoding,
    read: Callable[[Sample], None] = lambda sample: None,
) -> EncodedSample:
    """Make the requested parts of a sample. read: called with the record before its media are decoded.

    Raises UserError for a bad sample, and UnreadableFileError for a file that cannot be read after several tries.
    """
    name, began = request.name, time.perf_counter()
    for attempt in range(1, IO_TRIES + 1):
        try:
            sample = request.sample or datasets[request.dataset][request.index]
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
                raise UnreadableFileError(f"{name} cannot be read{times}: {why}; {remedy}") from None
            time.sleep(IO_PAUSE_SECONDS * 10 ** (attempt - 1))
    raise AssertionError


PoolOutcome = EncodedSample | UserError | WorkerError
"""Result of a request, as the rank receives it."""


def answer(
    ticket: int,
    request: SampleRequest,
    datasets: Mapping[str, Dataset],
    encoding: Encoding,
    read: Callable[[Sample], None] = lambda sample: None,
) -> tuple[Encoded | PoolRefused | Failed, list[np.ndarray]]:
    """Make a sample. Return the reply, and the arrays to send with it if it is `Encoded`. read: see `make`. Raises
    nothing."""
    try:
        sample = make(request, datasets, encoding, read)
        places, arrays, nbytes = lay_out(sample)
        sizes = {unit: int(tokens) for unit, tokens in sample.sizes.items()}
        return Encoded(ticket, sample.id, sizes, places, nbytes, sample.made_seconds), arrays
    except UnreadableFileError as error:
        return Failed(ticket, str(error), is_withheld=True), []
    except SampleError as error:
        return PoolRefused(ticket, error.problem, error.sample, error.remedy), []
    except UserError as error:
        return PoolRefused(ticket, str(error)), []
    except BaseException:
        return Failed(ticket, f"a data worker failed:\n{traceback.format_exc()}"), []
