"""Attention over packed rows of the language model: what training gives to the attention of every stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dilatant.attention.attention_plan import AttentionPlan
from dilatant.attention.hook import (
    PLAN_KEYWORD,
    dropout_of,
    leaks_between_samples,
    use_dilatant_attention,
    why_not,
)
from dilatant.attention.linear_rows import linear_layers
from dilatant.attention.mask import AttentionMask
from dilatant.attention.packing import (
    TEXT,
    RowLayout,
    bidirectional_instances,
    document_causal,
    embedded,
    prefix_lm,
)
from dilatant.config import UserError
from dilatant.config.model import LanguageModelConfig
from dilatant.models.multimodal import MultimodalModel

MEDIA_MASKS: Mapping[str, Callable[[RowLayout, Sequence[int]], AttentionMask]] = {
    "causal": lambda row, prefixes: document_causal(row),
    "bidirectional": lambda row, prefixes: bidirectional_instances(row, across_instances=True),
    "embedded": lambda row, prefixes: embedded(row),
    "prefix": prefix_lm,
    "in_windows": lambda row, prefixes: document_causal(row),
}
"""The masks that `model.language_model.media_attention` names, and those of families, of a row and the length of each
sample's prefix."""

MASKS_IN_WINDOWS: Mapping[str, str] = {"in_windows": "bidirectional"}
"""The same of layers with a window, where these have a mask of their own."""

_WITHOUT_ITEMS = ("causal", "prefix")
"""Masks for which media are tokens like others."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """How items stand in `input_ids`: each image or window of sound takes the next `tokens` copies of
    `placeholder_id`; None: all that stand together."""

    placeholder_id: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class RowAttention:
    """A language unit's `row_attention`: the attention plan of samples packed in one row, as a keyword.

    `media` is a key of `MEDIA_MASKS`, `units` says which tokens of a sample are media. `placement`: how
    context-parallel ranks share a row, see `attention.placement.place_row`.
    """

    media: str
    units: Mapping[str, MediaTokens]
    placement: str = "auto"

    def __call__(
        self,
        samples: Sequence[NDArray[np.int64]],
        padding: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
    ) -> dict[str, AttentionPlan]:
        """`samples`: the `input_ids` of each; `padding`: tokens before each that see and are seen by nobody;
        `prefixes`: tokens of each that see each other, under "prefix" (default: all).

        Raises UserError for a sample whose placeholders are not whole items.
        """
        row = self.layout(samples, padding)
        lengths = [len(ids) for ids in samples] if prefixes is None else prefixes
        if padding is not None:
            lengths = [before + own for before, own in zip(padding, lengths, strict=True)]
        return self._plan(row, lengths)

    def padded(
        self, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64] | None
    ) -> dict[str, AttentionPlan]:
        """The same for a batch `[samples, tokens]`, whose rows make one row laid end to end; mask 0 at padding."""
        is_token = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
        modality, instance = np.full(input_ids.shape, -1), np.zeros(input_ids.shape, np.int64)
        for number, (ids, at) in enumerate(zip(input_ids, is_token, strict=True)):
            modality[number, at], instance[number, at] = self._sample(ids[at], number)
        numbers = np.repeat(np.arange(len(input_ids)), input_ids.shape[1])
        row = RowLayout.of_tokens(numbers, modality.ravel(), instance.ravel(), (TEXT, *self.units))
        whole = [input_ids.shape[1]] * len(input_ids)
        return self._plan(row, whole)

    def _plan(self, row: RowLayout, prefixes: Sequence[int]) -> dict[str, AttentionPlan]:
        own = MASKS_IN_WINDOWS.get(self.media)
        in_windows = None if own is None else AttentionPlan(MEDIA_MASKS[own](row, prefixes))
        return {PLAN_KEYWORD: AttentionPlan(MEDIA_MASKS[self.media](row, prefixes), in_windows=in_windows)}

    def layout(self, samples: Sequence[NDArray[np.int64]], padding: Sequence[int] | None = None) -> RowLayout:
        """Which tokens of the row are text, which belong to which item, sample by sample."""
        if self.media in _WITHOUT_ITEMS and padding is None:
            return RowLayout.of_lengths([len(ids) for ids in samples])
        modality, instance = [], []
        for number, ids in enumerate(samples):
            kinds, items = self._sample(np.asarray(ids), number)
            before = padding[number] if padding is not None else 0
            modality.append(np.pad(kinds, (before, 0), constant_values=-1))
            instance.append(np.pad(items, (before, 0)))
        numbers = np.repeat(np.arange(len(samples)), [len(part) for part in modality])
        return RowLayout.of_tokens(
            numbers, np.concatenate(modality), np.concatenate(instance), (TEXT, *self.units)
        )

    def _sample(self, ids: NDArray[np.int64], number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Modality of each token, 0 for text, and the number of its item from 1 on, 0 for text."""
        modality = np.zeros(ids.size, dtype=np.int64)
        instance = np.zeros(ids.size, dtype=np.int64)
        if self.media in _WITHOUT_ITEMS:
            return modality, instance
        items = 0
        for place, (unit, media) in enumerate(self.units.items(), start=1):
            at = np.flatnonzero(ids == media.placeholder_id)
            if media.tokens is None:
                item = np.cumsum(np.diff(at, prepend=at[:1]) > 1, dtype=np.int64)
            elif at.size % media.tokens:
                raise UserError(
                    f"sample number {number} of a row has {at.size} placeholders of {unit}, which are no whole items "
                    f"of {media.tokens} tokens; media_attention cannot tell its items apart"
                )
            else:
                item = np.arange(at.size, dtype=np.int64) // media.tokens
            modality[at] = place
            instance[at] = 1 + items + item
            items += int(item[-1]) + 1 if at.size else 0
        return modality, instance


