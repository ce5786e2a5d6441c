"""Peak memory of operations on the CPU, whose allocator keeps no statistics."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Dispatch mode that tracks storages. `peak`: the most bytes that existed at once of storages created inside, minus
    freed bytes of earlier storages that were inputs of operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            self._see(value, made=False)
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            self._see(value, made=True)
        self.peak = max(self.peak, self._now)
        return result

    def _see(self, value: Any, made: bool) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes() if made else 0
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
