"""Energon's data sets: WebDataset tars with a folder `.nv-meta` that holds splits, counts and the samples' fields.

The names are those of Megatron-Energon 7 (docs/source/basic/data_prep.md). Its own index of members, index.sqlite or
`.tar.idx`, is not needed: tars are scanned like any others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.files.yaml_text import read_yaml
from dilatant.data.errors import SampleError
from dilatant.data.media.media_kind import HEAD_BYTES, kind_of_bytes, kind_of_suffix
from dilatant.data.readers.record_fields import FileRecord, as_list
from dilatant.data.readers.source_files import (
    SPLITS,
    Catalog,
    SourceFiles,
    expand_braces,
    json_object,
    path_inside,
    read_description,
)
from dilatant.data.readers.tar_records import JSON_SUFFIXES, TEXT_SUFFIXES, TarRecords, member_text, read_member
from dilatant.data.sample import FileSlice

META = ".nv-meta"
_IMAGE = {"image": "images"}
_ANSWERS = {"context": "question", "answers": "answer", "answer_weights": ""}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "Captioning": {**_IMAGE, "caption": "caption"},
    "Image": _IMAGE,
    "ImageClassification": {**_IMAGE, "label_name": "label", "label": "label"},
    "MultiChoiceVQA": {**_IMAGE, "context": "question", "choices": "choices", "correct_choice_idx": "answer"},
    "OCR": {**_IMAGE, "text": "text"},
    "Text": {"text": "text"},
    "VQA": {**_IMAGE, **_ANSWERS},
    "VQAOCR": {**_IMAGE, **_ANSWERS},
    "VidQA": {"video": "videos", **_ANSWERS},
}
"""Sample type → its fields → our columns, of which the first that is there counts. Other fields are not used."""
CRUDE = "Crude"
"""The type whose samples are the members of the tar, which the reader of tars understands."""
_CLASS = ("__module__", "__class__")
TEXTS = TEXT_SUFFIXES | {"transcript", "cls", "cls2", "class", "count", "index", "inx", "id"}
"""Members that WebDataset reads as text or as whole numbers."""
_ACCESS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _Info(msgspec.Struct):
    shard_counts: dict[str, _Count]


class _Splits(msgspec.Struct, forbid_unknown_fields=True):
    split_parts: dict[str, list[str]]
    exclude: list[str] = []


@dataclass(frozen=True, slots=True)
class Access:
    """One way to get a field: a member of the sample by its suffix, and keys inside its JSON."""

    member: str
    keys: tuple[str, ...] = ()


FieldMap = Mapping[str, tuple[Access, ...]]
"""Field of the sample type → the ways to get it, in order of preference."""


class EnergonRecords(TarRecords):
    """Samples of a split, by a field map. Picklable.

    kind: sample type, a key of `COLUMNS` or `CRUDE`. fields: how each field is read. excluded: the names of samples
    that are left out ("shard.tar/key"), by shard. Raises UserError for one that is not there.
    """

    def __init__(
        self, files: SourceFiles, kind: str, fields: FieldMap, excluded: Mapping[Path, frozenset[str]]
    ) -> None:
        super().__init__(files)
        self._kind, self._fields, self._excluded = kind, fields, excluded
        self._numbers = self._kept() if excluded else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files, self._kind, self._fields, self._excluded)

    def __len__(self) -> int:
        return super().__len__() if self._numbers is None else len(self._numbers)

    def name_of(self, index: int) -> str:
        return super().name_of(self._number(index))

    def read(self, index: int) -> FileRecord:
        if self._kind == CRUDE:
            return super().read(self._number(index))
        place, folder, members = self.members(self._number(index))
        return _Parts(place, members).record(folder, self._fields, COLUMNS[self._kind])

    def _number(self, index: int) -> int:
        return index if self._numbers is None else int(self._numbers[index])

    def _kept(self) -> NDArray[np.int64]:
        """Return the numbers of the samples that are not excluded."""
        away: list[int] = []
        for file, path in enumerate(self._files.paths):
            keys = self._excluded.get(path, frozenset())
            first, end = self._files.first[file : file + 2].tolist()
            named = {self.key_of(number): number for number in range(first, end)} if keys else {}
            if missing := sorted(keys - named.keys()):
                raise UserError(f"{path.name} holds no sample {missing[0]!r}, which {META} excludes; correct that")
            away += [named[key] for key in keys]
        return np.setdiff1d(np.arange(self._files.first[-1]), away)


class _Parts:
    """The members of one sample by suffix, parsed when a field asks for them."""

    def __init__(self, place: str, members: Sequence[tuple[str, FileSlice]]) -> None:
        self._place, self._members = place, dict(members)
        if len(self._members) < len(members):
            raise SampleError(place, "has a member twice", "give every sample of a shard a key of its own")
        self._texts: dict[str, Any] = {}
        self._used: dict[str, set[str]] = {}

    def record(self, folder: Path, fields: FieldMap, columns: Mapping[str, str]) -> FileRecord:
        values = {field: self._value(field, ways) for field, ways in fields.items()}
        found: dict[str, Any] = {}
        unused = [field for field in values if field not in columns]
        for field, column in columns.items():
            if column in found and field in values:
                unused.append(field)
            elif column and field in values:
                found[column] = values[field]
        if "answer_weights" in values:
            answers, weights = as_list(values.get("answers")), as_list(values["answer_weights"])
            if len(answers) != len(weights) or not all(isinstance(weight, int | float) for weight in weights):
                problem = f"has {len(answers)} answers, and answer_weights that do not fit them"
                raise SampleError(self._place, problem, "correct the sample")
            best = max(range(len(answers)), key=weights.__getitem__)
            found["answer"] = [answers[best], *answers[:best], *answers[best + 1 :]]
        return FileRecord(self._place, folder, found, (*unused, *self._unused()))

    def _value(self, field: str, ways: tuple[Access, ...]) -> Any:
        """Return the value of a field by the first way that leads to one. Raises SampleError."""
        for way in ways:
            if way.member not in self._members:
                continue
            value = self._part(way)
            with suppress(KeyError, IndexError, ValueError, TypeError):
                for key in way.keys:
                    value = value[int(key)] if isinstance(value, list) else value[key]
                return value
        wanted = " or ".join(way.member + "".join(f"[{key}]" for key in way.keys) for way in ways)
        raise SampleError(self._place, f"has no {wanted} for {field!r}", f"correct field_map in {META}/dataset.yaml")

    def _part(self, way: Access) -> Any:
        """Return a member: JSON and text parsed, media as their place in the tar. Raises SampleError."""
        member, last = self._members[way.member], way.member.rpartition(".")[2]
        self._used.setdefault(way.member, set()).update(way.keys[:1] or ("*",))
        if last in TEXTS | JSON_SUFFIXES:
            if way.member not in self._texts:
                self._texts[way.member] = member_text(self._place, way.member, member)
            return self._texts[way.member]
        head = read_member(member, min(member.length, HEAD_BYTES))
        if kind_of_suffix(last) is None and kind_of_bytes(head) is None:
            raise SampleError(
                self._place,
                f"its member .{way.member} is neither text, JSON nor a medium (pickles and tensors are not read)",
                "write it as JSON",
            )
        return [member]

    def _unused(self) -> list[str]:
        """Return the members, and keys of JSON objects, that no field has asked for."""
        unused = [f".{suffix}" for suffix in self._members if suffix not in self._used]
        for suffix, value in self._texts.items():
            if isinstance(value, dict) and "*" not in self._used[suffix]:
                unused += [f".{suffix}[{key}]" for key in value if key not in self._used[suffix]]
        return unused


def energon_catalog(place: Path, split: str | None, held_out: bool) -> Catalog | None:
    """Return the catalog of a folder that `energon prepare` has prepared; None for another one. split: the name of a
    part in split.yaml, or another name of it; None means `train`. held_out: as for `find_files`. Raises UserError."""
    meta = place / META
    said = _described(meta, ".info.json", ".info.yaml")
    if said is None:
        return None
    with as_user_error(f"{str(meta)!r} cannot be used", ValueError, msgspec.MsgspecError):
        info = msgspec.convert(said, _Info)
        splits = msgspec.convert(_described(meta, "split.yaml", "split.json") or {}, _Splits)
        dataset = _described(meta, "dataset.yaml") or {}
        kind = _kind(dataset)
        field_map = msgspec.convert(dataset.get("field_map") or {}, dict[str, str])
        part, others = _choose(splits.split_parts, split, held_out)
        away = {name for pattern in splits.exclude for name in expand_braces(pattern)}
        names = [name for pattern in splits.split_parts[part] for name in expand_braces(pattern) if name not in away]
        unknown = [name for name in names if name not in info.shard_counts]
        if unknown or not names or len({*names}) < len(names):
            raise ValueError(f"its split {part!r} names no shard, one twice, or one that .info lacks: {unknown[:3]}")
        paths = {name: path_inside(place, name) for name in names}
        excluded = {
            path: frozenset(one.removeprefix(f"{name}/") for one in away if one.startswith(f"{name}/"))
            for name, path in paths.items()
        }
        fields = {field: _ways(text) for field, text in field_map.items()}
    excluded = {path: keys for path, keys in excluded.items() if keys}
    count = sum(map(len, excluded.values()))
    shards = sum(name in info.shard_counts for name in away)
    passed_over = [
        *others,
        *([f"{shards:,} shards and {count:,} samples that {META} excludes"] if shards or count else []),
        *(f"{META}/dataset.yaml: {key}" for key in dataset if key not in ("sample_type", "field_map", *_CLASS)),
    ]
    return Catalog(
        str(meta),
        tuple(paths.values()),
        tuple(info.shard_counts[name] for name in paths),
        partial(EnergonRecords, kind=kind, fields=fields, excluded=excluded),
        passed_over=tuple(passed_over),
        settings=repr((kind, sorted(field_map.items()), sorted(away))),
    )


def _described(meta: Path, *names: str) -> Any:
    """Return the object in the first of several files that is there; None for none. Raises UserError."""
    for name in names:
        text = read_description(meta / name)
        if text is None:
            continue
        with as_user_error(f"{str(meta / name)!r} cannot be read", ValueError, yaml.YAMLError):
            return json_object(text) if name.endswith(".json") else read_yaml(text.decode())
    return None


def _kind(about: Any) -> str:
    """Return the sample type in dataset.yaml, without the ends of its class's name. Raises ValueError for what only the
    user's code could read."""
    if not isinstance(about, dict):
        raise ValueError("dataset.yaml holds no object")
    sample = about.get("sample_type", about)
    named = sample if isinstance(sample, dict) else {}
    module, name = str(named.get("__module__", "megatron.energon")), str(named.get("__class__", CRUDE))
    kind = re.sub("(Sample|Webdataset|WebdatasetFactory)$", "", name)
    problem = next((f"{key!r} is a function" for key in ("sample_loader", "part_filter") if about.get(key)), None)
    if not module.startswith("megatron.energon") or kind not in (*COLUMNS, CRUDE):
        problem = f"samples of the type {name!r} of {module!r} are not read"
    if problem is not None:
        raise ValueError(
            f"dataset.yaml: {problem}; known are {', '.join(COLUMNS)} with a field_map, and {CRUDE}. To read the "
            "members of tars as they are, name the tars by a pattern"
        )
    if kind != CRUDE and not about.get("field_map"):
        raise ValueError(f"dataset.yaml has no field_map for its {name}")
    return kind


