"""Copies on the host of weights and optimizer state, while their own memory is free for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class HostCopies:
    """Copy the state of optimizers, and with `moves_weights` weights and their gradients, from `device` to the host,
    and free their memory until `restore`. State that is a weight itself moves with the weights.

    Tensors stay the same objects and views of each other, but have no memory in between: whatever reads them crashes.
    copies: memory of tensors, and what it held; empty after `restore`.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Iterable[Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        moves_weights: bool,
    ) -> None:
        held = _storages(device, weights)
        moved = held if moves_weights else {}
        moved |= {at: each for at, each in _storages(device, _state_of(optimizers)).items() if at not in held}
        self.copies = [(storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)) for storage in moved.values()]
        for storage, _ in self.copies:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again and copy the values back; does nothing the second time."""
        for storage, copy in self.copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self.copies = []


def _storages(device: torch.device, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return address → memory of tensors and of their gradients that is on the device and can be freed."""
    both = (each for tensor in tensors for each in (tensor, tensor.grad) if each is not None and each.device == device)
    storages = (each.untyped_storage() for each in both)
    return {each.data_ptr(): each for each in storages if each.nbytes() and each.resizable()}


def _state_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))
