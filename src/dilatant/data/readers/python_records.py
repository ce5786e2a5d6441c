"""Data sets that are Python objects: map-style ones by index, and iterable ones as streams.

Items are records in the forms that files have, or `EncodedSample`s, which are trained on as they are. Media in records
may also be PIL images, and sounds as {"array": ..., "sampling_rate": ...}.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np

from dilatant.config.errors import UserError, type_and_text
from dilatant.config.own_parts import OwnPart
from dilatant.data.errors import SampleError
from dilatant.data.readers.arrow_records import TableRecords, converters
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import Blocks, parse_record
from dilatant.data.sample import EncodedSample, Sample


class PythonRecords:
    """Items of an object with `__len__` and `__getitem__`. Picklable if `part` is. fingerprint: the part's key, so that
    sizes are measured in every run."""

    blocks: Blocks | None = None

    def __init__(self, part: OwnPart) -> None:
        self._part = part
        self.fingerprint = part.key

    def __len__(self) -> int:
        return len(self._part.value)

    def name_of(self, index: int) -> str:
        return f"{self._part.name}[{index}]"

    def read(self, index: int) -> FileRecord | Sample:
        try:
            item = self._part.value[index]
        except (OSError, UserError):  # a file server may answer later
            raise
        except (Exception, SystemExit) as error:
            raise _unreadable(self.name_of(index), error) from None
        return as_record(item, self.name_of(index), self._part.folder)


def open_records(part: OwnPart) -> TableRecords | PythonRecords:
    """Open a map-style data set. Raises UserError for any other object."""
    value, datasets = part.value, sys.modules.get("datasets")
    if datasets is not None and isinstance(value, datasets.Dataset):
        own = value.format
        if own["type"] is None and own["columns"] == value.column_names:
            return TableRecords(part.name, value, Path(part.folder))
        return PythonRecords(part)  # its items are what the user's format makes of the rows
    if is_map_style(value):
        return PythonRecords(part)
    raise UserError(
        f"{part.name} is a {type(value).__name__}; give a list of records, a datasets.Dataset or an object with "
        "__len__ and __getitem__" + (", or an iterable one" if part.name == "train_data" else "")
    )


def is_map_style(value: Any) -> bool:
    """Return True for an object that is read by index."""
    is_list = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return is_list and not isinstance(value, Mapping | str | bytes)


@dataclass(frozen=True)
class PythonStream:
    """Stream of the items of an iterable data set; every `read` starts a new pass. Raises UserError for an object that
    cannot be iterated again."""

    part: OwnPart
    limit: int | None = None

    def __post_init__(self) -> None:
        value = self.part.value
        if isinstance(value, Mapping | str | bytes) or not hasattr(type(value), "__iter__"):
            open_records(self.part)  # raises
        if isinstance(value, Iterator):
            raise UserError(
                f"{self.part.name} is a {type(value).__name__}, which can be read once; every rank reads it, and a "
                "resumed run from the start: give an object whose __iter__ begins anew each time"
            )

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def identity(self) -> str:
        return ""

    def read(self, skip: int) -> Iterator[Sample | SampleError]:
        """Yield the samples from number `skip` on. An item in no known form yields its SampleError."""
        value, datasets = self.part.value, sys.modules.get("datasets")
        convert: Mapping[str, Any] = {}
        if datasets is not None and isinstance(value, datasets.IterableDataset):
            convert = converters(value.features.arrow_schema) if value.features else {}
            items = iter(value.decode(False).skip(skip))
        else:
            items = islice(iter(value), skip, None)
        for number, item in enumerate(islice(items, self.limit and max(0, self.limit - skip)), skip):
            try:
                record = as_record(item, f"{self.name}[{number}]", self.part.folder, convert)
                yield parse_record(record) if isinstance(record, FileRecord) else record
            except SampleError as error:
                yield error


def as_record(
    item: Any, place: str, folder: str, convert: Mapping[str, Any] = MappingProxyType({})
) -> FileRecord | Sample:
    """Return an item as a record whose media are encoded, or as an encoded sample. folder: base of relative paths.
    convert: by column, see `converters`. Raises SampleError."""
    if isinstance(item, EncodedSample):
        return Sample(place, (), encoded=item)
    if not isinstance(item, Mapping):
        raise SampleError(
            place, f"is a {type(item).__name__}", "give a dict in one of the forms of files, or an EncodedSample"
        )
    try:
        fields = {str(key): plain(value) for key, value in item.items()}
    except (OSError, ValueError) as error:
        raise _unreadable(place, error) from None
    fields = {key: convert[key](value) if key in convert else value for key, value in fields.items()}
    return FileRecord(place, Path(folder), fields)


def plain(value: Any) -> Any:
    """Return a value as the readers of files know it: media as encoded bytes."""
    from PIL import Image, ImageOps

    stream = io.BytesIO()
    if isinstance(value, Image.Image):
        value = ImageOps.exif_transpose(value)  # which PNG would lose
        if value.mode in ("F", "I"):
            raise ValueError(f"nobody knows what is white in an image of mode {value.mode}; give it 8 or 16 bits")
        if value.mode.startswith("I;16"):
            value = Image.fromarray(np.asarray(value).astype(np.uint16))
        is_kept = value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # by PNG, without loss
        (value if is_kept else value.convert("RGB")).save(stream, "PNG", compress_level=1)
        return stream.getvalue()
    if isinstance(value, Mapping) and "array" in value and value.get("sampling_rate"):
        import soundfile

        sound = np.asarray(value["array"], np.float32)
        sound = sound.T if sound.ndim == 2 and len(sound) < sound.shape[1] else sound
        soundfile.write(stream, sound, int(value["sampling_rate"]), format="WAV", subtype="FLOAT")
        return stream.getvalue()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def _unreadable(place: str, error: BaseException) -> SampleError:
    return SampleError(place, f"cannot be read: {type_and_text(error)}", "correct the data set")
