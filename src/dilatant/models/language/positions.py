"""Positions of tokens in time, height and width (M-RoPE; Wang et al. 2024, "Qwen2-VL", 2.1), from sizes alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


def spatial_positions(
    ids: NDArray[np.int64],
    placeholders: Collection[int],
    grids: NDArray[np.int64],
    merge: int,
    steps: Sequence[float] | None = None,
    behind_time: bool = False,
) -> NDArray[np.int64]:
    """int64 [4, tokens] of a sample: its order, which restarts with each sample and by which samples of a row are kept
    apart, then time, height and width.

    grids: int64 [items, 3], patches (frames, rows, columns) of each item in the order of the text, which stands there
    as so many tokens of `placeholders` as it has groups of `merge` by `merge` patches. steps: of each item, from one
    frame to the next in time (default: 1). Text advances all three by 1; what follows an item begins behind its longer
    side, or, `behind_time`, behind all of its positions. Raises ValueError where tokens and items do not agree.
    """
    is_media = np.isin(ids, list(placeholders))
    positions = np.empty((4, len(ids)), np.int64)
    positions[0] = np.arange(len(ids))
    at, start = 0, 0  # in the row, and in positions
    for (frames, rows, columns), step in zip(grids.tolist(), steps or [1.0] * len(grids), strict=True):
        rows, columns = rows // merge, columns // merge
        begin = at + int(is_media[at:].argmax())
        end = begin + frames * rows * columns
        if not is_media[begin:end].all() or end > len(ids):
            raise ValueError("the tokens that stand for an item are not as many as its rows")
        text = begin - at
        positions[1:, at:begin] = start + np.arange(text)
        start += text
        place = np.indices((frames, rows, columns)).reshape(3, -1)
        if step != 1:  # in float32, as the families have it
            place[0] = (place[0].astype(np.float32) * np.float32(step)).astype(np.int64)
        positions[1:, begin:end] = start + place
        start += int(place.max()) + 1 if behind_time else max(rows, columns)
        at = end
    if is_media[at:].any():
        raise ValueError("more tokens stand for items than there are items")
    positions[1:, at:] = start + np.arange(len(ids) - at)
    return positions
