"""Reader: open a source of samples, detect its file format by content, and read samples by index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError, file_errors
from dilatant.config.files.own_files import FETCH_LFS, LFS_POINTER
from dilatant.config.files.remote_files import RemotePath, data_path, is_address, is_folder, open_data
from dilatant.config.printable import masked
from dilatant.data.cache import Cache, open_cache
from dilatant.data.errors import SampleError
from dilatant.data.permutation import permute
from dilatant.data.readers.annotation_records import AnnotationRecords, is_annotations, scan_annotations
from dilatant.data.readers.arrow_records import ArrowRecords, scan_arrow
from dilatant.data.readers.csv_records import CsvRecords, scan_csv
from dilatant.data.readers.energon_records import energon_catalog
from dilatant.data.readers.folder_records import find_beside
from dilatant.data.readers.json_records import JsonRecords, scan_json
from dilatant.data.readers.mds_records import INDEX, MdsRecords, mds_catalog, scan_mds
from dilatant.data.readers.parquet_records import ParquetRecords, scan_parquet
from dilatant.data.readers.preferences import single_answer, with_other_answer
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import Blocks, parse_record
from dilatant.data.readers.source_files import SUFFIXES, Catalog, Form, Scan, Scanner, SourceFiles, find_files
from dilatant.data.readers.tar_records import TarRecords, scan_tar
from dilatant.data.sample import Sample, Turn

_STREAM = (0x5EED, 1)
"""Stream of the permutation, distinct from those that order training."""


@dataclass(frozen=True, slots=True)
class HeldOutSplit:
    """One side of a source: the held-out samples or the rest. size: number of held-out samples (1 or more) or their
    fraction (below 1); at least one sample in either case. seed: selects the samples."""

    size: float
    seed: int
    held_out: bool

    def count(self, total: int) -> int:
        """Count this side's samples in a source of `total` samples. Raises UserError if the other side gets none."""
        away = round(total * self.size) if self.size < 1 else int(self.size)
        away = max(1, away)
        if away >= total:
            raise UserError(
                f"data.val_size {self.size:g} would hold out all of a data set of {total} samples; hold out less"
            )
        return away if self.held_out else total - away

    def numbers(self, total: int) -> NDArray[np.int64]:
        """Return the numbers of the samples on this side, ascending: int64 [count]."""
        count = self.count(total)
        away = count if self.held_out else total - count
        places = permute(np.arange(total), total, self.seed, _STREAM)
        return np.flatnonzero((places < away) == self.held_out)


CSV_SUFFIXES = frozenset({".csv", ".tsv", ".txt"})
"""Suffixes of CSV, which has no first bytes of its own."""
FORM_OF_FORMAT: Mapping[str, Form] = {
    "jsonl": "json",
    "llava": "json",
    "coco": "annotations",
    "vqa": "annotations",
    "webdataset": "tar",
    "energon": "tar",
}
"""Forms of the values of `format` that are no form themselves."""


class Records(Protocol):
    """Protocol: records by number. Picklable, so that worker processes can read them."""

    @property
    def blocks(self) -> Blocks | None:
        """The runs of records that are cheap to read together; None if any order of reading costs the same."""

    def __len__(self) -> int: ...

    def name_of(self, index: int) -> str:
        """Return the id of a record without reading it."""

    def read(self, index: int) -> FileRecord | Sample: ...


