"""A rank's way to producers on a Ray cluster: the same requests, samples and order as of the machine's own pool.

Each rank has producers of its own, between limits: another one joins where the rank has waited for samples, and one
that had nothing to do for long leaves. When a producer or its node is lost, the sample that it was at is tried again
elsewhere and all others that it had are sent again. What waits or lies ready is bounded by bytes.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dilatant.config.errors import UserError
from dilatant.data.encode import Encoding
from dilatant.data.errors import SampleError
from dilatant.data.pool import Dataset, Request, Waiting, add_once, not_asked
from dilatant.data.pool_answer import Outcome, outcome_of
from dilatant.data.pool_wire import MAX_FRAME_BYTES, Encoded, Failed, Frames, Refused, to_rank
from dilatant.data.ray_producer import Producer
from dilatant.data.sample import EncodedSample
from dilatant.data.workers import WorkerError

IN_HAND = 3
"""Requests that a producer holds: one at work and the next ones waiting."""
UNKNOWN_BYTES = 1 << 20
TRIES = 3
"""How many producers may be lost, or samples be late, at one sample: nodes are lost without its fault, too."""
FAILED_STARTS = 3
REPORT_SECONDS = 10.0
LATE_SECONDS = 5.0
"""Beyond the deadline of a sample, after which its producer is ended."""
START_SECONDS = 600.0
POLL_SECONDS = 0.05
"""How soon what was asked meanwhile is looked at, while answers are awaited."""
JOIN_SECONDS = 1.0
"""So much waiting brings another producer."""
IDLE_SECONDS = 60.0
"""After so long without work a producer leaves."""


@dataclass(eq=False)
class _Entry:
    """A request on its way. charge: bytes of the budget while it is in a producer's hands."""

    request: Request
    name: str
    charge: int = 0
    losses: int = 0
    late: int = 0
    producer: _Hand | None = None
    is_urgent: bool = False
    is_forgotten: bool = False


@dataclass(eq=False)
class _Hand:
    """A producer. greeting: what tells that it runs. entries: by what stands for their answers, in their order. since:
    when it began what it is at, by `time.monotonic`; before it runs, when it was asked for."""

    actor: Any
    greeting: Any
    since: float
    name: str = ""
    entries: dict[Any, _Entry] = field(default_factory=dict)


