"""Request queue of one rank: pending requests in order, finished samples that were not taken, and their byte budget.

A thread of the sample source (local pool or Ray) takes requests from the queue.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.sample import EncodedSample
from dilatant.data.workers.ordered_map import UnreadableFileError, WorkerError
from dilatant.data.workers.pool import PoolOutcome, SampleRequest, Waiting, add_once, unknown_request
from dilatant.data.workers.pool_wire import Encoded, Failed, PoolRefused, unpack_sample

UNKNOWN_BYTES = 1 << 20
"""Assumed size of a sample without an estimate."""
REPORT_SECONDS = 10.0
"""Interval at which a waiting `take` reports its `Waiting` status."""
STOOD_STILL_SECONDS = 5.0
"""Gap between two turns of the watching thread that shows that the process was suspended."""


class Awake:
    """Tracks since when this process has run without a pause; during a pause, a peer is not considered late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since = self._last = clock()

    def now(self) -> float:
        """Return the time of the clock; called in each turn of the watching thread."""
        now = self._clock()
        if now - self._last > STOOD_STILL_SECONDS:
            self.since = now
        self._last = now
        return now


@dataclass(eq=False)
class Entry:
    """A pending request. holder, ticket: the worker that has it, and its number there. slot: its answer's arena offset.
    charge: its bytes in the budget. losses, late: number of times its worker died, or exceeded the time limit. avoided:
    the place of the last such worker."""

    request: SampleRequest
    name: str
    holder: Any = None
    ticket: int = -1
    avoided: int = -1
    slot: int | None = None
    charge: int = 0
    losses: int = 0
    late: int = 0
    is_urgent: bool = False
    is_forgotten: bool = False


