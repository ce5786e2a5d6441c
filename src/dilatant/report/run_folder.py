"""The run folder: what a run leaves behind, and where.

config.yaml, metrics.jsonl, eval.json, tensorboard/, checkpoints/, export/
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dilatant.config import UserError


class RunFolder:
    """Opens (and creates) a run folder for writing; `close` when done."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):  # a name of its own: all ranks of a run try at once
                pass
        self._metrics: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def write_config(self, text: str) -> None:
        """Save the resolved config."""
        self.write_text(self.config.name, text)

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Save `value` as `name` in the folder; a reader never sees half of it."""
        return self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Save `text` as `name` in the folder; a reader never sees half of it."""
        path = self.path / name
        with self._writing():
            _write_whole(path, text)
        return path

    def begin_metrics(self, completed_steps: int) -> None:
        """Open metrics.jsonl after step `completed_steps`.

        Records of later steps, left by a run that died after its last checkpoint, are dropped: those steps
        will be run again and the file keeps one record a step.
        """
        path = self.path / "metrics.jsonl"
        kept = [line for line in _records(path) if json.loads(line)["step"] <= completed_steps]
        with self._writing():
            _write_whole(path, "".join(f"{line}\n" for line in kept))
            self._metrics = path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        if self._metrics is None:
            raise RuntimeError("begin_metrics first")
        with self._writing():
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            with suppress(OSError):  # a record that could not be written was reported when it was logged
                self._metrics.close()
            self._metrics = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full or unwritable disk is the user's to mend. Raises UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(f"output_dir {str(self.path)!r} cannot be written: {error.strerror}") from None


def _records(path: Path) -> list[str]:
    """Complete lines; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        lines.append(line)
    return lines


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
