"""Durable writes: files and folders that survive a power failure, synced to disk before they get their name."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_TOKEN_BYTES = 6
LEFTOVERS = f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.writing"
"""Pattern of the temporary files that a killed `write_durably` leaves in a folder."""


def write_durably(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the content of `path` atomically: a reader, even after a crash, finds either the old or the new one.

    Each call uses a unique temporary name, so concurrent writers do not conflict. mode: the
    permissions, less the umask. Raises OSError, leaving no file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.writing")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_named(path: Path, text: str) -> None:
    """Like `write_durably`, but a path that is no plain file (a link, /dev/stdout) is written in place."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_durably(path, text)


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to disk; the one does not do the other. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below `folder`. Raises OSError."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
