"""Tile shapes of the Triton attention kernels by head dimension, element size and GPU generation."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.attention.masks.work import SMALLEST_PIECE_TOKENS


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one kernel's inner step: `queries` by `keys` tokens, on `warps` warps, loading `stages` steps ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of the three attention kernels and of their work lists.

    `block` is the block size of the tables; every tile divides it. `tma` loads tiles through tensor descriptors (the
    bulk copy engine of Hopper and later). `processors` is how many units run at once; None asks the device.
    `smallest_piece_tokens` is the fewest tokens that a piece of a split row visits.
    """

    forward: Tile
    grad_query: Tile
    grad_key_value: Tile
    block: int = 128
    tma: bool = False
    processors: int | None = None
    smallest_piece_tokens: int = SMALLEST_PIECE_TOKENS

    def __post_init__(self) -> None:
        for name in ("forward", "grad_query", "grad_key_value"):
            tile = getattr(self, name)
            if self.block % tile.queries or self.block % tile.keys:
                raise ValueError(f"{name} tile {tile.queries}x{tile.keys} does not divide the block of {self.block}")


_HOPPER_16_BIT = {
    64: Tuning(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), tma=True),
    128: Tuning(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), tma=True),
    256: Tuning(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2), tma=True),
}
_AMPERE_16_BIT = {
    64: Tuning(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tuning(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: Tuning(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
}
_32_BIT = {
    64: Tuning(Tile(32, 32, 4, 1), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: Tuning(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
    256: Tuning(Tile(32, 16, 8, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
}
# The 16-bit shapes for Hopper spill at most 40 registers per thread; those for float32, which multiplies without
# tensor cores, favour correctness over speed.

MAX_HEAD_DIM = 256

PRECISION = "ieee"
"""Float32 products use full precision: TensorFloat-32 has 11 bits, and its three-pass form spills more registers."""


def tuning_for(head_dim: int, element_size: int, capability: tuple[int, int]) -> Tuning:
    """Return the tuning for a head dimension up to 256, elements of `element_size` bytes and a compute capability.

    Only the entries for Hopper were tuned by the compiler's output; other generations get shapes that are known to fit
    their registers and shared memory.
    """
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is outside [1, {MAX_HEAD_DIM}]")
    if element_size == 4:
        shapes = _32_BIT
    else:
        shapes = _HOPPER_16_BIT if capability[0] == 9 else _AMPERE_16_BIT
    return next(shapes[limit] for limit in sorted(shapes) if head_dim <= limit)


def padded_head_dim(head_dim: int) -> int:
    """Return the channels of a tile: the next power of two, at least 16, the smallest matrix product."""
    return max(16, 1 << (head_dim - 1).bit_length())
