"""Process groups: point-to-point transfers and collectives, each of which returns a handle to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dilatant.comm.backends import MAX_TAG, Backend


class Watch(Protocol):
    """The part of `Comm` that a group uses."""

    def translated_errors(self, what: str) -> AbstractContextManager[None]:
        """Raise CommAborted or CommTimeout in place of a backend's errors."""

    def watch_device(self, what: str, is_completed: Callable[[], bool]) -> None:
        """Set a deadline for work that only a device waits for."""


@dataclass(eq=False, slots=True)
class Pending:
    """Handle of a transfer or collective in progress. Keeps its tensors alive until it is done.

    On a GPU `wait` makes the current stream wait, not the host; the host-side deadline starts there.
    """

    _watch: Watch
    _work: Any
    _what: str
    _tensors: Sequence[Tensor]
    _on_device: bool
    _finish: Callable[[], Any] | None

    @property
    def is_done(self) -> bool:
        """Return True if `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait until the tensors may be used. Raises CommAborted or CommTimeout."""
        if self._work is not None:
            with self._watch.translated_errors(self._what):
                self._work.wait()
            if self._on_device:
                self._watch.watch_device(self._what, self._work.is_completed)
            self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._tensors = ()


class Group:
    """A group of communicating ranks: one communicator, on a GPU with its own stream.

    `ranks` are ranks of the generation, in group order. Tensors must be contiguous and on the group's device. Every
    method but `barrier` returns at once; empty tensors are legal and send nothing. what: named in errors.
    """

    def __init__(self, watch: Watch, name: str, ranks: tuple[int, ...], rank: int, backend: Backend | None) -> None:
        self.name = name
        self.ranks = ranks
        self._watch = watch
        self._rank = rank
        self._backend: Any = backend
        self._on_device = backend is not None and backend.is_nccl

    @property
    def index(self) -> int:
        """Return this rank's index in the group."""
        return self.ranks.index(self._rank)

    @property
    def backend(self) -> Backend | None:
        """The communicator; None for a group of one rank and after `close`."""
        return self._backend

    @property
    def is_on_device(self) -> bool:
        """Return True if the group's tensors are on a GPU, where transfers overlap with compute."""
        return self._on_device

    def send(self, tensor: Tensor, to: int, tag: int = 0, what: str = "") -> Pending:
        """Send to rank `to`. Transfers between two ranks must be posted in the same order at both."""
        return self._transfer("send", tensor, to, tag, f"{what or self.name} to rank {to}")

    def receive(self, tensor: Tensor, source: int, tag: int = 0, what: str = "") -> Pending:
        """Fill `tensor` from rank `source`, which sends one of the same shape."""
        return self._transfer("receive", tensor, source, tag, f"{what or self.name} from rank {source}")

    def sum_(self, tensor: Tensor, what: str = "") -> Pending:
        """Replace `tensor` by its sum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, what)

    def max_(self, tensor: Tensor, what: str = "") -> Pending:
        """Replace `tensor` by its elementwise maximum over the ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, what)

    def all_gather(self, output: Tensor, input: Tensor, what: str = "") -> Pending:
        """Fill `output` with the inputs of all ranks in group order.

        input: the same number of elements and dtype on every rank. output: same dtype, number of ranks times as many
        elements. Raises ValueError.
        """
        self._check_sizes(whole=output, part=input)
        with self._watch.translated_errors(what or self.name):
            if len(self.ranks) == 1 or not input.numel():
                output.view(-1).copy_(input.view(-1))
                return self._pending(None, what)
            work = self._backend.all_gather(output.view(-1), input.view(-1))
        return self._pending(work, what, (output, input))

    def reduce_scatter(self, output: Tensor, input: Tensor, what: str = "") -> Pending:
        """Fill `output` with this rank's part of the sum of all inputs over the ranks, in group order.

        input: the same number of elements and dtype on every rank; unchanged, unless `output` is a view of this rank's
        part: the other parts are then undefined afterwards. output: same dtype, 1 / ranks of the elements. Raises
        ValueError.
        """
        self._check_sizes(whole=input, part=output)
        with self._watch.translated_errors(what or self.name):
            if len(self.ranks) == 1 or not output.numel():
                output.view(-1).copy_(input.view(-1))
                return self._pending(None, what)
            if self._on_device:
                work = self._backend.reduce_scatter(output.view(-1), input.view(-1))
                return self._pending(work, what, (output, input))
            if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
                work = self._backend.all_reduce(input.view(-1), dist.ReduceOp.SUM)
                return self._pending(work, what, (output, input))
            # Gloo has no native reduce-scatter, and would send everything to all ranks.
            parts = torch.empty_like(input.view(len(self.ranks), -1))
            work = self._backend.all_to_all(parts.view(-1), input.view(-1), [], [])

        @torch.no_grad()
        def add_up() -> None:
            torch.sum(parts, 0, dtype=output.dtype, out=output.view(-1))

        return self._pending(work, what, (input, parts), finish=add_up)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int], what: str = ""
    ) -> Pending:
        """Send a part of `input` to each rank and fill `output` with the parts from each rank, in group order.

        input, output: [elements] of one dtype. input_counts, output_counts: elements to and from each rank; any or all
        of them may be 0. Raises ValueError.
        """
        for tensor, counts in ((output, output_counts), (input, input_counts)):
            if tensor.shape != (sum(counts),) or len(counts) != len(self.ranks):
                raise ValueError(
                    f"group {self.name!r} of {len(self.ranks)} ranks: {list(counts)} are no counts of a tensor of "
                    f"shape {list(tensor.shape)}"
                )
        with self._watch.translated_errors(what or self.name):
            if len(self.ranks) == 1:
                output.copy_(input)
                return self._pending(None, what)
            work = self._backend.all_to_all(output, input, list(output_counts), list(input_counts))
        return self._pending(work, what, (output, input))

    def barrier(self, what: str = "") -> None:
        """Return when every rank has called this method."""
        flag = torch.ones(1, device="cuda" if self._on_device else "cpu")
        self.sum_(flag, what or f"barrier of {self.name}").wait()
        flag.item()

    def close(self) -> None:
        """Drop the reference to the communicator, which its owner shuts down."""
        self._backend = None

    def _transfer(self, direction: str, tensor: Tensor, peer: int, tag: int, what: str) -> Pending:
        if not tensor.numel():
            return self._pending(None, what)
        if not 0 <= tag < MAX_TAG:
            raise ValueError(f"tag {tag} is not in [0, {MAX_TAG})")
        with self._watch.translated_errors(what):
            work = getattr(self._backend, direction)(tensor, self.ranks.index(peer), tag)
        return self._pending(work, what, (tensor,))

    def _all_reduce(self, tensor: Tensor, operation: Any, what: str) -> Pending:
        with self._watch.translated_errors(what or self.name):
            if len(self.ranks) == 1 or not tensor.numel():
                return self._pending(None, what)
            work = self._backend.all_reduce(tensor, operation)
        return self._pending(work, what, (tensor,))

    def _check_sizes(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != len(self.ranks) * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"group {self.name!r} of {len(self.ranks)} ranks: {list(part.shape)} of {part.dtype} is not an equal "
                f"part of {list(whole.shape)} of {whole.dtype}"
            )

    def _pending(
        self, work: Any, what: str, tensors: Sequence[Tensor] = (), finish: Callable[[], Any] | None = None
    ) -> Pending:
        return Pending(self._watch, work, what or self.name, tensors, self._on_device, finish)
