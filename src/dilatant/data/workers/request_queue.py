"""What a rank has asked for and not taken yet: in which order it is made, what lies ready, and how many bytes it takes.

Whoever makes the samples, on this machine or elsewhere, takes them from the queue in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.data.workers.ordered_map import WorkerError
from dilatant.data.workers.pool import Request, Waiting, add_once, not_asked
from dilatant.data.workers.pool_answer import Outcome, outcome_of
from dilatant.data.workers.pool_wire import Encoded, Failed, Refused

UNKNOWN_BYTES = 1 << 20
"""What a sample is taken to need where nothing is known."""
REPORT_SECONDS = 10.0
"""After so long, and then as often, who waits says for what."""
STOOD_STILL_SECONDS = 5.0
"""Longer than a turn of a thread that watches others takes, unless its process was stopped."""


class Awake:
    """Since when this process has been running: what it is awaited for is not late while it stood still itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since = self._last = clock()

    def now(self) -> float:
        """Return the time of the clock; called in each turn of the thread that watches."""
        now = self._clock()
        if now - self._last > STOOD_STILL_SECONDS:
            self.since = now
        self._last = now
        return now


@dataclass(eq=False)
class Entry:
    """A request on its way. holder: in whose hands it is, by the number `ticket`. slot: where its answer goes. charge:
    bytes of the budget. losses, late: how often its maker was lost, and was late. shunned: the place of the last of
    these."""

    request: Request
    name: str
    holder: Any = None
    ticket: int = -1
    shunned: int = -1
    slot: int | None = None
    charge: int = 0
    losses: int = 0
    late: int = 0
    is_urgent: bool = False
    is_forgotten: bool = False


class Asked:
    """budget_bytes: what samples may take that are being made, or lie ready and are not taken. on_wait: called by the
    thread in `take` each ten seconds that it waits. on_change: called, with the lock held, where there may be something
    to do. place_of(entry): the name of the maker that is at it, "" where none is. waited: seconds in `take`, which the
    maker may set back.

    What is not said to be called by the rank is called with the lock of `changed` held.
    """

    def __init__(
        self,
        budget_bytes: int,
        on_wait: Callable[[Waiting], None],
        on_change: Callable[[], None],
        place_of: Callable[[Entry], str],
    ) -> None:
        self.budget = budget_bytes
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[tuple[str, int], Entry] = {}  # without an outcome
        self.queue: deque[Entry] = deque()
        self.charged = 0
        self.waited = 0.0
        self.error: WorkerError | None = None
        self.is_closing = False
        self._outcomes: dict[tuple[str, int], tuple[Outcome, int]] = {}  # with their charges
        self._scale: dict[frozenset[str], float] = defaultdict(lambda: 1.0)
        self._on_wait, self._on_change, self._place_of = on_wait, on_change, place_of

    # What the rank calls, see `Source`.

    def ask(self, requests: Sequence[Request]) -> None:
        with self.changed:
            for request in requests:
                if (request.dataset, request.draw) in self._outcomes:
                    raise ValueError(
                        f"draw {request.draw} of {request.dataset!r} lies ready and was not taken"
                    )
                entry = Entry(request, request.name)
                add_once(self.entries, request, entry)
                self.queue.append(entry)
            self._on_change()

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        key, began, reports = (dataset, draw), time.monotonic(), 0
        while True:
            with self.changed:
                if key not in self._outcomes:
                    self._hurry(key)
                    self.changed.wait(REPORT_SECONDS * (reports + 1) - (time.monotonic() - began))
                waited = time.monotonic() - began
                if key in self._outcomes:
                    outcome, charge = self._outcomes.pop(key)
                    self.charged -= charge
                    self.waited += waited
                    if self.queue:  # there is room for more
                        self._on_change()
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
            self._on_change()

    def close(self) -> None:
        """Nothing is made any more."""
        with self.changed:
            self.is_closing = True
            self.fail(WorkerError("the source of samples is closed"))
            self._on_change()

    # What whoever makes samples calls.

    def need(self, request: Request) -> int:
        """Bytes to hold free: as estimated, and more where estimates for such parts were too low."""
        return int((request.nbytes or UNKNOWN_BYTES) * self._scale[request.parts])

    def next(self) -> Entry | None:
        """The next to be made, of which the budget is charged; None where there is none, or no room for it."""
        if not self.queue:
            return None
        entry = self.queue[0]
        need = self.need(entry.request)
        if self.charged and self.charged + need > self.budget and not entry.is_urgent:
            return None
        self.queue.popleft()
        entry.charge = need
        self.charged += need
        return entry

    def discharge(self, entry: Entry) -> None:
        """It is in nobody's hands."""
        self.charged -= entry.charge
        entry.slot, entry.charge, entry.holder = None, 0, None

    def again(self, entry: Entry) -> None:
        """Make it before all others."""
        if not entry.is_forgotten:
            self.queue.appendleft(entry)

    def answered(self, entry: Entry, message: Encoded | Refused | Failed, held: memoryview) -> None:
        """Conclude with what a maker says. held: the numbers of the sample."""
        nbytes = 0
        if isinstance(message, Encoded):
            nbytes = message.nbytes
            if nbytes > (need := self.need(entry.request)):
                self._scale[entry.request.parts] *= nbytes / need
        if not entry.is_forgotten:
            self.conclude(entry, outcome_of(message, entry.request.draw, held), nbytes)

    def conclude(self, entry: Entry, outcome: Outcome, nbytes: int = 0) -> None:
        """The outcome lies ready, and takes so many bytes."""
        if not entry.is_forgotten:
            key = (entry.request.dataset, entry.request.draw)
            del self.entries[key]
            self._outcomes[key] = (outcome, nbytes)
            self.charged += nbytes
            self.changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        """Nothing more can be made; the first reason counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _hurry(self, key: tuple[str, int]) -> None:
        if self.error is not None:
            raise self.error
        entry = self.entries.get(key)
        if entry is None:
            raise not_asked(*key)
        if not entry.is_urgent:
            entry.is_urgent = True
            if entry.holder is None and entry in self.queue:
                self.queue.remove(entry)
                self.queue.appendleft(entry)
            self._on_change()

    def _waiting(self, key: tuple[str, int], seconds: float) -> Waiting | None:
        entry = self.entries.get(key)
        if entry is None or self.error is not None:
            return None
        place = self._place_of(entry)  # which may find out its name
        return Waiting(entry.name, seconds, 1 + entry.losses + entry.late, place)
