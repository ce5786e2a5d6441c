"""Data sets on the Hugging Face hub, through the `datasets` library: by index after a download, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.record_fields import Record
from dilatant.data.records import Blocks, parse_record
from dilatant.data.sample import Sample


class HubRecords:
    """Records of a downloaded data set, memory-mapped. Picklable: worker processes map the same files.

    fingerprint: the library's own, which changes with the data.
    """

    blocks: Blocks | None = None

    def __init__(self, source: DataSource) -> None:
        dataset = _load(source, streaming=False)
        self.fingerprint = f"{source.id} {source.subset} {source.split} {dataset._fingerprint}"
        self._name = str(source.id)
        self._labels = _label_names(dataset.features)
        # In this format nothing is decoded: images and sounds come as their encoded bytes or their path.
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def name_of(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def read(self, index: int) -> Record:
        fields = self._dataset[index : index + 1].to_pylist()[0]
        return Record(self.name_of(index), Path("."), _with_label_names(fields, self._labels))


@dataclass(frozen=True)
class HubStream:
    """The samples of a data set on the hub as they come, again from the start as often as asked."""

    source: DataSource

    @property
    def name(self) -> str:
        return str(self.source.id)

    def read(self, skip: int) -> Iterator[Sample | SampleError]:
        """The samples from number `skip` on. A record in no known form comes as the error that says so.

        Skipped records are fetched but not decoded. Raises UserError when the hub cannot be reached.
        """
        dataset = _load(self.source, streaming=True).decode(False)
        labels = _label_names(dataset.features or {})
        stop = self.source.limit
        columns: dict[str, str] = {**{str(key): value for key, value in self.source.columns.items()}}
        for number, fields in enumerate(
            islice(iter(dataset.skip(skip)), stop and max(0, stop - skip)), skip + 1
        ):
            record = Record(f"{self.name}:{number}", Path("."), _with_label_names(fields, labels))
            try:
                yield parse_record(record, self.source.prompt, columns)
            except SampleError as error:
                yield error


def _load(source: DataSource, streaming: bool) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.id, source.subset, split=source.split, streaming=streaming)
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


def _label_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Columns whose numbers stand for names."""
    return {name: list(feature.names) for name, feature in features.items() if hasattr(feature, "names")}


def _with_label_names(fields: Mapping[str, Any], labels: Mapping[str, list[str]]) -> dict[str, Any]:
    return {
        name: labels[name][value] if name in labels and isinstance(value, int) and value >= 0 else value
        for name, value in fields.items()
    }
