"""Latent cache: a frozen autoencoder's outputs for the images that a generator learns to produce, computed once.

Latents are keyed by the bytes of the image file: equal files share one entry, and a changed file is computed anew.
Files are written atomically and hold a digest of their content.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dilatant.config.errors import UserError
from dilatant.config.files.own_files import is_trusted_cache_file
from dilatant.data.errors import MediaError, may_pass
from dilatant.data.media.open_media import open_media
from dilatant.data.sample import Media

NAME = "latents"
"""Name of the array in a file, and of the generator's input."""


@dataclass(frozen=True, slots=True)
class Latents:
    """Folder of latents for one autoencoder and image size. shape: [parts, channels, height, width], float32; parts are
    mean and log-variance of a variational autoencoder, or the latents themselves. Picklable."""

    folder: Path
    shape: tuple[int, int, int, int]

    def key_of(self, media: Media) -> str:
        """Return the key of a media item's bytes. Raises MediaError if the file cannot be read."""
        with open_media(media) as stream:
            try:
                return blake2b(stream.read(), digest_size=20).hexdigest()
            except OSError as error:
                raise MediaError(f"{media.name!r} cannot be read: {error}", "", may_pass(error)) from None

    def find(self, key: str) -> NDArray[np.float32] | None:
        """Return the latents under a key; None if they are missing, damaged, or of another shape or item."""
        if not is_trusted_cache_file(path := self._path(key)):
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                values, about = file.get_tensor(NAME), file.metadata() or {}
        except (OSError, SafetensorError, ValueError, TypeError):
            return None
        is_right = values.shape == self.shape and values.dtype == np.float32
        return values if is_right and about == _about(key, values) else None

    def keep(self, key: str, values: NDArray[np.float32]) -> None:
        """Store latents under a key. Raises UserError if the folder cannot be written."""
        values = np.ascontiguousarray(values)  # safetensors writes memory as it is laid out
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
            os.close(number)
            try:
                save_file({NAME: values}, name, _about(key, values))
                os.replace(name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"latents cannot be kept in {str(self.folder)!r}: {error}; set 'data.cache_dir' to a folder with room, "
                "or leave out cache_latents"
            ) from None

    def load(self, media: Media) -> NDArray[np.float32] | None:
        """Return the latents of an item, [1, *shape]. If there are none, return None and delete the marks of complete
        data sets, so that the next start computes the latents. Raises MediaError if the file cannot be read."""
        values = self.find(self.key_of(media))
        if values is None:
            for note in self.folder.glob("whole-*"):
                with suppress(OSError):
                    note.unlink()
            return None
        return values[None]

    def is_whole(self, data: str) -> bool:
        """Return True if the latents of all data with this fingerprint were once stored."""
        return (self.folder / f"whole-{data}").exists()

    def note_whole(self, data: str) -> None:
        """Mark the data with this fingerprint as completely stored."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"whole-{data}").touch()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def data_fingerprint(parts: Iterable[str]) -> str:
    """Combine several fingerprints into one."""
    return blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def _about(key: str, values: NDArray[np.float32]) -> dict[str, str]:
    digest = blake2b(values.tobytes(), digest_size=16).hexdigest()
    return {"picture": key, "digest": digest}
