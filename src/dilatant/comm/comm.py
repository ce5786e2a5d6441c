"""Process groups of one generation: made by their members alone, aborted from any thread, closed with the runtime.

With mesh.py this is all that touches what torch.distributed keeps private. It uses backends directly: there is no
default group, no global registry and no group name that a later generation could resolve by mistake. Only what a mesh
needs is registered (mesh.py), and forgotten with the generation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilatant.comm import mailbox
from dilatant.comm.mesh import GenerationMesh, forget, grid_of, line_through, register

_POKE_TAG = 1 << 20
"""A tag that no transfer uses (`Group.send` counts below it)."""
_QUESTION = "?"
"""What a roll call puts before the key to answer under; no reason to end begins so."""


class CommAborted(RuntimeError):
    """Communication of this generation was ended; the message says by whom and why."""


class CommTimeout(RuntimeError):
    """A peer did not answer in time; the message says what was awaited, and which ranks are silent or busy."""


class Pending:
    """A transfer or collective under way. `tensors` stay alive until it is done.

    On a GPU `wait` makes the current stream wait, not the host.
    """

    def __init__(self, comm: Comm, work: Any, what: str, tensors: Sequence[Tensor]) -> None:
        self._comm = comm
        self._work = work
        self._what = what
        self._tensors = tensors

    def wait(self) -> None:
        """Return when the tensors may be used. Raises CommAborted or CommTimeout."""
        if self._work is not None:
            with self._comm._explained(self._what):
                self._work.wait()
            self._work = None
        self._tensors = ()


class Group:
    """Ranks that communicate: one communicator, on a GPU with a stream of its own.

    `ranks` are those of the generation, in group order. Tensors must be contiguous and on the group's device.
    Every method returns at once; empty tensors are legal and send nothing.
    """

    def __init__(self, comm: Comm, name: str, ranks: tuple[int, ...], backend: Any) -> None:
        self.name = name
        self.ranks = ranks
        self._comm = comm
        self._backend = backend

    def send(self, tensor: Tensor, to: int, tag: int = 0, what: str = "") -> Pending:
        """Send to rank `to`. Transfers between two ranks must be posted in the same order at both."""
        return self._transfer("send", tensor, to, tag, what)

    def receive(self, tensor: Tensor, source: int, tag: int = 0, what: str = "") -> Pending:
        """Fill `tensor` from rank `source`, which sends one of the same shape."""
        return self._transfer("recv", tensor, source, tag, what)

    def sum_(self, tensor: Tensor, what: str = "") -> Pending:
        """Replace `tensor` by its sum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, what)

    def max_(self, tensor: Tensor, what: str = "") -> Pending:
        """Replace `tensor` by its elementwise maximum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, what)

    def barrier(self, what: str = "") -> None:
        """Return when every rank has called it."""
        device = "cpu" if self._backend is None or self._backend.name() == "gloo" else self._comm.device
        flag = torch.ones(1, device=device)
        self.sum_(flag, what or f"barrier of {self.name}").wait()
        flag.item()

    def _transfer(self, direction: str, tensor: Tensor, peer: int, tag: int, what: str) -> Pending:
        if not tensor.numel():
            return self._pending(None, what, ())
        if not 0 <= tag < _POKE_TAG:
            raise ValueError(f"tag {tag} is not in [0, {_POKE_TAG})")
        what = f"{what or self.name} {'to' if direction == 'send' else 'from'} rank {peer}"
        with self._comm._explained(what):
            work = getattr(self._backend, direction)([tensor], self.ranks.index(peer), tag)
        return self._pending(work, what, (tensor,))

    def _all_reduce(self, tensor: Tensor, operation: Any, what: str) -> Pending:
        if self._backend is None or not tensor.numel():
            return self._pending(None, what, ())
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        with self._comm._explained(what or self.name):
            work = self._backend.allreduce([tensor], options)
        return self._pending(work, what, (tensor,))

    def _pending(self, work: Any, what: str, tensors: Sequence[Tensor]) -> Pending:
        return Pending(self._comm, work, what or self.name, tensors)


class Comm:
    """One rank's communication in one generation, until `close()`.

    store: a torch store that all ranks reach, best held by a process that is none of them. It also carries news: a
    rank that fails calls `abort`, and a watchdog thread in every other rank then ends what that rank is blocked in.
    `device` decides the backend of groups (NCCL for CUDA, else Gloo); `world` is always Gloo, for values on the CPU.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        generation: int = 0,
        device: torch.device | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.generation = generation
        self.device = device or torch.device("cpu")
        self._timeout = timedelta(seconds=timeout_seconds)
        self._root = store
        self._store = dist.PrefixStore(f"generation{generation}", store)
        store.set("generation", f"{generation} {size}")
        self._groups: dict[str, Group] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        self._process_groups: dict[str, dist.ProcessGroup] = {}
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._closed = False
        self._meeting: tuple[str, list[str]] | None = None
        self._main_thread = threading.get_ident()
        self._waiting: tuple[str, float] | None = None
        self._asked = 0.0
        self._watchdog = threading.Thread(target=self._watch, name="dilatant-watchdog", daemon=True)
        self._watchdog.start()
        self.world = self._open("world", tuple(range(size)), torch.device("cpu"))

    @property
    def aborted(self) -> str | None:
        """Why communication was ended, or None."""
        return self._reason

    def group(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """The group called `name`, made by its members alone at its first mention; every member gives equal ranks.

        A group of one rank is legal and communicates with nobody.
        """
        known = self._groups.get(name)
        if known is None:
            return self._open(name, tuple(ranks), device or self.device)
        if known.ranks != tuple(ranks):
            raise ValueError(f"group {name!r} has ranks {known.ranks}, not {tuple(ranks)}")
        return known

    def edge(self, name: str, source: int, target: int) -> Group:
        """The group of a directed edge, ready for `source` to send without waiting for `target`."""
        known = self._groups.get(name)
        if known is not None:
            return known
        group = self.group(name, (source, target))
        if _is_nccl(group):
            # NCCL connects two ranks at their first transfer, and both must take part: now, not in the first step.
            flag = torch.zeros(1, device=self.device)
            first = group.send(flag, target) if self.rank == source else group.receive(flag, source)
            first.wait()
            flag.item()
        return group

    def mesh(
        self,
        name: str,
        axes: Mapping[str, int],
        ranks: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> DeviceMesh:
        """The mesh called `name` over `ranks` (default: all) in row-major order, as {"replica": 2, "shard": 4} says.

        Made by its members alone at its first mention, with a group for every line of ranks along an axis; every
        member gives equal arguments. It lives until `close()`. An abort ends what is blocked in it, with the error of
        the operation; `aborted` says why.
        Ranks are the generation's, and where the process has a default group, they must be that one's as well.
        Raises ValueError.
        """
        grid = grid_of(name, axes, range(self.size) if ranks is None else ranks, self.rank, self.size)
        known = self._meshes.get(name)
        if known is not None:
            if known.mesh_dim_names != tuple(axes) or not torch.equal(known.mesh, grid):
                raise ValueError(
                    f"{known} called {name!r} has ranks {known.mesh.tolist()}, not {grid.tolist()}"
                )
            return known
        device = device or self.device
        groups = []
        for index, axis in enumerate(axes):
            line = line_through(grid, index, self.rank)
            groups.append(self._registered(self.group(f"{name}/{axis}/{line[0]}", line, device), device))
        mesh = GenerationMesh.over(groups, grid, tuple(axes), self.rank, device.type)
        self._meshes[name] = mesh
        return mesh

    @contextlib.contextmanager
    def default_group(self) -> Iterator[None]:
        """Make `world` the default group of this process inside the block, for what asks torch for one.

        So do torch.distributed.checkpoint, which without it takes every rank for the only one, and `distribute_tensor`
        from one rank's data. Every rank enters it. A process that has a default group of its own keeps that.
        """
        if dist.is_initialized():
            yield
            return
        dist.group.WORLD = self._registered(self.world, torch.device("cpu"))
        try:
            yield
        finally:
            dist.group.WORLD = None

    def abort(self, reason: str, tell: bool = True) -> None:
        """End all communication of this generation: whoever is blocked in it raises CommAborted. Never raises.

        Tells the other ranks through the store unless `tell` is False. The first reason stays.
        """
        with self._lock:
            if self._reason is not None or self._closed:
                return
            self._reason = reason
            groups = list(self._groups.values())
        if tell:
            with contextlib.suppress(Exception):
                for rank in self._others():
                    mailbox.post(self._store, rank, reason)
        with contextlib.suppress(Exception):
            self._call_off()
        threads = [threading.Thread(target=_end, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 5.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Give back every group of this generation. What was not awaited is lost. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = list(self._groups.values())
            self._groups.clear()
        with contextlib.suppress(Exception):
            mailbox.post(self._store, self.rank, "")
        if threading.current_thread() is not self._watchdog:
            self._watchdog.join(5.0)
        for mesh in self._meshes.values():
            mesh._pg_registry.clear()
        for process_group in self._process_groups.values():
            forget(process_group)
        self._meshes.clear()
        self._process_groups.clear()
        for group in groups:
            if self._reason is None and _is_nccl(group):
                with contextlib.suppress(Exception):
                    group._backend.shutdown()
            group._backend = None

    def _open(self, name: str, ranks: tuple[int, ...], device: torch.device) -> Group:
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is no member of group {name!r} with ranks {ranks}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"group {name!r} lists a rank twice: {ranks}")
        backend = None
        if len(ranks) > 1:
            store = dist.PrefixStore(f"group/{name}", self._store)
            what = f"making group {name!r} with ranks {ranks}"
            self._meet(name, store, ranks, what)
            with self._explained(what):
                backend = _open_backend(store, ranks.index(self.rank), len(ranks), device, self._timeout)
        group = Group(self, name, ranks, backend)
        with self._lock:
            self._groups[name] = group
            aborted = self._reason is not None
        if aborted:
            raise CommAborted(self._reason)
        return group

    def _registered(self, group: Group, device: torch.device) -> dist.ProcessGroup:
        """The group as torch's registry knows it, from its first mention to `close()`."""
        known = self._process_groups.get(group.name)
        if known is not None:
            return known
        with self._explained(f"registering group {group.name!r}"):
            # One name on all ranks, which this process sees in no other generation and no other run.
            run = self._store.compare_set("run", "", uuid4().hex).decode()
        if group._backend is None:
            group._backend = _open_backend(dist.HashStore(), 0, 1, device, self._timeout)
        name = f"{run}/generation{self.generation}/{group.name}"
        process_group = register(name, group.ranks, self.rank, group._backend, device.type)
        self._process_groups[group.name] = process_group
        return process_group

    def _meet(self, name: str, store: Any, ranks: tuple[int, ...], what: str) -> None:
        """Return when every member is about to make the group: an abort can end this, but not a backend's start.

        A member's word is written once, by itself or by who calls the meeting off in its place. So all members read
        the same words, and either all of them make the group or none.
        """
        keys = [f"here/{rank}" for rank in ranks]
        self._meeting = f"group/{name}", keys
        with self._explained(what):
            store.compare_set(f"here/{self.rank}", "", "yes")
            store.wait(keys, self._timeout)
            called_off = b"no" in store.multi_get(keys)
        self._meeting = None
        if called_off:
            self._await_news(self._timeout.total_seconds())
            raise CommAborted(self._reason or f"{what} was called off")

    def _call_off(self) -> None:
        """Wake who waits in `_meet`, in a store connection of our own: the usual one is blocked there."""
        meeting = self._meeting
        if meeting is None:
            return
        prefix, keys = meeting
        store = dist.PrefixStore(prefix, self._own_store())
        for key in keys:
            store.compare_set(key, "", "no")

    def _own_store(self) -> Any:
        return dist.PrefixStore(f"generation{self.generation}", self._root.clone())

    def _watch(self) -> None:
        """Read news in a store connection of its own: the main one may be blocked in making a group."""
        try:
            store = self._own_store()
            place = 1
            while (text := mailbox.read(store, self.rank, place)).startswith(_QUESTION):
                self._asked = time.monotonic()
                store.set(f"{text.removeprefix(_QUESTION)}/{self.rank}", self._doing())
                place += 1
        except Exception as error:
            # The launcher holds the store; without it nobody could tell us anything any more.
            text = f"the store is gone: {' '.join(str(error).split())[:200]}"
        if text:
            self.abort(text, tell=False)

    def _doing(self) -> str:
        """What the main thread is at, in words; beginning with "waits" if with others."""
        waiting = self._waiting
        if waiting is not None:
            return f"waits for {waiting[0]} since {time.monotonic() - waiting[1]:.0f} s"
        frame = sys._current_frames().get(self._main_thread)
        if frame is None:
            return "has ended its main thread"
        code = frame.f_code
        return f"is busy in {code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _who_is_missing(self) -> str:
        """After a wait in vain: the ranks that do not answer, and those that do not wait themselves."""
        try:
            others = self._others()
            answers = mailbox.call_roll(self._own_store(), others, _QUESTION)
        except Exception as error:
            return f"the store does not answer either: {' '.join(str(error).split())[:200]}"
        silent = [str(rank) for rank in others if rank not in answers]
        told = [f"rank {rank} {text}" for rank, text in answers.items()]
        busy = [text for text in told if " waits " not in text]
        if silent:
            busy.insert(
                0, f"rank {', '.join(silent[:16])} does not answer: killed or stopped, or its machine is gone"
            )
        return "; ".join((busy or told)[:8])

    @contextlib.contextmanager
    def _explained(self, what: str) -> Any:
        """Turn a backend's error into ours: the abort it follows from, or what was being awaited."""
        if self._reason is not None:
            raise CommAborted(self._reason)
        if self._closed:
            raise CommAborted(f"{what}: communication of generation {self.generation} is closed")
        is_main = threading.get_ident() == self._main_thread
        if is_main:
            self._waiting = what, time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            kind: type[RuntimeError] = CommTimeout
            text = f"rank {self.rank} waited over {self._timeout.total_seconds():g} s for {what}"
            if "imed out" not in str(error) and "imeout" not in str(error):
                self._await_news(1.0)
                kind = CommAborted
                text = f"rank {self.rank} lost its peer in {what}"
            if self._reason is None:
                text = f"{text}; {self._who_is_missing()}"
            if self._reason is not None:
                raise CommAborted(self._reason) from None
            self.abort(text)
            raise kind(text) from error
        finally:
            if is_main:
                self._waiting = None

    def _await_news(self, seconds: float) -> None:
        """A peer's connection often closes a moment before the news of why, or when it has waited too long and calls
        the roll: let the news arrive."""
        began = time.monotonic()
        while self._reason is None:
            if time.monotonic() > max(began + seconds, self._asked + 2 * mailbox.ANSWER_SECONDS):
                return
            self._watchdog.join(0.02)
            if not self._watchdog.is_alive():
                return


def announce_failure(store: Any, reason: str) -> bool:
    """Tell all ranks of the newest generation to end their communication; for a launcher that saw a worker die.

    Returns whether they had all begun to communicate: otherwise they have not done anything together yet.
    """
    if not store.check(["generation"]):
        return False
    generation, size = map(int, store.get("generation").split())
    own = dist.PrefixStore(f"generation{generation}", store)
    for rank in range(size):
        mailbox.post(own, rank, reason)
    return own.check([f"group/world/here/{rank}" for rank in range(size)])


def _open_backend(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # NCCL's own error handling kills the process; ours aborts, explains and may go on under the next generation.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def _is_nccl(group: Group) -> bool:
    return group._backend is not None and group._backend.name() == "nccl"


def _end(group: Group) -> None:
    """Make everything that is blocked in a group raise.

    Gloo's own abort does nothing (pytorch #130345). But a Gloo operation that times out closes all connections of its
    group, so a receive that nobody answers, with a timeout of a millisecond, is an abort. One from a rank that is gone
    fails at once and closes nothing: then another one must serve.
    """
    backend = group._backend
    if backend is None:
        return
    if _is_nccl(group):
        with contextlib.suppress(Exception):
            backend.abort()
        return
    own = group.ranks.index(group._comm.rank)
    for peer in range(own + 1 - len(group.ranks), own):
        try:
            backend.recv([torch.zeros(1)], peer % len(group.ranks), _POKE_TAG).wait(timedelta(milliseconds=1))
        except Exception as error:
            if "imed out" in str(error):
                return
