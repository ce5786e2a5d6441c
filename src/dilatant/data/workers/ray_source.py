"""Client of producers on a Ray cluster for one rank: requests, samples and order are the same as with the local pool.

Each rank has its own producers, up to a limit: one is added after the rank has waited for samples, and one that was
idle for long is removed. When a producer or its node is lost, the sample that it was making is retried and its other
requests are sent again. A byte budget bounds the samples that are in progress or ready.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dilatant.comm.ray_cluster import cause_of
from dilatant.config.environment import compute_in_one_thread
from dilatant.data.sample import Dataset
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import WorkerError, keep_freed_memory
from dilatant.data.workers.pool import SampleRequest, Waiting, answer
from dilatant.data.workers.pool_wire import Encoded, Failed, PoolRefused, encoder, pack_arrays, to_rank
from dilatant.data.workers.request_queue import Entry, QueuedSource


class Producer:
    """Ray actor that makes samples. job: pickled (data sets by name, encoding)."""

    def __init__(self, job: bytes) -> None:
        compute_in_one_thread()
        keep_freed_memory()
        warnings.simplefilter("ignore")  # libraries' warnings name neither the sample nor the remedy
        self._datasets, self._encoding = pickle.loads(job)

    def greet(self) -> str:
        """Return the name of this process in messages."""
        return f"process {os.getpid()} on {os.uname().nodename}"

    def make(self, draw: int, index: int, parts: list[str], dataset: str) -> tuple[bytes, np.ndarray]:
        """Return the reply as a pool worker sends it, and the bytes of a sample's arrays: uint8 [bytes]."""
        request = SampleRequest(draw, index, frozenset(parts), dataset)
        message, arrays = answer(0, request, self._datasets, self._encoding)
        held = pack_arrays(message, arrays) if isinstance(message, Encoded) else b""
        return encoder.encode(message), np.frombuffer(held, np.uint8)


TASKS_PER_PRODUCER = 3
"""Requests that a producer holds: one being made and the next ones queued."""
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


