"""The server that processes of ours come from, forked in a moment. Imports no torch itself, so it can start first.

Processes are never forked from the caller: one that runs torch has threads, and a fork of it may hang.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from dilatant.comm.temporary import OWNER, TemporaryFolder, short_temporary_folder
from dilatant.config.environment import without_working_folder
from dilatant.config.errors import UserError

RANK_PRELOAD = (
    "dilatant.training.run",
    "dilatant.schedule.loaded_kernels",
)
"""What a rank needs; its imports are the bulk of its start, and the server does them once."""


SOCKET_PATH_BYTES = 107
"""Longest path that a socket has on Linux."""
NO_GUARD_EXIT = 78
NO_GUARD = (
    'the script that started this has no `if __name__ == "__main__":` line; processes that import it must not run it '
    "again: put what it does below that line"
)


def warm_up(preload: Sequence[str] = RANK_PRELOAD) -> None:
    """Start the server; its imports go on beside what the caller does.

    Signals to a whole process group (Ctrl-C in a terminal, SIGTERM from `timeout` or Slurm) are for the caller: the
    server and its workers hold them back. Nothing is imported from the folder in which the caller runs. Raises
    UserError where no folder for temporary files has a path short enough for a socket.
    """
    require_main_guard()
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":  # no file, though it says so: workers would look for it
        del main.__file__
    _choose_folder()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with without_working_folder():
        resource_tracker.ensure_running()  # at its start it lets both signals through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    folder = own_folder()
    if folder is not None and not Path(folder, OWNER).exists():
        util.Finalize(None, TemporaryFolder(path=folder).close, exitpriority=-101)


def require_main_guard() -> None:
    """End this process where it is one of ours that imports the user's script, which calls us at its top level. Whoever
    started it finds NO_GUARD_EXIT, and says NO_GUARD."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_GUARD_EXIT)


def _choose_folder() -> None:
    """Let multiprocessing have its folder, of mode 0700, where its socket fits. Raises UserError."""
    with short_temporary_folder():
        folder = util.get_temp_dir()
    if len(os.fsencode(folder)) + len("/listener-12345678") > SOCKET_PATH_BYTES:
        raise UserError(f"the path of {folder} is too long for sockets in it; set TMPDIR to a shorter one")


def own_folder() -> str | None:
    """The folder that multiprocessing made for this process, for `remove_behind_parent`; None in a process that it
    started, which shares its parent's."""
    return util.get_temp_dir() if multiprocessing.parent_process() is None else None


def remove_behind_parent(folder: str | None, seconds: float = 1.0) -> None:
    """In a worker, once its parent seems gone: remove the parent's `own_folder`, which it could not if it was killed.
    Kept while the parent lives on, which may start others from there; it is given some seconds to end."""
    parent = multiprocessing.parent_process()
    if folder is None or parent is None:
        return
    parent.join(seconds)
    if not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def heed_launcher() -> None:
    """In a worker: SIGTERM is for it again, which its launcher sends when it is asked to stop; Ctrl-C is not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
