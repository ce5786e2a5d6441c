"""Folders for sockets and other temporary files, which the next command removes where their process could not."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dilatant.config.errors import UserError

OWNER = "owner"
"""File in such a folder that its process holds locked, and that names it by process id and start."""
_PREFIXES = ("dilatant-", "pymp-", "ray-")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LONGEST_FOLDER_BYTES = 70
"""Of a folder for temporary files in which sockets have room, in folders of their own."""


@contextmanager
def short_temporary_folder(longest: int = LONGEST_FOLDER_BYTES) -> Iterator[str]:
    """Inside, `tempfile` makes folders where sockets in them have short paths; the folder that it is.

    Raises UserError where there is none.
    """
    usual = before = tempfile.gettempdir()
    if len(os.fsencode(usual)) > longest:
        usual = next((folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), "")
        if not usual:
            raise UserError(
                f"the path of TMPDIR ({before}) is too long for sockets in it; set it to a shorter one"
            )
    tempfile.tempdir = usual
    try:
        yield usual
    finally:
        tempfile.tempdir = before


class TemporaryFolder:
    """A folder for this user alone, of this process until `close` or until it ends however that happens.

    prefix: of its name. longest: bytes of the folder for temporary files; sockets need short paths, so that another one
    takes its place where it is longer. path: of a folder that is there already. Raises OSError and UserError.
    """

    def __init__(
        self, prefix: str = _PREFIXES[0], longest: int = LONGEST_FOLDER_BYTES, path: str | None = None
    ) -> None:
        with short_temporary_folder(longest) as usual:
            self.path = path or tempfile.mkdtemp(prefix=prefix, dir=usual)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._owner: int | None = os.open(Path(self.path, OWNER), flags, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._owner, f"{os.getpid()} {_start_of(os.getpid())}".encode())

    def close(self) -> None:
        """Remove the folder with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def remove_left_folders() -> None:
    """Remove the folders of processes of this user that were killed. Never raises, and leaves all others alone."""
    for parent in {tempfile.gettempdir(), *_SHORT_FOLDERS}:
        with suppress(OSError):
            for folder in _own_folders(parent):
                with suppress(OSError):
                    _remove_if_left(folder)


def _own_folders(parent: str) -> Iterator[str]:
    with os.scandir(parent) as entries:
        for entry in entries:
            is_ours = entry.name.startswith(_PREFIXES) and entry.is_dir(follow_symlinks=False)
            if is_ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield entry.path


def _remove_if_left(folder: str) -> None:
    """Raises OSError where the folder is not one of ours, or its process holds it."""
    owner = os.open(Path(folder, OWNER), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(owner)
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process, _, start = os.read(owner, 64).decode(errors="replace").partition(" ")
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and process.isdecimal()
        if is_ours and _start_of(int(process)) != start:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(owner)


def _start_of(process: int) -> str:
    """Return when a process started, in the system's ticks, with the machine's boot; "gone" for one that does not run.
    Numbers of processes are used again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        after_name = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        )
        return f"{after_name.split()[19]} {boot}"
    except (OSError, IndexError):
        return "gone"
