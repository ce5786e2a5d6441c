"""Parquet files, read by row number.

A row group can only be read from its start, and may be larger than memory: it is read in blocks of rows, one after
another, and the newest blocks are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.records import Blocks, Record

CACHE_BYTES = 256 << 20
BLOCK_BYTES = 32 << 20
"""Of a block, as the file's footer promises."""
OPEN_GROUPS = 4
"""Row groups that are half read; neighbours in the order of training may be the end of one and the start of others."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one row group.

    number: of the `count` blocks of the group. first: of its rows, in the file. rows: how many it has; the last block
    may have fewer.
    """

    file: int
    group: int
    number: int
    count: int
    first: int
    rows: int


@dataclass(slots=True)
class _Stream:
    """The blocks of a row group as tables. next: the number of the one that comes next."""

    tables: Iterator[Any]
    next: int


class ParquetRecords:
    """Rows of several Parquet files, in file order. Picklable; what was already read is not carried along.

    blocks: the runs of rows that are read together, unless all of them can be kept. Raises UserError for a file that
    cannot be read, naming it.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        from pyarrow.parquet import read_metadata

        self._paths = tuple(paths)
        self._names = tuple(names)
        self._blocks: list[_Block] = []
        lengths: list[int] = []
        groups: list[int] = []
        total_bytes = 0
        for file, (path, name) in enumerate(zip(paths, names)):
            try:
                metadata = read_metadata(path)
            except (OSError, ValueError) as error:
                raise UserError(f"{name} cannot be read as Parquet: {error}") from None
            first = 0
            for group in range(metadata.num_row_groups):
                about = metadata.row_group(group)
                total_bytes += about.total_byte_size
                rows = max(1, about.num_rows * BLOCK_BYTES // max(about.total_byte_size, BLOCK_BYTES))
                starts = range(0, about.num_rows, rows)
                for number, start in enumerate(starts):
                    self._blocks.append(_Block(file, group, number, len(starts), first + start, rows))
                    lengths.append(min(rows, about.num_rows - start))
                    groups.append(groups[-1] + (number == 0) if groups else 0)
                first += about.num_rows
        window = max(1, int(CACHE_BYTES * len(lengths) / max(total_bytes, 1)))
        self.blocks = Blocks(tuple(lengths), window, tuple(groups)) if total_bytes > CACHE_BYTES else None
        self._first = np.cumsum([0, *lengths])
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._open: OrderedDict[int, _Stream] = OrderedDict()

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict(), "_open": OrderedDict()}

    def read(self, index: int) -> Record:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        block, row = self._blocks[number], index - int(self._first[number])
        fields = self._table(number).slice(row, 1).to_pylist()[0]
        return Record(
            f"{self._names[block.file]}:{block.first + row + 1}", self._paths[block.file].parent, fields
        )

    def _table(self, number: int) -> Any:
        """The rows of a block. Those before it in its row group are read and kept on the way."""
        from pyarrow import ArrowException

        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        block = self._blocks[number]
        group = number - block.number
        stream = self._open.pop(group, None)
        try:
            if stream is None or stream.next > number:
                stream = _Stream(_row_group(self._paths[block.file], block), group)
            while stream.next <= number:
                self._keep(stream.next, next(stream.tables))
                stream.next += 1
        except (OSError, ValueError, ArrowException, StopIteration) as error:
            raise SampleError(
                self._names[block.file], f"row group {block.group} is damaged: {error}", "get the file again"
            ) from None
        if stream.next < group + block.count:
            self._open[group] = stream
            while len(self._open) > OPEN_GROUPS:
                self._open.popitem(last=False)
        return self._cache[number]

    def _keep(self, number: int, table: Any) -> None:
        self._cache[number] = table
        while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)


def _row_group(path: Path, block: _Block) -> Iterator[Any]:
    """The blocks of a row group as tables, one after another."""
    from pyarrow.parquet import ParquetFile

    # Pages are read as they are needed, not a whole column at once.
    with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as opened:
        batches = opened.iter_batches(batch_size=block.rows, row_groups=[block.group], use_threads=False)
        yield from in_blocks(batches, block.rows)


def in_blocks(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Record batches of any lengths as tables of `rows` rows; the last one may have fewer. Parquet may give shorter
    batches than were asked for where a column is large."""
    import pyarrow as pa

    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        while (have := pa.Table.from_batches(waiting)).num_rows >= rows:
            yield have.slice(0, rows)
            waiting = have.slice(rows).to_batches() or [batch.slice(0, 0)]
    if waiting and have.num_rows:
        yield have
