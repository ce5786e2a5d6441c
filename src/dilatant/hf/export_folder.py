"""Export folder: only a new folder, an empty one or an earlier export is ever replaced, and never in part."""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dilatant.config import UserError
from dilatant.config.files.durable import sync_folder, sync_tree, write_durably

FILES = "files.json"
"""File that lists what an export wrote, so that the next one knows what it may replace."""

_FORMAT = "dilatant export 1"
_TOKEN = "[0-9a-f]" * 8


def check_target(folder: Path, run: Path | None = None) -> None:
    """Raise UserError unless `folder` may become an export: it is absent, empty, or an earlier export and no more.

    run: the run folder that is exported; neither it nor a folder above it is replaced.
    """
    try:
        problem = _problem(folder, run)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    if problem is not None:
        raise UserError(
            f"the export cannot go to {str(folder)!r}: {problem}; name a new folder, an empty one or an earlier export"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which replaces it when the block ends without an error.

    The old content goes only then: a crash at any moment leaves the old content or the new, under its name or, between
    two renames, beside it, where the next `replacing` finds it. Raises OSError.
    """
    place = folder.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place)
    token = secrets.token_hex(4)
    writing, old = _beside(place, "writing", token), _beside(place, "old", token)
    writing.mkdir()
    try:
        yield writing
        write_durably(
            writing / FILES, json.dumps({"format": _FORMAT, "files": sorted(_files(writing))}, indent=1)
        )
        sync_tree(writing)
        had = place.exists()
        if had:
            place.rename(old)
        try:
            writing.rename(place)
        except OSError:
            if had:
                old.rename(place)
            raise
        sync_folder(place.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _problem(folder: Path, run: Path | None) -> str | None:
    place, here = folder.resolve(), Path.cwd().resolve()
    if folder.is_symlink():
        return f"it is a link to {str(place)!r}"
    if place in (here, *here.parents):
        return "the command runs in it"
    if run is not None:
        run = run.resolve()
        if place in (run, *run.parents):
            return "it holds the run itself"
        if place.is_relative_to(run / "checkpoints"):
            return "it is among the run's checkpoints"
    if not place.exists():
        return None
    if not place.is_dir():
        return "it is a file"
    found = _files(place)
    if not found and not any(place.iterdir()):
        return None
    foreign = sorted(found - _listed(place))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        return f"no export wrote {foreign[0]!r}{more} there"
    return None


def _files(folder: Path) -> set[str]:
    """Return the relative paths of everything below `folder`: files, links, and empty folders."""
    found = set()
    for parent, folders, files in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found |= {str(inside / name) for name in [*files, *links]}
        if not files and not folders and inside != Path("."):
            found.add(str(inside))
    return found


def _listed(folder: Path) -> set[str]:
    """Return the files that an earlier export lists, without links; none if it has no readable list."""
    try:
        content = json.loads((folder / FILES).read_bytes())
        if content["format"] != _FORMAT:
            return set()
        return {FILES, *(name for name in content["files"] if not (folder / name).is_symlink())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _recover(place: Path) -> None:
    """Clean up after a crash: rename the old content back, delete half-written folders."""
    for path in place.parent.glob(f".{glob.escape(place.name)}.old-{_TOKEN}"):
        if place.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(place)
    for path in place.parent.glob(f".{glob.escape(place.name)}.writing-{_TOKEN}"):
        shutil.rmtree(path, ignore_errors=True)


def _beside(place: Path, what: str, token: str) -> Path:
    return place.with_name(f".{place.name}.{what}-{token}")
