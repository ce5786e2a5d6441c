"""What the papers' models cost, counted in floating-point operations from their public shapes.

Times are modelled: operations over a device's peak rate at one efficiency for everything. Ratios between parts of a
model then depend on shapes alone; absolute seconds only set the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

A40_BF16 = 149.7e12  # dense FLOP/s, NVIDIA A40 data sheet
A800_BF16 = 312e12  # dense FLOP/s, NVIDIA A800 (as A100) data sheet
EFFICIENCY = 0.5  # of the peak; one number for all, so it cancels in every ratio


@dataclass(frozen=True, slots=True)
class Layer:
    """Forward operations: `per_token` of the weights, `per_pair` of attention per token² (or token and `window`)."""

    per_token: float
    per_pair: float = 0.0
    window: int | None = None

    def forward(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Operations of one forward over each number of tokens."""
        x = np.asarray(tokens, dtype=np.float64)
        span = x if self.window is None else np.minimum(x, self.window)
        return (self.per_token + self.per_pair * span) * x

    def input_gradient(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Operations of the input gradient: weights once more, attention twice (both of its factors)."""
        return self.forward(tokens) + Layer(0.0, self.per_pair, self.window).forward(tokens)

    def weight_gradient(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Operations of the weight gradient; attention has none."""
        return self.per_token * np.asarray(tokens, dtype=np.float64)


def block(hidden: int, parameters: float, causal: bool, window: int | None = None) -> Layer:
    """A transformer block: two operations per parameter and token; QK^T and AV, half of them if causal."""
    return Layer(2.0 * parameters, 4.0 * hidden * (0.5 if causal else 1.0), window)


def llama_block(hidden: int, ffn: int, heads: int, kv_heads: int) -> Layer:
    """Grouped-query attention and a gated MLP."""
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return block(hidden, attention + 3 * hidden * ffn, causal=True)


def head(hidden: int, vocabulary: int) -> Layer:
    return Layer(2.0 * hidden * vocabulary)


def llama(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int
) -> tuple[Layer, ...]:
    return (*[llama_block(hidden, ffn, heads, kv_heads)] * layers, head(hidden, vocabulary))


LLAMA_3_2_1B = llama(16, 2048, 8192, 32, 8, 128_256)
LLAMA_3_2_3B = llama(28, 3072, 8192, 24, 8, 128_256)


def qwen_vision(language_hidden: int) -> tuple[Layer, ...]:
    """Qwen2.5-VL's vision encoder in *merged* tokens (four patches each): 32 blocks of width 1,280 with gated MLPs of
    3,420, windows of 64 patches in all but every eighth block, and the merger as the last layer."""
    parameters = 4 * 1280 * 1280 + 3 * 1280 * 3420
    blocks = []
    for index in range(32):
        patch = block(1280, parameters, causal=False, window=None if index % 8 == 7 else 64)
        window = None if patch.window is None else patch.window // 4
        blocks.append(Layer(4 * patch.per_token, 16 * patch.per_pair, window))
    return (*blocks, Layer(2.0 * (5120 * 5120 + 5120 * language_hidden)))


@dataclass(frozen=True, slots=True)
class Component:
    """A Cornstarch model part (thesis Table 3.1): equal blocks that hold `parameters` together."""

    layers: int
    hidden: int
    parameters: float
    causal: bool = False

    @property
    def blocks(self) -> tuple[Layer, ...]:
        return (block(self.hidden, self.parameters / self.layers, self.causal),) * self.layers


CORNSTARCH_LLM = {
    "S": Component(16, 2048, 1.2e9, True),
    "M": Component(32, 4096, 8e9, True),
    "L": Component(64, 5120, 32e9, True),
}
CORNSTARCH_VISION = {
    "S": Component(32, 1280, 0.6e9),
    "M": Component(48, 2560, 3.9e9),
    "L": Component(64, 3840, 11.6e9),
}
CORNSTARCH_AUDIO = {
    "S": Component(24, 1024, 0.5e9),
    "M": Component(32, 3072, 3.4e9),
    "L": Component(48, 5120, 12.4e9),
}

# DistTrain Table 1: layers, hidden, FFN, heads, groups; vocabulary of Llama 3.
DISTTRAIN_LLM = {
    "9B": llama(32, 4096, 11_008, 32, 32, 128_256),
    "15B": llama(40, 5120, 13_824, 40, 40, 128_256),
    "72B": llama(80, 8192, 28_672, 64, 8, 128_256),
}
VIT_HUGE = (block(1280, 0.63e9 / 32, causal=False),) * 32


def forward(layers: tuple[Layer, ...], tokens: ArrayLike) -> NDArray[np.float64]:
    """Forward operations of all layers."""
    return np.sum([layer.forward(tokens) for layer in layers], axis=0)


def backward(layers: tuple[Layer, ...], tokens: ArrayLike) -> NDArray[np.float64]:
    """Operations of a whole backward, everything trained."""
    return np.sum([layer.input_gradient(tokens) + layer.weight_gradient(tokens) for layer in layers], axis=0)
