"""Samples of unlike length in rows of at most so many tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.data.sample import EncodedSample, PackedRow


def pack_rows(sizes: Sequence[int], row_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Positions of `sizes` in rows, each summing to at most `row_tokens`; every position once.

    Best-fit decreasing: at most 11/9 of the fewest rows, plus one (Johnson, 1974). Rows and the samples in
    them keep the order of `sizes`. Raises ValueError naming sizes that no row can hold.
    """
    too_long = [position for position, size in enumerate(sizes) if size > row_tokens]
    if too_long:
        raise ValueError(
            f"samples {too_long} have {[sizes[position] for position in too_long]} tokens, but a row holds {row_tokens}"
        )
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for position in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        best = bisect_left(room, (sizes[position], -1))
        if best == len(room):
            rows.append([position])
            insort(room, (row_tokens - sizes[position], len(rows) - 1))
        else:
            free, row = room.pop(best)
            rows[row].append(position)
            insort(room, (free - sizes[position], row))
    return tuple(sorted(tuple(sorted(row)) for row in rows))


def collate(samples: Sequence[EncodedSample]) -> PackedRow:
    """Several samples one after another in one row. Raises ValueError for no sample."""
    if not samples:
        raise ValueError("a row needs at least one sample")
    lengths = tuple(len(sample.input_ids) for sample in samples)
    media: dict[str, dict[str, list[NDArray]]] = {}
    sizes: dict[str, int] = {}
    for sample in samples:
        for unit, inputs in sample.media.items():
            collected = media.setdefault(unit, {})
            for name, array in inputs.items():
                collected.setdefault(name, []).append(array)
        for unit, tokens in sample.sizes.items():
            sizes[unit] = sizes.get(unit, 0) + tokens
    return PackedRow(
        sample_ids=tuple(sample.id for sample in samples),
        lengths=lengths,
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        labels=np.concatenate([sample.labels for sample in samples]),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        media={
            unit: {name: np.concatenate(arrays) for name, arrays in inputs.items()}
            for unit, inputs in media.items()
        },
        sizes=sizes,
    )