class QueuedSource(ABC):
    """Base class of sample sources: requests wait in a queue, from which a thread of the source gives them to workers.

    budget_bytes: memory for samples that are being made, or are ready and not taken. on_wait: called by the thread in
    `take` every ten seconds of waiting. waited: seconds spent in `take`, which the source may reset.
    Methods other than those of `SampleSource` are called with the lock of `changed` held.
    """

    workers: ClassVar[str]
    """What its workers are called in errors."""
    tries: ClassVar[int]
    """Number of lost workers, or of exceeded time limits, after which a sample is given up."""

    def __init__(self, budget_bytes: int, on_wait: Callable[[Waiting], None]) -> None:
        self.budget = budget_bytes
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[tuple[str, int], Entry] = {}  # requests without an outcome
        self.queue: deque[Entry] = deque()
        self.charged = 0
        self.waited = 0.0
        self.error: WorkerError | None = None
        self.is_closing = False
        self._outcomes: dict[tuple[str, int], tuple[PoolOutcome, int]] = {}  # outcome and charged bytes
        self._scale: dict[frozenset[str], float] = defaultdict(lambda: 1.0)
        self._on_wait = on_wait
        self._awake = Awake()
        self._thread = threading.Thread(target=self._run, name="dilatant-samples", daemon=True)

    @abstractmethod
    def _work(self) -> None:
        """Give requests to workers and store their answers, until the source is closing."""

    @abstractmethod
    def _release_all(self) -> None:
        """Leave all workers."""

    @abstractmethod
    def _poke(self) -> None:
        """Wake the thread, because there may be work."""

    @abstractmethod
    def _place_of(self, entry: Entry) -> str:
        """Return the name of the worker that is making a sample, "" if none."""

    # Called by the rank, see `SampleSource`.

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        with self.changed:
            for request in requests:
                if (request.dataset, request.draw) in self._outcomes:
                    raise ValueError(f"draw {request.draw} of {request.dataset!r} lies ready and was not taken")
                entry = Entry(request, request.name)
                add_once(self.entries, request, entry)
                self.queue.append(entry)
            self._poke()

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        key, began, reports = (dataset, draw), time.monotonic(), 0
        while True:
            with self.changed:
                if key not in self._outcomes:
                    self._prioritize(key)
                    self.changed.wait(REPORT_SECONDS * (reports + 1) - (time.monotonic() - began))
                waited = time.monotonic() - began
                if key in self._outcomes:
                    outcome, charge = self._outcomes.pop(key)
                    self.charged -= charge
                    self.waited += waited
                    if self.queue:  # the budget has space for more
                        self._poke()
                    break
                waiting = self._waiting(key, waited)
            if waiting is not None and waited >= REPORT_SECONDS * (reports + 1):
                reports += 1
                self._on_wait(waiting)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    def forget(self, dataset: str) -> None:
        with self.changed:
            for key in [key for key in self.entries if key[0] == dataset]:
                self.entries.pop(key).is_forgotten = True
            self.queue = deque(entry for entry in self.queue if not entry.is_forgotten)
            for key in [key for key in self._outcomes if key[0] == dataset]:
                self.charged -= self._outcomes.pop(key)[1]
            self._poke()

    def close(self) -> None:
        """Refuse all open and further requests, and leave the workers."""
        with self.changed:
            self.is_closing = True
            self.fail(WorkerError("the source of samples is closed"))
            self._poke()
        self._thread.join()

    # Called by the thread.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            self.fail(WorkerError(f"the source of samples failed:\n{traceback.format_exc()}"))
        finally:
            with self.changed:
                self._release_all()

    def nbytes_of(self, request: SampleRequest) -> int:
        """Return the bytes to reserve: the estimate, scaled up if estimates for the same parts were too low."""
        return int((request.nbytes or UNKNOWN_BYTES) * self._scale[request.parts])

    def next(self) -> Entry | None:
        """Return the next request to make and charge the budget; None if there is none or the budget is exhausted."""
        if not self.queue:
            return None
        entry = self.queue[0]
        need = self.nbytes_of(entry.request)
        if self.charged and self.charged + need > self.budget and not entry.is_urgent:
            return None
        self.queue.popleft()
        entry.charge = need
        self.charged += need
        return entry

    def enlarge(self, entry: Entry, nbytes: int) -> None:
        """Charge at least `nbytes` for a request."""
        more = max(0, nbytes - entry.charge)
        entry.charge += more
        self.charged += more

    def discharge(self, entry: Entry) -> None:
        """Credit the request's bytes back to the budget, because no worker holds the request any more."""
        self.charged -= entry.charge
        entry.slot, entry.charge, entry.holder = None, 0, None

    def requeue(self, entry: Entry) -> None:
        """Put the request at the front of the queue."""
        if not entry.is_forgotten:
            self.queue.appendleft(entry)

    def lost(self, entry: Entry, how: str, is_late: bool, decode_seconds: float) -> None:
        """Put the request of a lost worker at the front, or conclude it with an error after `tries` losses or time
        limits. how: the reason for the loss."""
        entry.late += is_late
        entry.losses += not is_late
        if entry.late >= self.tries:
            problem = f"decoding took longer than {decode_seconds:g} s"
            remedy = "look at its media, or raise 'data.decode_seconds'"
            self.conclude(entry, SampleError(entry.name, problem, remedy))
        elif entry.losses >= self.tries:
            text = f"{entry.name} has ended {self.tries} {self.workers} that were at it; the last, {how}"
            self.conclude(entry, WorkerError(text))
        else:
            self.requeue(entry)

    def answered(self, entry: Entry, message: Encoded | PoolRefused | Failed, held: memoryview) -> None:
        """Conclude a request with a worker's reply. held: the bytes of the sample's arrays, which are copied. Raises
        FrameError if they do not fit."""
        if not isinstance(message, Encoded):
            if isinstance(message, Failed):
                self.conclude(entry, (UnreadableFileError if message.is_withheld else WorkerError)(message.problem))
            elif message.sample:
                self.conclude(entry, SampleError(message.sample, message.problem, message.remedy))
            else:
                self.conclude(entry, UserError(message.problem))
            return
        if message.nbytes > (need := self.nbytes_of(entry.request)):
            self._scale[entry.request.parts] *= message.nbytes / need
        if not entry.is_forgotten:
            self.conclude(entry, unpack_sample(message, entry.request.draw, held), message.nbytes)

    def conclude(self, entry: Entry, outcome: PoolOutcome, nbytes: int = 0) -> None:
        """Store the outcome, which takes `nbytes` bytes, for `take`."""
        if not entry.is_forgotten:
            key = (entry.request.dataset, entry.request.draw)
            del self.entries[key]
            self._outcomes[key] = (outcome, nbytes)
            self.charged += nbytes
            self.changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        """Fail all open and further requests; the first error is the one reported."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _prioritize(self, key: tuple[str, int]) -> None:
        if self.error is not None:
            raise self.error
        entry = self.entries.get(key)
        if entry is None:
            raise unknown_request(*key)
        if not entry.is_urgent:
            entry.is_urgent = True
            if entry.holder is None and entry in self.queue:
                self.queue.remove(entry)
                self.queue.appendleft(entry)
            self._poke()

    def _waiting(self, key: tuple[str, int], seconds: float) -> Waiting | None:
        entry = self.entries.get(key)
        if entry is None or self.error is not None:
            return None
        place = self._place_of(entry)  # may update entry.name
        return Waiting(entry.name, seconds, 1 + entry.losses + entry.late, place)