def _ways(text: str) -> tuple[Access, ...]:
    """Parse an entry of a field map, such as `jpg,png` or `json[answers][0]`. Raises ValueError."""
    ways = []
    for option in text.split(","):
        match = _ACCESS.fullmatch(option.strip())
        if match is None:
            raise ValueError(f"{text!r} in field_map is no list of members such as 'jpg' or 'json[caption]'")
        ways.append(Access(match[1].lower(), tuple(re.findall(r"\[([^\[\]]+)\]", match[2]))))
    return tuple(ways)


def _choose(parts: Mapping[str, Sequence[str]], wanted: str | None, held_out: bool) -> tuple[str, list[str]]:
    """Return the part of a data set to read, and a line about the others. Raises ValueError."""
    filled = [name for name, shards in parts.items() if shards]
    if wanted is None and held_out:
        raise ValueError(f"it has the splits {', '.join(filled)}; name one with 'split' of the data source")
    known = next((names for names in SPLITS.values() if wanted in names), (wanted or "train",))
    part = wanted if wanted in filled else next((name for name in known if name in filled), None)
    if part is None:
        raise ValueError(f"it has no split {wanted or 'train'!r}; there are {', '.join(filled) or 'none'}")
    others = [f"{name} ({len(parts[name]):,} shards)" for name in filled if name != part]
    return part, [f"the splits {', '.join(others)}; only {part!r} is read"] if others else []
