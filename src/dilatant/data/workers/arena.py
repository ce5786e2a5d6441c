"""Memory of one process that data workers write samples into: anonymous, so that nothing is left behind by any end."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_right, insort

ALIGNMENT = 64
"""Of every slot, in bytes: a line of the processor's cache."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """`nbytes` of memory, of which only what was written takes room. Others get at it by its descriptor `fd`.

    The first `reserved` bytes belong to no slot; slots lie as far to the front as there is room. Not safe for several
    threads.
    """

    def __init__(self, nbytes: int, reserved: int = 0) -> None:
        self.nbytes = max(aligned(nbytes), aligned(reserved), mmap.PAGESIZE)
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self._free = [(aligned(reserved), self.nbytes)]  # (start, end), in order, never touching
        self._taken: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new slot, or None where no gap is long enough."""
        wanted = max(aligned(nbytes), ALIGNMENT)
        for number, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                self._free[number : number + 1] = [(start + wanted, end)] if end - start > wanted else []
                self._taken[start] = start + wanted
                return start
        return None

    def release(self, offset: int) -> None:
        """Give a slot back. Raises KeyError where there is none."""
        start, end = offset, self._taken.pop(offset)
        at = bisect_right(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of its bytes; to be let go before `close`."""
        return memoryview(self._memory)[offset : offset + nbytes]

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dilatant-samples")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
