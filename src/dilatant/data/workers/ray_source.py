"""Client of producers on a Ray cluster for one rank: requests, samples and order are the same as with the local pool.

Each rank has its own producers, up to a limit: one is added after the rank has waited for samples, and one that was
idle for long is removed. When a producer or its node is lost, the sample that it was making is retried and its other
requests are sent again. A byte budget bounds the samples that are in progress or ready.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import WorkerError
from dilatant.data.workers.pool import Dataset, SampleRequest, Waiting
from dilatant.data.workers.pool_wire import MAX_FRAME_BYTES, Encoded, Failed, PoolFrames, PoolRefused, to_rank
from dilatant.data.workers.ray_producer import Producer
from dilatant.data.workers.request_queue import Awake, Entry, RequestQueue

IN_HAND = 3
"""Requests that a producer holds: one being made and the next ones queued."""
TRIES = 3
"""Lost producers, or exceeded time limits, after which a sample is given up; nodes also fail for other reasons."""
FAILED_STARTS = 3
LATE_SECONDS = 5.0
"""Time beyond a sample's time limit after which its producer is killed."""
START_SECONDS = 600.0
POLL_SECONDS = 0.05
"""Interval at which new requests are noticed while answers are awaited."""
JOIN_SECONDS = 1.0
"""Seconds of waiting after which another producer is started."""
IDLE_SECONDS = 60.0
"""Seconds without work after which a producer is removed."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Producer:
    """A producer. greeting: Ray reference of the pending `greet`, None once it runs. entries: open requests by Ray
    reference. since: `time.monotonic` when its current sample began; before it runs, when it was requested."""

    actor: Any
    greeting: Any
    since: float
    name: str = ""
    entries: dict[Any, Entry] = field(default_factory=dict)


class RaySource:
    """A `Source` whose producers use one processor each of the cluster that this process is connected to.

    budget_bytes: memory for samples that are being made, or are ready and not taken. most: maximum number of producers.
    decode_seconds: time limit for a sample. on_wait: called by the thread in `take` after every ten seconds of waiting.
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
        # cloudpickle pickles by value what the user's script defines; producers do not run that script.
        self._job = ray.put(ray.cloudpickle.dumps((dict(datasets), encoding)))
        self._make = ray.remote(Producer).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        self._most = most
        self._decode_seconds = decode_seconds
        self._asked = RequestQueue(budget_bytes, on_wait, self._wake, _place_of)
        self._awake = Awake()
        self._hands: list[_Producer] = []
        self._failed_starts = 0
        self._thread = threading.Thread(target=self._run, name="dilatant-samples", daemon=True)
        self._thread.start()

    @property
    def producers(self) -> tuple[str, ...]:
        """Return the names of the running producers, each "process N on HOST"."""
        with self._asked.changed:
            return tuple(hand.name for hand in self._hands if not hand.greeting)

    # Called by the rank.

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        self._asked.ask(requests)

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        return self._asked.take(dataset, draw)

    def forget(self, dataset: str) -> None:
        self._asked.forget(dataset)

    def close(self) -> None:
        self._asked.close()
        self._thread.join()

    def _wake(self) -> None:
        self._asked.changed.notify_all()

    # Called by the thread.

    def _run(self) -> None:
        try:
            while True:
                with self._asked.changed:
                    if self._asked.is_closing:
                        break
                    self._scale_producers()
                    self._dispatch()
                    self._drop_late()
                    awaited = [ref for hand in self._hands for ref in (*hand.entries, hand.greeting) if ref]
                    if not awaited:
                        self._asked.changed.wait(1.0)
                        continue
                ready, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0)
                if not ready:
                    ready, _ = self._ray.wait(awaited, num_returns=1, timeout=POLL_SECONDS)
                for ref in ready:
                    self._receive(ref)
        except BaseException:
            self._asked.fail(WorkerError(f"the source of samples failed:\n{traceback.format_exc()}"))
        finally:
            for hand in self._hands:
                self._end(hand)

    def _start(self) -> None:
        actor = self._make.remote(self._job)
        self._hands.append(_Producer(actor, actor.greet.remote(), time.monotonic()))
        self._asked.waited = 0.0

    def _scale_producers(self) -> None:
        """Start a producer if this rank waits and all producers are busy; remove one that has been idle for long."""
        now = time.monotonic()
        if self._asked.queue and not self._hands:
            self._start()
        is_starting = any(hand.greeting for hand in self._hands)
        behind = self._asked.queue and (
            self._asked.queue[0].is_urgent or self._asked.charged < self._asked.budget
        )
        if behind and self._asked.waited > JOIN_SECONDS and not is_starting and len(self._hands) < self._most:
            self._start()
        idle = [hand for hand in self._hands if not (hand.entries or hand.greeting)]
        if len(self._hands) > 1 and idle and now - idle[0].since > IDLE_SECONDS:
            self._hands.remove(idle[0])
            self._end(idle[0])

    def _dispatch(self) -> None:
        """Send requests in order, as long as producers and budget permit."""
        while True:
            free = [hand for hand in self._hands if not hand.greeting and len(hand.entries) < IN_HAND]
            entry = self._asked.next() if free else None
            if entry is None:
                return
            hand = min(free, key=lambda hand: len(hand.entries))
            if not hand.entries:
                hand.since = time.monotonic()
            request = entry.request
            ref = hand.actor.make.remote(request.draw, request.index, sorted(request.parts), request.dataset)
            hand.entries[ref] = entry
            entry.holder = hand

    def _receive(self, ref: Any) -> None:
        hand = next((hand for hand in self._hands if ref in hand.entries or hand.greeting == ref), None)
        if hand is None:  # its producer was already lost
            return
        lost, how = False, ""
        value: Any = None
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            lost, how = True, f"{hand.name or 'a producer'} was lost: {_cause(error)}"
        except self._ray.exceptions.RayError as error:  # or the answer was lost with its node
            lost, how = hand.greeting == ref, f"a producer failed: {_cause(error)}"
        with self._asked.changed:
            if lost:
                self._lose(hand, how)
            elif hand.greeting == ref:
                hand.greeting, hand.name, hand.since, self._failed_starts = None, value, time.monotonic(), 0
            else:
                entry = hand.entries.pop(ref)
                hand.since = time.monotonic()
                if value is None:
                    self._asked.discharge(entry)
                    self._blame(entry, how, is_late=False)
                else:
                    self._finish(entry, *value)

    def _finish(self, entry: Entry, framed: bytes, held: Any) -> None:
        message = to_rank.decode(next(PoolFrames(MAX_FRAME_BYTES).feed(framed)))
        assert isinstance(message, Encoded | PoolRefused | Failed)
        self._asked.answered(entry, message, memoryview(held))
        self._asked.discharge(entry)

    # Loss of producers.

    def _lose(self, hand: _Producer, how: str, is_late: bool = False) -> None:
        """Send a lost producer's requests again, and start another producer."""
        self._hands.remove(hand)
        self._end(hand)
        lost = list(hand.entries.values())
        for entry in reversed(lost):
            self._asked.discharge(entry)
            if entry is not lost[0]:
                self._asked.again(entry)
        if lost:
            self._blame(lost[0], how, is_late)
        if hand.greeting:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                self._asked.fail(WorkerError(f"{FAILED_STARTS} producers could not begin; the last: {how}"))
                return
        self._start()

    def _blame(self, entry: Entry, how: str, is_late: bool) -> None:
        self._asked.lost(
            entry, how, is_late, tries=TRIES, decode_seconds=self._decode_seconds, workers="producers"
        )

    def _drop_late(self) -> None:
        now = self._awake.now()
        for hand in list(self._hands):
            waited = now - max(hand.since, self._awake.since)
            if hand.entries and waited > self._decode_seconds + LATE_SECONDS:
                _log.warning("%s was given up: it has been at one sample for %.0f s", hand.name, waited)
                self._lose(hand, f"{hand.name} was late", is_late=True)
            elif hand.greeting and waited > START_SECONDS:
                self._hands.remove(hand)  # the cluster has no free processor for it
                self._end(hand)
                self._most = len(self._hands)
                if not self._hands:
                    self._asked.fail(
                        WorkerError(f"the Ray cluster gave no processor within {START_SECONDS:g} s")
                    )

    def _end(self, hand: _Producer) -> None:
        with suppress(Exception):
            self._ray.kill(hand.actor)


def _place_of(entry: Entry) -> str:
    hand: _Producer | None = entry.holder
    return "" if hand is None else hand.name


def _cause(error: BaseException) -> str:
    """Return the line of a remote error that names the exception raised there, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return raised[-1] if raised else lines[0]
