"""Source files: their format and the locations of their records, found by one scan and cached."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, file_errors, list_problems
from dilatant.config.files.remote_files import RemotePath, data_path, is_folder, open_data
from dilatant.config.printable import masked
from dilatant.data.cache import Arrays, Cache
from dilatant.data.errors import SampleError, may_pass
from dilatant.data.parallel_map import IndexRange, map_ranges, piece_bounds
from dilatant.data.readers.record_fields import FileRecord, distinct

FORMAT = 3
MOST_BYTES = 256 << 20
"""Bytes of a record, which may hold media as base64."""
SCAN_SECONDS = 3600.0
"""Time limit for scanning one file in a process."""
Form = Literal["parquet", "json", "annotations", "csv", "tar", "arrow", "mds"]


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of scanning one file: the number of records, and arrays with their locations."""

    records: int
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Scanner:
    """Functions that inspect files. form_of: format by a file's first bytes; None if empty. check: raises UserError if
    no file has a format, or formats cannot be combined. scan: for each format, a function of a file's path and name."""

    form_of: Callable[[Path], Form | None]
    check: Callable[[Sequence[Form | None]], None]
    scan: Mapping[Form, Callable[[Path, str], Scan]]


class SourceFiles:
    """Files of one format, and the arrays of their scans. Picklable: another process maps the cached arrays.

    paths: the non-empty files. names: their names in messages. identity: changes when a file (name, size or time) does.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str], scanner: Scanner, cache: Cache) -> None:
        self._all = tuple(zip(paths, names))
        self._scanner = scanner
        self._cache = cache
        self._states = tuple(_state(path) for path in paths)
        scanner.check(self._found.about["forms"])

    @cached_property
    def identity(self) -> str:
        return repr([(name, state) for (_, name), state in zip(self._all, self._states)])

    @cached_property
    def form(self) -> Form:
        """The format of the non-empty files; the scanner's check ensures that there is one."""
        return next(form for form in self._found.about["forms"] if form is not None)

    @cached_property
    def _filled(self) -> list[int]:
        return [at for at, form in enumerate(self._found.about["forms"]) if form is not None]

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self._all[at][0] for at in self._filled)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all[at][1] for at in self._filled)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of every file."""
        return tuple(self._states[at][0] for at in self._filled)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """The first record of every file, then the number of records: int64 [files + 1]."""
        return np.cumsum(np.append(0, self._found.arrays["records"]))

    def locate(self, index: int) -> tuple[int, int]:
        """Return the file that holds a record, and the record's number in that file."""
        file = int(np.searchsorted(self.first, index, side="right")) - 1
        return file, index - int(self.first[file])

    def array(self, name: str) -> NDArray[Any]:
        """Return a scanned array by name, concatenated over all files."""
        return self._found.arrays[name]

    def part(self, name: str, file: int) -> NDArray[Any]:
        """Return one file's part of a scanned array."""
        ends = self._ends[name]
        return self._found.arrays[name][ends[file] : ends[file + 1]]

    @cached_property
    def _ends(self) -> dict[str, NDArray[np.int64]]:
        return _ends_by_field(self._found)

    @cached_property
    def _found(self) -> Arrays:
        key = hashlib.sha256(f"{FORMAT} {self.identity}".encode()).hexdigest()
        # The name depends on the paths only: a new scan of changed files replaces the old one.
        places = repr([FORMAT, *(masked(str(path.resolve())) for path, _ in self._all)])
        name = f"records-{hashlib.sha256(places.encode()).hexdigest()[:16]}"
        return self._cache.kept(name, key, lambda: self._scan(self._cache.known(name)))

    def _scan(self, before: Arrays | None) -> Arrays:
        """Scan the files, except those that have not changed since the scan `before`."""
        known = _scans(before) if before is not None else {}
        states = [json.dumps([masked(str(path.resolve())), *_state(path)]) for path, _ in self._all]
        forms = [
            known[state][0] if state in known else self._scanner.form_of(path)
            for state, (path, _) in zip(states, self._all)
        ]
        self._scanner.check(forms)
        filled = [at for at, form in enumerate(forms) if form is not None]
        new = [at for at in filled if states[at] not in known]
        job = _ScanJob(tuple((*self._all[at], forms[at]) for at in new), self._scanner)
        pieces = piece_bounds(len(new), 1)
        scanned = map_ranges(job, pieces, len(new), job.named, None, SCAN_SECONDS)
        found = {new[at]: scan for (at, _), scan in scanned}
        for (path, name), state in zip(self._all, self._states):
            if _state(path) != state:
                raise UserError(f"{name} was changed while it was read; start again once it is written")
        scans = [found[at] if at in found else known[states[at]][1] for at in filled]
        arrays: dict[str, NDArray[Any]] = {"records": np.array([scan.records for scan in scans], np.int64)}
        for field in scans[0].arrays if scans else ():
            parts = [scan.arrays[field] for scan in scans]
            arrays[field] = np.concatenate(parts)
            arrays[f"rows {field}"] = np.array([len(part) for part in parts], np.int64)
        return Arrays(arrays, {"forms": forms, "states": states})

    def __getstate__(self) -> dict[str, Any]:
        # Cached arrays are mapped again; derived values are computed again.
        own = ("_all", "_scanner", "_cache", "_states", *(() if self._found.digest else ("_found",)))
        return {name: self.__dict__[name] for name in own}


