"""Comm: one rank's communication in one generation, with groups that only their members create, and its abort."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from dilatant.comm.backends import Backend, abort_all, gloo_device, open_gloo, open_nccl
from dilatant.comm.deadlines import DeadlineThread, Stalled
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.group import Group
from dilatant.comm.rendezvous import (
    ANSWER_SECONDS,
    Rendezvous,
    answer_check,
    check_liveness,
    join,
    known_inboxes,
    read_inbox,
    register_inbox,
    send_abort,
    this_machine,
)
from dilatant.comm.store.store import Store

WORLD = "world"
"""Name of the group of all ranks."""
ABORTED = "waits for nothing more: its communication is aborted"
"""Answer of a rank to a check after an abort: not it, but what it aborted for, keeps others waiting."""


class Comm:
    """One rank's communication in one generation, until `close()`.

    store: shared by all ranks, best hosted by a process that is no rank; None for a single rank, which opens no socket
    and starts no thread. A rank that fails calls `abort`; a watchdog thread in every other rank then aborts that rank's
    blocked operations. `device` selects the backend of groups (NCCL for CUDA, else Gloo); `world` is always Gloo, for
    CPU tensors. Ranks may join one generation repeatedly, also after a failure; attempts never share messages.

    Raises CommAborted or CommTimeout.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        generation: int = 0,
        device: torch.device | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if store is None and size > 1:
            raise ValueError(f"{size} ranks need a store to find each other")
        self.rank = rank
        self.size = size
        self.generation = generation
        self.device = device or torch.device("cpu")
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._has_ended = threading.Event()
        self._closed = False
        self._main_thread = threading.get_ident()
        self._waiting: tuple[str, float] | None = None
        self._last_check = 0.0
        self._deadlines: DeadlineThread | None = None
        self._watchdog: threading.Thread | None = None
        self._membership = Rendezvous("", (), (this_machine(),))
        self._num_broadcasts = 0
        self._gloo_device: Any = None
        try:
            if store is not None and size > 1:
                self._connect(store)
            self.world = self._open(WORLD, tuple(range(size)), torch.device("cpu"))
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Store) -> None:
        self._store = store.clone()
        self._inbox_store = store.clone()
        self._inbox = register_inbox(self._store, self.generation, self.rank, self.size)
        self._watchdog = threading.Thread(target=self._watch, name="dilatant-watchdog", daemon=True)
        self._watchdog.start()
        try:
            with self.translated_errors(f"all {self.size} ranks of generation {self.generation} to join"):
                join(self._store, self.generation, self.rank, self.size, self._inbox, self._timeout, self._accept_offer)
            self._gloo_device = gloo_device(self._store)
        except BaseException:
            if self._reason is not None and self._membership.inboxes:
                self._abort_offer(self._reason)
            raise

    def _accept_offer(self, offer: Rendezvous) -> None:
        self._membership = offer

    def _abort_offer(self, reason: str) -> None:
        """Abort the attempt that this rank has accepted: an abort of the attempt before may arrive behind the offer."""
        with contextlib.suppress(Exception), contextlib.closing(self._inbox_store.clone()) as store:
            for inbox in self._membership.inboxes:
                if inbox != self._inbox:
                    send_abort(store, inbox, reason)

    @property
    def aborted(self) -> str | None:
        """The reason why communication was aborted, or None."""
        return self._reason

    @property
    def attempt(self) -> str:
        """Unique id of this attempt at the generation; empty for a single rank."""
        return self._membership.id

    @property
    def machines(self) -> tuple[str, ...]:
        """The name of each rank's machine, by rank."""
        return self._membership.machines

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """The ranks on this machine."""
        return tuple(rank for rank, other in enumerate(self.machines) if other == self.machines[self.rank])

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of every rank, numbered in the order of each node's first rank."""
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(self.machines))}
        return tuple(numbers[machine] for machine in self.machines)

    def broadcast_on_machine(self, text: str) -> str:
        """Broadcast `text` from the first rank of this machine to its other ranks; all of them must call this."""
        first, *others = self.ranks_here
        key = f"{self.attempt}/broadcast/{first}/{self._num_broadcasts}"
        self._num_broadcasts += 1
        if not others:
            return text
        with self.translated_errors(f"rank {first} to say what all ranks of its machine should know"):
            if self.rank == first:
                self._store.set(key, text)
                return text
            self._store.wait([key], self._timeout)
            return self._store.get(key).decode()

    def group(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """Return the group called `name`. Its members, which must pass equal ranks, create it at the first call.

        A group of one rank is legal and does not communicate.
        """
        known = self._groups.get(name)
        if known is None:
            return self._open(name, tuple(ranks), device or self.device)
        if known.ranks != tuple(ranks):
            raise ValueError(f"group {name!r} has ranks {known.ranks}, not {tuple(ranks)}")
        return known

    def edge(self, name: str, source: int, target: int) -> Group:
        """Return the group of a directed edge, ready for `source` to send without waiting for `target`."""
        known = self._groups.get(name)
        if known is not None:
            return known
        group = self._open(name, (source, target), self.device, for_edge=True)
        if group.backend is not None and group.backend.is_nccl:
            # NCCL connects two ranks at their first transfer, with both taking part: do so now, not in the first step.
            flag = torch.zeros(1, device=self.device)
            first = group.send(flag, target) if self.rank == source else group.receive(flag, source)
            first.wait()
            flag.item()
        return group

    def abort(self, reason: str, notify_others: bool = True) -> None:
        """End all communication of this generation: operations blocked in it raise CommAborted. Never raises.

        Notifies the other ranks through the store unless `notify_others` is False. The first reason is kept.
        """
        with self._lock:
            if self._reason is not None or self._closed:
                return
            self._reason = reason
            self._has_ended.set()
            backends = [group.backend for group in self._groups.values()]
        if self._watchdog is None:
            return
        self._store.close()  # the main thread may be blocked in it
        if notify_others:
            with contextlib.suppress(Exception), contextlib.closing(self._inbox_store.clone()) as store:
                for inbox in self._inboxes_of_others(store).values():
                    send_abort(store, inbox, reason)
        abort_all([backend for backend in backends if backend is not None])

    def close(self) -> None:
        """Release every group of this generation. Operations that were not awaited are lost. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups.values())
            self._groups.clear()
        if self._deadlines is not None:
            self._deadlines.close()
        for group in groups:
            if group.backend is not None and self._reason is None:
                group.backend.shut_down()
            group.close()
        self._gloo_device = None
        if self._watchdog is not None:
            self._store.close()
            self._inbox_store.close()
            if threading.current_thread() is not self._watchdog:
                self._watchdog.join(5.0)

    @contextlib.contextmanager
    def translated_errors(self, what: str) -> Iterator[None]:
        """Translate a backend's error into CommAborted or CommTimeout, naming the abort's reason or `what`."""
        if self._reason is not None:
            raise CommAborted(self._reason)
        if self._closed:
            raise CommAborted(f"{what}: communication of generation {self.generation} is closed")
        began = time.monotonic()
        is_main = threading.get_ident() == self._main_thread
        if is_main:
            self._waiting = what, began
        try:
            yield
        except (RuntimeError, ValueError, TimeoutError) as error:
            timeout_seconds = self._timeout.total_seconds()
            waited_long = time.monotonic() - began > 0.9 * timeout_seconds
            if timed_out := waited_long or "imed out" in str(error) or "imeout" in str(error):
                text = f"rank {self.rank} waited over {timeout_seconds:g} s for {what}"
            else:
                self._await_abort()
                text = f"rank {self.rank} lost its peer in {what}"
            self._fail(CommTimeout if timed_out else CommAborted, text, error)
        finally:
            if is_main:
                self._waiting = None

    def watch_device(self, what: str, is_completed: Callable[[], bool]) -> None:
        """Abort if work that the device waits for stalls longer than the timeout; the host checks this deadline."""
        if self._deadlines is None:
            self._deadlines = DeadlineThread(
                self._timeout.total_seconds(), self._on_stall, self._device_error, self.device.type == "cuda"
            )
        self._deadlines.add(what, is_completed)

    def _device_error(self) -> str:
        """Return an error that a backend of this rank found while no host call waited; empty without one."""
        backends = [(name, group.backend) for name, group in list(self._groups.items())]
        errors = ((name, backend.error()) for name, backend in backends if backend is not None)
        return next((f"{error} in {name}" for name, error in errors if error), "")

    def _on_stall(self, stalled: Stalled) -> None:
        text = f"rank {self.rank} waited over {self._timeout.total_seconds():g} s for {stalled.what}"
        if stalled.error:
            self._await_abort()
            text = f"rank {self.rank} lost its peer in {stalled.what} ({stalled.error[:200]})"
        with contextlib.suppress(CommAborted, CommTimeout):
            self._fail(CommTimeout, text, None)

    def _fail(self, kind: type[RuntimeError], text: str, cause: BaseException | None) -> None:
        """Abort with a description of the other ranks' state, unless already aborted; always raises."""
        culprits: list[int] = []
        if self._reason is None:
            others, culprits = self._describe_others()
            text = f"{text}; {others}"
        if self._reason is not None:
            raise CommAborted(self._reason) from None
        self.abort(text)
        raise (CommTimeout(text, culprits) if kind is CommTimeout else kind(text)) from cause

    def _open(self, name: str, ranks: tuple[int, ...], device: torch.device, for_edge: bool = False) -> Group:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is no member of group {name!r} with ranks {ranks}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"group {name!r} lists a rank twice: {ranks}")
        backend = None
        if len(ranks) > 1:
            with self.translated_errors(f"making group {name!r} with ranks {ranks}"):
                backend = self._open_backend(name, ranks, device, for_edge)
        group = Group(self, name, ranks, self.rank, backend)
        with self._lock:
            self._groups[name] = group
            reason = self._reason
        if reason is not None:
            raise CommAborted(reason)
        return group

    def _open_backend(self, name: str, ranks: tuple[int, ...], device: torch.device, for_edge: bool) -> Backend:
        store = self._store.prefixed(f"{self._membership.id}/{name}")
        if name != WORLD:  # all ranks have just joined, so all are about to open it
            # Opening a backend cannot be interrupted, so members open it only when all of them are present.
            store.set(f"here/{self.rank}", b"")
            store.wait([f"here/{rank}" for rank in ranks], self._timeout)
        own, size = ranks.index(self.rank), len(ranks)
        if device.type == "cuda":
            return self._interruptible(lambda: open_nccl(store, own, size, self._timeout, device, for_edge))
        return self._interruptible(lambda: open_gloo(store, own, size, self._timeout, self._gloo_device))

    def _interruptible(self, opens: Callable[[], Backend]) -> Backend:
        """Return `opens()`, run in a thread that is abandoned at an abort or after the timeout."""
        opened: list[Backend] = []
        errors: list[BaseException] = []
        done, left_behind = threading.Event(), threading.Event()

        def run() -> None:
            try:
                opened.append(opens())
                if left_behind.is_set():
                    abort_all(opened)
            except BaseException as error:
                errors.append(error)
            done.set()

        threading.Thread(target=run, name="dilatant-open", daemon=True).start()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not done.wait(0.05):
            if self._reason is not None or time.monotonic() > deadline:
                left_behind.set()
                raise TimeoutError("timed out")
        if errors:
            raise errors[0]
        return opened[0]

    def _inboxes_of_others(self, store: Store) -> dict[int, str]:
        inboxes = dict(enumerate(self._membership.inboxes)) or known_inboxes(store, self.generation, self.size)
        return {rank: inbox for rank, inbox in inboxes.items() if rank != self.rank}

    def _watch(self) -> None:
        """Read this rank's inbox through a separate connection, because the main one may be blocked."""
        try:
            while True:
                kind, text = read_inbox(self._inbox_store, self._inbox)
                if kind == "abort":
                    break
                self._last_check = time.monotonic()
                answer_check(self._inbox_store, text, self.rank, self._activity())
        except Exception as error:
            # The process that hosts the store is gone; without the store no rank can notify this one.
            text = f"the store is gone: {' '.join(str(error).split())[:200]}"
        self.abort(text, notify_others=False)

    def _activity(self) -> str:
        """Describe what the main thread is doing; the text begins with "waits" if it keeps no other rank waiting."""
        if self._reason is not None:
            return ABORTED
        waiting = self._waiting
        if waiting is not None:
            return f"waits for {waiting[0]} since {time.monotonic() - waiting[1]:.0f} s"
        stalled = self._deadlines.oldest() if self._deadlines is not None else None
        if stalled is not None and stalled.seconds > min(ANSWER_SECONDS, self._timeout.total_seconds() / 2):
            return f"waits for {stalled.what} on its GPU since {stalled.seconds:.0f} s"
        frame = sys._current_frames().get(self._main_thread)
        if frame is None:
            return "has ended its main thread"
        code = frame.f_code
        return f"is busy in {code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"

    def _describe_others(self) -> tuple[str, list[int]]:
        """After a timeout, find the ranks that do not answer or do not wait for others. Return (description, ranks)."""
        try:
            with contextlib.closing(self._inbox_store.clone()) as store:
                inboxes = self._inboxes_of_others(store)
                answers = check_liveness(store, inboxes)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            return (f"nor does the store (of the launcher, or of rank 0 under an outer one) answer: {reason}", [])
        if ABORTED in answers.values():
            self._await_abort()  # that rank's message gives the reason
        others = [rank for rank in range(self.size) if rank != self.rank]
        absent = [str(rank) for rank in others if rank not in inboxes]
        silent = [str(rank) for rank in inboxes if rank not in answers]
        activities = [f"rank {rank} {activity}" for rank, activity in sorted(answers.items())]
        problems = [activity for activity in activities if " waits " not in activity]
        busy = [rank for rank, activity in answers.items() if not activity.startswith("waits ")]
        culprits = sorted({*others} - {*inboxes} | {*inboxes} - {*answers} | {*busy})
        if silent:
            gone = "does not answer: killed or stopped, or its machine is gone"
            problems.insert(0, f"rank {', '.join(silent[:16])} {gone}")
        if absent:
            problems.insert(0, f"rank {', '.join(absent[:16])} has not begun to communicate")
        return "; ".join((problems or activities)[:8]), culprits

    def _await_abort(self) -> None:
        """Wait for an abort message: a peer's connection often closes before its message arrives, or while the peer is
        still checking which ranks are alive after its own timeout."""
        began = time.monotonic()
        while self._reason is None and self._watchdog is not None:
            if time.monotonic() > max(began + 1.0, self._last_check + 2 * ANSWER_SECONDS):
                return
            if self._has_ended.wait(0.02) or not self._watchdog.is_alive():
                return
