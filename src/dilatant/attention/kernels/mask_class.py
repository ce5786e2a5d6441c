"""Classes of masks: what the runs of a row say about which attention backends can run it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilatant.attention.masks import mask as layout
from dilatant.attention.masks.mask import AttentionMask

Kind = Literal["causal", "window", "full", "equal", "media"]
"""`causal`, `window` (a sliding one) and `full`: every sample attends so to itself. `equal`: full samples of one
length. `media`: all others, such as texts with media, and keys of another row."""


class RaggedRow(NamedTuple):
    """A row of samples that all attend in one way, as kernels for samples of unlike lengths take it.

    borders: int32 `[samples + 1]`, cumulative lengths; padding counts as samples of its own. longest: tokens of the
    longest sample. before, after: number of a token's neighbours that it sees; -1: all. padding: int64, the row's
    padding tokens, which see nothing.
    """

    borders: NDArray[np.int32]
    longest: int
    before: int
    after: int
    padding: NDArray[np.int64]


class MaskClass(NamedTuple):
    """The class of a mask. not_plain: why it is not one full or causal block per sample, or None. row: the row as
    kernels for ragged rows take it, or None if they cannot. key_runs: the most runs of keys in a sample; no query sees
    more intervals of keys."""

    kind: Kind
    not_plain: str | None = None
    row: RaggedRow | None = None
    key_runs: int = 1


def mask_class(mask: AttentionMask, keys: AttentionMask) -> MaskClass:
    """Classify the mask of a row whose keys have the mask `keys`."""
    samples = (keys.runs.field & layout.SAMPLE) >> layout.SAMPLE_SHIFT
    return _class_of(mask, keys)._replace(key_runs=int(np.bincount(samples).max(initial=0)))


def _class_of(mask: AttentionMask, keys: AttentionMask) -> MaskClass:
    reason = _why_not_uniform(mask, keys)
    if reason is not None:
        return MaskClass("media", reason)
    runs = mask.runs
    is_token = (runs.field & (layout.OWN | layout.ATTEND)) != 0
    seen = runs.field[is_token] & (layout.OWN | layout.CAUSAL | layout.WINDOW | layout.TOGETHER)
    lengths = runs.length[is_token]
    longest = int(lengths.max(initial=0))
    windowed = (seen & layout.WINDOW != 0) & (lengths > (mask.window or longest))
    together = (seen & layout.TOGETHER != 0) & (seen & layout.OWN != 0)
    causal = (seen & layout.CAUSAL != 0) & ~together
    not_plain = None
    if windowed.any():
        number = int(np.argmax(windowed))
        sample = (int(runs.field[is_token][number]) & layout.SAMPLE) >> layout.SAMPLE_SHIFT
        not_plain = f"sample {sample} of {lengths[number]} tokens is held to a window of {mask.window}"
    several = lengths > 1  # a sample of one token sees itself, whatever its kind
    is_alike = bool((causal[several] == causal[several][:1]).all() and not (windowed & together).any())
    if not is_alike or (windowed.any() and not (seen[several] & layout.WINDOW).all()):
        return MaskClass("media", not_plain)
    is_causal, width = bool(causal[several].any()), (mask.window or 0) - 1 if windowed.any() else -1
    ends = np.cumsum(np.concatenate([[0], runs.length])).astype(np.int32)
    padding = np.flatnonzero(np.repeat(~is_token, runs.length))
    row = RaggedRow(ends, int(runs.length.max(initial=0)), width, 0 if is_causal else width, padding)
    if windowed.any():
        return MaskClass("window", not_plain, row)
    if is_causal:
        return MaskClass("causal", None, row)
    is_equal = lengths.size == runs.length.size > 0 and bool((lengths == longest).all()) and not causal.any()
    return MaskClass("equal" if is_equal else "full", None, row)


def _why_not_uniform(mask: AttentionMask, keys: AttentionMask) -> str | None:
    """Return why the mask is not one block per sample in which all tokens attend alike; None if it is."""
    if keys is not mask:
        return "the keys are not the queries' own row"
    runs = mask.runs
    samples = set()
    for start, word in zip(runs.start.tolist(), runs.field.tolist()):
        own, attended = word & layout.OWN, (word & layout.ATTEND) >> layout.ATTEND_SHIFT
        if not own and not attended:
            continue
        sample = (word & layout.SAMPLE) >> layout.SAMPLE_SHIFT
        if sample in samples:
            return f"the tokens of sample {sample} attend in more than one way (from token {start} on)"
        samples.add(sample)
        if not (own & attended) and not (word & layout.TOGETHER and own):
            return f"tokens from {start} on do not attend to their own modality"
    return None