@dataclass(frozen=True, slots=True)
class _ScanJob:
    files: tuple[tuple[Path, str, Form | None], ...]
    scanner: Scanner

    def __call__(self, piece: IndexRange) -> Scan:
        path, name, form = self.files[piece[0]]
        assert form is not None
        return self.scanner.scan[form](path, name)

    def named(self, piece: IndexRange) -> str:
        return self.files[piece[0]][1]


class RecordsOfFiles:
    """Base class of the records of several files, of any format, in file order. Picklable. blocks: None, as any order
    of reading costs the same."""

    blocks: Any = None

    def __init__(self, files: SourceFiles) -> None:
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files,)

    def __len__(self) -> int:
        return int(self._files.first[-1])

    def name_of(self, index: int) -> str:
        file, number = self._files.locate(index)
        return f"{self._files.names[file]}:{number + 1}"

    def read(self, index: int) -> FileRecord:
        """Return a record. Raises SampleError."""
        file, number = self._files.locate(index)
        place = self.name_of(index)
        return FileRecord(place, self._files.paths[file].parent, self.fields(place, file, number), self.unused)

    @property
    def unused(self) -> tuple[str, ...]:
        """Parts of every record that are not in its fields."""
        return ()

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        """Return the fields of a record by its number in a file. place: its name in errors."""
        raise NotImplementedError


class SpannedRecords(RecordsOfFiles):
    """Base class of records that are spans of a file: first and end byte in the array `spans`, int64 [records, 2]."""

    def raw(self, place: str, file: int, number: int) -> bytes:
        """Return the bytes of a record. Raises SampleError if there are more than `MOST_BYTES`."""
        start, end = self._files.part("spans", file)[number].tolist()
        if end - start > MOST_BYTES:
            problem = f"has {end - start:,} bytes, more than the {MOST_BYTES:,} allowed"
            raise SampleError(place, problem, "cut it into pieces")
        with open_data(self._files.paths[file], end) as stream:
            stream.seek(start)
            return stream.read(end - start)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Holds what a data set says about its own files, such as the index of MDS shards.

    place: the describing file, in messages. paths: the data files, in order. samples: how many each holds. sizes: the
    bytes of each; empty if unknown. passed_over: descriptions of files that are not read. settings: how records are
    read, which changes the identity of the data. records: makes the records of these files.
    """

    place: str
    paths: tuple[Path, ...]
    samples: tuple[int, ...]
    records: Callable[[SourceFiles], Any]
    sizes: tuple[int, ...] = ()
    passed_over: tuple[str, ...] = ()
    settings: str = ""

    def require(self, files: SourceFiles) -> None:
        """Raise UserError naming the files that have other sizes or numbers of samples than the catalog says."""
        samples = dict(zip(files.paths, np.diff(files.first).tolist()))
        sizes = dict(zip(files.paths, files.sizes))
        problems = [
            f"{path.name} has {have.get(path, 0):,} {what}, not {says:,}"
            for what, have, said in (("bytes", sizes, self.sizes), ("samples", samples, self.samples))
            for path, says in zip(self.paths, said)
            if have.get(path, 0) != says
        ]
        if problems:
            raise list_problems(f"{self.place} and the files that it describes disagree; fetch both again", problems)


MOST_TEXT = 256 << 20
"""Bytes of a file that describes others."""


def read_description(path: Path) -> bytes | None:
    """Return the content of a file that describes others; None if it is missing. Raises UserError for one that is too
    long, or whose file system does not answer."""
    try:
        with open_data(path) as stream:
            text = stream.read(MOST_TEXT + 1)
    except OSError as error:
        if may_pass(error) and not (isinstance(path, RemotePath) and path.is_web):
            raise UserError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
        return None  # a server may also forbid to look for files
    if len(text) > MOST_TEXT:
        raise UserError(f"{str(path)!r} is longer than {MOST_TEXT >> 20} MiB")
    return text


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for any other text, and for a key that is there twice."""
    try:
        found = json.loads(text, object_pairs_hook=distinct)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a catalog in `folder` names. Raises ValueError for a name that leads out."""
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or not set(parts).isdisjoint({"", ".", ".."}):
        raise ValueError(f"it names {name!r}, which is no file below its own folder")
    return folder / name


def _state(path: Path) -> tuple[int, int]:
    """Return the size and modification time (ns) of a file."""
    with file_errors(f"{str(path)!r} cannot be read"):
        about = path.stat()
    return about.st_size, about.st_mtime_ns


def _ends_by_field(found: Arrays) -> dict[str, NDArray[np.int64]]:
    """Return field → where each file's part begins, and the end of the last one."""
    rows = {name.removeprefix("rows "): each for name, each in found.arrays.items() if name.startswith("rows ")}
    return {field: np.cumsum(np.append(0, each)) for field, each in rows.items()}