@dataclass(frozen=True)
class Reader:
    """The samples of one source by index: `len(reader)`, `reader[index]`. Picklable.

    fingerprint: changes when the files (names, sizes or times) or the options for reading them change. home: the folder
    of the data; None for the hub. split: the subset of the samples that this reader has, after the source's limit; None
    for all. passed_over: descriptions of files that are not read. contrasts: every sample's `rejected` ends with the
    answer of the sample before it, the first one's with that of the last; a sample without an answer is passed over.
    Indexing raises UserError naming the invalid record.
    """

    name: str
    records: Records
    fingerprint: str
    source: DataSource
    home: Path | None = None
    passed_over: tuple[str, ...] = ()
    split: HeldOutSplit | None = None
    contrasts: bool = False

    @property
    def is_called(self) -> str:
        """The name of this source in reports."""
        place = self.name.partition("?")[0] if is_address(self.name) else self.name
        return self.source.name or Path(place).name or self.name

    @property
    def all_samples(self) -> int:
        """The number of samples on both sides of a split."""
        length = len(self.records)
        return min(length, self.source.limit or length)

    def __len__(self) -> int:
        return self.all_samples if self.split is None else self.split.count(self.all_samples)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = self._read(index)
        if not self.contrasts or sample.encoded is not None:
            return sample
        single_answer(sample)  # if this one is bad, the others do not matter
        return with_other_answer(sample, self._answer_before(index))

    def _answer_before(self, index: int) -> Turn:
        """Return the answer that stands before that of a sample, which the data alone decide. Raises SampleError."""
        for distance in range(1, len(self)):
            try:
                return single_answer(self._read((index - distance) % len(self)))
            except SampleError as error:
                if error.may_pass:  # another rank may have read it
                    raise
        problem = "kto compares its prompt with another record's answer, and no other record here has a usable one"
        raise SampleError(self.name_of(index), problem, "correct the others")

    def _read(self, index: int) -> Sample:
        record = self.records.read(self._number(index))
        if isinstance(record, Sample):
            return record
        if self.source.media_dir is not None:
            record = replace(record, folder=data_path(self.source.media_dir))
        try:
            columns = cast(Mapping[str, str], self.source.columns)
            return parse_record(record, self.source.prompt, columns, has_marks=self.contrasts)
        except RecursionError:
            raise SampleError(record.id, "nests too deep", "write it flat") from None

    def name_of(self, index: int) -> str:
        """Return the id of a sample, which messages use, without reading it."""
        return self.records.name_of(self._number(index))

    def _number(self, index: int) -> int:
        return index if self.split is None else int(self._numbers[index])

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        assert self.split is not None
        return self.split.numbers(self.all_samples)

    @property
    def blocks(self) -> Blocks | None:
        """The runs of samples that are cheap to read together; None if any order of reading costs the same."""
        blocks = self.records.blocks
        if blocks is None or (self.source.limit is None and self.split is None):
            return blocks
        ends = np.minimum(np.cumsum(blocks.lengths), self.all_samples)
        if self.split is not None:
            ends = np.searchsorted(self._numbers, ends)
        lengths = np.diff(ends, prepend=0)
        kept = np.flatnonzero(lengths)
        groups = tuple(blocks.groups[block] for block in kept) if blocks.groups else ()
        return Blocks(tuple(lengths[kept].tolist()), blocks.window, groups)


def open_source(source: DataSource, *, cache_dir: str | Path | None = None, held_out: bool = False) -> Reader:
    """Open the reader of a source.

    cache_dir: folder of the cached file scans; default: the user's cache. held_out: the source is for evaluation, which
    uses the split `train` of a folder only if the user names it. Raises UserError if nothing is there, the format is
    unknown, no sample is found, or a `cache_dir` cannot be written.
    """
    records: Records
    home = None
    passed_over: tuple[str, ...] = ()
    if source.path is None:
        from dilatant.data.readers.hub_records import HubRecords

        name = str(source.id)
        records = HubRecords(source)
        identity = records.fingerprint
    else:
        name = source.path
        folder = data_path(source.path)
        may_be_beside = source.format == "auto" and not isinstance(folder, RemotePath) and is_folder(folder)
        beside = find_beside(folder, source.split, held_out) if may_be_beside else None
        if beside is not None:
            records, home, identity, passed_over = beside, folder, beside.identity, beside.passed_over
        else:
            with file_errors(f"{source.path!r} cannot be read"):
                records, home, identity, passed_over = _open_files(source, held_out, open_cache(cache_dir))
    if len(records) == 0:
        raise UserError(f"data set {name!r} is empty")
    fingerprint = hashlib.sha256(
        repr((identity, source.prompt, sorted(source.columns.items()), source.media_dir)).encode()
    ).hexdigest()
    return Reader(masked(name), records, fingerprint, source, home, passed_over)


def _open_files(source: DataSource, held_out: bool, cache: Cache) -> tuple[Records, Path, str, tuple[str, ...]]:
    """Return the records of a source's data files, their common folder, their identity and what is not read."""
    catalog = _catalog(source, held_out)
    if catalog is None:
        paths, passed_over = find_files(str(source.path), source.split, held_out)
    else:
        paths, passed_over = catalog.paths, catalog.passed_over
    home = data_path(os.path.commonpath([path.parent for path in paths]))
    names = [masked(str(path.relative_to(home))) for path in paths]
    forms = {form: each.scan for form, each in FORMS.items()}
    files = SourceFiles(paths, names, Scanner(detect_form, partial(_check_forms, source, paths), forms), cache)
    if catalog is None:
        records = FORMS[files.form].records(files)
    else:
        catalog.require(files)
        records = catalog.records(files)
    if isinstance(records, TarRecords):
        passed_over += records.passed_over
    return records, home, files.identity + (catalog.settings if catalog else ""), passed_over


