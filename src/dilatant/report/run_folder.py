"""Run folder: the files that a run writes.

config.yaml, metrics.jsonl, eval.json, tensorboard/, checkpoints/, traces/, export/

One command at a time trains in the folder: the launcher holds `.lock`. Rank 0 of a run writes; readers need not wait,
since every text appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dilatant.config import UserError
from dilatant.config.errors import file_errors
from dilatant.config.files.credentials import CREDENTIALS, mask_tree, store_credentials
from dilatant.config.files.durable import LEFTOVERS, write_durably
from dilatant.config.files.own_files import open_in_place, open_regular, require_plain
from dilatant.config.files.trust import record_trust
from dilatant.config.files.yaml_text import dump_yaml

if TYPE_CHECKING:
    from dilatant.config import Config

_WRITTEN = (
    *("config.yaml", "metrics.jsonl", "metrics.damaged", "plan.json", "step.json", "eval.json", "data.html"),
    CREDENTIALS,
    *("timeline.html", "timeline.json", "generations.html", "checkpoints", "resilience", "traces"),
)
"""Files of a run that it replaces without asking; an export checks its own files."""
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl: more than one record."""


class RunFolder:
    """Opens (and creates) a run folder for writing; call `close` when done."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.config = self.path / "config.yaml"
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):  # a unique name: all ranks of a run try at once
                pass
        self._metrics: BinaryIO | None = None
        self._lock: BinaryIO | None = None

    def lock(self) -> None:
        """Lock the folder until `close`, or until this process ends in any way.

        Call it in the process that starts the ranks, or in rank 0 under an outer launcher, before reading anything that
        decides about the run. Raises UserError that names the process which already holds the lock, and for a folder of
        no run that has files a run would replace.
        """
        require_plain(self.path, is_run=True)
        with self._writing():
            # A copy of a run may lack the lock.
            is_of_a_run = (self.path / ".lock").is_file() or any(self.checkpoints.glob("step-*/manifest.json"))
            foreign = next((name for name in _WRITTEN if os.path.lexists(self.path / name)), None)
            if foreign is not None and not is_of_a_run:
                raise UserError(
                    f"output_dir {str(self.path)!r} holds {foreign!r}, which no run wrote and this one would replace; "
                    "choose a folder of its own"
                )
            lock = open_in_place(self.path / ".lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).decode(errors="replace").strip() or "another process"
            lock.close()
            raise UserError(
                f"{str(self.path)!r} is in use by {holder}; wait for it, or choose another output_dir"
            ) from None
        except OSError:  # a file system without locks: assume no other process
            lock.close()
            return
        self._lock = lock
        with self._writing():
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            lock.flush()
            for leftover in self.path.glob(LEFTOVERS):
                leftover.unlink(missing_ok=True)

    def write_config(self, config: Config) -> None:
        """Save the resolved config, whose code the user has allowed to run (see `config/files/trust.py`), without the
        secrets in its addresses (see `config/files/credentials.py`)."""
        tree = config.model_dump(mode="json")
        record_trust(self.path, tree)
        secret = mask_tree(tree)
        with self._writing():
            store_credentials(self.path, secret)
        self.write_text(self.config.name, dump_yaml(tree))

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Save `value` as `name` in the folder; readers never see a partial file."""
        return self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Save `text` as `name` in the folder; readers never see a partial file."""
        path = self.path / name
        with self._writing():
            write_durably(path, text)
        return path

    def evaluations_before(self, completed_steps: int) -> list[dict[str, Any]]:
        """Return the history of eval.json up to step `completed_steps`; empty if it is missing or unreadable."""
        try:
            history = json.loads((self.path / "eval.json").read_text(encoding="utf-8"))["history"]
            return [entry for entry in history if entry["step"] <= completed_steps]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def begin_metrics(self, completed_steps: int, goes_on: bool = False) -> str | None:
        """Open metrics.jsonl after step `completed_steps`; return a warning if some of it was unreadable.

        goes_on: the run continues with other ranks; then only the last record is read if that suffices.

        Records of later steps, left by a run that died after its last checkpoint, are dropped: those steps run again,
        and the file keeps one record per step. Lines that are no records move to metrics.damaged, except a last line
        that a crash cut off.
        """
        path = self.path / "metrics.jsonl"
        with self._writing():
            if goes_on and 0 < last_step(path) <= completed_steps and _ends_with_a_line(path):
                self._metrics = open_in_place(path)
                return None
            kept, damaged = _records(path, completed_steps)
            if damaged:
                with open_in_place(self.path / "metrics.damaged") as aside:
                    aside.writelines(line + b"\n" for line in damaged)
            write_durably(path, "".join(f"{line}\n" for line in kept))
            self._metrics = open_in_place(path)
        if not damaged:
            return None
        return f"{len(damaged)} lines of {path} are no records; they were moved to metrics.damaged beside it"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, with the time in UTC."""
        if self._metrics is None:
            raise RuntimeError("begin_metrics first")
        with self._writing():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._metrics.write(json.dumps({**record, "time": now}).encode() + b"\n")
            self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            with suppress(OSError):  # `log` has already reported write errors
                self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _writing(self) -> AbstractContextManager[None]:
        return file_errors(f"output_dir {str(self.path)!r} cannot be written")


def is_deserted(path: Path) -> bool:
    """Return True if the last command that trained in the run folder at `path` ran on this machine and is gone."""
    try:
        with open_regular(path / ".lock") as lock:
            _, process, _, host = lock.read(1000).decode().split()
    except (OSError, ValueError):
        return False
    is_here = host == socket.gethostname() and os.path.isdir("/proc")
    return is_here and process.isdecimal() and not os.path.isdir(f"/proc/{process}")


def last_step(path: Path) -> int:
    """Return the last step in a metrics.jsonl that others may be writing to; 0 before the first. Reads only its end."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            length = _TAIL_BYTES
            while True:
                file.seek(max(0, size - length))
                lines = file.read(length).split(b"\n")
                steps = map(_step_of, reversed(lines[0 if length >= size else 1 :]))
                if (step := next((step for step in steps if step is not None), None)) is not None:
                    return step
                if length >= size:
                    return 0
                length *= 8
    except OSError:
        return 0


def _step_of(line: bytes) -> int | None:
    """Return the step of a record of metrics.jsonl; None for a line that is no record."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _records(path: Path, completed_steps: int) -> tuple[list[str], list[bytes]]:
    """Return the lines that are records of steps up to `completed_steps`, and the lines that are no records."""
    *lines, cut_off = path.read_bytes().split(b"\n") if path.exists() else [b""]
    kept, damaged = [], []
    for line in [*lines, cut_off]:
        if (step := _step_of(line)) is None:
            damaged.append(line)
        elif step <= completed_steps:
            kept.append(line.decode())
    if damaged[-1:] == [cut_off]:
        damaged.pop()  # an empty last line, or one that a crash cut off
    return kept, [line for line in damaged if line.strip()]
