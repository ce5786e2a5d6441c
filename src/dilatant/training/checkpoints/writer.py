"""Checkpoint writer: every rank writes its part in the background, and rank 0 publishes the checkpoint.

A save has two phases. Every rank writes its part under a temporary name (`save`), and can tell without waiting when the
part is on disk (`ready`). When all ranks are ready, rank 0 binds the parts together and renames the folder (`publish`).
So a folder with its final name is complete, and rank 0 reports a part that never appears.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dilatant.config import UserError
from dilatant.config.files.durable import sync, write_durably
from dilatant.training.checkpoints.checkpoint import (
    CONTINUED,
    BoxPiece,
    Checkpoint,
    Shapes,
    Tensors,
    damage,
    list_checkpoints,
    pieces_of,
)
from dilatant.training.checkpoints.files import (
    FROZEN,
    MANIFEST,
    PART_MANIFEST,
    Branch,
    DamagedError,
    Manifest,
    RankPart,
    Stamp,
    part_name,
    read_manifest,
    read_part,
    stamp_of,
    write_manifest,
    write_part,
)
from dilatant.training.checkpoints.retention import abandon_checkpoint, prune, remove_leftovers, retire_other_branches

PATIENCE_SECONDS = 60.0
"""Seconds that a part reported to be on disk may take to become visible to rank 0 (NFS caches names)."""


class CheckpointWriter:
    """Write one rank's parts of a run's checkpoints, one at a time, off the training path.

    session: the same on all ranks of this start, and used by no other start. keep: how many checkpoints of this branch
    stay. `close` ends the background thread; what was not published by then is lost.
    """

    def __init__(self, folder: Path, keep: int, session: str, rank: int = 0, num_parts: int = 1) -> None:
        self._folder = folder
        self._keep = keep
        self._session = session
        self._rank = rank
        self._num_parts = num_parts
        self._branch: Branch = ()
        self._frozen = _Frozen(folder / FROZEN, f".writing-{session}-{rank}")
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        self._part: Future[None] | None = None
        self._unpublished: tuple[int, dict[str, Any]] | None = None
        self._published: list[Checkpoint] = []
        if rank == 0:
            remove_leftovers(folder)

    @property
    def published(self) -> Checkpoint | None:
        """The newest checkpoint that this writer has published; known on rank 0."""
        return self._published[-1] if self._published else None

    def continue_from(self, checkpoint: Path) -> None:
        """Begin a branch after `checkpoint`: checkpoints of other branches are renamed to `abandoned-...`, not deleted.

        Call this on rank 0, after all ranks have read `checkpoint` (which may be renamed) and the config is known to be
        right. Raises UserError.
        """
        try:
            self._branch = read_manifest(checkpoint).whole_branch
            retire_other_branches(self._folder, self._branch)
            if checkpoint.resolve().parent == self._folder.resolve():
                (self._folder / CONTINUED).unlink(missing_ok=True)
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_durably(self._folder / CONTINUED, f"{checkpoint.resolve()}\n")
        except (OSError, DamagedError) as error:
            raise UserError(_explain_failure(self._folder, error)) from error

    def save(
        self,
        step: int,
        tensors: Tensors,
        values: dict[str, Any],
        frozen: Collection[str] = frozenset(),
        shapes: Shapes | None = None,
    ) -> None:
        """Copy `tensors` to host memory, and write them in the background as this rank's part of step `step`.

        values: JSON, the same on all ranks. frozen: names in `tensors["model"]` that do not train; these are copied and
        stored once, and again only if they were written to (torch counts writes). shapes: full shapes of the weights of
        which `tensors` has boxes. A save that was never published is dropped. Waits for the previous save, whose
        failure is raised here as UserError.
        """
        self.wait()
        self._drop_unpublished()
        weights = tensors.get("model", {})
        fixed = {name: weights[name] for name in sorted(frozen) if name in weights}
        moving = {**tensors, "model": {name: t for name, t in weights.items() if name not in fixed}}
        pieces = {kind: list(pieces_of(held, shapes or {})) for kind, held in moving.items()}
        parts = {
            f"{kind}.{piece.box.name}": piece.box.whole
            for kind, held in {**pieces, "model": [*pieces["model"], *pieces_of(fixed, shapes or {})]}.items()
            for piece in held
            if not piece.box.is_whole
        }
        copies = {kind: _to_host(held) for kind, held in pieces.items()}
        store = self._frozen.prepare(fixed)
        self._unpublished = step, values
        self._part = self._pool.submit(self._write, step, copies, store, parts)
        self._pending.append(self._part)

    def ready(self) -> bool:
        """Return True if this rank's part of the last save, if any, is on disk. Never waits; raises UserError if
        writing failed."""
        if all(future.done() for future in self._pending):
            self.wait()
            return True
        return False

    def publish(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Give the last save its final name, in the background; then delete what `keep` no longer covers.

        Call this on rank 0 when all ranks are `ready`. After ranks have lost contact, it may be called at once: it
        waits for the other parts for `patience_seconds`. If they do not appear, nothing is published, and the next
        `wait` raises UserError. Does nothing if nothing was saved.
        """
        if self._unpublished is None:
            return
        (step, values), self._unpublished = self._unpublished, None
        self._pending.append(self._pool.submit(self._publish, step, values, patience_seconds))

    def wait(self) -> None:
        """Return when this rank has nothing left to write. Raises UserError if something could not be written."""
        while self._pending:
            try:
                self._pending.pop(0).result()
            except (OSError, SafetensorError, RuntimeError, DamagedError) as error:
                self._pending = [rest for rest in self._pending if not rest.cancel()]
                raise UserError(_explain_failure(self._folder, error)) from error

    def close(self) -> None:
        """Finish the current write and end the background thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._drop_unpublished()

    def _writing(self, step: int) -> Path:
        return self._folder / f".writing-{step:08d}-{self._session}"

    def _drop_unpublished(self) -> None:
        """Drop the last save. Only rank 0 deletes files: it may still need other ranks' parts, and ends by itself."""
        if self._unpublished is not None and self._rank == 0:
            shutil.rmtree(self._writing(self._unpublished[0]), ignore_errors=True)
        self._unpublished = None

    def _write(
        self, step: int, copies: dict[str, dict[str, torch.Tensor]], frozen: _Fixed, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        writing = self._writing(step)
        part = writing / part_name(self._rank)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            files = {}
            for kind, tensors in copies.items():
                if tensors:
                    file = part / f"{kind}.safetensors"
                    save_file(tensors, file)
                    sync(file)
                    files[file.name] = stamp_of(file)
            stored = self._frozen.store(frozen)
            write_durably(part / PART_MANIFEST, write_part(RankPart(step, self._session, files, stored, shapes)))
            for folder in (writing, self._folder, self._folder.parent):
                sync(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):
                writing.rmdir()  # unless others write there
            raise

    def _publish(self, step: int, values: dict[str, Any], patience_seconds: float) -> None:
        if self._part is not None and self._part.exception() is not None:
            return  # `wait` raises that
        writing, final = self._writing(step), self._folder / f"step-{step:08d}"
        try:
            parts = self._await_parts(writing, step, patience_seconds)
            manifest = Manifest(step, self._session, self._branch, values, parts)
            write_durably(writing / MANIFEST, write_manifest(manifest))
            if final.exists() or final.is_symlink():
                abandon_checkpoint(final)
            writing.rename(final)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        sync(self._folder)
        self._published.append(Checkpoint(final, step))
        (self._folder / CONTINUED).unlink(missing_ok=True)
        best = values.get("best")
        step_of_best = best.get("step") if isinstance(best, dict) else None
        prune(self._folder, self._keep, len(self._published) >= self._keep, step_of_best)

    def _await_parts(self, writing: Path, step: int, patience_seconds: float) -> dict[str, Stamp]:
        """Wait for all parts; return folder → stamp of its part.json. Raises DamagedError that names missing parts."""
        deadline = time.monotonic() + patience_seconds
        missing = list(range(self._num_parts))
        while True:
            missing = [rank for rank in missing if not (writing / part_name(rank) / PART_MANIFEST).is_file()]
            if not missing:
                break
            if time.monotonic() >= deadline:
                ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise DamagedError(
                    f"of step {step} rank 0 does not see the part of rank {ranks}; all machines must write "
                    "to the same file system"
                )
            time.sleep(0.1)
        stamps = {}
        for rank in range(self._num_parts):
            path = writing / part_name(rank) / PART_MANIFEST
            part = read_part(path, f"{path.parent.name}/{path.name}")
            if (part.step, part.session) != (step, self._session):
                raise DamagedError(f"{path.parent.name} is of another step or start of the run")
            stamps[path.parent.name] = stamp_of(path)
        return stamps


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Frozen weights to store. writes: how often each was written to. copies: None if an earlier save stored them."""

    weights: dict[str, torch.Tensor]
    writes: list[Any]
    copies: dict[str, torch.Tensor] | None


class _Frozen:
    """Store each set of frozen weights a single time, under the checksum of its file.

    Weights count as unchanged if they have the address of the stored ones and were not written to since. References to
    the stored tensors are kept, so that no other tensor can get their address.
    """

    def __init__(self, folder: Path, writing: str) -> None:
        self._folder = folder
        self._writing = writing
        self._last: _Fixed | None = None
        self._stored: dict[str, Stamp] = {}

    def prepare(self, weights: dict[str, torch.Tensor]) -> _Fixed:
        """Copy the weights if they are not those that were stored. Called on the thread that uses the weights."""
        writes = [_writes(tensor) for tensor in weights.values()]
        last = self._last
        same = last is not None and last.writes == writes and last.weights.keys() == weights.keys()
        if last is not None and same and all(map(_is_same, last.weights.values(), weights.values())):
            return _Fixed(weights, writes, None)
        return _Fixed(weights, writes, _to_host(pieces_of(weights, {})))

    def store(self, fixed: _Fixed) -> dict[str, Stamp]:
        """Store the weights and return file name → stamp. Called in the background. Raises OSError."""
        if fixed.copies is None and all((self._folder / name).is_file() for name in self._stored):
            return self._stored
        self._last, self._stored = None, {}
        if fixed.copies is None:
            raise OSError(errno.ENOENT, f"the frozen weights in {str(self._folder)!r} were removed")
        if fixed.copies:
            self._folder.mkdir(parents=True, exist_ok=True)
            writing = self._folder / self._writing
            try:
                save_file(fixed.copies, writing)
                sync(writing)
                stamp = stamp_of(writing)
                writing.replace(self._folder / f"{stamp.checksum}.safetensors")
            finally:
                writing.unlink(missing_ok=True)
            sync(self._folder)
            self._stored = {f"{stamp.checksum}.safetensors": stamp}
        self._last = replace(fixed, copies=None)
        return self._stored


def _is_same(stored: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (stored.data_ptr(), stored.shape, stored.stride(), stored.dtype, stored.device) == (
        tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    )  # fmt: skip


def _writes(tensor: torch.Tensor) -> Any:
    """Return how often `tensor` was written to; a unique value if torch does not count (inference tensors)."""
    return object() if tensor.is_inference() else tensor._version


def _to_host(pieces: Iterable[BoxPiece]) -> dict[str, torch.Tensor]:
    return {piece.box.key: piece.tensor.detach().to("cpu", copy=True).contiguous() for piece in pieces}


def _explain_failure(folder: Path, error: BaseException) -> str:
    text = " ".join(str(error).split())
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    full = full or "No space left" in text or "File too large" in text
    reason = "the disk is full" if full else text
    newest = next((c for c in list_checkpoints(folder) if damage(c.path, contents=False) is None), None)
    rest = f"{newest.path.name} is still valid" if newest else "there is no earlier one"
    remedy = ". Free space and resume" if full else ""
    return f"the checkpoint in {str(folder)!r} could not be written: {reason}; {rest}{remedy}"
