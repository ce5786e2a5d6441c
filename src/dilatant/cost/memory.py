"""What a parameter takes in memory: weight, gradient, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per parameter. `optimizer` holds moments and, with low-precision weights, the master copy.

    The defaults are AdamW in bf16 with fp32 gradients, master weights and moments.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0

    def of(self, parameters: int, trainable: bool) -> float:
        """Bytes that `parameters` parameters take through the whole step; frozen ones keep their weights only."""
        return parameters * (self.weight + (self.gradient + self.optimizer if trainable else 0.0))


FP32 = ParameterBytes(weight=4.0, gradient=4.0, optimizer=8.0)
BF16 = ParameterBytes()
