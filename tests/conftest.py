"""What every test may ask for. This folder is on the import path, so `from oracles.x import y` works."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Tiny models on a few cores: more threads wait for each other than work. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from worker_pool import WorkerPool  # torch reads the variable above when it is imported


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes to run a function on several ranks in."""
    pool = WorkerPool()
    yield pool
    pool.close()
