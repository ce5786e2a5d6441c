"""Parquet files, read by row number.

A row group can only be read from its start and may be larger than memory, so it is read as consecutive blocks of rows,
of which the most recently used are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import as_user_error
from dilatant.config.files.remote_files import RemotePath, open_data
from dilatant.data.errors import SampleError
from dilatant.data.readers.arrow_records import row_fields
from dilatant.data.readers.records import Blocks
from dilatant.data.readers.source_files import RecordsOfFiles, Scan, SourceFiles

CACHE_BYTES = 256 << 20
BLOCK_BYTES = 32 << 20
"""Bytes of a block, estimated from the sizes in the file's footer."""
OPEN_GROUPS = 4
"""Row groups that may be partly read at a time: neighbours in training order may be in several groups."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """All blocks of rows, in order. first: the first record of each block, then the number of records: int64
    [blocks + 1]. The others are int64 [blocks]. group: row group in the file. number: index among the `count` blocks of
    the group. rows: rows of a block; the last one may have fewer. group_of numbers the non-empty row groups over all
    files."""

    first: NDArray[np.int64]
    group_of: NDArray[np.int64]
    file: NDArray[np.int64]
    group: NDArray[np.int64]
    number: NDArray[np.int64]
    count: NDArray[np.int64]
    rows: NDArray[np.int64]

    @staticmethod
    def of(files: SourceFiles) -> _Runs:
        groups = np.concatenate([files.part("groups", file) for file in range(len(files.paths))])
        in_file = [np.arange(len(files.part("groups", file))) for file in range(len(files.paths))]
        rows, size = groups.T
        block_rows = np.maximum(1, rows * BLOCK_BYTES // np.maximum(size, BLOCK_BYTES))
        count = -(-rows // block_rows)
        each = np.repeat(np.arange(len(groups)), count)
        number = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
        lengths = np.minimum(block_rows[each], rows[each] - number * block_rows[each])
        return _Runs(
            first=np.cumsum(np.append(0, lengths)),
            group_of=np.unique(each, return_inverse=True)[1],
            file=np.repeat(np.arange(len(in_file)), [len(part) for part in in_file])[each],
            group=np.concatenate(in_file)[each],
            number=number,
            count=count[each],
            rows=block_rows[each],
        )


@dataclass(slots=True)
class _Stream:
    """The blocks of a row group as tables. next: the number of the block that comes next."""

    tables: Iterator[Any]
    next: int


class ParquetRecords(RecordsOfFiles):
    """Rows of several Parquet files. Picklable, without its cache.

    blocks: the runs of rows that are read together; None if all of the data fit into the cache.
    """

    def __init__(self, files: SourceFiles) -> None:
        super().__init__(files)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._open: OrderedDict[int, _Stream] = OrderedDict()

    @cached_property
    def _runs(self) -> _Runs:
        return _Runs.of(self._files)

    @cached_property
    def blocks(self) -> Blocks | None:
        total_bytes = int(self._files.array("groups")[:, 1].sum())
        if total_bytes <= CACHE_BYTES:
            return None
        lengths = np.diff(self._runs.first)
        window = max(1, int(CACHE_BYTES * len(lengths) / total_bytes))
        return Blocks(tuple(lengths.tolist()), window, tuple(self._runs.group_of.tolist()))

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        index = int(self._files.first[file]) + number
        block = int(np.searchsorted(self._runs.first, index, side="right")) - 1
        return row_fields(self._table(block), index - int(self._runs.first[block]), place)

    def _table(self, number: int) -> Any:
        """Return the rows of a block. The blocks before it in its row group are read and cached on the way."""
        from pyarrow import ArrowException

        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        runs = self._runs
        file, group, rows = (int(column[number]) for column in (runs.file, runs.group, runs.rows))
        first = number - int(runs.number[number])
        stream = self._open.pop(first, None)
        try:
            if stream is None or stream.next > number:
                stream = _Stream(_row_group(self._files.paths[file], group, rows), first)
            while stream.next <= number:
                self._cache[stream.next] = next(stream.tables)
                stream.next += 1
                while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
        except (OSError, ValueError, ArrowException, StopIteration) as error:
            raise SampleError(
                self._files.names[file], f"row group {group} is damaged: {error}", "get the file again"
            ) from None
        if stream.next < first + runs.count[number]:
            self._open[first] = stream
            while len(self._open) > OPEN_GROUPS:
                self._open.popitem(last=False)
        return self._cache[number]


def scan_parquet(path: Path, name: str) -> Scan:
    """Return `groups`: rows and bytes of every row group by the file's footer, int64 [groups, 2]. Raises UserError
    naming a file that cannot be read."""
    from pyarrow.parquet import read_metadata

    with as_user_error(f"{name} cannot be read as Parquet", OSError, ValueError):
        metadata = read_metadata(_source(path))
    about = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    groups = np.array([(group.num_rows, group.total_byte_size) for group in about], np.int64).reshape(-1, 2)
    return Scan(int(groups[:, 0].sum()), {"groups": groups})


def _source(path: Path) -> Any:
    return open_data(path) if isinstance(path, RemotePath) else path


def _row_group(path: Path, group: int, rows: int) -> Iterator[Any]:
    """Yield the blocks of a row group as tables."""
    from pyarrow.parquet import ParquetFile

    # Pages are read as they are needed, not a whole column at once.
    with ParquetFile(_source(path), pre_buffer=False, buffer_size=1 << 20) as opened:
        batches = opened.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
        yield from in_blocks(batches, rows)


def in_blocks(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Regroup record batches of any lengths into tables of `rows` rows; the last may have fewer. Parquet may yield
    shorter batches than requested if a column is large."""
    import pyarrow as pa

    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        while (have := pa.Table.from_batches(waiting)).num_rows >= rows:
            yield have.slice(0, rows)
            waiting = have.slice(rows).to_batches() or [batch.slice(0, 0)]
    if waiting and have.num_rows:
        yield have
