"""Arena: anonymous shared memory of one process into which data workers write samples; no exit leaves files behind."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_right, insort

ALIGNMENT = 64
"""Alignment of every slot in bytes: one cache line."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """An allocator in `nbytes` of shared memory, of which only written pages use RAM. Others map it by descriptor `fd`.

    The first `reserved` bytes belong to no slot; a slot is placed in the first gap that fits. Not thread-safe.
    """

    def __init__(self, nbytes: int, reserved: int = 0) -> None:
        self.nbytes = max(aligned(nbytes), aligned(reserved), mmap.PAGESIZE)
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self._free = [(aligned(reserved), self.nbytes)]  # (start, end), in order, never touching
        self._taken: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new slot, or None if no gap is long enough."""
        wanted = max(aligned(nbytes), ALIGNMENT)
        for number, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                self._free[number : number + 1] = [(start + wanted, end)] if end - start > wanted else []
                self._taken[start] = start + wanted
                return start
        return None

    def release(self, offset: int) -> None:
        """Free a slot. Raises KeyError if no slot starts at `offset`."""
        start, end = offset, self._taken.pop(offset)
        at = bisect_right(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of a byte range; the caller must release the view before `close`."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap the memory and close its descriptor. Idempotent."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dilatant-samples")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
