"""The sizes index: tokens of every sample in every unit, known before anything is decoded, kept in a cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.environment import cache_folder
from dilatant.config.errors import UserError
from dilatant.data.blend import Blend, StreamBlend
from dilatant.data.encode import Encoding, measure_sample
from dilatant.data.reader import Reader
from dilatant.data.workers import WorkerPool

FORMAT = 1
CHUNK = 64
"""Samples that a worker measures in one go."""

Progress = Callable[[int, int], None]
"""Called with the samples done and the samples in all."""


@dataclass(frozen=True)
class SizesIndex:
    """Tokens per unit of every sample, in the order of the samples.

    units: "language", then the encoders. tokens: int64 [samples, units]. target_tokens: int64 [samples], those that
    carry loss. problems: sample → why it could not be measured; its tokens are 0.
    """

    units: tuple[str, ...]
    tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    problems: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, unit: str) -> NDArray[np.int64]:
        """Tokens of one unit: int64 [samples]."""
        return self.tokens[:, self.units.index(unit)]


def blend_sizes(
    blend: Blend | StreamBlend,
    encoding: Encoding,
    *,
    cache_dir: str | Path | None = None,
    workers: int = 0,
    progress: Progress = lambda done, total: None,
) -> SizesIndex:
    """The index of all sources of a blend, in its order. Parameters as of `reader_sizes`."""
    if not isinstance(blend, Blend):
        raise UserError(
            "the sizes of a streamed data set are not known ahead; do not stream it to measure it"
        )
    total = len(blend)
    parts: list[SizesIndex] = []
    done = 0
    for reader in blend.readers:
        parts.append(
            reader_sizes(
                reader,
                encoding,
                cache_dir=cache_dir,
                workers=workers,
                progress=partial(_forward, progress, done, total),
            )
        )
        done += len(reader)
        progress(done, total)
    return _joined(parts)


def reader_sizes(
    reader: Reader,
    encoding: Encoding,
    *,
    cache_dir: str | Path | None = None,
    workers: int = 0,
    progress: Progress = lambda done, total: None,
) -> SizesIndex:
    """The index of one source: read from the cache, or measured and written there.

    It is measured again when the data files, the tokenizer, the template or a processor are others. Media files that
    a data file names are not watched.
    cache_dir: where the index is kept; default: the user's cache directory. workers: processes that measure; 0 works
    here. Raises UserError where the index cannot be written.
    """
    key = hashlib.sha256(
        f"{FORMAT} {reader.fingerprint} {encoding.fingerprint} {len(reader)}".encode()
    ).hexdigest()
    # Another state of the same files replaces this one; another use of them has its own file.
    folder = reader.home and reader.home.resolve()
    use = (folder, reader.name, reader.prompt, sorted(reader.columns.items()), reader.limit)
    name = hashlib.sha256(repr((use, encoding.fingerprint)).encode()).hexdigest()[:16]
    file = (Path(cache_dir) if cache_dir else cache_folder() / "sizes") / f"sizes-{name}.parquet"
    known = _load(file, key)
    if known is not None:
        return known
    index = measure(reader, encoding, workers=workers, progress=progress)
    _save(index, file, key)
    return index


def _forward(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def measure(
    reader: Reader, encoding: Encoding, *, workers: int = 0, progress: Progress = lambda done, total: None
) -> SizesIndex:
    """The index of one source, measured now."""
    total = len(reader)
    bounds = [*range(0, total, CHUNK), total]
    # A handful of chunks is done before processes have started.
    pool: WorkerPool[tuple[int, int], _Chunk] = WorkerPool(
        _MeasureJob(reader, encoding),
        workers if len(bounds) > 8 else 0,
        named=lambda bounds: f"samples {bounds[0]} to {bounds[1] - 1} of {reader.name}",
    )
    chunks: list[_Chunk] = []
    try:
        for chunk in pool.map(pairwise(bounds), ahead=4 * max(1, workers)):
            if isinstance(chunk, UserError):
                raise chunk
            chunks.append(chunk)
            progress(min(len(chunks) * CHUNK, total), total)
    finally:
        pool.close()
    return SizesIndex(
        encoding.unit_names,
        np.concatenate([chunk.tokens for chunk in chunks]),
        np.concatenate([chunk.target_tokens for chunk in chunks]),
        {at: problem for chunk in chunks for at, problem in chunk.problems.items()},
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    problems: dict[int, str]


@dataclass(frozen=True)
class _MeasureJob:
    reader: Reader
    encoding: Encoding

    def __call__(self, bounds: tuple[int, int]) -> _Chunk:
        start, end = bounds
        units = self.encoding.unit_names
        tokens = np.zeros((end - start, len(units)), np.int64)
        target_tokens = np.zeros(end - start, np.int64)
        problems = {}
        for index in range(start, end):
            try:
                sizes = measure_sample(self.reader[index], self.encoding)
            except UserError as error:
                problems[index] = str(error)
                continue
            tokens[index - start] = [sizes.tokens[unit] for unit in units]
            target_tokens[index - start] = sizes.target_tokens
        return _Chunk(tokens, target_tokens, problems)


def _joined(parts: Sequence[SizesIndex]) -> SizesIndex:
    problems = {}
    offset = 0
    for part in parts:
        problems.update({offset + at: problem for at, problem in part.problems.items()})
        offset += len(part)
    return SizesIndex(
        parts[0].units,
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.target_tokens for part in parts]),
        problems,
    )


def _load(path: Path, key: str) -> SizesIndex | None:
    """The index in a file, unless it is missing, damaged or about something else."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
        header = json.loads((table.schema.metadata or {})[b"dilatant"])
        if header["key"] != key:
            return None
        units = tuple(header["units"])
        tokens = np.stack([table[f"tokens_{unit}"].to_numpy() for unit in units], axis=1)
        problem = table["problem"]
    except (OSError, ArrowException, KeyError, ValueError):
        return None
    wrong = np.flatnonzero(problem.is_valid().to_numpy())
    return SizesIndex(
        units,
        tokens.astype(np.int64),
        table["target_tokens"].to_numpy().astype(np.int64),
        {int(at): problem[int(at)].as_py() for at in wrong},
    )


def _save(index: SizesIndex, path: Path, key: str) -> None:
    """Write the index; nobody ever sees half a file."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    columns: dict[str, Any] = {f"tokens_{unit}": index.of(unit) for unit in index.units}
    columns["target_tokens"] = index.target_tokens
    columns["problem"] = pa.array([index.problems.get(at) for at in range(len(index))], pa.string())
    header = json.dumps({"key": key, "units": index.units})
    table = pa.table(columns).replace_schema_metadata({"dilatant": header})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".sizes-", delete=False) as file:
            temporary = Path(file.name)
            try:
                write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink()
                raise
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"the sizes index cannot be written to {str(path.parent)!r}: {error}; set 'data.cache_dir' to a folder "
            "with room"
        ) from None
