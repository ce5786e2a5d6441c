"""Token layout: token ids of a sample with every media item expanded, computed from sizes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.errors import SampleError
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.sample import (
    Media,
    Sample,
)
from dilatant.data.text.encoding import NO_LOSS, Encoding, EncodingUnit
from dilatant.data.text.media_places import ClipTokens, name_item_in_errors, place_media


@dataclass(frozen=True, slots=True)
class Item:
    """A media item and its unit, with the item's tokens in that unit and in the language model."""

    media: Media
    unit: EncodingUnit
    encoder_tokens: int
    merged_tokens: int
    grid: Mapping[str, EncoderInput]
    goes_on: bool = False
    """True for a clip's later pieces; its first piece is another item."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Token ids of a sample and its media items, in order. targets: tokens that carry loss. is_cut: the sample was
    cut."""

    ids: NDArray[np.int64]
    targets: NDArray[np.bool_]
    items: tuple[Item, ...]
    is_cut: bool = False

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.where(self.targets, self.ids, NO_LOSS)

    def sizes(self, encoding: Encoding) -> dict[str, int]:
        sizes = dict.fromkeys(encoding.unit_names, 0)
        sizes[LANGUAGE] = len(self.ids)
        for item in self.items:
            sizes[item.unit.name] += item.encoder_tokens
        return sizes


def lay_out(sample: Sample, encoding: Encoding, for_generation: bool = False) -> Layout:
    """Compute token ids with every media item expanded, from sizes alone."""
    unheard = [turn.role for turn in sample.turns if turn.role != "assistant" and not turn.carries_loss]
    if unheard and encoding.train_on == "all":
        raise SampleError(
            sample.id,
            f"marks the {unheard[0]}'s turn as not to be learned, but 'data.train_on: all' learns such turns",
            "remove the mark, or set 'data.train_on: assistant'",
        )
    messages, placed, prepended = place_media(sample, encoding)
    try:
        tokens = encoding.chat.tokens(messages, for_generation, sample.tools)
    except UserError as error:
        raise SampleError(sample.id, str(error)) from None
    for target in encoding.targets:
        if bool((tokens.ids == target.placeholder_id).any()):
            raise SampleError(
                sample.id,
                f"the text holds the token by which the model asks {target.name!r} for an image",
                "remove it; an image in an assistant's turn stands for itself",
            )
    together = Counter((unit.name, unit.kind) for _, unit, *_ in (*prepended, *placed))
    items = tuple(
        _sized(sample, *each, alone=together[each[1].name, each[1].kind] == 1)
        for each in (*prepended, *placed)
    )
    front, inside = items[: len(prepended)], items[len(prepended) :]
    targets = (tokens.answered if encoding.train_on == "assistant" else tokens.ids != -1) & ~tokens.silent
    for unit in encoding.units:
        if (tokens.ids == unit.placeholder_id).any():
            raise SampleError(
                sample.id,
                f"its text holds the token that stands for {unit.kind}s ({unit.placeholder_id})",
                f"write {unit.marker!r} where one belongs, or remove it",
            )
    at = np.flatnonzero(tokens.ids == -1)
    if len(at) != len(inside):
        raise SampleError(
            sample.id,
            f"the chat template wrote {len(at)} of {len(inside)} media items",
            "it hides or repeats turns; choose another with 'data.chat_template'",
        )
    repeats = np.ones(len(tokens.ids), np.int64)
    repeats[at] = [item.merged_tokens for item in inside]
    ids = tokens.ids.copy()
    ids[at] = [item.unit.placeholder_id for item in inside]
    lead = [np.full(item.merged_tokens, item.unit.placeholder_id) for item in front]
    ids = np.concatenate([*lead, np.repeat(ids, repeats)]).astype(np.int64)
    targets = np.concatenate([np.zeros(len(ids) - repeats.sum(), bool), np.repeat(targets, repeats)])
    targets[:1] = False  # no token precedes it to predict it
    if for_generation or encoding.cuts_at is None or len(ids) <= encoding.cuts_at:
        return Layout(ids, targets, items)
    return _cut(ids, targets, items, encoding.cuts_at)


def _cut(ids: NDArray[np.int64], targets: NDArray[np.bool_], items: tuple[Item, ...], length: int) -> Layout:
    """Cut to the first `length` tokens, or fewer so that no media item is split."""
    at = kept = 0
    for item in items:
        at += int(np.argmax(ids[at:] == item.unit.placeholder_id))
        if at + item.merged_tokens > length:
            length = min(at, length)
            break
        at += item.merged_tokens
        kept += 1
    return Layout(ids[:length], targets[:length], items[:kept], is_cut=True)


def _sized(
    sample: Sample, media: Media, unit: EncodingUnit, piece: ClipTokens | None = None, *, alone: bool
) -> Item:
    with name_item_in_errors(sample, media):
        if piece is not None and not piece.is_first:
            return Item(media, unit, 0, piece.tokens, {}, goes_on=True)
        size = replace(media_size(media), alone=alone)
        merged = unit.merged_tokens(size) if piece is None else piece.tokens
        return Item(media, unit, unit.encoder_tokens(size), merged, unit.grid(size))
