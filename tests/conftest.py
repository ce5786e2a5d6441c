"""Fixtures and settings of all tests. This folder is on the import path, so `from oracles.x import y` works."""

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

# Failed asserts in these modules show the values that differ, as in test files.
pytest.register_assert_rewrite("cases", "harness.checked_steps", "harness.memberships", "harness.refused")

# Measurements of tests must not enter the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="dilatant-cache-")
os.environ["DILATANT_CACHE"] = _CACHE.name


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same random cases in every default run, so that only changes make tests fail; `-m slow` draws new ones.

    Cases have no deadline: the speed of a busy machine must not fail a test.
    """
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("searching", deadline=None)
    settings.load_profile("repeatable" if config.option.markexpr == "not slow" else "searching")
    if "gpu" not in config.option.markexpr:  # these tests are of what a CPU computes; `-m gpu` has those of GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # during imports: torch and transformers make many objects and little garbage
    if hasattr(config, "workerinput"):
        start_fork_server()
    is_first_of_several = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if is_first_of_several and not config.option.collectonly:
        compile_kernels()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep nanobind's list of what is not freed at exit from the terminal: frozen modules are not, which is quicker."""
    if hasattr(config, "workerinput"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    else:
        gc.unfreeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Pool of processes that runs a function on several ranks."""
    pool = WorkerPool()
    yield pool
    pool.close()
