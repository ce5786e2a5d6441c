"""Profiler of one rank: traces of the steps that `train.profile` names; a snapshot when GPU memory runs out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import profile, record_function
from torch.utils.checkpoint import set_checkpoint_early_stop

from dilatant.comm.launch import Worker
from dilatant.config import Config
from dilatant.config.files.durable import write_durably
from dilatant.report.say import open_console, warn

TRACES = "traces"
"""Folder of traces and memory snapshots in the run folder."""


def trace_folder(config: Config, step: int) -> Path | None:
    """Return the folder of the traces of `step` (counted from 1); None if it is not to be traced."""
    first, last = (config.train.profile and config.train.profile.steps) or (1, 0)
    return Path(config.output_dir, TRACES, f"step-{step:08d}") if first <= step <= last else None


class StepProfiler:
    """Profiles the steps of one rank. A trace covers a whole step and is written after it: a step that fails has none,
    and a repeated step replaces its trace. named_ranges: context inside which actions have named ranges."""

    def __init__(
        self, config: Config, worker: Worker, named_ranges: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._config = config
        self._place = f"rank-{worker.rank}-of-{worker.size}"
        self._named_ranges = named_ranges
        records = config.train.profile is not None and config.train.profile.memory
        memory = torch.cuda.memory if records and worker.device.type == "cuda" else None
        self._record = getattr(memory, "_record_memory_history", None)  # private, so it may not exist
        self._dump = getattr(memory, "_dump_snapshot", None)
        if self._record is not None:
            self._record(stacks="python", max_entries=200_000)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Open the context in which step `number` (counted from 1) runs."""
        folder = trace_folder(self._config, number)
        # torch ends a recomputation early by an exception, and seems to lose it (SystemError, torch 2.11) when memory
        # is freed on the way and Python's stack is recorded.
        whole = nullcontext() if self._record is None else set_checkpoint_early_stop(False)
        try:
            if folder is None:
                with whole:
                    yield
                return
            with whole, profile() as trace, record_function(f"step {number}"), self._named_ranges():
                yield
            _write(folder / f"{self._place}.json.gz", trace.export_chrome_trace)
        except Exception as error:
            if self._dump is not None and _is_out_of_memory(error):
                name = f"out-of-memory-in-step-{number}.{self._place}.pickle"
                _write(path := Path(self._config.output_dir, TRACES, name), self._dump)
                warn(open_console(stderr=True), f"GPU memory ran out in step {number}; {path} has what held it")
            raise

    def close(self) -> None:
        """Stop recording allocations."""
        if self._record is not None:
            self._record(enabled=None)


def _write(path: Path, export: Callable[[str], object]) -> None:
    """Write `path` durably; `export` writes its content to a given name. Failures only cause a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            export(str(file := Path(scratch, path.name)))
            write_durably(path, file.read_bytes())
    except OSError as error:
        warn(open_console(stderr=True), f"{path} cannot be written: {error}")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes is a GPU's out-of-memory error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None
