"""Untrusted folders: open files without following links, waiting for pipes or reading without limit.

A run folder, a checkpoint or an export may come from another person. `require_plain` checks such a folder when it is
opened, before anything in it is written, truncated or deleted; `open_in_place` opens a file that is appended to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from dilatant.config.errors import UserError

RUN_FOLDERS = frozenset({"checkpoints", "export", "plan", "resilience", "tensorboard", "traces"})
RUN_SUFFIXES = (".lock", ".damaged", ".html", ".json", ".jsonl", ".yaml")
"""Folders and file suffixes that a run writes. Users may keep other entries next to them (also links, like wandb)."""
MOST_TEXT = 256 << 20
"""Maximum bytes of a text file that is read whole; a plan of ten thousand ranks takes a tenth of it."""
LFS_POINTER = b"version https://git-lfs"
"""Beginning of the placeholder that a clone without Git LFS has in place of a large file."""
FETCH_LFS = "is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"


def require_plain(folder: Path, is_run: bool = False) -> None:
    """Raise UserError if `folder` contains a link, a pipe, a socket or a device at any depth.

    The folder itself may be a link or be reached by one, since its user named it. is_run: check only what runs write.
    """
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except OSError:
            continue  # absent, no folder or unreadable: opening it will report that
        if is_run and place == folder:
            found = [one for one in found if one.name in RUN_FOLDERS or one.name.endswith(RUN_SUFFIXES)]
        for entry in found:
            if entry.is_symlink():
                raise UserError(
                    f"{entry.path!r} is a link, which could lead out of {str(folder)!r}; remove it, or put what it "
                    "leads to in its place"
                )
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise UserError(f"{entry.path!r} is no regular file; remove it")


def open_in_place(path: Path) -> BinaryIO:
    """Open a file of the run for reading and appending; create it if absent.

    Refuses a link, a pipe, a device and a file with several names (hard links), whose other names would be changed too.
    Raises OSError.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(error.errno, f"{path.name} is a link; remove it") from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return os.fdopen(descriptor, "a+b")
    os.close(descriptor)
    what = "has several names (hard links)" if stat.S_ISREG(status.st_mode) else "is no regular file"
    raise OSError(0, f"{path.name} {what}; remove it, or put a copy in its place")


def is_trusted_cache_file(path: Path) -> bool:
    """Return True for a cache file that no other user can have placed. It is no link, and it belongs to this user or
    its folder is not writable by everybody."""
    try:
        status, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_uid == os.geteuid() or not folder.st_mode & stat.S_IWOTH)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a pipe or a device, which might block, and ValueError for an
    impossible file name."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(0, "it is no regular file")


def read_text(path: Path, most_bytes: int = MOST_TEXT) -> str:
    """Read an untrusted text file. Files passed by the shell (`/dev/stdin`, `<(...)`) are read too. Raises OSError,
    also if it is longer than `most_bytes`, and UnicodeDecodeError."""
    with path.open("rb") if path.is_relative_to("/dev") else open_regular(path) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(0, f"it is longer than {most_bytes >> 20} MiB")
    return content.decode()
