"""CSV and TSV files, and lists of files with captions: read by record number without loading the file.

Every value is text. Quoted values may contain line breaks. Values between tabs are often written without quoting, so
there a quotation mark is an ordinary character unless it encloses the whole value, and a row is a line: two marks in
different rows must not join them.
"""

from __future__ import annotations

import mmap
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.files.remote_files import map_file
from dilatant.data.errors import SampleError
from dilatant.data.media.media_kind import kind_of_name
from dilatant.data.readers.json_records import MARK
from dilatant.data.readers.source_files import Scan, SpannedRecords

DELIMITERS = (",", "\t", ";", "|")
_LISTED = re.compile(r'"?([^"\t,;|]+?\.\w+)(?:#\d+)?"?([\t,;|])')
"""Begin of a first line without column names: a file name (Flickr8k appends the caption's number) and a delimiter."""


class CsvRecords(SpannedRecords):
    """Rows of several CSV files."""

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        try:
            text = self.raw(place, file, number).decode()
        except UnicodeDecodeError as error:
            raise SampleError(place, f"is not UTF-8 text: {error}", "save the file as UTF-8") from None
        delimiter, listed, *columns = self._files.part("header", file).tobytes().decode().split("\0")
        values = _values(text, delimiter)
        if listed:
            values[0] = re.sub(r"#\d+$", "", values[0])
        if len(values) != len(columns):
            raise SampleError(
                place,
                f"has {len(values)} values for the {len(columns)} columns in the first line",
                "put a value that contains the delimiter into quotation marks",
            )
        return dict(zip(columns, values))


def scan_csv(path: Path, name: str) -> Scan:
    """Return the rows of a file. Raises UserError naming a file whose quotation marks or column names are wrong.

    spans: first and end byte of every row, int64 [records, 2]. header: as bytes, separated by zeros, the delimiter,
    "listed" for a list of files and captions without column names, and the names of the columns.
    """
    text = map_file(path)
    begin = len(MARK) if text[: len(MARK)] == MARK else 0
    first = text[begin : begin + (1 << 16)].lstrip(b"\r\n").partition(b"\n")[0].decode("utf-8", "replace")
    listed = _LISTED.match(first)
    kind = kind_of_name(listed[1]) if listed else None
    if listed and kind and listed[2] != "\t":
        raise UserError(
            f"{name} begins with the file {listed[1]!r}, not with names of columns; put them into its first line, as "
            f"in {kind}{listed[2]}caption"
        )
    delimiter = "\t" if kind else max(DELIMITERS, key=first.count)
    spans = _row_spans(text, begin, delimiter, name)
    if kind is not None:
        columns = [kind, "caption"]
    else:
        columns = _values(text[slice(*spans[0])].decode("utf-8", "replace"), delimiter)
        # pandas writes its index as a column without a name.
        columns = [column.strip() or f"column {number}" for number, column in enumerate(columns, 1)]
        spans = spans[1:]
    twice = [column for column, count in Counter(columns).items() if count > 1]
    if twice:
        raise UserError(f"{name} has two columns {twice[0]!r} in its first line; rename one")
    header = "\0".join([delimiter, "listed" if kind else "", *columns]).encode()
    return Scan(len(spans), {"spans": spans, "header": np.frombuffer(header, np.uint8)})


def _field(delimiter: str) -> str:
    """Return the pattern of a value; its groups are the content of a quoted one, and a plain one."""
    mark, inside = re.escape(delimiter), r'[^"\n]*+' if delimiter == "\t" else '[^"]*+'
    quoted = rf'"({inside}(?:""{inside})*+)"(?={mark}|\r?\n|\r?\Z)'
    plain = rf"[^{mark}\n]*+" if delimiter == "\t" else rf'(?!")[^{mark}\n]*+'
    return f"(?:{quoted}|({plain}))"


def _row_spans(text: mmap.mmap, begin: int, delimiter: str, name: str) -> NDArray[np.int64]:
    field = _field(delimiter)
    row = re.compile(rf"{field}(?:{re.escape(delimiter)}{field})*+(?:\r?\n|\r?\Z)".encode())
    spans = array("q")
    at = begin
    while at < len(text):
        found = row.match(text, at)
        if found is None:
            raise UserError(
                f"{name}: in the row that begins on line {text[:at].count(10) + 1}, a quotation mark opens a value and "
                "does not close it at its end; write marks inside of a quoted value twice"
            )
        if found[0].strip(f"{delimiter} \r\n".encode()):
            spans.extend((at, found.end()))
        at = found.end()
    return np.array(spans, np.int64).reshape(-1, 2)


def _values(row: str, delimiter: str) -> list[str]:
    """Split a row into its values, without quotation marks around them."""
    row = row.removesuffix("\n").removesuffix("\r")
    values = re.finditer(f"(?:^|{re.escape(delimiter)}){_field(delimiter)}", row)
    return [plain if quoted is None else quoted.replace('""', '"') for quoted, plain in (v.groups() for v in values)]
