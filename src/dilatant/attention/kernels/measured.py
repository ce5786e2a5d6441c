"""Seconds of attention backends measured on this machine, kept in the cost cache by device and versions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from dilatant.config.environment import cache_folder
from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import is_trusted_cache_file, read_text

_PACKAGES = ("torch", "triton", "flash_attn_3", "magi_attention", "nvidia-cudnn-frontend")


class MeasuredRow(msgspec.Struct, frozen=True):
    """Seconds of a forward and a backward of each backend, for rows of one mask class and heads of one shape. group:
    query heads of a KV head. tokens: of a row. failed: backends that raised an error, and its first line."""

    mask: str
    dtype: str
    group: int
    head_dim: int
    tokens: int
    seconds: Mapping[str, float]
    failed: Mapping[str, str] = {}

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.mask, self.dtype, self.group, self.head_dim

    @property
    def ranking(self) -> list[str]:
        """Return the backends that ran, the fastest first."""
        return sorted(self.seconds, key=self.seconds.__getitem__)


def measured_row(
    rows: Iterable[MeasuredRow], mask: str, dtype: torch.dtype, group: int, head_dim: int
) -> MeasuredRow | None:
    """Return what was measured for such calls, of the rows of `measured_rows`; None if nothing was."""
    wanted = mask, str(dtype).removeprefix("torch."), group, head_dim
    return next((row for row in rows if row.key == wanted), None)


def store_measured(rows: Iterable[MeasuredRow], device: str, index: int | None = None) -> None:
    """Keep measured rows with those of other classes and heads. If the cache cannot be written, nothing is kept."""
    kept = {row.key: row for row in (*measured_rows(device, index), *rows)}
    path = _path(device, index)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, msgspec.json.format(msgspec.json.encode([*kept.values()])))
    _read.cache_clear()


def measured_rows(device: str, index: int | None = None) -> tuple[MeasuredRow, ...]:
    """Return what was measured on this kind of device. A process reads it once, so that its choices do not change."""
    return _read(_path(device, index))


@functools.cache
def _read(path: Path) -> tuple[MeasuredRow, ...]:
    if not is_trusted_cache_file(path):
        return ()
    try:
        return msgspec.json.decode(read_text(path), type=tuple[MeasuredRow, ...])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return ()


def _path(device: str, index: int | None) -> Path:
    what = torch.cuda.get_device_name(index) if device == "cuda" else device, _versions()
    return cache_folder() / "costs" / f"attention-{sha256(repr(what).encode()).hexdigest()[:24]}.json"


@functools.cache
def _versions() -> tuple[str | None, ...]:
    return tuple(_version(package) for package in _PACKAGES)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
