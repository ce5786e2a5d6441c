"""Boxes in checkpoints: the pieces of tensors that are written, and how a wanted box is assembled from stored ones.

A tensor's full name is `<kind>.<weight>`, and for a moment of the optimizer `<kind>.<weight>.<moment>`. A piece of it
is stored as `<name>@<intervals>`, and the part's manifest tells the full shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilatant.plan.boxes import Box, parse_key

Tensors = dict[str, Any]
"""Tensors under nested names: {"model": {key: tensor}, "optimizer": {key: {"exp_avg": tensor}}}, keyed by `Box.key`."""

Shapes = Mapping[str, tuple[int, ...]]
"""Weight → full shape, for weights of which only a part is held."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxPiece:
    """Tensor to store or to fill; its box has the full name."""

    box: Box
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Location and form of a stored piece."""

    box: Box
    file: Path
    key: str
    dtype: torch.dtype


def pieces_of(tensors: Tensors, shapes: Shapes, prefix: str = "") -> Iterator[BoxPiece]:
    """Yield every tensor with its box. A scalar beside a weight's boxes (its step count) is of the whole weight."""
    for key, value in tensors.items():
        name, intervals = parse_key(key)
        if intervals is None or name not in shapes:
            if isinstance(value, Tensor):
                yield BoxPiece(Box.of(prefix + key, value.shape), value)
            else:
                yield from pieces_of(value, shapes, f"{prefix}{key}.")
            continue
        for kind, tensor in (("", value),) if isinstance(value, Tensor) else value.items():
            full, shape = f"{prefix}{name}.{kind}".removesuffix("."), shapes[name]
            is_whole = tensor.ndim == 0 and shape
            yield BoxPiece(Box.of(full, ()) if is_whole else Box(full, shape, intervals), tensor)


def stored_box(name: str, shape: Sequence[int], shapes: Shapes) -> Box:
    """Return the box stored as `name`. shapes: by full name. Raises ValueError if the piece does not fit its tensor."""
    whole, intervals = parse_key(name)
    if intervals is None or whole not in shapes:
        return Box.of(name, shape)
    box = Box(whole, shapes[whole], intervals)
    if box.shape != tuple(shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    return box


def overlap(stored: Sequence[StoredPiece]) -> bool:
    """Return True if any two pieces of one tensor hold the same element."""
    if len(stored) == 1:
        return False
    ordered = sorted((p.box for p in stored), key=lambda box: box.intervals[:1])
    for number, box in enumerate(ordered):
        if not box.whole or not box.size:
            return True
        for other in ordered[number + 1 :]:
            if other.intervals[0] and other.intervals[0][0][0] >= box.intervals[0][-1][1]:
                break
            if box.meet(other) is not None:
                return True
    return False


def sources(wanted: Box, stored: Sequence[StoredPiece]) -> list[tuple[StoredPiece, Box]]:
    """Return the cells of `wanted`, each with the piece that holds it; cells that are stored nowhere are absent."""
    found = []
    for piece in stored:
        both = wanted.meet(piece.box)
        if both is not None:
            found += [(piece, cell) for cell in both.cells()]
    return found
