"""Seeded permutation whose entries can be computed one by one, so that no epoch's order is ever stored."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def permute(positions: NDArray[np.int64], length: int, seed: int, stream: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Return where each of `positions` in `range(length)` goes in a permutation of that range chosen by (seed, stream).

    A Feistel network on the next power of four, iterated until the result falls inside the range (cycle walking: Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). int64, the shape of `positions`.
    """
    half_bits = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    digest = hashlib.sha256(repr((seed, stream)).encode()).digest()
    keys = np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64))).integers(
        0, 1 << 64, ROUNDS, dtype=np.uint64, endpoint=False
    )
    values = np.asarray(positions).astype(np.uint64)
    result = values.copy()
    outside = np.ones(values.shape, bool)
    while outside.any():
        walking = result[outside]
        left, right = walking >> shift, walking & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(length)
    return result.astype(np.int64)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014); products wrap at 64 bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
