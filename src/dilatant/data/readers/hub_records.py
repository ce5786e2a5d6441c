"""Hugging Face hub data sets, through the `datasets` library: by index after a download, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.config.files.remote_files import RemotePath, data_path
from dilatant.data.errors import SampleError
from dilatant.data.readers.arrow_records import TableRecords, converters
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import parse_record
from dilatant.data.sample import Sample, digest_of


class HubRecords(TableRecords):
    """Records of a downloaded data set."""

    def __init__(self, source: DataSource) -> None:
        super().__init__(str(source.id), _load(source, streaming=False))
        self.fingerprint = f"{source.id} {source.subset} {source.split or 'train'} {self.fingerprint}"


@dataclass(frozen=True)
class HubStream:
    """Stream of the samples of a hub data set; every `read` starts a new pass."""

    source: DataSource

    @property
    def name(self) -> str:
        return str(self.source.id)

    @property
    def identity(self) -> str:
        """A digest of the names, sizes and, on the hub, contents of the files; "" if they cannot be asked."""
        import datasets

        split = self.source.split or "train"
        try:
            files = datasets.load_dataset_builder(self.source.id, self.source.subset).config.data_files or {}
            paths = [data_path(str(file)) for file in files.get(split, ())]
            states = [path.stat() for path in paths]
        except (OSError, ValueError):
            return ""
        about = [
            (path.name, state.st_size, isinstance(path, RemotePath) and state.st_mtime_ns)
            for path, state in zip(paths, states)
        ]
        return digest_of((self.source.subset, split, about)) if about else ""

    def read(self, skip: int) -> Iterator[Sample | SampleError]:
        """Yield the samples from number `skip` on. A record in no known form yields its SampleError.

        Skipped records are fetched but not decoded. Raises UserError if the hub cannot be reached.
        """
        dataset = _load(self.source, streaming=True).decode(False)
        convert = converters(dataset.features.arrow_schema) if dataset.features else {}
        stop = self.source.limit
        columns = cast(Mapping[str, str], self.source.columns)
        for number, fields in enumerate(islice(iter(dataset.skip(skip)), stop and max(0, stop - skip)), skip + 1):
            known = {key: convert[key](value) if key in convert else value for key, value in fields.items()}
            record = FileRecord(f"{self.name}:{number}", data_path(self.source.media_dir or "."), known)
            try:
                yield parse_record(record, self.source.prompt, columns)
            except SampleError as error:
                yield error


def _load(source: DataSource, streaming: bool) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.id, source.subset, split=source.split or "train", streaming=streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(f"data set {source.id!r} was not found on the hub, nor as a local folder: {error}") from None
    except ConnectionError as error:
        raise UserError(
            f"data set {source.id!r} is on the hub, which this machine cannot reach ({error}); download it where "
            "there is a network and give its folder as 'path', or copy the cache (HF_HOME) here"
        ) from None
    except (ValueError, OSError) as error:
        raise UserError(f"data set {source.id!r} cannot be opened: {error}") from None