def _scans(found: Arrays) -> dict[str, tuple[Form | None, Scan]]:
    """Return the format and scan of each file in a cached result, by the file's state."""
    ends = _ends_by_field(found)
    scans: dict[str, tuple[Form | None, Scan]] = {}
    file = 0
    for form, state in zip(found.about["forms"], found.about["states"]):
        if form is None:
            scans[state] = (None, Scan(0, {}))
            continue
        parts = {field: found.arrays[field][at[file] : at[file + 1]] for field, at in ends.items()}
        scans[state] = (form, Scan(int(found.arrays["records"][file]), parts))
        file += 1
    return scans


SUFFIXES: Mapping[str, Form] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonlines": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".tar": "tar",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".mds": "mds",
}
LISTS = frozenset({"captions.txt"})
"""Names of lists of files with captions, whose suffix does not tell the format."""
UNREAD = frozenset((".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tgz", ".7z", ".rar", ".orc", ".avro", ".lance")) | {
    *(".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5", ".tfrecord", ".xls", ".xlsx")
}
"""Suffixes of files with data in forms that are not read."""
ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files in which `datasets` describes the data next to them."""
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → the words in file and folder names that denote the split."""


def find_files(path: str, split: str | None = None, held_out: bool = False) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the data files, sorted, and descriptions of the files in a folder that are skipped.

    split: the split to use of a folder that has several; None means `train`. held_out: the files are for evaluation,
    where the user must name the split. Raises UserError.
    """
    found: list[Path] = []
    passed_over: list[str] = []
    for pattern in expand_braces(str(data_path(path))):
        place = data_path(pattern)
        if is_folder(place):
            below = files_below(place)
            inside = [file for file in below if is_data_file(file, place)]
            unread = [file.name for file in below if file.suffix.lower() in UNREAD]
            if not inside:
                raise UserError(
                    f"folder {str(place)!r} holds no data file; expected {', '.join(SUFFIXES)} files in it, or media "
                    "with a .txt, .caption or .json of the same name beside each"
                )
            forms = {file: SUFFIXES.get(file.suffix.lower()) for file in inside}
            tables = [file for file in inside if forms[file] == "csv"]
            if tables and {"tar", "parquet", "arrow"} & {*forms.values()}:  # a list of licences, say
                inside = [file for file in inside if file not in tables]
                passed_over.append(
                    f"{', '.join(file.name for file in tables[:3])}{' and others' if len(tables) > 3 else ''}: "
                    "tables beside other data files"
                )
            inside, others = choose_split(place, inside, split, held_out)
            found += inside
            passed_over += others
            if unread:
                passed_over.append(f"{len(unread):,} of forms that are not read ({', '.join(unread[:3])})")
        elif place.exists():
            found.append(place)
        else:
            matches = _matches(place)
            if not matches:
                nothing = "matches no file" if glob.has_magic(pattern) else "does not exist"
                raise UserError(f"data path {pattern!r} {nothing}{_near(place)}")
            found += matches
    return tuple(dict.fromkeys(found)), tuple(passed_over)


def _near(place: Path) -> str:
    """Return the name beside `place` that is most like its own, for an error; nothing for places elsewhere."""
    if isinstance(place, RemotePath) or not place.parent.is_dir():
        return ""
    try:
        near = difflib.get_close_matches(place.name, os.listdir(place.parent), n=1)
    except OSError:  # the folder may not be read
        return ""
    return f"; did you mean {near[0]!r} there?" if near else ""


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, without hidden folders; also those in linked folders, each once, but in
    none that holds `folder`."""
    if isinstance(folder, RemotePath):
        return sorted(folder.rglob("*"))
    found: list[Path] = []
    seen = set(map(str, folder.resolve().parents))
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        is_new = real not in seen
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        found += (Path(place, file) for file in files if is_new)
    return sorted(found)