class RaySource(QueuedSource):
    """A `SampleSource` whose producers use one processor each of the cluster that this process is connected to.

    budget_bytes: memory for samples that are being made, or are ready and not taken. most: maximum number of producers.
    decode_seconds: time limit for a sample. on_wait: called by the thread in `take` after every ten seconds of waiting.
    """

    workers = "producers"
    tries = 3  # nodes also fail for other reasons

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

        super().__init__(budget_bytes, on_wait)
        self._ray = ray
        # cloudpickle pickles by value what the user's script defines; producers do not run that script.
        self._job = ray.put(ray.cloudpickle.dumps((dict(datasets), encoding)))
        self._make = ray.remote(Producer).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        self._most = most
        self._decode_seconds = decode_seconds
        self._producers: list[_Producer] = []
        self._failed_starts = 0
        self._thread.start()

    @property
    def producers(self) -> tuple[str, ...]:
        """Return the names of the running producers, each "process N on HOST"."""
        with self.changed:
            return tuple(producer.name for producer in self._producers if not producer.greeting)

    def _poke(self) -> None:
        self.changed.notify_all()

    def _place_of(self, entry: Entry) -> str:
        producer: _Producer | None = entry.holder
        return "" if producer is None else producer.name

    # Called by the thread.

    def _work(self) -> None:
        while True:
            with self.changed:
                if self.is_closing:
                    return
                self._scale_producers()
                self._dispatch()
                self._drop_late()
                awaited = [ref for each in self._producers for ref in (*each.entries, each.greeting) if ref]
                if not awaited:
                    self.changed.wait(1.0)
                    continue
            ready, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0)
            if not ready:
                ready, _ = self._ray.wait(awaited, num_returns=1, timeout=POLL_SECONDS)
            for ref in ready:
                self._receive(ref)

    def _release_all(self) -> None:
        for producer in self._producers:
            self._end(producer)

    def _start(self) -> None:
        actor = self._make.remote(self._job)
        self._producers.append(_Producer(actor, actor.greet.remote(), time.monotonic()))
        self.waited = 0.0

    def _scale_producers(self) -> None:
        """Start a producer if this rank waits and all producers are busy; remove one that has been idle for long."""
        now = time.monotonic()
        if self.queue and not self._producers:
            self._start()
        is_starting = any(producer.greeting for producer in self._producers)
        behind = self.queue and (self.queue[0].is_urgent or self.charged < self.budget)
        if behind and self.waited > JOIN_SECONDS and not is_starting and len(self._producers) < self._most:
            self._start()
        idle = [producer for producer in self._producers if not (producer.entries or producer.greeting)]
        if len(self._producers) > 1 and idle and now - idle[0].since > IDLE_SECONDS:
            self._producers.remove(idle[0])
            self._end(idle[0])

    def _dispatch(self) -> None:
        """Send requests in order, as long as producers and budget permit."""
        while True:
            free = [each for each in self._producers if not each.greeting and len(each.entries) < TASKS_PER_PRODUCER]
            entry = self.next() if free else None
            if entry is None:
                return
            producer = min(free, key=lambda producer: len(producer.entries))
            if not producer.entries:
                producer.since = time.monotonic()
            request = entry.request
            parts = sorted(request.parts)
            ref = producer.actor.make.remote(request.draw, request.index, parts, request.dataset)
            producer.entries[ref] = entry
            entry.holder = producer

    def _receive(self, ref: Any) -> None:
        holders = (each for each in self._producers if ref in each.entries or each.greeting == ref)
        producer = next(holders, None)
        if producer is None:  # its producer was already lost
            return
        lost, how = False, ""
        value: Any = None
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            lost, how = True, f"{producer.name or 'a producer'} was lost: {cause_of(error)}"
        except self._ray.exceptions.RayError as error:  # or the answer was lost with its node
            lost, how = producer.greeting == ref, f"a producer failed: {cause_of(error)}"
        with self.changed:
            if lost:
                self._lose(producer, how)
            elif producer.greeting == ref:
                producer.greeting, producer.name, producer.since = None, value, time.monotonic()
                self._failed_starts = 0
            else:
                entry = producer.entries.pop(ref)
                producer.since = time.monotonic()
                if value is None:
                    self.discharge(entry)
                    self.lost(entry, how, False, self._decode_seconds)
                else:
                    self._finish(entry, *value)

    def _finish(self, entry: Entry, body: bytes, arrays: Any) -> None:
        message = to_rank.decode(body)
        assert isinstance(message, Encoded | PoolRefused | Failed)
        self.answered(entry, message, memoryview(arrays))
        self.discharge(entry)

    # Loss of producers.

    def _lose(self, producer: _Producer, how: str, is_late: bool = False) -> None:
        """Send a lost producer's requests again, and start another producer."""
        self._producers.remove(producer)
        self._end(producer)
        lost = list(producer.entries.values())
        for entry in reversed(lost):
            self.discharge(entry)
            if entry is not lost[0]:
                self.requeue(entry)
        if lost:
            self.lost(lost[0], how, is_late, self._decode_seconds)
        if producer.greeting:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                self.fail(WorkerError(f"{FAILED_STARTS} producers could not begin; the last: {how}"))
                return
        self._start()

    def _drop_late(self) -> None:
        now = self._awake.now()
        for producer in list(self._producers):
            waited = now - max(producer.since, self._awake.since)
            if producer.entries and waited > self._decode_seconds + LATE_SECONDS:
                _log.warning("%s was given up: it has been at one sample for %.0f s", producer.name, waited)
                self._lose(producer, f"{producer.name} was late", is_late=True)
            elif producer.greeting and waited > START_SECONDS:
                self._producers.remove(producer)  # the cluster has no free processor for it
                self._end(producer)
                self._most = len(self._producers)
                if not self._producers:
                    self.fail(WorkerError(f"the Ray cluster gave no processor within {START_SECONDS:g} s"))

    def _end(self, producer: _Producer) -> None:
        with suppress(Exception):
            self._ray.kill(producer.actor)
