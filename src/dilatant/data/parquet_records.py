"""Parquet files, read by row number. A row group is the least that Parquet can read, so a few are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.records import Blocks, Record

CACHE_BYTES = 256 << 20


class ParquetRecords:
    """Rows of several Parquet files, in file order. Picklable; row groups already read are not carried along.

    blocks: the row groups, unless all of them together can be kept. Raises UserError for a file that cannot be read,
    naming it.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        from pyarrow.parquet import read_metadata

        self._paths = tuple(paths)
        self._names = tuple(names)
        lengths: list[list[int]] = []
        total_bytes = 0
        for path, name in zip(paths, names):
            try:
                metadata = read_metadata(path)
            except (OSError, ValueError) as error:
                raise UserError(f"{name} cannot be read as Parquet: {error}") from None
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            lengths.append([group.num_rows for group in groups])
            total_bytes += sum(group.total_byte_size for group in groups)
        flat = [rows for file in lengths for rows in file]
        window = max(1, int(CACHE_BYTES * len(flat) / max(total_bytes, 1)))
        self.blocks = Blocks(tuple(flat), window) if total_bytes > CACHE_BYTES else None
        self._block_file = np.repeat(np.arange(len(paths)), [len(file) for file in lengths])
        self._block_group = np.concatenate([np.arange(len(file)) for file in lengths])
        self._first_row = np.concatenate(
            [np.cumsum([0, *file[:-1]]) if file else [] for file in lengths]
        ).astype(int)
        self._first = np.cumsum([0, *flat])
        self._cache: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}

    def read(self, index: int) -> Record:
        block = int(np.searchsorted(self._first, index, side="right")) - 1
        row = index - int(self._first[block])
        file = int(self._block_file[block])
        fields = self._table(block).slice(row, 1).to_pylist()[0]
        place = f"{self._names[file]}:{int(self._first_row[block]) + row + 1}"
        return Record(place, self._paths[file].parent, fields)

    def _table(self, block: int) -> Any:
        if block in self._cache:
            self._cache.move_to_end(block)
            return self._cache[block]
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        file = int(self._block_file[block])
        try:
            with ParquetFile(self._paths[file]) as opened:
                table = opened.read_row_group(int(self._block_group[block]))
        except (OSError, ValueError, ArrowException) as error:
            raise SampleError(
                self._names[file],
                f"row group {self._block_group[block]} is damaged: {error}",
                "get the file again",
            ) from None
        self._cache[block] = table
        while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return table
