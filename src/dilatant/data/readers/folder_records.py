"""Folders of media with a text beside each: files that share a name up to the suffix are one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dilatant.data.media.media_kind import kind_of_suffix
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import Blocks
from dilatant.data.readers.source_files import choose_split, files_below, is_data_file
from dilatant.data.readers.tar_records import FIELD_SUFFIXES, record_of_members
from dilatant.data.sample import FileSlice


@dataclass(frozen=True, slots=True)
class FolderRecords:
    """Records of a folder. Picklable. members: name of each record below the folder, and its files' suffixes. identity:
    changes when a text (name, size or time) or the name of a medium does. passed_over: what is not read."""

    folder: Path
    members: tuple[tuple[str, tuple[str, ...]], ...]
    identity: str
    passed_over: tuple[str, ...]
    blocks: Blocks | None = None

    def __len__(self) -> int:
        return len(self.members)

    def name_of(self, index: int) -> str:
        return self.members[index][0]

    def read(self, index: int) -> FileRecord:
        name, suffixes = self.members[index]
        files = [self.folder / f"{name}.{suffix}" for suffix in suffixes]
        slices = [FileSlice(file, 0, file.stat().st_size) for file in files]
        members = [(suffix.lower(), one) for suffix, one in zip(suffixes, slices)]
        return record_of_members(name, files[0].parent, members)


def find_beside(folder: Path, split: str | None, held_out: bool) -> FolderRecords | None:
    """Return the records of a folder in which media lie beside their texts; None if it has none, or holds data files.

    split, held_out: as for `find_files`. Raises UserError.
    """
    found: dict[str, list[str]] = {}
    for file in files_below(folder):
        stem, dot, suffix = file.name.rpartition(".")
        if dot and not file.name.startswith("."):
            found.setdefault(str(file.parent.relative_to(folder) / stem), []).append(suffix)
    kinds = {name: {_role(suffix) for suffix in suffixes} for name, suffixes in found.items()}
    paired = {name for name, roles in kinds.items() if {"medium", "text"} <= roles}
    single = [name for name in found if name not in paired]
    files = [folder / f"{name}.{suffix}" for name in single for suffix in found[name]]
    if not paired or any(is_data_file(file, folder) for file in files):
        return None
    # Names of files may hold words such as "test"; those of folders name splits.
    chosen, passed_over = choose_split(folder, [(folder / name).parent for name in paired], split, held_out)
    lonely = [f"{name}.{found[name][0]}" for name in single if kinds[name] & {"medium", "text"}]
    if lonely:
        passed_over.append(f"{len(lonely):,} files without a medium or a text of the same name ({lonely[0]}, ...)")
    places = frozenset(chosen)
    members = tuple((name, tuple(found[name])) for name in sorted(paired) if (folder / name).parent in places)
    texts = [
        (folder / f"{name}.{suffix}").stat()
        for name, suffixes in members
        for suffix in suffixes
        if _role(suffix) == "text"
    ]
    identity = repr((members, [(text.st_size, text.st_mtime_ns) for text in texts]))
    return FolderRecords(folder, members, identity, tuple(passed_over))


def _role(suffix: str) -> str:
    if suffix.lower() in FIELD_SUFFIXES:
        return "text"
    return "other" if kind_of_suffix(suffix.lower()) is None else "medium"
