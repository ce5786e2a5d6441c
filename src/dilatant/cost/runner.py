"""Training programs, as far as they differ in what a layer takes on the same device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Runner:
    """A training program. attention: its kernel, a key of `Hardware.attention`. fused: norms, rotary embeddings and
    activations are one kernel each. shards_rows: between tensor-parallel layers each rank has a part of the
    tokens (sequence parallelism). operations: those that its host issues, as a multiple of transformers' own blocks.
    wait: seconds that a tensor-parallel collective takes longer than its messages. products: dtype of matrix products,
    if not that of the activations."""

    name: str
    attention: str = "packed"
    fused: bool = False
    shards_rows: bool = True
    operations: float = 1.0
    wait: float = 0.0
    products: str | None = None


DILATANT = Runner("dilatant")
