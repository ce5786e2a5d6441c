"""Packed rows of the language model on block tables: what training gives to the attention of every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.attention.attention_plan import AttentionPlan
from dilatant.attention.hook import PLAN_KEYWORD, use_dilatant_attention
from dilatant.attention.mask import AttentionMask
from dilatant.attention.packing import TEXT, RowLayout, bidirectional_instances, document_causal, embedded
from dilatant.config import UserError
from dilatant.models.multimodal import MultimodalModel

MEDIA_MASKS: Mapping[str, Callable[[RowLayout], AttentionMask]] = {
    "causal": document_causal,
    "bidirectional": lambda row: bidirectional_instances(row, across_instances=True),
    "embedded": embedded,
}
"""The masks that `model.language_model.media_attention` names."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """How items stand in `input_ids`: each image or window of sound takes the next `tokens` copies of
    `placeholder_id`."""

    placeholder_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RowAttention:
    """A language unit's `row_attention`: the attention plan of samples packed in one row, as a keyword.

    `media` is a key of `MEDIA_MASKS`, `units` says which tokens of a sample are media.
    """

    media: str
    units: Mapping[str, MediaTokens]

    def __call__(
        self, samples: Sequence[NDArray[np.int64]], padding: Sequence[int] | None = None
    ) -> dict[str, AttentionPlan]:
        """`samples`: the `input_ids` of each; `padding`: tokens before each that see and are seen by nobody.

        Raises UserError for a sample whose placeholders are not whole items.
        """
        row = self.layout(samples, padding)
        return {PLAN_KEYWORD: AttentionPlan(MEDIA_MASKS[self.media](row))}

    def layout(self, samples: Sequence[NDArray[np.int64]], padding: Sequence[int] | None = None) -> RowLayout:
        """Which tokens of the row are text, which belong to which item, sample by sample."""
        if self.media == "causal" and padding is None:
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
        items = 0
        for place, (unit, media) in enumerate(self.units.items(), start=1):
            at = np.flatnonzero(ids == media.placeholder_id)
            if at.size % media.tokens:
                raise UserError(
                    f"sample number {number} of a row has {at.size} placeholders of {unit}, which are no whole items "
                    f"of {media.tokens} tokens; media_attention cannot tell its items apart"
                )
            modality[at] = place
            instance[at] = 1 + items + np.arange(at.size) // media.tokens
            items += at.size // media.tokens
        return modality, instance


def use_row_attention(model: MultimodalModel) -> None:
    """Let the language model of `model` attend over block tables, media as `model.media_attention` says.

    From then on training passes it the plan of every packed row; `generate` goes on as before. Call it before the
    model is cut into stages.
    """
    language = model.language
    if language.row_attention is not None:
        return
    units = {
        name: MediaTokens(placeholder, model[name].geometry.tokens_per_row)
        for name, placeholder in model.placeholder_ids.items()
    }
    language.row_attention = RowAttention(model.media_attention, units)
    language.generating_attention = language.model.config._attn_implementation
    use_dilatant_attention(language.model)
