"""A folder of arrays that were made once, for all processes and later runs."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dilatant.config.environment import cache_folder
from dilatant.config.errors import UserError
from dilatant.config.files.own_files import is_kept_safely
from dilatant.data.array_file import Arrays, read_arrays, write_arrays


@dataclass(frozen=True, slots=True)
class Cache:
    """Arrays by name. Picklable.

    named: the user chose the folder, so that one which cannot be written is an error; else it only costs time.
    """

    folder: Path
    named: bool = False

    def known(self, name: str, key: str | None = None) -> Arrays | None:
        """Return what is kept under a name and key, unless it is missing, damaged, or another user's in a folder that
        everybody may write to. key: None takes any."""
        path = self._path(name)
        return read_arrays(path, key) if is_kept_safely(path) else None

    def kept(
        self,
        name: str,
        key: str,
        make: Callable[[], Arrays],
        valid: Callable[[Arrays], bool] = lambda _: True,
    ) -> Arrays:
        """What is kept under a name and key, or is made now and replaces what was kept under that name.

        Of several processes one makes it and the others wait for it. valid: whether what is kept may still be used.
        Raises UserError where a named folder cannot be written or a script lacks its guard, and what `make` raises.
        """
        found = self.known(name, key)
        if found is not None and valid(found):
            return found
        _refuse_while_being_started()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(
                self._path(name).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )
        except OSError as error:
            self._cannot_write(error)
            return make()
        with _locked(lock):
            found = self.known(name, key)
            if found is not None and valid(found):
                return found
            for left in self.folder.glob(f".{name}.*-*"):  # of a process that was killed as it wrote
                with suppress(OSError):
                    left.unlink()
            made = make()
            try:
                write_arrays(self._path(name), key, made)
            except OSError as error:
                self._cannot_write(error)
                return made
        return self.known(name, key) or made

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.arrays"

    def _cannot_write(self, error: OSError) -> None:
        problem = (
            f"the index of the data cannot be written to {str(self.folder)!r}: {error.strerror or error}"
        )
        remedy = "set 'data.cache_dir' to a folder with room"
        if self.named:
            raise UserError(f"{problem}; {remedy}") from None
        # By its own place, so that it is shown once, whoever asks.
        warnings.warn(f"{problem}, so it is made again in every run; {remedy}", stacklevel=1)


def open_cache(cache_dir: str | Path | None) -> Cache:
    """The folder that the user names, or one in the user's cache."""
    return Cache(Path(cache_dir), named=True) if cache_dir else Cache(cache_folder() / "sizes")


def _refuse_while_being_started() -> None:
    """A process that is being started imports its parent's script. What an unguarded script does there would wait for
    the parent, which may hold the lock and waits for it."""
    if multiprocessing.parent_process() is None and multiprocessing.current_process().name != "MainProcess":
        raise UserError(
            "this script runs again in each process that reads data for it; put what it does under "
            "`if __name__ == '__main__':`"
        )


@contextmanager
def _locked(lock: int) -> Iterator[None]:
    """Hold a lock file, and close it. The kernel frees it when its holder dies."""
    try:
        with suppress(
            OSError
        ):  # a file system without locks: several may make the same, and the last one stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
