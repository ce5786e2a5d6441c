"""Profiler of one rank: traces of the steps that `train.profile` names, and a snapshot of GPU memory when it runs out.

Private functions of torch.cuda.memory are called only here, and only if this torch has them.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dilatant.config import Config
from dilatant.config.files.durable import write_durably
from dilatant.config.train import ProfileConfig
from dilatant.report.run_folder import TRACES
from dilatant.report.say import open_console, say, warn

_MAX_EVENTS = 200_000
"""Maximum number of allocations and frees in a memory snapshot, the newest."""


def is_traced(config: ProfileConfig | None, step: int) -> bool:
    """Return True if ranks write traces of `step` (counted from 1)."""
    return config is not None and config.steps is not None and config.steps[0] <= step <= config.steps[1]


def trace_folder(output_dir: str | Path, step: int) -> Path:
    """Return the folder of a step's traces and memory snapshots."""
    return Path(output_dir, TRACES, f"step-{step:08d}")


class StepProfiler:
    """Profiles steps of rank `rank` of `size`; does nothing without `train.profile`.

    A trace covers a whole step and is written after it: a step that fails has none, and a repeated step replaces its
    trace. named_ranges: returns a context inside which the step's actions have named ranges.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        size: int,
        device: torch.device,
        named_ranges: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._config = config.train.profile
        self._output_dir = config.output_dir
        self._place = f"rank-{rank}-of-{size}"
        self._named_ranges = named_ranges
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._records_memory = self._config is not None and self._config.memory and device.type == "cuda"
        self._record_memory("all")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run step `number` (counted from 1) inside."""
        if self._config is None:
            yield
            return
        try:
            if is_traced(self._config, number):
                with self._traced(number), record_function(f"step {number}"), self._named_ranges():
                    yield
            else:
                yield
        except Exception as error:
            if self._records_memory and _is_out_of_memory(error):
                self._write_memory(number)
            raise

    def close(self) -> None:
        """Stop recording allocations."""
        self._record_memory(None)

    @contextmanager
    def _traced(self, number: int) -> Iterator[None]:
        assert self._config is not None
        with profile(activities=self._activities, with_stack=self._config.stacks) as trace:
            yield
        self._write(number, f"{self._place}.json.gz", trace.export_chrome_trace, compress=True)

    def _record_memory(self, enabled: str | None) -> None:
        record = getattr(torch.cuda.memory, "_record_memory_history", None)
        if self._records_memory and record is not None:
            record(enabled=enabled, stacks="python", max_entries=_MAX_EVENTS)

    def _write_memory(self, number: int) -> None:
        dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
        if dump is not None and (path := self._write(number, f"memory-{self._place}.pickle", dump)):
            say(open_console(stderr=True), f"out of GPU memory in step {number}; what held it: {path}")

    def _write(
        self, number: int, name: str, export: Callable[[str], object], compress: bool = False
    ) -> Path | None:
        """Write what `export` writes into a file; a file that cannot be written is a warning and ends no run."""
        path = trace_folder(self._output_dir, number) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as scratch:
                export(str(file := Path(scratch, "exported.json")))
                content = file.read_bytes()
            write_durably(path, gzip.compress(content, 5) if compress else content)
        except (OSError, RuntimeError) as error:
            warn(open_console(stderr=True), f"{path} cannot be written: {error}")
            return None
        return path


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes is a GPU's out-of-memory error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None
