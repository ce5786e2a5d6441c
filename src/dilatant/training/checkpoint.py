"""Checkpoints: written atomically in the background, found again newest first, refused when damaged.

A checkpoint is a folder `step-00000100`: one part for each rank that wrote (`part-00000`, a
torch.distributed.checkpoint under logical names, with the size and CRC-32 of every file in `part.json`), and a
`manifest.json` with the plain values (step, data position). It is written under a temporary name and renamed when all
parts are complete, so a folder with the final name is whole or damaged by others, never half-written by us. The rank
whose part is the last one does that: nobody waits for a rank that may have failed. Tensors are found by name in
whichever part holds them: a checkpoint loads under any other layout.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dilatant.config import UserError

Tensors = dict[str, Any]
"""Tensors under nested names: {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor}}}."""

_NAME = re.compile(r"^step-(\d{8})$")
_MANIFEST = "manifest.json"
_PART_MANIFEST = "part.json"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    path: Path
    step: int


class CheckpointWriter:
    """Writes one rank's parts of a run's checkpoints, one at a time, off the training path.

    A checkpoint is complete when all `num_parts` are there; the newest `keep` stay. Rank 0's writer must exist before
    another rank's first `save`.
    """

    def __init__(self, folder: Path, keep: int, rank: int = 0, num_parts: int = 1) -> None:
        self._folder = folder
        self._keep = keep
        self._rank = rank
        self._num_parts = num_parts
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if rank == 0:
            for leftover in folder.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, tensors: Tensors, values: dict[str, Any]) -> None:
        """Copy `tensors` to host memory and write them, with `values` (JSON, the same on all ranks), in the background.

        Waits for the checkpoint before it, whose failure is raised here as UserError.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, step, _to_host(tensors), values)

    def wait(self) -> None:
        """Return when this rank writes nothing any more. Raises UserError if the last write failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            raise UserError(_explain_failure(self._folder, error)) from error

    def close(self) -> None:
        """Finish what is being written and end the background thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(self, step: int, tensors: Tensors, values: dict[str, Any]) -> None:
        final = self._folder / f"step-{step:08d}"
        writing = self._folder / f".writing-{step:08d}"
        part = writing / _part_name(self._rank)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            with _without_process_group():
                dcp.save(tensors, checkpoint_id=part, no_dist=True)
            files = {file.name: [file.stat().st_size, _crc32(file)] for file in sorted(part.iterdir())}
            with _durable(part / f".{_PART_MANIFEST}") as stream:
                json.dump({"files": files}, stream, indent=1)
            (part / f".{_PART_MANIFEST}").rename(part / _PART_MANIFEST)  # appears when it is on disk
            self._complete(writing, final, {"step": step, "values": values})
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):
                writing.rmdir()  # unless others write there
            raise

    def _complete(self, writing: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Give the checkpoint its name if all parts are there. Of two ranks that find so, the first to open the
        manifest does."""
        parts = [_part_name(rank) for rank in range(self._num_parts)]
        if not all((writing / name / _PART_MANIFEST).exists() for name in parts):
            return
        try:
            with _durable(writing / _MANIFEST) as stream:
                json.dump({**manifest, "parts": parts}, stream, indent=1)
        except (FileExistsError, FileNotFoundError):
            return
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        _sync_folder(self._folder)
        for old in list_checkpoints(self._folder)[self._keep :]:
            shutil.rmtree(old.path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder`, newest first, not yet checked for damage."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return sorted(
        (Checkpoint(path, int(match[1])) for match, path in found), key=lambda c: c.step, reverse=True
    )


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every file is as it was written."""
    manifest: Path = checkpoint / _MANIFEST
    try:
        for name in _read_json(manifest)["parts"]:
            manifest = checkpoint / name / _PART_MANIFEST
            for file, (size, crc) in _read_json(manifest)["files"].items():
                problem = _file_damage(checkpoint / name / file, size, crc)
                if problem is not None:
                    return f"{name}/{file} {problem}"
    except FileNotFoundError:
        return f"{manifest.relative_to(checkpoint)} is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"{manifest.relative_to(checkpoint)} cannot be read ({error})"
    return None


def _file_damage(file: Path, size: int, crc: int) -> str | None:
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes instead of {size}"
    return "differs from what was written" if _crc32(file) != crc else None


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint in `folder` and a warning for every damaged one passed over."""
    warned: list[str] = []
    for checkpoint in list_checkpoints(folder):
        problem = damage(checkpoint.path)
        if problem is None:
            return checkpoint, warned
        warned.append(f"checkpoint {checkpoint.path.name} is damaged and was skipped: {problem}")
    return None, warned


def load(checkpoint: Path, tensors: Tensors, known: Collection[str] | None = None) -> dict[str, Any]:
    """Fill `tensors` in place from `checkpoint`; returns the plain values saved with them.

    known: all weights of the model, where `tensors` is only a part of it. Raises UserError when a tensor is absent
    there or has another shape, or when the checkpoint holds weights that the model has not: it is of another model.
    """
    wanted = _flatten(tensors)
    names = {*wanted, *(f"model.{name}" for name in known or ())}
    manifest = _read_json(checkpoint / _MANIFEST)
    stored = {name: _stored(checkpoint / name) for name in manifest["parts"]}
    shapes = {name: shape for part in stored.values() for name, shape in part.items()}
    problems = []
    for name, tensor in wanted.items():
        if name not in shapes:
            problems.append(f"{name} is not in the checkpoint")
        elif shapes[name] != tuple(tensor.shape):
            problems.append(f"{name} is {list(tensor.shape)} here and {list(shapes[name])} there")
    weights = {name for name in shapes if name.startswith("model.")}
    problems += [f"{name} is in the checkpoint only" for name in sorted(weights - names)]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UserError(
            f"checkpoint {str(checkpoint)!r} belongs to another model: {shown}. "
            "Use the config saved in its run folder, or another output_dir"
        )
    for part, held in stored.items():
        chosen = {name: wanted.pop(name) for name in held if name in wanted}
        if chosen:
            with _without_process_group():
                dcp.load(chosen, checkpoint_id=checkpoint / part, no_dist=True)
    return manifest["values"]


def stored_shapes(checkpoint: Path, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under `prefix.` that `checkpoint` holds, by its name without the prefix."""
    return {
        name.removeprefix(prefix + "."): shape
        for part in _read_json(checkpoint / _MANIFEST)["parts"]
        for name, shape in _stored(checkpoint / part).items()
        if name.startswith(prefix + ".")
    }


def _stored(part: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in one part."""
    metadata = dcp.FileSystemReader(part).read_metadata().state_dict_metadata
    return {name: tuple(e.size) for name, e in metadata.items() if isinstance(e, TensorStorageMetadata)}


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def _durable(path: Path) -> Iterator[TextIO]:
    """A new file that is on disk when the block ends; none if it fails. Raises FileExistsError if there is one."""
    with path.open("x", encoding="utf-8") as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            path.unlink()
            raise


@contextmanager
def _without_process_group() -> Iterator[None]:
    """Silence the reminder that one process works alone here; that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def _to_host(tensors: Tensors) -> Tensors:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else _to_host(value)
        for name, value in tensors.items()
    }


def _flatten(tensors: Tensors, prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + name] = value
        else:
            flat |= _flatten(value, f"{prefix}{name}.")
    return flat


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain_failure(folder: Path, error: BaseException) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    failures = getattr(error, "failures", None)
    if failures:
        causes += [failure[0] if isinstance(failure, tuple) else failure for failure in failures.values()]
    text = " ".join(str(cause) for cause in causes)
    full = any(
        isinstance(c, OSError) and c.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) for c in causes
    )
    full = full or "No space left" in text or "File too large" in text or "enforce fail" in text
    reason = "the disk is full" if full else " ".join(str(causes[-1]).split())
    kept = list_checkpoints(folder)
    rest = f"{kept[0].path.name} is still valid" if kept else "there is no earlier one"
    return f"the checkpoint in {str(folder)!r} could not be written: {reason}; {rest}. Free space and resume"
