"""What light workers train: integers, so that sums are exact and an undisturbed run can be foretold to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

LAYERS = 4
SIZE = 64
BATCH = 12
MODULUS = 1 << 61

State = dict[int, list[int]]
"""Layer → weights, then as many moments."""


def initial() -> State:
    return {layer: [layer * 1000 + index for index in range(2 * SIZE)] for layer in range(LAYERS)}


def samples_of(step: int) -> range:
    return range(step * BATCH, (step + 1) * BATCH)


def gradient(layer: int, samples: Iterable[int]) -> list[int]:
    """Of some samples: a sum over them, so any split of a batch has the same total."""
    total = [0] * SIZE
    for sample in samples:
        for index in range(SIZE):
            total[index] += (sample * 2_654_435_761 + layer * 97 + index * index) % 10_007
    return total


def update(state: State, gradients: dict[int, list[int]]) -> None:
    """Not linear in the gradient: a step that is applied twice, or to an older state, shows for ever."""
    for layer, values in state.items():
        for index, slope in enumerate(gradients[layer]):
            moment = (9 * values[SIZE + index] + slope) % MODULUS
            values[SIZE + index] = moment
            values[index] = (values[index] * 3 + moment * moment + 1) % MODULUS


def digest(values: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(values).encode(), digest_size=7).digest(), "big")


def undisturbed(steps: int) -> list[dict[int, int]]:
    """Layer → digest, after 0, 1, ... steps."""
    state = initial()
    found = [{layer: digest(values) for layer, values in state.items()}]
    for step in range(steps):
        update(state, {layer: gradient(layer, samples_of(step)) for layer in state})
        found.append({layer: digest(values) for layer, values in state.items()})
    return found
