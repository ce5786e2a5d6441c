"""Masks of packed rows, built from the sample and the image of each segment of the row.

Every function here returns runs; its time is proportional to the number of segments, not of tokens. All words except
those of prefixes have the bit WINDOW, so `mask.with_window(width)` gives the mask of a sliding-window layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.attention.masks.mask import (
    ATTEND_SHIFT,
    CLASS_BITS,
    OWN,
    PADDING,
    SAMPLE,
    SAMPLE_SHIFT,
    AttentionMask,
    MaskError,
    Runs,
    pack_fields,
)

TEXT = "text"
PADDING_SEGMENT = "padding"
MEDIA_KINDS = ("causal", "bidirectional", "embedded", "modality", "isolated")
"""Rules for what media tokens may see (see `media_mask`)."""


class Segment(NamedTuple):
    """Consecutive tokens of one modality in a sample.

    `instance` numbers the image or clip from 1 and is needed only if one instance has several segments; with None, each
    segment of a modality other than text is a separate instance. Text has instance 0.
    """

    modality: str
    length: int
    instance: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """A packed row as segments in row order; each array is int64 `[segments]`.

    `modality` indexes `modalities`, whose first entry is the text; -1 marks padding. `instance` is 0 for text. Samples
    are numbered from 0 in row order.
    """

    modalities: tuple[str, ...]
    sample: NDArray[np.int64]
    modality: NDArray[np.int64]
    instance: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of_samples(
        cls, samples: Iterable[Iterable[Segment | tuple]], modalities: Sequence[str] | None = None
    ) -> RowLayout:
        """Build a row from samples, each a list of `Segment`s (or their tuples) in token order.

        `modalities` fixes the number of each modality, text first; by default they are numbered as they appear. Raises
        MaskError on a negative length or an unknown modality.
        """
        known = list(modalities) if modalities is not None else [TEXT]
        rows: list[tuple[int, int, int, int]] = []
        for number, sample in enumerate(samples):
            segments = [Segment(*segment) for segment in sample]
            next_instance = 1 + max((segment.instance or 0 for segment in segments), default=0)
            for place, (modality, length, instance) in enumerate(segments):
                where = f"sample {number}, segment {place}"
                if length < 0:
                    raise MaskError(f"{where}: length {length} is negative")
                if modality == PADDING_SEGMENT:
                    rows.append((number, -1, 0, length))
                    continue
                if modality not in known:
                    if modalities is not None:
                        raise MaskError(f"{where}: unknown modality {modality!r}; known are {', '.join(known)}")
                    known.append(modality)
                if instance is None and modality != known[0]:
                    instance, next_instance = next_instance, next_instance + 1
                rows.append((number, known.index(modality), instance or 0, length))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(tuple(known), *(np.ascontiguousarray(column) for column in columns.T))

    @classmethod
    def of_tokens(
        cls, sample: ArrayLike, modality: ArrayLike, instance: ArrayLike, modalities: Sequence[str]
    ) -> RowLayout:
        """Build a row from the sample, modality (index into `modalities`, -1 for padding) and instance of every token.

        Samples must be numbered from 0 in row order; text has instance 0. O(tokens).
        """
        columns = np.stack([np.asarray(part, dtype=np.int64) for part in (sample, modality, instance)])
        opens = np.ones(columns.shape[1], dtype=bool)
        opens[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        first = np.flatnonzero(opens)
        samples, kinds, instances = columns[:, first]
        if (np.diff(samples, prepend=0) < 0).any() or (samples.size and samples[0] != 0):
            raise MaskError("samples of a packed row must be numbered from 0 in row order, each in one stretch")
        if kinds.size and not -1 <= kinds.min() <= kinds.max() < len(modalities):
            raise MaskError(f"modalities must be -1 (padding) or an index into {list(modalities)}")
        return cls(tuple(modalities), samples, kinds, instances, np.diff(first, append=columns.shape[1]))

    @classmethod
    def of_lengths(cls, lengths: ArrayLike) -> RowLayout:
        """Build a row of text samples of the given token counts."""
        lengths = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
        zeros = np.zeros_like(lengths)
        return cls((TEXT,), np.arange(lengths.size), zeros, zeros, lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_samples(self) -> int:
        return int(self.sample.max()) + 1 if self.sample.size else 0

    @property
    def is_padding(self) -> NDArray[np.bool_]:
        return self.modality < 0

    @property
    def is_text(self) -> NDArray[np.bool_]:
        return self.modality == 0

    def part(self, chosen: slice | NDArray[np.bool_]) -> RowLayout:
        """Return some of the segments, with samples renumbered from 0."""
        columns = (self.sample, self.modality, self.instance, self.length)
        sample, *others = (column[chosen] for column in columns)
        return RowLayout(self.modalities, sample - sample[:1], *others)

    def split(self) -> list[RowLayout]:
        """Return each sample as a separate row."""
        border = np.searchsorted(self.sample, np.arange(self.num_samples + 1))
        return [self.part(slice(start, end)) for start, end in pairwise(border)]

    def positions(self) -> NDArray[np.int64]:
        """Return the index of each segment's first token within its sample: int64 `[segments]`."""
        start = np.cumsum(self.length) - self.length
        opens = np.ones(self.sample.size, dtype=bool)
        opens[1:] = self.sample[1:] != self.sample[:-1]
        first = np.flatnonzero(opens)
        return start - np.repeat(start[first], np.diff(first, append=self.sample.size))


