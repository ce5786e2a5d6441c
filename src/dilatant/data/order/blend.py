"""Blend: concatenate several data sources into one indexable data set, with a sampling weight for each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.config.own_parts import OwnPart
from dilatant.data.order.sampler import Sampler, Stream, StreamSampler
from dilatant.data.readers.python_records import PythonStream, is_map_style, open_records
from dilatant.data.readers.reader import HeldOutSplit, Reader, open_source
from dilatant.data.sample import Sample


@dataclass(frozen=True)
class Blend:
    """A map-style data set: the samples of several sources, concatenated. Picklable."""

    readers: tuple[Reader, ...]
    weights: tuple[float, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(reader) for reader in self.readers)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        reader, number = self._locate(index)
        return reader[number]

    def name(self, index: int) -> str:
        """Return the name of a sample in messages ("charts.parquet:881"), without reading the sample."""
        reader, number = self._locate(index)
        return reader.name_of(number)

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """Return one unique name for each source, under which its statistics are reported."""
        names: list[str] = []
        for reader in self.readers:
            name, number = reader.is_called, 1
            while name in names:
                number += 1
                name = f"{reader.is_called} #{number}"
            names.append(name)
        return tuple(names)

    def source_of(self, index: int) -> int:
        """Return the number of the source to which a sample belongs."""
        return int(np.searchsorted(self._ends, index, side="right"))

    def first(self, limit: int | None) -> NDArray[np.int64]:
        """Return the numbers of the first `limit` samples of each source (None: of all samples)."""
        counts = [min(length, limit or length) for length in self.lengths]
        return np.concatenate(
            [np.arange(end - of, end - of + n) for end, of, n in zip(self._ends, self.lengths, counts)]
        )

    def split(self, size: float, seed: int) -> tuple[Blend, Blend]:
        """Split every source into (training, held-out) samples; see `HeldOutSplit`. Raises UserError."""
        sides = []
        for held_out in (False, True):
            split = HeldOutSplit(size, seed, held_out)
            sides.append(Blend(tuple(replace(reader, split=split) for reader in self.readers), self.weights))
            for reader in self.readers:
                split.count(reader.all_samples)
        return sides[0], sides[1]

    def contrasted(self) -> Blend:
        """Return the blend with a second answer for each sample, see `Reader.contrasts`. Raises UserError for a source
        of one sample, which has no other answer."""
        for name, length in zip(self.source_names, self.lengths):
            if length == 1:
                raise UserError(
                    f"{name!r} has one record here, and kto compares its prompt with another record's answer; add "
                    "records, or put it into the file of another source"
                )
        return replace(self, readers=tuple(replace(reader, contrasts=True) for reader in self.readers))

    def _locate(self, index: int) -> tuple[Reader, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = self.source_of(index)
        return self.readers[source], index - int(self._ends[source]) + self.lengths[source]

    def sampler(self, seed: int, global_batch_size: int) -> Sampler:
        """Return the sampler that gives the training order of these samples."""
        blocks = tuple(reader.blocks for reader in self.readers)
        return Sampler(self.lengths, self.weights, seed, global_batch_size, blocks=blocks)


@dataclass(frozen=True)
class StreamBlend:
    """Several sources that are read as streams: usable for training, without length, index or random access."""

    streams: tuple[Stream, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        raise UserError("a streamed data set has no known length; set 'train.steps', and do not stream 'data.eval'")

    def __getitem__(self, index: int) -> Sample:
        raise UserError("a streamed data set cannot be read by index; do not stream it here")

    def sampler(self, seed: int, global_batch_size: int) -> StreamSampler:
        """Return the sampler that gives the training order of these streams."""
        return StreamSampler(self.streams, self.weights, seed, global_batch_size)


def open_blend(
    sources: Sequence[DataSource],
    *,
    cache_dir: str | Path | None = None,
    max_samples: int | None = None,
    held_out: bool = False,
) -> Blend | StreamBlend:
    """Open all sources of a config section. max_samples limits each source. cache_dir, held_out and errors: see
    `open_source`."""
    if max_samples is not None:
        sources = [
            source.model_copy(update={"limit": min(max_samples, source.limit or max_samples)}) for source in sources
        ]
    weights = tuple(source.weight for source in sources)
    if any(source.streaming for source in sources):
        from dilatant.data.readers.hub_records import HubStream

        if not all(source.streaming for source in sources):
            raise UserError("data sets that are streamed cannot be blended with others; set 'streaming' on all or none")
        return StreamBlend(tuple(HubStream(source) for source in sources), weights)
    readers = tuple(open_source(source, cache_dir=cache_dir, held_out=held_out) for source in sources)
    return Blend(readers, weights)


def open_own_data(part: OwnPart, max_samples: int | None = None) -> Blend | StreamBlend:
    """Open a data set that the user passed as an object. Raises UserError."""
    if part.name == "train_data" and not is_map_style(part.value):
        return StreamBlend((PythonStream(part, max_samples),), (1.0,))
    records = open_records(part)
    if not len(records):
        raise UserError(f"{part.name} is empty")
    source = DataSource(id=part.name, limit=max_samples)
    return Blend((Reader(part.name, records, records.fingerprint, source),), (1.0,))
