"""M-RoPE: positions of tokens in time, height and width (Wang et al. 2024, "Qwen2-VL", 2.1), from sizes alone."""

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
    """Return int64 [4, tokens] for a sample: the index in the sample, which separates the samples of a row, then time,
    height and width.

    grids: int64 [items, 3], patches (frames, rows, columns) of each item in text order; the text has one token of
    `placeholders` per group of `merge` by `merge` patches. steps: for each item, the time from one frame to the next
    (default: 1). Text advances all three by 1; the token after an item starts beyond its longer side or, with
    `behind_time`, beyond all of its positions. Raises ValueError if tokens and items do not agree.
    """
    is_media = np.isin(ids, list(placeholders))
    positions = np.empty((4, len(ids)), np.int64)
    positions[0] = np.arange(len(ids))
    at, start = 0, 0  # index in the row, next position
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
        if step != 1:  # in float32, as the families compute it
            place[0] = (place[0].astype(np.float32) * np.float32(step)).astype(np.int64)
        positions[1:, begin:end] = start + place
        start += int(place.max()) + 1 if behind_time else max(rows, columns)
        at = end
    if is_media[at:].any():
        raise ValueError("more tokens stand for items than there are items")
    positions[1:, at:] = start + np.arange(len(ids) - at)
    return positions
