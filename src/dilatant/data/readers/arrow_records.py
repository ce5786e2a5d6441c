"""Arrow files (written by `datasets.save_to_disk` or Feather): memory-mapped and read by row number."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.readers.arrow_values import row_fields
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import Blocks
from dilatant.data.readers.source_files import RecordsOfFiles, Scan, SourceFiles


class ArrowRecords(RecordsOfFiles):
    """Rows of several Arrow files, in file order. Picklable: another process maps the same files."""

    blocks: Blocks | None = None

    def __reduce__(self) -> tuple[type[ArrowRecords], tuple[SourceFiles]]:
        return ArrowRecords, (self._files,)

    def read(self, index: int) -> FileRecord:
        file, row = self._files.locate(index)
        place, path = self.name_of(index), self._files.paths[file]
        if file not in self._tables:
            self._tables[file] = _mapped(path)
        return FileRecord(place, path.parent, row_fields(self._tables[file], row, place))

    @cached_property
    def _tables(self) -> dict[int, Any]:
        return {}


def scan_arrow(path: Path, name: str) -> Scan:
    """Count the rows of a file. Raises UserError naming a file that cannot be read."""
    from pyarrow import ArrowException

    try:
        rows = _mapped(path).num_rows
    except (OSError, ValueError, ArrowException) as error:
        raise UserError(f"{name} cannot be read as Arrow: {error}") from None
    return Scan(rows, {"rows": np.array([rows], np.int64)})


def _mapped(path: Path) -> Any:
    """Return the table of a file; its buffers are views of the memory-mapped file."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
