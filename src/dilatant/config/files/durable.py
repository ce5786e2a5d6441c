"""Files and folders that survive a power cut: on disk first, then under their name."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_TOKEN_BYTES = 6
LEFTOVERS = f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.writing"
"""Matches what a `write_durably` that was killed leaves in a folder."""


def write_durably(path: Path, text: str) -> None:
    """Put `text` at `path`, replacing what is there: a reader, also one after a crash, finds the old text or the new.

    Its temporary name is its own, so several writers do not meet. Raises OSError, and leaves nothing then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.writing")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_named(path: Path, text: str) -> None:
    """`write_durably` to a path that the user names: what is no plain file (a link, /dev/stdout) is written through."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_durably(path, text)


def sync_file(path: Path) -> None:
    """Return when the content of `path` is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on disk: a file's content does not bring its name along. Raises OSError."""
    sync_file(folder)


def sync_tree(folder: Path) -> None:
    """`sync_file` and `sync_folder` for all below `folder`. Raises OSError."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))
