"""Memory of parameters, gradients and optimizer state, and byte counts as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dilatant.config.memory_modes import Shard

Zero = Literal["none", "node", "all"]
"""Sharding of a weight's optimizer state: none, over its holders on one node, or over all of its holders."""

ZEROS: tuple[Zero, ...] = get_args(Zero)
DEFAULT_ZERO: Zero = "node"


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per parameter. `optimizer` includes moments and, with low-precision weights, the master copy.

    The defaults are AdamW in bf16 with fp32 gradients, master weights and moments, unsharded. zero: sharding of the
    optimizer state. ranks_per_node: None if all are on one node. State offloaded to the host takes no device memory.
    keeps_gradients: a rank keeps its local gradients until the update, for partial-step recovery. integers: bytes of
    integer sums over samples (`train.deterministic`), in addition to one sample's gradients. shard: pairs of a unit and
    what is sharded of it besides its state; the unit "" stands for all others. sum_copies: flat copies of a block's
    gradients while ranks reduce-scatter them. host_link: as in `Hardware`, for inputs of blocks that are kept on the
    host.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    zero: Zero = "none"
    ranks_per_node: int | None = None
    keeps_gradients: bool = False
    integers: float = 0.0
    shard: tuple[tuple[str, Shard], ...] = ()
    sum_copies: float = 2.0  # GLOO_COPIES
    host_link: float = 0.0

    def shard_of(self, unit: str) -> Shard:
        """Return what is sharded of a unit besides its optimizer state."""
        words = dict(self.shard)
        return words.get(unit, words.get("", "none"))

    @property
    def has_masters(self) -> bool:
        """True if the optimizer updates fp32 copies of low-precision weights."""
        return self.weight < 4.0 <= self.optimizer

    @property
    def own_gradient(self) -> float:
        """Additional bytes from the last backward to the update, for a weight that other ranks hold as well."""
        return self.summed if self.keeps_gradients else 0.0

    @property
    def summed(self) -> float:
        """Bytes that are reduced over the holders."""
        return self.integers or self.gradient

    @property
    def gradients(self) -> float:
        """Bytes of all buffers in which a backward accumulates."""
        return self.gradient + self.integers

    def of(self, parameters: float, trainable: bool) -> float:
        """Return the bytes of `parameters` parameters during the whole step, without sharding; frozen ones have only
        weights."""
        return parameters * (self.weight + (self.gradients + self.optimizer if trainable else 0.0))

    def held(self, parameters: float, trained: float) -> float:
        """Return the bytes of `parameters` parameters, of which only `trained` train."""
        return self.of(parameters - trained, False) + self.of(trained, True)

    def spared(self, parameters: float) -> float:
        """Return the bytes that frozen parameters save in four bits."""
        return parameters * (self.weight - FOUR_BITS)

    def shared(self, parameters: float, trainable: bool, unit: str = "") -> float:
        """Return the part of these bytes that ranks shard."""
        shard = self.shard_of(unit)
        besides = self.gradients if shard != "none" else 0.0
        state = self.optimizer + besides if trainable else 0.0
        return parameters * (state + (self.weight if shard == "weights" else 0.0))

    def spared_by_masters(self, unit: str, trainable: bool = True) -> float:
        """Return the bytes of a parameter's own shard that its master replaces while its weight is not gathered;
        negative if there is no master and the shard exists beside the whole weight."""
        has_master = self.has_masters and trainable
        spared = {"weights": self.weight * has_master, "weights_by_step": self.weight * (has_master - 1)}
        return spared.get(self.shard_of(unit), 0.0)


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Bytes of a device that plans leave free: for the context of driver and libraries, for the buffers of all
    communicators, and for allocator fragmentation."""

    context: float = 0.0
    communicators: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        return self.context + self.communicators + self.fragmentation


NOTHING = MemoryReserve()
FP32_MOMENTS = 8.0
MUON_SAVES = 4.0
"""Bytes per parameter that Muon updates: its second moment."""
EXACT_SUMS = 8.0
GLOO_COPIES = 2.0
NCCL_COPIES = 1.0
"""Flat copies of gradients in a reduce-scatter: CPU ranks exchange parts into a second one."""
FP32_AVERAGE = 4.0
FOUR_BITS = 0.5 + 4 / 64
"""Bytes per frozen parameter: 64 numbers share a scale in fp32."""
EIGHT_BIT_MOMENTS = 2.0 + 2 * 4 / 256
"""Bytes per parameter: two moments, with a scale in fp32 per 256 numbers."""
FP32 = ParameterBytes(weight=4.0, gradient=4.0, optimizer=8.0)
BF16 = ParameterBytes()


def bytes_text(count: float) -> str:
    """Format bytes in binary units: `38.2 GiB`, `512 MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 0.9995 * 1024**power:
            return f"{three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Format with three significant digits: `1.84`, `12.4`, `820`."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
