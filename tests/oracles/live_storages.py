"""What tensors take at every moment: a dispatch mode that counts the storages that live, by what torch allocates.

Knows nothing of models, plans or schedules. It sees what operations return, not what they use inside.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While entered: `now`, the bytes of storages made inside that still live, and `peak`, the most there were.

    given: tensors from before, which do not count; all weights and buffers, or their views would. resizing: storages
    may be resized, which is seen at the next operation.

    Threads that run collectives have this mode, too, and operate and free at any moment. Hence the lock, and what is
    freed is only noted in `_freed`, which is taken into account before the next number is read. Storages are known by a
    mark of their own, since an address may be that of another one by then.
    """

    def __init__(self, given: Iterable[torch.Tensor] = (), resizing: bool = False) -> None:
        super().__init__()
        self._now = self.peak = 0
        self._numbers = itertools.count()
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref] | None = {} if resizing else None
        self._freed: deque[int] = deque()
        self._lock = threading.RLock()
        for tensor in given:
            self._watch(tensor, counted=False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        with self._lock:
            self._see(result)
        return result

    def _see(self, result: Any) -> None:
        self._take_off()
        for number, reference in list((self._storages or {}).items()):
            storage = reference()
            if storage is not None and number in self._sizes:
                self._now += storage.nbytes() - self._sizes[number]
                self._sizes[number] = storage.nbytes()
        self.peak = max(self.peak, self._now)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self._watch(value, counted=True)

    @property
    def now(self) -> int:
        with self._lock:
            self._take_off()
            return self._now

    def reset_peak(self) -> None:
        """Forget higher moments before this one."""
        self.peak = self.now

    def _watch(self, tensor: torch.Tensor, counted: bool) -> None:
        storage: Any = tensor.untyped_storage()
        if getattr(storage, "watched_by", None) is self:
            return
        self._take_off()
        storage.watched_by = self
        number, size = next(self._numbers), storage.nbytes() if counted else 0
        self._sizes[number] = size
        self._now += size
        self.peak = max(self.peak, self._now)
        if counted and self._storages is not None:
            self._storages[number] = weakref.ref(storage)
        weakref.finalize(storage, self._freed.append, number)

    def _take_off(self) -> None:
        """Take freed storages off the count."""
        while self._freed:
            number = self._freed.popleft()
            self._now -= self._sizes.pop(number)
            if self._storages is not None:
                self._storages.pop(number, None)
