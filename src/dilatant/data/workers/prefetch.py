"""Prefetching iterator: a background thread produces the next items of a generator."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterate over `source` in a background thread, with one item ready and the next one in production.

    An exception of `source` is raised in the consumer at its position; the iterator is then exhausted.
    """

    def __init__(self, source: Generator[T], name: str) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._over or self._closing.is_set():
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "item":
            return value
        self._over = True
        raise value if kind == "error" else StopIteration

    def close(self) -> None:
        """Close `source` in its thread and wait for the thread to end. Idempotent."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # the thread may wait for space in the queue
            except queue.Empty:
                self._thread.join(timeout=0.01)
        with suppress(queue.Full):
            self._ready.put_nowait(("end", None))  # for a consumer in another thread

    def _run(self) -> None:
        try:
            with closing(self._source) as source:
                for item in source:
                    self._ready.put(("item", item))
                    if self._closing.is_set():
                        return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))
