"""Random packed rows of the mask kinds that the papers name, and how much of them is visible.

EP puts encoder outputs before the text (20-50 % image, 5-25 % audio); EE alternates text (64-2k tokens) with images
(576-8k) or audio (375-1.5k); MP packs EE samples of log-normal length (thesis 3.5.4). `causal` is one document,
`document_causal` packs text of the lengths of MP.
"""

from __future__ import annotations

import numpy as np

from dilatant.attention.masks.blocks import block_workloads
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout, media_mask

KINDS = ("causal", "document_causal", "EP", "EE", "MP")


def draw_row(kind: str, tokens: int, seed: int) -> RowLayout:
    rng = np.random.default_rng(seed)
    if kind == "causal":
        return RowLayout.of_lengths([tokens])
    if kind == "document_causal":
        return RowLayout.of_lengths(_sample_lengths(tokens, rng))
    if kind == "EP":
        image, audio = int(tokens * rng.uniform(0.2, 0.5)), int(tokens * rng.uniform(0.05, 0.25))
        return RowLayout.of_samples([[("vision", image), ("audio", audio), ("text", tokens - image - audio)]])
    lengths = [tokens] if kind == "EE" else _sample_lengths(tokens, rng)
    return RowLayout.of_samples([_embedded_sample(length, rng) for length in lengths])


def build(kind: str, row: RowLayout) -> AttentionMask:
    """The mask of `kind` over a row drawn for it."""
    return media_mask(row, "embedded")  # rows of text alone are causal


def count_visible_pairs(mask: AttentionMask) -> int:
    """Pairs of tokens that see each other: the area that a rate in FLOP/s is counted over."""
    return int(block_workloads(mask, 1, 1).sum())


def _sample_lengths(tokens: int, rng: np.random.Generator) -> list[int]:
    lengths, left = [], tokens
    while left > 0:
        lengths.append(min(left, max(1, int(rng.lognormal(8.5, 1.0)))))
        left -= lengths[-1]
    return lengths


def _embedded_sample(tokens: int, rng: np.random.Generator) -> list[tuple[str, int]]:
    segments: list[tuple[str, int]] = []
    left = tokens
    while left > 0:
        image = rng.random() < 0.7
        encoded = _log_uniform(rng, 576, 8000) if image else _log_uniform(rng, 375, 1500)
        for modality, length in (("text", _log_uniform(rng, 64, 2000)), ("vision" if image else "audio", encoded)):
            length = min(length, left)
            segments.append((modality, length))
            left -= length
    return segments


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))
