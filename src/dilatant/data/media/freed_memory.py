"""Memory allocator settings for decoding: keep freed memory in the process."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20
"""The maximum that glibc accepts."""
_KEPT = 512 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 512 MiB of freed memory in this process for the next image.

    By default glibc returns megabytes to the system and faults them in again page by page, a third of the time of
    decoding an image of 1,024 pixels. Other C libraries are left unchanged.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
