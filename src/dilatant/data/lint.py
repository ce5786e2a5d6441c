"""Find every sample that would fail in training, before any device is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from dilatant.config.errors import UserError
from dilatant.data.encode import Encoding, find_problems
from dilatant.data.errors import SampleError
from dilatant.data.loader import Dataset
from dilatant.data.workers import WorkerPool

CHUNK = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """A sample that would fail. index: its number in the data; sample: where it was read from."""

    index: int
    sample: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


def lint(
    samples: Dataset,
    encoding: Encoding,
    *,
    deep: bool = True,
    held_out: bool = False,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Problem, ...]:
    """Everything wrong with the samples, in order; empty when all of them can be trained on.

    deep: also decode the media, which finds those that are cut off. Without it headers are read. held_out: they are
    also asked, so each needs a question. The longest sample allowed is `encoding.max_length`. workers: processes that
    read; 0 works here.
    """
    total = len(samples)
    bounds = [*range(0, total, CHUNK), total]
    job = _LintJob(samples, encoding, deep, held_out)
    pool: WorkerPool[tuple[int, int], list[Problem]] = WorkerPool(
        job, workers if len(bounds) > 8 else 0, named=lambda bounds: f"samples {bounds[0]} to {bounds[1] - 1}"
    )
    found: list[Problem] = []
    try:
        for number, problems in enumerate(pool.map(pairwise(bounds), ahead=4 * max(1, workers)), 1):
            if isinstance(problems, UserError):
                raise problems
            found += problems
            progress(min(number * CHUNK, total), total)
    finally:
        pool.close()
    return tuple(found)


@dataclass(frozen=True)
class _LintJob:
    samples: Dataset
    encoding: Encoding
    deep: bool
    held_out: bool

    def __call__(self, bounds: tuple[int, int]) -> list[Problem]:
        problems = []
        for index in range(*bounds):
            try:
                errors = find_problems(self.samples[index], self.encoding, self.deep, self.held_out)
            except SampleError as error:
                errors = [error]
            problems += [Problem(index, error.sample, error.problem, error.remedy) for error in errors]
        return problems
