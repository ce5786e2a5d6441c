"""Folders for sockets and other temporary files; those of killed processes are removed by the next command."""

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
"""Name of the lock file in such a folder: locked by the owning process, with its process id and start time."""
_PREFIXES = ("dilatant-", "pymp-", "ray-")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LONGEST_FOLDER_BYTES = 70
"""Longest path of a temporary folder that leaves space for sockets in subfolders, in bytes."""


@contextmanager
def short_temporary_folder(longest: int = LONGEST_FOLDER_BYTES) -> Iterator[str]:
    """Inside this context, `tempfile` creates folders whose paths are short enough for sockets; yields their parent.

    Raises UserError if no such folder exists.
    """
    usual = before = tempfile.gettempdir()
    if len(os.fsencode(usual)) > longest:
        usual = next((folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), "")
        if not usual:
            raise UserError(f"the path of TMPDIR ({before}) is too long for sockets in it; set it to a shorter one")
    tempfile.tempdir = usual
    try:
        yield usual
    finally:
        tempfile.tempdir = before


class TemporaryFolder:
    """A private folder of this process until `close`; removed by a later command if the process is killed.

    prefix: of its name. longest: most bytes of the parent folder's path; a shorter folder is used if TMPDIR is longer,
    because socket paths are limited. path: an existing folder to adopt. Raises OSError and UserError.
    """

    def __init__(
        self, prefix: str = _PREFIXES[0], longest: int = LONGEST_FOLDER_BYTES, path: str | None = None
    ) -> None:
        with short_temporary_folder(longest) as usual:
            self.path = path or tempfile.mkdtemp(prefix=prefix, dir=usual)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._owner: int | None = os.open(Path(self.path, OWNER), flags, 0o600)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._owner, f"{os.getpid()} {_start_of(os.getpid())}".encode())

    def close(self) -> None:
        """Remove the folder and its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def remove_left_folders() -> None:
    """Remove the folders of killed processes of this user, and no others. Never raises."""
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
    """Remove a folder if its process is gone. Raises OSError if the folder is not ours or its process holds it."""
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
    """Return a process's start time in system ticks and the machine's boot id, since process ids are reused; "gone" if
    it does not run."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        after_name = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return f"{after_name.split()[19]} {boot}"
    except (OSError, IndexError):
        return "gone"
