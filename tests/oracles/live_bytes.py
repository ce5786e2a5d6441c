"""Bytes of all tensors that live: of every storage that an operation made, from its making to its end."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, `peak` is the most bytes that lived at once. held: what lives already and counts."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        self._seen[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)
