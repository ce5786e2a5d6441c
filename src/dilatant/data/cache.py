"""Cache: a folder of arrays that are computed once and shared by all processes and later runs."""

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
from dilatant.config.files.own_files import is_trusted_cache_file
from dilatant.data.array_file import Arrays, read_arrays, write_arrays


@dataclass(frozen=True, slots=True)
class Cache:
    """Arrays cached by name and key in a folder. Picklable.

    named: the user chose the folder, so failing to write there is an error; otherwise it is a warning.
    """

    folder: Path
    named: bool = False

    def known(self, name: str, key: str | None = None) -> Arrays | None:
        """Return the arrays cached under a name and key (None accepts any key); None if they are missing, damaged, or
        another user's in a folder that everybody may write to."""
        path = self._path(name)
        return read_arrays(path, key) if is_trusted_cache_file(path) else None

    def kept(
        self,
        name: str,
        key: str,
        make: Callable[[], Arrays],
        valid: Callable[[Arrays], bool] = lambda _: True,
    ) -> Arrays:
        """Return the arrays cached under a name and key, or compute them and replace that name's entry.

        One process computes while the others wait for its lock. valid: returns whether cached arrays may still be used.
        Raises UserError if a named folder cannot be written or a script has no main guard; and errors of `make`.
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
            for left in self.folder.glob(f".{name}.*-*"):  # temporary files of a process killed while writing
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
        # stacklevel=1, so that the warning is shown once, whichever caller triggers it.
        warnings.warn(f"{problem}, so it is made again in every run; {remedy}", stacklevel=1)


def open_cache(cache_dir: str | Path | None) -> Cache:
    """Return the cache in the folder that the user names, or in the user's cache folder."""
    return Cache(Path(cache_dir), named=True) if cache_dir else Cache(cache_folder() / "sizes")


def _refuse_while_being_started() -> None:
    """Raise UserError while this process imports its parent's script: an unguarded script would wait here for a lock of
    the parent, which waits for this process."""
    if multiprocessing.parent_process() is None and multiprocessing.current_process().name != "MainProcess":
        raise UserError(
            "this script runs again in each process that reads data for it; put what it does under "
            "`if __name__ == '__main__':`"
        )


@contextmanager
def _locked(lock: int) -> Iterator[None]:
    """Hold a lock file, and close it afterwards. The kernel releases the lock if the holder dies."""
    try:
        with suppress(
            OSError
        ):  # no locks on this file system: several processes compute the arrays, the last write wins
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
