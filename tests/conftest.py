"""What every test may ask for. This folder is on the import path, so `from oracles.x import y` works."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from harness.kernels import compile_kernels

# Tiny models on a few cores: more threads wait for each other than work. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch reads the variable above when it is imported.
from harness.fork_server import start_fork_server
from harness.worker_pool import WorkerPool

# What these compare is shown where it differs, as in test files.
pytest.register_assert_rewrite("cases", "harness.checked_steps", "harness.refused")

# What tests measure is not kept among the user's files.
_CACHE = tempfile.TemporaryDirectory(prefix="dilatant-cache-")
os.environ["DILATANT_CACHE"] = _CACHE.name


def pytest_configure(config: pytest.Config) -> None:
    """The default run draws the same cases every time, so that what is red is the change; `-m slow` draws new ones.

    No case has a deadline: how fast a busy machine is does not decide what is right.
    """
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("searching", deadline=None)
    settings.load_profile("repeatable" if config.option.markexpr == "not slow" else "searching")
    gc.disable()  # while tests are imported: torch and transformers leave little garbage and much to look through
    if hasattr(config, "workerinput"):
        start_fork_server()
    is_first_of_several = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if is_first_of_several and not config.option.collectonly:
        compile_kernels()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes to run a function on several ranks in."""
    pool = WorkerPool()
    yield pool
    pool.close()
