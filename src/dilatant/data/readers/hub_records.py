"""Hugging Face hub data sets, through the `datasets` library: by index after a download, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.readers.arrow_records import converters, row_fields
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import Blocks, parse_record
from dilatant.data.sample import Sample


class HubRecords:
    """Records of a downloaded data set, memory-mapped. Picklable: worker processes map the same files.

    fingerprint: includes the fingerprint of `datasets`, which changes with the data.
    """

    blocks: Blocks | None = None

    def __init__(self, source: DataSource) -> None:
        dataset = _load(source, streaming=False)
        self.fingerprint = f"{source.id} {source.subset} {source.split or 'train'} {dataset._fingerprint}"
        self._name = str(source.id)
        # In this format nothing is decoded: images and sounds stay encoded bytes or paths.
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def name_of(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def read(self, index: int) -> FileRecord:
        place = self.name_of(index)
        return FileRecord(place, Path("."), row_fields(self._dataset[index : index + 1], 0, place))


@dataclass(frozen=True)
class HubStream:
    """Stream of the samples of a hub data set; every `read` starts a new pass."""

    source: DataSource

    @property
    def name(self) -> str:
        return str(self.source.id)

    def read(self, skip: int) -> Iterator[Sample | SampleError]:
        """Yield the samples from number `skip` on. A record in no known form yields its SampleError.

        Skipped records are fetched but not decoded. Raises UserError if the hub cannot be reached.
        """
        dataset = _load(self.source, streaming=True).decode(False)
        convert = converters(dataset.features.arrow_schema) if dataset.features else {}
        stop = self.source.limit
        columns: dict[str, str] = {**{str(key): value for key, value in self.source.columns.items()}}
        for number, fields in enumerate(
            islice(iter(dataset.skip(skip)), stop and max(0, stop - skip)), skip + 1
        ):
            known = {key: convert[key](value) if key in convert else value for key, value in fields.items()}
            record = FileRecord(f"{self.name}:{number}", Path(self.source.media_dir or "."), known)
            try:
                yield parse_record(record, self.source.prompt, columns)
            except SampleError as error:
                yield error


def _load(source: DataSource, streaming: bool) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            source.id, source.subset, split=source.split or "train", streaming=streaming
        )
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"data set {source.id!r} was not found on the hub, nor as a local folder: {error}"
        ) from None
    except ConnectionError as error:
        raise UserError(
            f"data set {source.id!r} is on the hub, which this machine cannot reach ({error}); download it where "
            "there is a network and give its folder as 'path', or copy the cache (HF_HOME) here"
        ) from None
    except (ValueError, OSError) as error:
        raise UserError(f"data set {source.id!r} cannot be opened: {error}") from None
