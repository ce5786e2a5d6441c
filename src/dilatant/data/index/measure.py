"""Measure samples: count each unit's tokens from headers and text, without decoding media, in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.parallel_map import IndexRange, Progress, map_ranges, piece_bounds
from dilatant.data.readers.records import Blocks
from dilatant.data.sample import Dataset, Frames, Media, Sample
from dilatant.data.text.encode import measure_sample
from dilatant.data.text.encoding import Encoding

PIECE = 64
"""Samples measured per work item if samples can be read one by one."""
BLOCK_PIECE = 8192
"""Most samples per work item if samples are read in blocks; only a longer group is cut."""


@dataclass(frozen=True)
class SampleSubset:
    """A subset of a data set, by sample numbers: int64 [chosen]."""

    samples: Dataset
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int, /) -> Sample:
        return self.samples[int(self.numbers[index])]


FileState = tuple[str, int, int]
"""Path, size in bytes and modification time in ns of a file; -1 and -1 for a missing file."""


@dataclass(frozen=True, slots=True)
class SampleMeasurements:
    """Result of measuring samples from headers and text. numbers: int64 [units + 3, samples]: tokens in each unit (0 if
    unknown), target tokens, the `content_digest`, and 1 for answers that are not marked as bad.

    problems: sample → why it cannot be trained on at any length. media: sample with a problem → the files that hold its
    media. unused: columns, and keys inside of columns, that no sample uses, as an ordered set.
    """

    numbers: NDArray[np.int64]
    problems: dict[int, str] = field(default_factory=dict)
    media: dict[int, tuple[FileState, ...]] = field(default_factory=dict)
    unused: dict[str, None] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens, int64 [units, samples], target tokens, digests and marks, int64 [samples]."""
        return self.numbers[:-3], self.numbers[-3], self.numbers[-2], self.numbers[-1]


def measure(
    samples: Dataset,
    encoding: Encoding,
    *,
    blocks: Blocks | None = None,
    name: str = "a source",
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> SampleMeasurements:
    """Measure all samples with `measure_sample`: sizes, digests and problems.

    blocks: the blocks in which samples are read. name: the source's name in messages. workers: number of measuring
    processes; 0 measures in this process; None uses all cores available to this process, if the work is large enough.
    Raises UserError for an error of the source as a whole.
    """
    total = len(samples)
    found = SampleMeasurements(np.zeros((len(encoding.unit_names) + 3, total), np.int64))
    job = _MeasureJob(samples, encoding)

    def named(piece: IndexRange) -> str:
        return f"samples {piece[0]} to {piece[1] - 1} of {name}"

    for (start, end), piece in map_ranges(job, _pieces(total, blocks), total, named, workers):
        found.numbers[:, start:end] = piece.numbers
        found.problems.update(piece.problems)
        found.media.update(piece.media)
        found.unused.update(piece.unused)
        progress(end, total)
    return found


def _pieces(total: int, blocks: Blocks | None) -> Iterator[IndexRange]:
    """Return the work items, as ranges of samples in order: whole groups of blocks, cut only if too long."""
    if blocks is None:
        return piece_bounds(total, PIECE)
    groups = blocks.groups or range(len(blocks.lengths))
    ends = np.cumsum(blocks.lengths)[np.append(np.diff(groups) != 0, True)].tolist()
    return (
        (start + first, start + last)
        for start, end in zip([0, *ends], ends)
        for first, last in piece_bounds(end - start, BLOCK_PIECE)
    )


@dataclass(frozen=True)
class _MeasureJob:
    samples: Dataset
    encoding: Encoding

    def __call__(self, piece: IndexRange) -> SampleMeasurements:
        start, end = piece
        units = self.encoding.unit_names
        found = SampleMeasurements(np.zeros((len(units) + 3, end - start), np.int64))
        for index in range(start, end):
            sample = None
            try:
                sample = self.samples[index]
                found.unused.update(dict.fromkeys(unused_keys(sample, self.encoding)))
                sizes = measure_sample(sample, self.encoding)
            except UserError as error:
                found.problems[index] = str(error)
                if sample is not None and (files := media_files(sample)):
                    found.media[index] = tuple(map(file_state, files))
                continue
            tokens = (sizes.tokens[unit] for unit in units)
            found.numbers[:, index - start] = [*tokens, sizes.target_tokens, sizes.content, sizes.is_desired]
            if sizes.refusals:
                found.problems[index] = str(sizes.refusals[0])
        return found


def unused_keys(sample: Sample, encoding: Encoding) -> list[str]:
    """Return the columns of a sample's record that training does not use, and keys that the chat template ignores."""
    keys = {key: None for turn in sample.turns for key, _ in turn.extras}
    reads = encoding.chat.template.reads
    unread = [f"messages[].{key}" for key in keys if not reads(key)]
    parts = [(turn.role, part) for turn in sample.turns for part in turn.content]
    seen = {media.kind for media in (*sample.unplaced, *(part for _, part in parts)) if isinstance(media, Media)}
    words = {unit.marker: None for role, part in parts for unit in encoding.units_in(role)
             if isinstance(part, str) and unit.kind not in seen and unit.marker in part}  # fmt: skip
    return [*sample.unused, *unread, *(f"{word} in a text without such media" for word in words)]


def media_files(sample: Sample) -> list[Path]:
    """Return the files that hold a sample's media, except for slices of larger files."""
    found: list[Path] = []
    waiting = [part for turn in sample.turns for part in turn.content if isinstance(part, Media)]
    for media in (*sample.unplaced, *waiting):
        pictures = media.source.pictures if isinstance(media.source, Frames) else (media,)
        found += [picture.source for picture in pictures if isinstance(picture.source, Path)]
    return found


def file_state(path: Path) -> FileState:
    try:
        about = path.stat()
    except (OSError, ValueError):
        return str(path), -1, -1
    return str(path), about.st_size, about.st_mtime_ns
