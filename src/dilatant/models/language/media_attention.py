"""Media attention: the user's setting for the mask among media tokens in the language model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import get_args

from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout
from dilatant.config.errors import UserError
from dilatant.config.model import MediaMask
from dilatant.config.signatures import require_call

OwnMask = Callable[[RowLayout], AttentionMask]
"""Builds the mask of one sample, without a window, from its segments: `modalities` are "text" and the encoders, and
`instance` numbers items. Called on every rank that attends to the sample; equal segments must give equal masks."""

MediaMasks = str | Mapping[str, str] | OwnMask
"""A word of `MediaMask` (or of a family, see `families`) for all encoders, encoder → word, or a mask function."""


def read_media_attention(setting: MediaMasks | None, encoders: Collection[str]) -> MediaMasks:
    """Validate the setting and simplify it to one word if it is the same for all encoders. Raises UserError."""
    if setting is None:
        return "causal"
    if callable(setting):
        require_call("media_attention", setting, "segments")
        return setting
    words = {"": setting} if isinstance(setting, str) else setting
    known = get_args(MediaMask)
    if not isinstance(words, Mapping) or not all(word in known for word in words.values()):
        raise UserError(
            f"media_attention is {setting!r}; give one of {', '.join(known)}, a word for each encoder, or a function "
            "from the segments of a sample to an AttentionMask"
        )
    if isinstance(setting, str):
        return setting
    if strange := [name for name in words if name not in encoders]:
        raise UserError(f"media_attention names {strange[0]!r}; the encoders are {', '.join(encoders) or 'none'}")
    full = {name: words.get(name, "causal") for name in encoders}
    return full if len({*full.values()}) > 1 else next(iter(full.values()), "causal")


def in_words(media: MediaMasks) -> str:
    """Return the setting as it is named in messages."""
    return getattr(media, "__name__", type(media).__name__) if callable(media) else repr(media)
