"""Inputs of blocks in host memory: under `recompute: block_offload` they leave the device until their backward.

On a GPU the copies run on streams of their own, into pinned memory: out while the next blocks compute, back while the
block behind computes its backward. Bits do not change.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAVING = 2
"""Inputs whose copies to the host may be under way while later blocks compute."""


class HostCopy:
    """A copy of a tensor in host memory; `left` and `arrived` are events of its copies in either direction."""

    def __init__(self, host: Any, device: torch.device, left: Any = None) -> None:
        self.host, self.device, self.left = host, device, left
        self.back: Tensor | None = None
        self.arrived: Any = None


class Copies(Protocol):
    """Copies between a device and its host."""

    def leave(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host, where nobody may write to it meanwhile."""

    def fetch(self, copy: HostCopy) -> None:
        """Begin to copy it back, unless that has begun."""

    def take(self, copy: HostCopy) -> Tensor:
        """Return it for use on the current stream."""


class PlainCopies:
    """Copies of tensors that are in host memory anyway."""

    def leave(self, tensor: Tensor) -> HostCopy:
        return HostCopy(tensor.clone(), tensor.device)

    def fetch(self, copy: HostCopy) -> None:
        return

    def take(self, copy: HostCopy) -> Tensor:
        host: Tensor = copy.host
        return host


class StreamedCopies:
    """Copies of a GPU. `cuda`: torch.cuda, or what records its calls."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._out, self._in = cuda.Stream(device=device), cuda.Stream(device=device)
        self._leaving: deque[tuple[Tensor, HostCopy]] = deque()

    def leave(self, tensor: Tensor) -> HostCopy:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._out.wait_stream(self._cuda.current_stream(tensor.device))
        with self._cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            copy = HostCopy(host, tensor.device, self._out.record_event())
        self._leaving.append((tensor, copy))
        if len(self._leaving) > LEAVING:
            self._drop()
        return copy

    def fetch(self, copy: HostCopy) -> None:
        if copy.back is not None:
            return
        while self._leaving:  # the newest may be the one
            tensor, leaving = self._leaving[0]
            if leaving is copy:
                copy.back = tensor
            self._drop()
        if copy.back is not None:
            return
        # Allocated for the current stream, which uses it; so its earlier use there must be over.
        copy.back = torch.empty(copy.host.shape, dtype=copy.host.dtype, device=copy.device)
        self._in.wait_stream(self._cuda.current_stream(copy.device))
        self._in.wait_event(copy.left)
        with self._cuda.stream(self._in):
            copy.back.copy_(copy.host, non_blocking=True)
            copy.arrived = self._in.record_event()

    def take(self, copy: HostCopy) -> Tensor:
        self.fetch(copy)
        if copy.arrived is not None:
            self._cuda.current_stream(copy.device).wait_event(copy.arrived)
        tensor, copy.back, copy.arrived = copy.back, None, None
        assert tensor is not None
        return tensor

    def _drop(self) -> None:
        """Let go of the oldest tensor that leaves: the current stream uses its memory again behind the copy."""
        tensor, copy = self._leaving.popleft()
        self._cuda.current_stream(tensor.device).wait_event(copy.left)


class _Kept:
    """The input of block `number` of one forward, and that of the block before, whose backward is next."""

    def __init__(self, copy: HostCopy, number: int, before: weakref.ref[_Kept] | None) -> None:
        self.copy, self.number, self.before = copy, number, before


class HostInputs:
    """The inputs of a unit's blocks on their way to the host and back. copies: None: those of the inputs' device."""

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies
        self._last: weakref.ref[_Kept] | None = None

    def kept(self, hidden: Tensor, number: int) -> AbstractContextManager[Any]:
        """Return a context in which `hidden`, the input of block `number`, is saved for a backward in host memory."""
        # The rows that a stage received stay until their gradient is sent, so a copy would save nothing.
        is_received = hidden.is_leaf and hidden.requires_grad
        place, shape = hidden.data_ptr(), hidden.shape  # autograd keeps `pack`, which must not keep `hidden`

        def pack(tensor: Tensor) -> Tensor | _Kept:
            if is_received or tensor.data_ptr() != place or tensor.shape != shape:
                return tensor
            if self._copies is None:
                self._copies = StreamedCopies(tensor.device) if tensor.is_cuda else PlainCopies()
            before = None if self._last is None else self._last()
            follows = before is not None and before.number < number
            kept = _Kept(self._copies.leave(tensor.detach()), number, self._last if follows else None)
            self._last = weakref.ref(kept)
            return kept

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self._copies is not None
        tensor = self._copies.take(packed.copy)
        before = None if packed.before is None else packed.before()
        if before is not None:
            self._copies.fetch(before.copy)
        return tensor