def _catalog(source: DataSource, held_out: bool) -> Catalog | None:
    """Return the description that the data set of a source has of itself; None for one without. Raises UserError if the
    source's format needs one."""
    place = data_path(str(source.path))
    found = None
    may_be_folder = isinstance(place, RemotePath) and place.is_web and "?" not in str(place)
    if place.name == INDEX or is_folder(place) or may_be_folder:
        if source.format in ("auto", "mds"):
            found = mds_catalog(place, source.split, held_out)
        if found is None and source.format in ("auto", "energon"):
            found = energon_catalog(place, source.split, held_out)
    if found is None and source.format == "energon":
        raise UserError(f"{source.path!r} has no .nv-meta/.info.json or .info.yaml; run `energon prepare` there")
    return found


class _FormOfFiles(NamedTuple):
    """A form of files: its title, and the functions that read and scan such files."""

    title: str
    records: Callable[[SourceFiles], Records]
    scan: Callable[[Path, str], Scan]


FORMS: Mapping[Form, _FormOfFiles] = {
    "parquet": _FormOfFiles("Parquet", ParquetRecords, scan_parquet),
    "json": _FormOfFiles("JSON", JsonRecords, scan_json),
    "annotations": _FormOfFiles("COCO or VQA JSON", AnnotationRecords, scan_annotations),
    "csv": _FormOfFiles("CSV", CsvRecords, scan_csv),
    "tar": _FormOfFiles("WebDataset tar", TarRecords, scan_tar),
    "arrow": _FormOfFiles("Arrow", ArrowRecords, scan_arrow),
    "mds": _FormOfFiles("MDS", MdsRecords, scan_mds),
}


def _check_forms(source: DataSource, files: Sequence[Path], forms: Sequence[Form | None]) -> None:
    """Raise UserError if all files are empty or their formats differ."""
    wanted = FORM_OF_FORMAT.get(source.format, source.format)
    if wanted in FORMS:
        for file, form in zip(files, forms):
            if form not in (wanted, None):
                raise UserError(f"{str(file)!r} is {FORMS[form].title}, but 'format' says {source.format!r}")
    kinds = sorted({form for form in forms if form is not None})
    titles = " and ".join(FORMS[kind].title for kind in kinds)
    if len(kinds) > 1 and is_folder(data_path(str(source.path))):
        # JSON next to other files often only describes them, but the user has to decide that.
        raise UserError(
            f"{source.path!r} holds {titles} files; name the data by a pattern, "
            f"for example {source.path}/*{next(suffix for suffix, form in SUFFIXES.items() if form != 'json')}"
        )
    if len(kinds) > 1:
        raise UserError(f"{source.path!r} mixes {titles}; use one source for each")
    if not kinds:
        raise UserError(f"data set {source.path!r} is empty")


def detect_form(file: Path) -> Form | None:
    """Detect a file's format by its first bytes, that of CSV by its suffix; None if it is empty. Raises UserError
    naming any other content."""
    with file_errors(f"{str(file)!r} cannot be read"), open_data(file) as stream:
        head = stream.read(512)
    if not head.strip():
        return None
    if ".mds" in file.suffixes:
        return "mds"
    if head[:4] == b"PAR1":
        return "parquet"
    is_remote = isinstance(file, RemotePath)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        if is_remote:
            raise UserError(f"{str(file)!r} is Arrow, which is mapped into memory: copy it here, or write Parquet")
        return "arrow"
    if head[257:262] == b"ustar":
        return "tar"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        # To tell COCO from JSON Lines means to read all of a file.
        return "annotations" if text[:1] == b"{" and not is_remote and is_annotations(file) else "json"
    known = {
        b"\x1f\x8b": "a gzip file; unpack it first, so that samples can be read in any order",
        b"\x28\xb5\x2f\xfd": "a zstd file; unpack it first, so that samples can be read in any order",
        b"PK\x03\x04": "a zip file; unpack it first",
        b"\xff\xfe": "text in UTF-16; save it as UTF-8",
        LFS_POINTER: FETCH_LFS.removeprefix("is "),
    }
    found = next((what for magic, what in known.items() if head.startswith(magic)), None)
    suffix = Path(str(file).partition("?")[0]).suffix if is_remote else file.suffix
    if found is None and suffix.lower() in CSV_SUFFIXES and b"\0" not in head:
        return "csv"
    raise UserError(
        f"{str(file)!r} is {found or f'unknown (starts {head[:12]!r})'}. Known forms: Parquet, JSON Lines, a JSON "
        "array, CSV (.csv, .tsv, .txt), a WebDataset tar, Arrow, MDS"
    )
