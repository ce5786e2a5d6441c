"""Ranks that share a device: tensors travel through host memory and Gloo, since NCCL takes one rank of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.backends import Backend
from dilatant.comm.comm import WORLD, Comm


@dataclass(frozen=True)
class _Work:
    """An operation on copies in host memory; `wait` copies its results back."""

    work: Any
    finish: Callable[[], Any]

    def wait(self, *timeout: Any) -> None:
        self.work.wait(*timeout)
        self.finish()

    def is_completed(self) -> bool:
        """Not before `wait`, for what is received is not on the device yet."""
        return False


class StagedBackend(Backend):
    """A Gloo communicator for tensors of any device. Operations begin when the current stream has made their inputs."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return super().send(_copy(tensor), to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._staged(tensor, lambda there: Backend.receive(self, there, source, tag))

    def all_reduce(self, tensor: Tensor, operation: Any) -> Any:
        return self._staged(tensor, lambda there: Backend.all_reduce(self, there, operation))

    def all_gather(self, output: Tensor, input: Tensor) -> Any:
        return self._staged(output, lambda there: Backend.all_gather(self, there, _copy(input)))

    def all_to_all(self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int]) -> Any:
        counts = output_counts, input_counts
        return self._staged(output, lambda there: Backend.all_to_all(self, there, _copy(input), *counts))

    def _staged(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> _Work:
        there = _copy(tensor)
        return _Work(start(there), lambda: tensor.detach().copy_(there))


def _copy(tensor: Tensor) -> Tensor:
    """Copy to host memory, when everything in the current stream is done."""
    return tensor.detach().to("cpu", copy=True)


class StagedComm(Comm):
    """The communication of a rank that shares its device."""

    def _open_backend(self, name: str, ranks: tuple[int, ...], device: torch.device, for_edge: bool) -> Backend:
        opened = super()._open_backend(name, ranks, torch.device("cpu"), for_edge)
        if name == WORLD:
            return opened
        return StagedBackend(**{each.name: getattr(opened, each.name) for each in fields(opened)})