def _mask(row: RowLayout, fields: ArrayLike) -> AttentionMask:
    return AttentionMask(Runs.build(row.length, np.where(row.is_padding, 0, fields), row.positions()))


def document_causal(row: RowLayout) -> AttentionMask:
    """Build a mask in which every token sees the tokens before it in its sample."""
    return _mask(row, pack_fields(1, 1, sample=row.sample, causal=True, window=True))


def with_padding(mask: AttentionMask, count: int) -> AttentionMask:
    """Return the mask of the same row with `count` tokens of padding behind it."""
    columns = mask.runs.length, mask.runs.field, mask.runs.position
    return AttentionMask(Runs.build(*map(np.append, columns, (count, PADDING, 0))), mask.window)


def full(row: RowLayout) -> AttentionMask:
    """Build a mask in which every token sees its whole sample: for encoders over packed images."""
    return _mask(row, pack_fields(1, 1, sample=row.sample, window=True))


def prefix_lm(row: RowLayout, prefix_lengths: ArrayLike) -> AttentionMask:
    """Build a prefix-LM mask: the first `prefix_lengths[s]` tokens of sample s see each other; the other tokens see all
    before them. A window applies only to those other tokens (as in PaliGemma 2).

    Raises MaskError unless there is one prefix per sample, none longer than its sample.
    """
    prefix = np.asarray(prefix_lengths, dtype=np.int64)
    if prefix.shape != (row.num_samples,):
        raise MaskError(f"{prefix.size} prefix lengths for {row.num_samples} samples")
    tokens = np.bincount(row.sample, weights=row.length, minlength=row.num_samples)
    for sample in np.flatnonzero((prefix < 0) | (prefix > tokens)):
        raise MaskError(f"sample {sample}: prefix of {prefix[sample]} tokens in a sample of {int(tokens[sample])}")
    position = row.positions()
    inside = np.clip(prefix[row.sample] - position, 0, row.length)
    before = pack_fields(1, 1, sample=row.sample)
    after = pack_fields(2, 3, sample=row.sample, causal=True, window=True)
    padding = row.is_padding
    return AttentionMask(
        Runs.build(
            np.stack([inside, row.length - inside], axis=1).ravel(),
            np.stack([np.where(padding, 0, before), np.where(padding, 0, after)], axis=1).ravel(),
            np.stack([position, position + inside], axis=1).ravel(),
        )
    )


def media_mask(row: RowLayout, kinds: str | Mapping[str, str]) -> AttentionMask:
    """Build a mask with causal text and a rule for media: `kinds` is one rule for all, or modality → rule (default
    "causal"); no token sees another sample.

    "causal" media see everything before them; "bidirectional" media also see their whole item (Gemma 3); "isolated"
    media see their item, and the text and "causal" media before it; "embedded" media see only their item; "modality"
    media see all items of their modality and nothing else. Text sees everything before it. The number of modalities is
    unlimited: a word encodes the rule, not the modality, and items that see each other have the same instance number,
    of which a sample has up to 65,535. Raises MaskError on an unknown kind or modality, or on more instances than a
    word distinguishes.
    """
    media = row.modalities[1:]
    named = dict.fromkeys(media, kinds) if isinstance(kinds, str) else kinds
    for name, word in named.items():
        if word not in MEDIA_KINDS or name not in media:
            raise MaskError(
                f"{name!r}: {word!r} is no kind of media mask ({', '.join(MEDIA_KINDS)}) of a modality "
                f"({', '.join(media)})"
            )
    kind = np.array(["causal", *(named.get(name, "causal") for name in media)])[np.maximum(row.modality, 0)]
    plain = kind == "causal"
    causal = ~np.isin(kind, ("embedded", "modality"))
    attend = np.where(kind == "isolated", 1, np.where(causal, 3, 2))
    return _mask(
        row,
        pack_fields(
            np.where(plain, 1, 2),
            attend,
            instance=_seen_together(row, plain, kind == "modality"),
            sample=row.sample,
            causal=causal,
            local=~causal,
            together=causal & ~plain,
            window=True,
        ),
    )


