"""What tensors take at every moment: a dispatch mode that counts the storages that live, by what torch allocates.

Knows nothing of models, plans or schedules. It sees what operations return, not what they use inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While entered: `now`, the bytes of storages made inside that still live, and `peak`, the most there were.

    given: tensors from before, which do not count; all weights and buffers, or their views would. resizing: storages
    may be resized, which is seen at the next operation.
    """

    def __init__(self, given: Iterable[torch.Tensor] = (), resizing: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref] | None = {} if resizing else None
        self._known: dict[int, int] = {}
        for tensor in given:
            self._watch(tensor, counted=False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for key, reference in list((self._storages or {}).items()):
            storage = reference()
            if storage is not None and key in self._known:
                self.now += storage.nbytes() - self._known[key]
                self._known[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self._watch(value, counted=True)
        return result

    def reset_peak(self) -> None:
        """Forget higher moments before this one."""
        self.peak = self.now

    def _watch(self, tensor: torch.Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0
        self._known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        if counted and self._storages is not None:
            self._storages[key] = weakref.ref(storage)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
        if self._storages is not None:
            self._storages.pop(key, None)
