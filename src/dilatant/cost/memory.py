"""What parameters take in memory, and bytes in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Zero = Literal["none", "node", "all"]
"""Who shares the optimizer's state of a weight: nobody, its holders on one node, or all of its holders."""

ZEROS: tuple[Zero, ...] = get_args(Zero)
DEFAULT_ZERO: Zero = "node"


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per parameter. `optimizer` holds moments and, with low-precision weights, the master copy.

    The defaults are AdamW in bf16 with fp32 gradients, master weights and moments, shared with nobody. zero: who does
    share them; ranks_per_node: None where all are on one. Of state that is kept by the host the device has nothing.
    keeps_gradients: a rank's own gradients stay beside their sums with other holders until the update (salvage).
    integers: of the sums over samples that no layout changes (`train.deterministic`), beside the gradients of one.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    zero: Zero = "none"
    ranks_per_node: int | None = None
    keeps_gradients: bool = False
    integers: float = 0.0

    @property
    def own_gradient(self) -> float:
        """Bytes beside `of` from the last backward to the update, of a weight that other ranks hold, too."""
        return self.summed if self.keeps_gradients else 0.0

    @property
    def summed(self) -> float:
        """Bytes of what is summed with other holders."""
        return self.integers or self.gradient

    @property
    def gradients(self) -> float:
        """Bytes of all that a backward adds to."""
        return self.gradient + self.integers

    def of(self, parameters: float, trainable: bool) -> float:
        """Bytes that `parameters` parameters take through the whole step where nobody shares their state; frozen ones
        keep their weights only."""
        return parameters * (self.weight + (self.gradients + self.optimizer if trainable else 0.0))

    def held(self, parameters: float, trained: float) -> float:
        """As `of`, of which only `trained` parameters train."""
        return self.of(parameters - trained, False) + self.of(trained, True)

    def spared(self, parameters: float) -> float:
        """Bytes that frozen parameters take less in four bits."""
        return parameters * (self.weight - FOUR_BITS)

    def shared(self, parameters: float, trainable: bool) -> float:
        """The part of these bytes that is divided among those who share state."""
        return parameters * self.optimizer if trainable else 0.0


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Bytes of a device that plans leave free: for the context of its driver and libraries, for the buffers of all its
    communicators, and for pieces between tensors that its allocator cannot join."""

    context: float = 0.0
    communicators: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        return self.context + self.communicators + self.fragmentation


NOTHING = MemoryReserve()
FP32_MOMENTS = 8.0
EXACT_SUMS = 8.0
FP32_AVERAGE = 4.0
FOUR_BITS = 0.5 + 4 / 64
"""Of a frozen parameter: 64 numbers have a scale in fp32."""
EIGHT_BIT_MOMENTS = 2.0 + 2 * 4 / 256
"""Of a parameter: two moments, of which 256 numbers have a scale in fp32."""
FP32 = ParameterBytes(weight=4.0, gradient=4.0, optimizer=8.0)
BF16 = ParameterBytes()


def bytes_text(count: float) -> str:
    """Bytes in binary units: `38.2 GiB`, `512 MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 0.9995 * 1024**power:
            return f"{three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """`1.84`, `12.4`, `820`."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