def _matches(pattern: Path) -> list[Path]:
    """Return the files that a pattern names, sorted, without broken links."""
    if not isinstance(pattern, RemotePath):
        return [file for file in map(Path, sorted(glob.glob(str(pattern), recursive=True))) if file.is_file()]
    fixed = next((at for at, part in enumerate(pattern.parts) if glob.has_magic(part)), 0)
    return sorted(RemotePath(*pattern.parts[:fixed]).glob("/".join(pattern.parts[fixed:]))) if fixed else []


def is_data_file(file: Path, folder: Path) -> bool:
    """Return True for a file that a source of the whole `folder` reads."""
    if file.name in ABOUT or (file.suffix.lower() not in SUFFIXES and file.name not in LISTS):
        return False
    if file.name.startswith("cache-") and file.suffix == ".arrow":  # a cache file of `datasets`
        return False
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def choose_split(
    folder: Path, files: Sequence[Path], wanted: str | None, held_out: bool
) -> tuple[list[Path], list[str]]:
    """Return the files of the requested split, and what is skipped. A file that names no split belongs to `train`."""
    words = {file: _splits_of(file.relative_to(folder)) for file in files}
    count = Counter(split for file in files for split in words[file])
    known = next((split for split, names in SPLITS.items() if wanted in names), wanted)
    if wanted is not None and known not in count and (count or known != "train"):
        by_word = [file for file in files if wanted.lower() in _words(file.relative_to(folder))]
        if not by_word:
            there = f"; there are {', '.join(sorted(count))}" if count else ""
            raise UserError(f"folder {str(folder)!r} holds no file of the split {wanted!r}{there}")
        return by_word, [f"{len(files) - len(by_word)} files that are not of the split {wanted!r}"]
    if len(count) < 2 and (wanted is None or len(count) == 0 or all(words.values())):
        return list(files), []
    if wanted is None and (held_out or "train" not in count):
        raise UserError(
            f"folder {str(folder)!r} holds the splits {', '.join(sorted(count))}; name the one to use with 'split' of "
            "the data source, or its files by a pattern"
        )
    chosen = known or "train"
    kept = [file for file in files if chosen in words[file] or (chosen == "train" and not words[file])]
    others = [
        f"{split} ({number:,} of {len(files):,} files)" for split, number in sorted(count.items()) if split != chosen
    ]
    return kept, [f"the splits {', '.join(others)}; only {chosen!r} is read"]


def _splits_of(file: Path) -> frozenset[str]:
    """Return the split that the name of a file, or else its nearest folder that names one, stands for; none if that
    name contains several."""
    for part in reversed(file.parts):
        words = _words(Path(part))
        found = frozenset(split for split, names in SPLITS.items() if not words.isdisjoint(names))
        if found:
            return found if len(found) == 1 else frozenset()
    return frozenset()


def _words(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", str(file).lower()))


MOST_FILES = 100_000
"""Names that a pattern may stand for."""


def expand_braces(pattern: str) -> list[str]:
    """Expand `shard-{000..003}.tar`, as WebDataset users write it, and `{a,b}`; the name of a file stays. Raises
    UserError for too many names."""
    found: list[str] = []
    waiting = [pattern]
    while waiting:
        text = waiting.pop()
        match = re.search(r"\{([^{}]*)\}", text)
        if match is None or os.path.exists(text):  # not Path.exists, which refuses long names
            found.append(text)
            continue
        span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
        choices = match[1].split(",")
        first, last = (int(span[1]), int(span[2])) if span else (1, len(choices))
        if len(found) + len(waiting) + last - first >= MOST_FILES:
            raise UserError(f"{pattern!r} stands for more than {MOST_FILES:,} files")
        if span:
            choices = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
        waiting += [text[: match.start()] + choice + text[match.end() :] for choice in reversed(choices)]
    return found
