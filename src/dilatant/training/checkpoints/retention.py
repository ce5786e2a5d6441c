"""Checkpoint retention: keep the newest checkpoints of the run's own branch, and the files that they refer to.

Nothing here is deleted before its replacement is on disk.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from dilatant.config import UserError
from dilatant.config.files.durable import sync
from dilatant.training.checkpoints.checkpoint import damage, list_checkpoints
from dilatant.training.checkpoints.files import FROZEN, Branch, DamagedError, read_manifest, read_parts, step_of

ABANDONED = "abandoned-"


def retire_other_branches(folder: Path, branch: Branch) -> None:
    """Rename the checkpoints in `folder` that are not on `branch`, and restore the names of those that are.

    branch: of the run that continues, up to its start. Unreadable checkpoints are renamed, too. Raises OSError.
    """
    for checkpoint in list_checkpoints(folder):
        if not _lies_on(checkpoint.path, branch):
            abandon_checkpoint(checkpoint.path)
    for path in sorted(folder.glob(f"{ABANDONED}step-*")):
        step = step_of(path)
        if step is not None and _lies_on(path, branch):
            name = folder / f"step-{step:08d}"
            if not name.exists():
                path.rename(name)
    if folder.is_dir():
        sync(folder)


def abandon_checkpoint(path: Path) -> Path:
    """Rename a checkpoint so that no run resumes from it by itself; return its new path. Raises OSError."""
    aside, number = path.with_name(ABANDONED + path.name), 2
    while aside.exists() or aside.is_symlink():
        aside, number = path.with_name(f"{ABANDONED}{path.name}.{number}"), number + 1
    return path.rename(aside)


def prune(folder: Path, keep: int, drop_abandoned: bool, best: int | None = None) -> None:
    """Delete all checkpoints but the newest `keep` undamaged ones and the one of step `best`, and frozen weights that
    only the deleted ones named.

    A damaged checkpoint does not count, and is deleted when it is older than all that are kept. drop_abandoned: delete
    other branches as well. Never raises: what cannot be deleted stays.
    """
    with suppress(OSError, UserError):
        whole = [c for c in list_checkpoints(folder) if damage(c.path, contents=False) is None]
        kept = {c.path for c in whole[:keep]}
        oldest = min((c.step for c in whole[:keep]), default=0)
        doomed = [c.path for c in list_checkpoints(folder) if c.path not in kept and c.step < oldest and c.step != best]
        if drop_abandoned:
            doomed += [path for path in folder.glob(f"{ABANDONED}step-*") if step_of(path) is not None]
        named = set().union(*(_frozen_of(path) or set() for path in doomed))
        for path in doomed:
            with suppress(OSError):
                # Under another name first: a crash meanwhile leaves no partial checkpoint under its own.
                shutil.rmtree(path.rename(path.with_name(f".deleting-{path.name}")), ignore_errors=True)
        _drop_frozen(folder, named)


def remove_leftovers(folder: Path) -> None:
    """Delete what an earlier start left half written or half deleted. Never raises: what cannot be deleted stays.

    Call this at the start of a run, before any of its ranks writes.
    """
    with suppress(OSError):
        for pattern in (".writing-*", ".deleting-*", f"{FROZEN}/.writing-*"):
            for leftover in folder.glob(pattern):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
        _drop_frozen(folder, {path.name for path in (folder / FROZEN).glob("*.safetensors")})


def _drop_frozen(folder: Path, names: set[str]) -> None:
    """Delete those of `names` in `frozen/` that no checkpoint names; none while any checkpoint is unreadable."""
    rest = [_frozen_of(path) for path in folder.iterdir() if step_of(path) is not None]
    if names and all(held is not None for held in rest):
        for name in names.difference(*(held for held in rest if held is not None)):
            (folder / FROZEN / name).unlink(missing_ok=True)


def _lies_on(checkpoint: Path, branch: Branch) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except DamagedError:
        return False
    return any(manifest.session == session and manifest.step <= step for session, step in branch)


def _frozen_of(checkpoint: Path) -> set[str] | None:
    """Return the frozen files that `checkpoint` names; None if it cannot be read."""
    try:
        parts = read_parts(checkpoint, read_manifest(checkpoint))
    except DamagedError:
        return None
    return {name for part in parts.values() for name in part.frozen}