class RaySource:
    """A `Source` whose producers take a processor each of the cluster that this process is connected to.

    budget_bytes: what samples may take that are being made, or lie ready and are not taken. most: producers at once.
    decode_seconds: longest that a sample may take. on_wait: called by the thread in `take` each ten seconds that it
    waits.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        encoding: Encoding,
        budget_bytes: int,
        most: int,
        decode_seconds: float = 60.0,
        on_wait: Callable[[Waiting], None] = lambda waiting: None,
    ) -> None:
        import ray

        self._ray = ray
        self._job = ray.put(pickle.dumps((dict(datasets), encoding)))
        self._make = ray.remote(Producer).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        self._budget = budget_bytes
        self._most = most
        self._decode_seconds = decode_seconds
        self._on_wait = on_wait
        self._changed = threading.Condition(threading.RLock())
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._outcomes: dict[tuple[str, int], tuple[Outcome, int]] = {}
        self._queue: deque[_Entry] = deque()
        self._hands: list[_Hand] = []
        self._charged = 0
        self._scale: dict[frozenset[str], float] = defaultdict(lambda: 1.0)
        self._waited = 0.0  # since a producer joined
        self._failed_starts = 0
        self._error: WorkerError | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dilatant-samples", daemon=True)
        self._thread.start()

    @property
    def producers(self) -> tuple[str, ...]:
        """Those that run now, "process N on HOST" each."""
        with self._changed:
            return tuple(hand.name for hand in self._hands if not hand.greeting)

    # What the rank calls.

    def ask(self, requests: Sequence[Request]) -> None:
        with self._changed:
            for request in requests:
                if (request.dataset, request.draw) in self._outcomes:
                    raise ValueError(
                        f"draw {request.draw} of {request.dataset!r} lies ready and was not taken"
                    )
                entry = _Entry(request, request.name)
                add_once(self._entries, request, entry)
                self._queue.append(entry)
            self._changed.notify_all()

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        key, began, reports = (dataset, draw), time.monotonic(), 0
        while True:
            with self._changed:
                if key not in self._outcomes:
                    self._hurry(key)
                    self._changed.wait(REPORT_SECONDS * (reports + 1) - (time.monotonic() - began))
                waited = time.monotonic() - began
                if key in self._outcomes:
                    outcome, charge = self._outcomes.pop(key)
                    self._charged -= charge
                    self._waited += waited
                    self._changed.notify_all()
                    break
                waiting = self._waiting(key, waited)
            if waiting is not None and waited >= REPORT_SECONDS * (reports + 1):
                reports += 1
                self._on_wait(waiting)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    def forget(self, dataset: str) -> None:
        with self._changed:
            for key in [key for key in self._entries if key[0] == dataset]:
                self._entries.pop(key).is_forgotten = True
            self._queue = deque(entry for entry in self._queue if not entry.is_forgotten)
            for key in [key for key in self._outcomes if key[0] == dataset]:
                self._charged -= self._outcomes.pop(key)[1]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._error = self._error or WorkerError("the source of samples is closed")
            self._changed.notify_all()
        self._thread.join()

    # What both threads call, with the lock held.

    def _hurry(self, key: tuple[str, int]) -> None:
        if self._error is not None:
            raise self._error
        entry = self._entries.get(key)
        if entry is None:
            raise not_asked(*key)
        if not entry.is_urgent:
            entry.is_urgent = True
            if entry.producer is None and entry in self._queue:
                self._queue.remove(entry)
                self._queue.appendleft(entry)
            self._changed.notify_all()

    def _waiting(self, key: tuple[str, int], seconds: float) -> Waiting | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        hand = entry.producer
        return Waiting(entry.name, seconds, 1 + entry.losses + entry.late, "" if hand is None else hand.name)

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._is_closing:
                        break
                    self._scale_producers()
                    self._dispatch()
                    self._drop_late()
                    awaited = [ref for hand in self._hands for ref in (*hand.entries, hand.greeting) if ref]
                    if not awaited:
                        self._changed.wait(1.0)
                        continue
                ready, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0)
                if not ready:
                    ready, _ = self._ray.wait(awaited, num_returns=1, timeout=POLL_SECONDS)
                for ref in ready:
                    self._receive(ref)
        except BaseException:
            self._fail(WorkerError(f"the source of samples failed:\n{traceback.format_exc()}"))
        finally:
            for hand in self._hands:
                self._end(hand)

    def _start(self) -> None:
        actor = self._make.remote(self._job)
        self._hands.append(_Hand(actor, actor.greet.remote(), time.monotonic()))
        self._waited = 0.0

    def _scale_producers(self) -> None:
        """Another producer where this rank waits and all are at work; one less where one has nothing to do."""
        now = time.monotonic()
        if self._queue and not self._hands:
            self._start()
        is_starting = any(hand.greeting for hand in self._hands)
        behind = self._queue and (self._queue[0].is_urgent or self._charged < self._budget)
        if behind and self._waited > JOIN_SECONDS and not is_starting and len(self._hands) < self._most:
            self._start()
        idle = [hand for hand in self._hands if not (hand.entries or hand.greeting)]
        if len(self._hands) > 1 and idle and now - idle[0].since > IDLE_SECONDS:
            self._hands.remove(idle[0])
            self._end(idle[0])

    def _dispatch(self) -> None:
        """Send what may be sent, in order."""
        while self._queue:
            entry = self._queue[0]
            free = [hand for hand in self._hands if not hand.greeting and len(hand.entries) < IN_HAND]
            if not free:
                return
            need = self._need(entry.request)
            if self._charged and self._charged + need > self._budget and not entry.is_urgent:
                return
            self._queue.popleft()
            hand = min(free, key=lambda hand: len(hand.entries))
            if not hand.entries:
                hand.since = time.monotonic()
            request = entry.request
            ref = hand.actor.make.remote(request.draw, request.index, sorted(request.parts), request.dataset)
            hand.entries[ref] = entry
            entry.charge, entry.producer = need, hand
            self._charged += need

    def _need(self, request: Request) -> int:
        return int((request.nbytes or UNKNOWN_BYTES) * self._scale[request.parts])

    def _receive(self, ref: Any) -> None:
        hand = next((hand for hand in self._hands if ref in hand.entries or hand.greeting == ref), None)
        if hand is None:  # lost, with another answer of it
            return
        lost, how = False, ""
        value: Any = None
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            lost, how = True, f"{hand.name or 'a producer'} was lost: {_first_line(error)}"
        except self._ray.exceptions.RayError as error:  # or the answer was, with the node that it lay on
            lost, how = hand.greeting == ref, f"a producer failed: {_last_line(error)}"
        with self._changed:
            if lost:
                self._lose(hand, how)
            elif hand.greeting == ref:
                hand.greeting, hand.name, hand.since, self._failed_starts = None, value, time.monotonic(), 0
            else:
                entry = hand.entries.pop(ref)
                hand.since = time.monotonic()
                if value is None:
                    self._discharge(entry)
                    self._blame(entry, how, is_late=False)
                else:
                    self._finish(entry, *value)

    def _finish(self, entry: _Entry, framed: bytes, held: Any) -> None:
        message = to_rank.decode(next(Frames(MAX_FRAME_BYTES).feed(framed)))
        assert isinstance(message, Encoded | Refused | Failed)
        nbytes = 0
        if isinstance(message, Encoded):
            nbytes = message.nbytes
            if nbytes > (need := self._need(entry.request)):
                self._scale[entry.request.parts] *= nbytes / need
        outcome = outcome_of(message, entry.request.draw, memoryview(held))
        self._discharge(entry)
        self._conclude(entry, outcome, nbytes)

    def _conclude(self, entry: _Entry, outcome: Outcome, nbytes: int = 0) -> None:
        if not entry.is_forgotten:
            key = (entry.request.dataset, entry.request.draw)
            del self._entries[key]
            self._outcomes[key] = (outcome, nbytes)
            self._charged += nbytes
            self._changed.notify_all()

    def _discharge(self, entry: _Entry) -> None:
        self._charged -= entry.charge
        entry.charge, entry.producer = 0, None

    # Ends of producers.

    def _lose(self, hand: _Hand, how: str, is_late: bool = False) -> None:
        """Send again what a producer had, and put another one in its place."""
        self._hands.remove(hand)
        self._end(hand)
        lost = list(hand.entries.values())
        for entry in reversed(lost):
            self._discharge(entry)
            if entry is not lost[0]:
                self._again(entry)
        if lost:
            self._blame(lost[0], how, is_late)
        if hand.greeting:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                self._fail(WorkerError(f"{FAILED_STARTS} producers could not begin; the last: {how}"))
                return
        self._start()

    def _blame(self, entry: _Entry, how: str, is_late: bool) -> None:
        entry.late += is_late
        entry.losses += not is_late
        if entry.late >= TRIES:
            problem = f"decoding took longer than {self._decode_seconds:g} s"
            remedy = "look at its media, or raise 'data.decode_seconds'"
            self._conclude(entry, SampleError(entry.name, problem, remedy))
        elif entry.losses >= TRIES:
            self._conclude(
                entry,
                WorkerError(f"{entry.name} has ended {TRIES} producers that were at it; the last, {how}"),
            )
        else:
            self._again(entry)

    def _again(self, entry: _Entry) -> None:
        if not entry.is_forgotten:
            self._queue.appendleft(entry)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for hand in list(self._hands):
            if hand.entries and now - hand.since > self._decode_seconds + LATE_SECONDS:
                self._lose(hand, f"{hand.name} was late", is_late=True)
            elif hand.greeting and now - hand.since > START_SECONDS:
                self._hands.remove(hand)  # the cluster has no processor left for it
                self._end(hand)
                self._most = len(self._hands)
                if not self._hands:
                    self._fail(WorkerError(f"the Ray cluster gave no processor within {START_SECONDS:g} s"))

    def _end(self, hand: _Hand) -> None:
        with suppress(Exception):
            self._ray.kill(hand.actor)

    def _fail(self, error: WorkerError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
    )
