"""Measure many samples, in this process or in several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.encode import Encoding, measure_sample
from dilatant.data.records import Blocks
from dilatant.data.sample import Sample
from dilatant.data.workers import WorkerPool

PIECE = 64
"""Samples that are measured in one go, where every sample is as cheap to read as the next."""
BLOCK_PIECE = 8192
"""Most samples of one go where they are read in blocks, which is for nothing but the first of a group."""
TRIAL_SECONDS = 1.0
WORTH_SECONDS = 5.0
"""What must be left to do for processes, which take seconds to start."""

Progress = Callable[[int, int], None]
"""Called with the samples done and the samples in all."""


class Measurable(Protocol):
    """Samples by number. Picklable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of samples from headers and text. tokens: int64 [units, samples]; the others: int64 [samples].

    problems: sample → why it cannot be trained on at any length; tokens are 0 where they are not known.
    """

    tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    content: NDArray[np.int64]
    problems: dict[int, str]

    @staticmethod
    def none(units: int, samples: int) -> Measured:
        zeros = np.zeros((units + 2, samples), np.int64)
        return Measured(zeros[:units], zeros[units], zeros[units + 1], {})


def measure(
    samples: Measurable,
    encoding: Encoding,
    *,
    blocks: Blocks | None = None,
    name: str = "the data",
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Measured:
    """Sizes, digests and problems of all samples, by `measure_sample`.

    blocks: how samples are read together. name: how messages call the source. workers: processes that measure; 0 works
    here; None takes all cores that this process may use, where there is work for them. Raises UserError for what is
    wrong with the source as a whole.
    """
    total = len(samples)
    found = Measured.none(len(encoding.unit_names), total)
    pieces = _pieces(total, blocks)
    for (start, end), piece in _measured(_MeasureJob(samples, encoding), pieces, total, name, workers):
        found.tokens[:, start:end] = piece.tokens
        found.target_tokens[start:end] = piece.target_tokens
        found.content[start:end] = piece.content
        found.problems.update(piece.problems)
        progress(end, total)
    return found


_Piece = tuple[int, int]


def _pieces(total: int, blocks: Blocks | None) -> Iterator[_Piece]:
    """Runs of samples, in order: whole groups of blocks, where they are not too long."""
    if blocks is None:
        ends = range(PIECE, total + PIECE, PIECE)
        limit = PIECE
    else:
        groups = blocks.groups or range(len(blocks.lengths))
        last = np.append(np.diff(groups) != 0, True)
        ends = np.cumsum(blocks.lengths)[last].tolist()
        limit = BLOCK_PIECE
    start = 0
    for end in ends:
        while start < min(end, total):
            stop = min(start + limit, end, total)
            yield start, stop
            start = stop


def _measured(
    job: _MeasureJob, pieces: Iterator[_Piece], total: int, name: str, workers: int | None
) -> Iterator[tuple[_Piece, Measured]]:
    """Every piece as it was measured, in order."""
    if workers is None or total <= 8 * PIECE:
        began = time.monotonic()
        for piece in pieces:
            yield piece, job(piece)
            spent = time.monotonic() - began
            left = spent * (total - piece[1]) / piece[1]
            if workers is None and spent > TRIAL_SECONDS and left > WORTH_SECONDS:
                break
        cores = len(os.sched_getaffinity(0))
        workers = cores if cores > 1 else 0
    sent: list[_Piece] = []

    def remembered() -> Iterator[_Piece]:
        for piece in pieces:
            sent.append(piece)
            yield piece

    pool: WorkerPool[_Piece, Measured] = WorkerPool(
        job, workers, named=lambda piece: f"samples {piece[0]} to {piece[1] - 1} of {name}"
    )
    try:
        for measured in pool.map(remembered(), ahead=4 * max(1, workers)):
            if isinstance(measured, UserError):
                raise measured
            yield sent.pop(0), measured
    finally:
        pool.close()


@dataclass(frozen=True)
class _MeasureJob:
    samples: Measurable
    encoding: Encoding

    def __call__(self, piece: _Piece) -> Measured:
        start, end = piece
        units = self.encoding.unit_names
        found = Measured.none(len(units), end - start)
        for index in range(start, end):
            try:
                sizes = measure_sample(self.samples[index], self.encoding)
            except UserError as error:
                found.problems[index] = str(error)
                continue
            at = index - start
            found.tokens[:, at] = [sizes.tokens[unit] for unit in units]
            found.target_tokens[at] = sizes.target_tokens
            found.content[at] = sizes.content
            if sizes.refusals:
                found.problems[index] = str(sizes.refusals[0])
        return found
