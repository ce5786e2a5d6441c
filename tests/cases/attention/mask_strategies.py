"""Packed rows and masks drawn for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cases.attention import mask_kinds
from dilatant.attention.masks import packing
from dilatant.attention.masks.mask import AttentionMask, pack_fields
from dilatant.attention.masks.packing import RowLayout

MODALITIES = ("text", "vision", "audio")

segments = st.tuples(st.sampled_from([*MODALITIES, "text", "padding"]), st.integers(0, 9))
rows = st.lists(st.lists(segments, min_size=1, max_size=6), min_size=1, max_size=4)
prepended_rows = st.lists(
    st.builds(
        lambda encoders, text: [*encoders, ("text", text)],
        st.lists(st.tuples(st.sampled_from(MODALITIES[1:]), st.integers(0, 9)), max_size=4),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=4,
)
windows = st.none() | st.integers(1, 12)

BUILDERS = {
    **mask_kinds.MASK_KINDS,
    "embedded_across": lambda row: mask_kinds.embedded(row, across_instances=True),
    "bidirectional_across": lambda row: mask_kinds.bidirectional_instances(row, across_instances=True),
    "prefix_lm": lambda row: packing.prefix_lm(
        row, np.bincount(row.sample, weights=row.length, minlength=row.num_samples).astype(int) // 2
    ),
}


@st.composite
def masks(draw: st.DrawFn) -> AttentionMask:
    """Masks of every kind, with and without a window."""
    kind = draw(st.sampled_from(sorted(BUILDERS)))
    row = RowLayout.of_samples(draw(prepended_rows if kind == "prepended" else rows), MODALITIES)
    return BUILDERS[kind](row).with_window(draw(windows))


@st.composite
def ragged_masks(draw: st.DrawFn) -> AttentionMask:
    """Words and positions without any order, as nothing in the package builds them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens, words = draw(st.integers(1, 48)), draw(st.integers(1, 8))
    vocabulary = pack_fields(
        rng.integers(0, 8, words),
        rng.integers(0, 8, words),
        instance=rng.integers(0, 3, words),
        sample=rng.integers(0, 2, words),
        causal=rng.integers(0, 2, words),
        local=rng.integers(0, 2, words),
        window=rng.integers(0, 2, words),
        together=rng.integers(0, 2, words),
    )
    fields = np.repeat(
        vocabulary[rng.integers(0, words, tokens)], rng.integers(1, 1 + draw(st.integers(1, 12)), tokens)
    )
    positions = rng.integers(0, 24, tokens) if draw(st.booleans()) else None
    return AttentionMask.from_tokens(fields[:tokens], positions, draw(windows))
