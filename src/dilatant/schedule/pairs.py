"""Edges between units, derived from samples: which pieces of one unit consume samples of which pieces of another."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.packed import Pieces
from dilatant.schedule.plan_arrays import PlanArrays


@lru_cache(maxsize=8)  # a few steps under several families
def unit_pairs(arrays: PlanArrays, pieces: Pieces) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the (producer, consumer) pieces of every pair that shares a sample, ascending within each unit edge.

    A sample that only the consumer has (text without an image) makes no pair: no rows travel for it.
    """
    sources, targets = [], []
    num_samples = int(pieces.samples.max()) + 1 if len(pieces.samples) else 0
    num_pieces = len(pieces.microbatch)
    owner = np.full((len(arrays.units), num_samples), -1, dtype=np.int64)
    piece_of_entry = np.repeat(np.arange(num_pieces), np.diff(pieces.offsets))
    piece_unit = np.repeat(arrays.unit_of, np.diff(pieces.first))
    if num_pieces:
        owner[piece_unit[piece_of_entry], pieces.samples] = piece_of_entry
    for source, target in arrays.feeds:
        both = (owner[source] >= 0) & (owner[target] >= 0)
        code = np.unique(owner[source][both] * num_pieces + owner[target][both])
        sources.append(code // max(num_pieces, 1))
        targets.append(code % max(num_pieces, 1))
    if not sources:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    return np.concatenate(sources).astype(np.int32), np.concatenate(targets).astype(np.int32)