def use_row_attention(model: MultimodalModel) -> None:
    """Let the language model of `model` attend over plans of its packed rows, media as `model.media_attention` says.

    From then on training passes it the plan of every packed row, at the cost of the sum of its samples' squares;
    `generate` goes on as before. Call it before the model is cut into stages. Raises UserError for a family that
    cannot.
    """
    language = model.language
    if language.row_attention is not None:
        return
    units = {
        name: MediaTokens(placeholder, None if model[name].packs else model[name].geometry.tokens_per_row)
        for name, placeholder in model.placeholder_ids.items()
        # Sounds are as text is to the families whose images see themselves in layers with a window.
        if model.media_attention not in MASKS_IN_WINDOWS or model[name].geometry.kind == "image"
    }
    generating = language.model.config._attn_implementation
    use_dilatant_attention(language.model)
    # States of linear attention pass along the row.
    placement = "contiguous" if linear_layers(language.model) else "auto"
    language.row_attention = RowAttention(model.media_attention, units, placement)
    language.generating_attention = generating


def place_rows(model: MultimodalModel, placement: str) -> None:
    """Let context-parallel ranks share rows as `placement` says (see `attention.placement.place_row`). Raises UserError
    where they cannot."""
    language = model.language
    if language.row_attention is None or placement == "auto":
        return
    if linear_layers(language.model) and placement != "contiguous":
        raise UserError(
            f"parallel.placement: {placement!r} would scatter tokens along which linear attention passes its state; "
            "leave it out, or set it to 'contiguous'"
        )
    language.row_attention = replace(cast(RowAttention, language.row_attention), placement=placement)


def prefer_row_attention(model: MultimodalModel) -> None:
    """As `use_row_attention`, where the family allows it; else its packed rows keep transformers' dense mask, which
    costs the square of the row, and a warning says so once. Raises UserError where that would be wrong."""
    reason = why_not(model.language.model, causal=model.media_attention == "causal")
    if reason is None:
        use_row_attention(model)
        return
    if model.media_attention != "causal":
        raise UserError(f"model: its tokens see each other as {model.media_attention!r} says, but {reason}")
    _refuse_leaks(model, reason)
    warnings.warn(
        f"packed rows will pay for the square of the row, under a mask of tokens by tokens: {reason}. Shorter rows "
        "(train.row_tokens) cost less",
        stacklevel=2,
    )


def attend_as_configured(model: MultimodalModel, config: LanguageModelConfig) -> None:
    """What `model.language_model` of a config asks for: plans where it must or may have them. Raises UserError."""
    if config.needs_plans:
        use_row_attention(model)
        reason = dropout_of(model.language.model)
        if reason is not None:
            raise UserError(f"model.language_model: {reason}; set it to 0 in the model's config")
    elif config.attn_implementation is None:
        prefer_row_attention(model)
    elif model.media_attention != "causal":
        raise UserError(
            f"model.attn_implementation: {config.attn_implementation!r} knows nothing of whom tokens see in packed "
            f"rows of this family ({model.media_attention}); leave it out"
        )
    else:
        _refuse_leaks(model, f"attn_implementation is {config.attn_implementation!r}")


def _refuse_leaks(model: MultimodalModel, reason: str) -> None:
    """Raise UserError if samples of a packed row would reach each other; reason: why there is no plan to part them."""
    leak = leaks_between_samples(model.language.model)
    if leak is not None:
        raise UserError(
            f"model.language_model: {leak}, and attention over plans, which parts them, cannot be used: {reason}"
        )
