"""NEFTune (Jain et al. 2023): uniform noise on the token embeddings of training samples.

The numbers are keyed like those of dropout, by seed, sample and position, so no layout changes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.models.language.extension import Extension, LanguageForward


class EmbeddingNoise(Extension):
    """Add noise between -1 and 1 times `alpha / sqrt(tokens * width)` to the embeddings of each sample of `tokens`
    tokens. Rows of encoders, and learned queries, have none."""

    def __init__(self, unit: str, alpha: float) -> None:
        self._place = f"{unit}.embedding/noise"
        self._alpha = alpha

    def embed(self, forward: LanguageForward, embeddings: Tensor) -> Tensor:
        if forward.draws is None:
            return embeddings
        row, width = forward.packed, embeddings.shape[-1]
        of_sample = self._alpha * (torch.tensor(row.lengths) * width).float().rsqrt()
        scale = to_device(row.padded(of_sample[row.sample_of][:, None]), embeddings.device)
        numbers, _ = forward.draws().uniform(self._place, embeddings.shape, embeddings.device)
        return embeddings + numbers.mul(2).sub_(1).mul_(scale).to(embeddings.dtype)
