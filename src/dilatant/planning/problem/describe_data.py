"""Report of a run's training data, for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from dilatant.config import Config, UserError
from dilatant.data.index.show_examples import show_examples
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.index.stats import BlendSource, describe
from dilatant.data.order.blend import Blend
from dilatant.planning.assemble import Samples
from dilatant.report.text.stats_summary import StatsReport
from dilatant.schedule.assignment.batch_balance import batch_balance

BATCHES = 64
"""Number of batches that show, within a few percent, how evenly batches divide."""


def describe_data(
    config: Config, samples: Samples, index: SizesIndex, title: str, examples: bool = False
) -> StatsReport:
    """Return the report of the training data, from their index; with `examples` a few samples are decoded. Raises
    UserError for streamed data."""
    blend, encoding, batch = samples.train, samples.encoding, config.train.global_batch_size
    if not isinstance(blend, Blend):
        raise UserError("a streamed data set has no index; do not stream it to describe it")
    sources = tuple(
        BlendSource(name, length, weight)
        for name, length, weight in zip(
            _short([reader.name for reader in blend.readers]), blend.lengths, blend.weights, strict=True
        )
    )
    return StatsReport(
        title=title,
        stats=describe(index, sources, encoding.max_length),
        batch_size=batch,
        balance=batch_balance(index.units, _batches(blend, index, batch, config.seed)),
        examples=show_examples(blend, index, encoding) if examples else (),
    )


def _batches(blend: Blend, index: SizesIndex, size: int, seed: int) -> list[NDArray[np.int64]]:
    """Return the tokens of the first global batches of training: `[samples, units]` each."""
    sampler = blend.sampler(seed, size)
    bad = np.fromiter(index.problems, np.int64, len(index.problems))
    drawn = (np.asarray(indices) for indices, _ in islice(sampler.batches(sampler.start()), BATCHES))
    return [index.tokens[indices[~np.isin(indices, bad)]] for indices in drawn]


def _short(names: Sequence[str]) -> list[str]:
    """Return the names of sources without the folders that all share; a path keeps at least a folder and a name."""
    parts = [PurePath(name).parts for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*parts)))
    return ["/".join(part[min(shared, max(len(part) - 2, 0)) :]) for part in parts]
