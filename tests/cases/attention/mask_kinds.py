"""Mask kinds that tests name: those of the papers, and baselines, over the masks that the package builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dilatant.attention.masks.mask import AttentionMask, MaskError, Runs, pack_fields
from dilatant.attention.masks.packing import RowLayout, document_causal, full, media_mask, pack


def causal(row: RowLayout) -> AttentionMask:
    """Build a mask in which every token sees all tokens before it, across samples too: the row is one document."""
    start = np.cumsum(row.length) - row.length
    fields = np.where(row.is_padding, 0, pack_fields(1, 1, causal=True, window=True))
    return AttentionMask(Runs.build(row.length, fields, start))


def sliding_window(row: RowLayout, window: int) -> AttentionMask:
    """Build a mask in which every token sees itself and the `window - 1` tokens before it in its sample."""
    return document_causal(row).with_window(window)


def embedded(row: RowLayout, across_instances: bool = False) -> AttentionMask:
    """Mask for encoder outputs embedded in the text (EE; Cornstarch, the thesis, 3.5.4): text sees everything before it
    in its sample, an image sees only itself. With `across_instances` an image sees all images of its sample, as in the
    papers."""
    return media_mask(row, "modality" if across_instances else "embedded")


def prepended(row: RowLayout, across_instances: bool = False) -> AttentionMask:
    """Mask for encoder outputs before the text (EP; Cornstarch, the thesis, 3.5.4): `embedded` on rows with that
    layout. Raises MaskError naming the sample in which an encoder output follows text."""
    text_seen = -1
    for sample, modality in zip(row.sample.tolist(), row.modality.tolist()):
        if modality == 0:
            text_seen = sample
        elif modality > 0 and text_seen == sample:
            raise MaskError(
                f"sample {sample}: {row.modalities[modality]} follows text; in a prepended row encoder outputs come "
                "first (use the embedded mask otherwise)"
            )
    return embedded(row, across_instances)


def bidirectional_instances(row: RowLayout, across_instances: bool = False) -> AttentionMask:
    """Mask of causal text with bidirectional images: every token sees the text before it in its sample, text sees the
    images before it too, and an image sees the whole of itself.

    With `across_instances` an image also sees the images before it: the mask of Gemma 3.
    """
    return media_mask(row, "bidirectional" if across_instances else "isolated")


def multimodal_packing(row: RowLayout, kinds: Sequence[str]) -> AttentionMask:
    """Combine samples with different kinds of masks in one row (MP; Cornstarch, the thesis, 3.5.4): `kinds[s]`, a key
    of `MASK_KINDS`, for sample s. Raises MaskError unless there is one known kind per sample."""
    if len(kinds) != row.num_samples:
        raise MaskError(f"{len(kinds)} mask kinds for {row.num_samples} samples")
    return pack([build_mask(alone, kind) for alone, kind in zip(row.split(), kinds, strict=True)])


MASK_KINDS: dict[str, Callable[[RowLayout], AttentionMask]] = {
    "causal": causal,
    "document_causal": document_causal,
    "full": full,
    "embedded": embedded,
    "prepended": prepended,
    "bidirectional_instances": bidirectional_instances,
}
"""Masks that need only the row, by the names used in a config."""


def build_mask(row: RowLayout, kind: str, window: int | None = None) -> AttentionMask:
    """Build the mask of `kind` (a key of `MASK_KINDS`) over a packed row, with an optional sliding window. Raises
    MaskError on an unknown kind, listing the known ones."""
    if kind not in MASK_KINDS:
        raise MaskError(f"unknown mask kind {kind!r}; known are {', '.join(sorted(MASK_KINDS))}")
    return MASK_KINDS[kind](row).with_window(window)
