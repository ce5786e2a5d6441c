"""Data lint: find every sample that would fail in training, before any device is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from dilatant.data.errors import SampleError
from dilatant.data.index.measure import SampleSubset, unused_keys
from dilatant.data.index.sizes import SizesIndex, blend_sizes
from dilatant.data.order.blend import Blend, StreamBlend
from dilatant.data.parallel_map import Progress, map_ranges, piece_bounds
from dilatant.data.sample import Sample
from dilatant.data.text.encode import find_problems
from dilatant.data.text.encoding import Encoding

CHUNK = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """A sample that would fail. index: its number in the data; sample: its name, which says where it was read."""

    index: int
    sample: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


def lint(
    blend: Blend | StreamBlend,
    encoding: Encoding,
    *,
    deep: bool = True,
    index: SizesIndex | None = None,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Problem, ...]:
    """Return all problems of the samples, in order; empty if every sample can be trained on.

    index: the sizes index, which holds the problems found from headers and text; default: built by `blend_sizes`.
    deep: also decode the media, which finds truncated files. `encoding.max_length` is the longest sample allowed.
    cache_dir, workers: see `blend_sizes`.
    """
    total = len(blend)
    if index is None:
        index = blend_sizes(blend, encoding, cache_dir=cache_dir, workers=workers, progress=progress)
    wanted = np.zeros(total, bool)
    wanted[list(index.refused(encoding.max_length))] = True
    if deep:
        wanted |= index.tokens[:, 1:].any(axis=1)
    numbers = np.flatnonzero(wanted)
    job = _LintJob(SampleSubset(blend, numbers), encoding, deep)
    pieces = piece_bounds(len(numbers), CHUNK)
    found: list[Problem] = []
    for piece, problems in map_ranges(job, pieces, len(numbers), job.named, workers):
        found += [replace(problem, index=int(numbers[problem.index])) for problem in problems]
        progress(int(numbers[piece[1] - 1]) + 1, total)
    progress(total, total)
    return tuple(found)


@dataclass(frozen=True)
class _LintJob:
    samples: SampleSubset
    encoding: Encoding
    deep: bool

    def __call__(self, piece: tuple[int, int]) -> list[Problem]:
        problems = []
        for index in range(*piece):
            try:
                errors = find_problems(self.samples[index], self.encoding, self.deep)
            except SampleError as error:
                errors = [error]
            problems += [Problem(index, error.sample, error.problem, error.remedy) for error in errors]
        return problems

    def named(self, piece: tuple[int, int]) -> str:
        numbers = self.samples.numbers
        return f"samples {numbers[piece[0]]} to {numbers[piece[1] - 1]}"


STREAMED = 64
"""Number of samples read from the start of a stream."""


def unused_by_source(
    blend: Blend | StreamBlend, index: SizesIndex | None, encoding: Encoding
) -> dict[str, tuple[str, ...]]:
    """Return, for each source, the sorted columns and inner keys that no sample uses; for a stream, by its first
    samples. Sources that are fully used are omitted."""
    if isinstance(blend, StreamBlend):
        names: Sequence[str] = [stream.name for stream in blend.streams]
        keys = [
            {key for sample in islice(stream.read(0), STREAMED) if isinstance(sample, Sample)
             for key in unused_keys(sample, encoding)}
            for stream in blend.streams
        ]  # fmt: skip
    else:
        names = blend.source_names
        keys = [set(unused) for unused in index.unused] if index is not None else []
    return {name: tuple(sorted(unused)) for name, unused in zip(names, keys) if unused}


def unused_lines(blend: Blend | StreamBlend | None, index: SizesIndex | None, encoding: Encoding) -> list[str]:
    """Return one line for each source with unused columns, and one for each source with unused files."""
    if blend is None:
        return []
    lines = [
        f"source {name}: columns not used: {', '.join(keys)}"
        for name, keys in unused_by_source(blend, index, encoding).items()
    ]
    if isinstance(blend, Blend):
        lines += [
            f"source {name}: files not used: {', '.join(reader.passed_over)}"
            for name, reader in zip(blend.source_names, blend.readers)
            if reader.passed_over
        ]
    return lines