def _seen_together(row: RowLayout, plain: NDArray[np.bool_], whole: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number from 1, per sample, the sets of tokens that see each other as a whole. They are items, or all items of a
    modality where `whole` is set; 0 where `plain` is set."""
    columns = np.stack([row.sample, row.modality, np.where(whole, 0, row.instance)])[:, ~plain]
    numbers = np.zeros(plain.size, dtype=np.int64)
    if columns.size:
        sets, place = np.unique(columns, axis=1, return_inverse=True)
        numbers[~plain] = 1 + (np.arange(sets.shape[1]) - np.searchsorted(sets[0], sets[0]))[place.ravel()]
    return numbers


def mask_of_samples(row: RowLayout, make: Callable[[RowLayout], AttentionMask]) -> AttentionMask:
    """Build the mask of a row from the masks of its samples; `make` is called with one sample's layout without padding.

    Raises MaskError naming the sample if `make` returns anything but a mask of that sample's tokens without a window
    and without padding.
    """
    masks = []
    for number, alone in enumerate(row.split()):
        is_token = ~alone.is_padding
        mask = make(alone.part(is_token))
        where, tokens = f"the mask of sample number {number} of a row", int(alone.length[is_token].sum())
        if not isinstance(mask, AttentionMask):
            raise MaskError(f"{where} is of type {type(mask).__name__}; give an AttentionMask")
        if mask.num_tokens != tokens:
            raise MaskError(f"{where} has {mask.num_tokens} tokens, the sample has {tokens}")
        if mask.window is not None:
            raise MaskError(f"{where} has a window; the widths are those of the model's layers")
        if (mask.runs.field == PADDING).any():
            token = int(mask.runs.start[np.argmax(mask.runs.field == PADDING)])
            raise MaskError(f"{where}: token {token} has the word of padding, which sees nobody")
        if not is_token.all():
            fields, at = np.zeros(alone.num_tokens, np.int64), np.repeat(is_token, alone.length)
            positions = np.arange(alone.num_tokens)
            fields[at], positions[at] = mask.fields, mask.positions
            mask = AttentionMask.from_tokens(fields, positions)
        masks.append(mask)
    return pack(masks)


def pack(masks: Sequence[AttentionMask]) -> AttentionMask:
    """Concatenate rows with masks of any kinds, keeping their samples apart. Raises MaskError if window widths differ
    or the row has more samples than a word distinguishes."""
    windows = {mask.window for mask in masks}
    if len(windows) > 1:
        raise MaskError(f"masks with window widths {sorted(map(str, windows))} in one row; a row has one width")
    fields, samples = [], 0
    for mask in masks:
        field = mask.runs.field
        sample = (field & SAMPLE) >> SAMPLE_SHIFT
        word = field & ~SAMPLE | pack_fields(0, 0, sample=sample + samples)
        fields.append(np.where(field == 0, 0, word))
        samples += int(sample.max()) + 1 if sample.size else 0
    if not fields:
        return AttentionMask(Runs.build([], [], []))
    return AttentionMask(
        Runs.build(
            np.concatenate([mask.runs.length for mask in masks]),
            np.concatenate(fields),
            np.concatenate([mask.runs.position for mask in masks]),
        ),
        windows.pop(),
    )


_BRANCHES = (1 << CLASS_BITS - 1, 1 << CLASS_BITS - 2)
"""Classes of the tokens behind a shared beginning; masks of media use the lowest bits."""


def share_beginnings(mask: AttentionMask, lengths: Sequence[Sequence[int]], shared: Sequence[int]) -> AttentionMask:
    """Join sequences that begin alike: of each group's `shared` first tokens one copy is kept, which all of them see.

    mask: of a row in which every sequence is a sample. lengths: for each group, the tokens of its sequences, one or
    two. shared: for each group; none of these tokens may see a later one. Groups that share nothing stay as they are.
    """
    fields, kept, at = mask.fields.copy(), [], 0
    for of_group, common in zip(lengths, shared, strict=True):
        sample = fields[at] & SAMPLE
        for number, length in enumerate(of_group):
            if common:
                branch = _BRANCHES[number]
                fields[at : at + length] = fields[at : at + length] & ~SAMPLE | sample
                behind = slice(at + common, at + length)
                fields[behind] = fields[behind] & ~OWN | branch | branch << ATTEND_SHIFT
            kept.append(np.arange(at + (common if number else 0), at + length))
            at += length
    tokens = np.concatenate(kept)
    return AttentionMask.from_tokens(fields[tokens], mask.positions[tokens], mask.window)
