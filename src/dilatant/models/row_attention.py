"""Row attention: builds the attention plans of the language model's packed rows, for every stage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dilatant.attention.hook import PLAN_KEYWORD, dropout_of, leaks_between_samples, use_dilatant_attention, why_not
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.linear_rows import linear_layers
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import TEXT, RowLayout, document_causal, mask_of_samples, media_mask, prefix_lm
from dilatant.config import UserError
from dilatant.config.model import LanguageModelConfig
from dilatant.models.core.running_statistics import statistics_notes
from dilatant.models.families.media_proof import prove_media
from dilatant.models.families.training_proof import prove
from dilatant.models.language.language import LanguageUnit, Proof
from dilatant.models.language.media_attention import MediaMasks, in_words
from dilatant.models.language.rotary_length import RotaryLength
from dilatant.models.multimodal import MultimodalModel

IN_WINDOWS = "in_windows"
"""The mask of families whose media are bidirectional in sliding-window layers, and causal in others."""

_WITHOUT_ITEMS = ("causal", "prefix")
"""Masks that treat media tokens like text."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Rule that finds a unit's items in `input_ids`: each item has `tokens` tokens `placeholder_id`; with None, each
    contiguous run of them is one item."""

    placeholder_id: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class RowAttention:
    """A language unit's `row_attention`: computes the attention plan of samples packed in one row, as a keyword.

    media: the mask among media (see `media_attention`; families add "prefix" and "in_windows"). units: encoder → its
    media tokens. placement: policy of context parallelism (see `attention.masks.placement.place_row`).
    """

    media: MediaMasks
    units: Mapping[str, MediaTokens]
    placement: str = "auto"

    def __call__(
        self,
        samples: Sequence[NDArray[np.int64]],
        padding: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
    ) -> dict[str, AttentionPlan]:
        """Plan a packed row. samples: the `input_ids` of each; padding: number of padding tokens before each; prefixes:
        under "prefix", number of first tokens of each that attend to each other (default: all).

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
        """Plan a batch [samples, tokens] as the concatenation of its rows; attention_mask is 0 at padding."""
        is_token = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
        modality, instance = np.full(input_ids.shape, -1), np.zeros(input_ids.shape, np.int64)
        for number, (ids, at) in enumerate(zip(input_ids, is_token, strict=True)):
            modality[number, at], instance[number, at] = self._sample(ids[at], number)
        numbers = np.repeat(np.arange(len(input_ids)), input_ids.shape[1])
        row = RowLayout.of_tokens(numbers, modality.ravel(), instance.ravel(), (TEXT, *self.units))
        whole = [input_ids.shape[1]] * len(input_ids)
        return self._plan(row, whole)

    def _plan(self, row: RowLayout, prefixes: Sequence[int]) -> dict[str, AttentionPlan]:
        in_windows = AttentionPlan(media_mask(row, "bidirectional")) if self.media == IN_WINDOWS else None
        return {PLAN_KEYWORD: AttentionPlan(self._mask(row, prefixes), in_windows=in_windows)}

    def _mask(self, row: RowLayout, prefixes: Sequence[int]) -> AttentionMask:
        if callable(self.media):
            return mask_of_samples(row, self.media)
        if self.media == "prefix":
            return prefix_lm(row, prefixes)
        if self.media in ("causal", IN_WINDOWS):
            return document_causal(row)
        return media_mask(row, self.media)

    def layout(self, samples: Sequence[NDArray[np.int64]], padding: Sequence[int] | None = None) -> RowLayout:
        """Return the row's layout: each token's sample, and its item unless it is text."""
        if self.media in _WITHOUT_ITEMS and padding is None:
            return RowLayout.of_lengths([len(ids) for ids in samples])
        modality, instance = [], []
        for number, ids in enumerate(samples):
            kinds, items = self._sample(np.asarray(ids), number)
            before = padding[number] if padding is not None else 0
            modality.append(np.pad(kinds, (before, 0), constant_values=-1))
            instance.append(np.pad(items, (before, 0)))
        numbers = np.repeat(np.arange(len(samples)), [len(part) for part in modality])
        return RowLayout.of_tokens(numbers, np.concatenate(modality), np.concatenate(instance), (TEXT, *self.units))

    def _sample(self, ids: NDArray[np.int64], number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each token's modality (0 for text) and its item's number from 1 on (0 for text)."""
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
    """Make the language model of `model` attend by plans of its packed rows, with the mask of `model.media_attention`.

    Training then passes the plan of every packed row, and attention costs the sum of the samples' squared lengths;
    `generate` is unchanged. Call it before the model is cut into stages. Raises UserError for unsupported families.
    """
    units = {
        name: MediaTokens(placeholder, None if model[name].packs else model[name].geometry.tokens_per_row)
        for name, placeholder in model.placeholder_ids.items()
        # In families with bidirectional images in sliding-window layers, sounds are causal like text.
        if model.media_attention != IN_WINDOWS or model[name].geometry.kind == "image"
    }
    _attend_over_plans(model.language, model.media_attention, units)


def _attend_over_plans(language: LanguageUnit, media: MediaMasks, units: Mapping[str, MediaTokens]) -> None:
    if language.row_attention is not None:
        return
    generating = language.model.config._attn_implementation
    use_dilatant_attention(language.model)
    # Linear-attention states pass along the row.
    placement = "contiguous" if linear_layers(language.model) else "auto"
    language.row_attention = RowAttention(media, units, placement)
    language.generating_attention = generating


def place_rows(model: MultimodalModel, placement: str) -> None:
    """Set the policy by which context-parallel ranks divide rows (see `attention.masks.placement.place_row`)."""
    language = model.language
    if language.row_attention is not None and placement != "auto":
        language.row_attention = replace(cast(RowAttention, language.row_attention), placement=placement)


def attend_as_configured(model: MultimodalModel, config: LanguageModelConfig) -> None:
    """Choose attention by the config's `model.language_model` (see `choose_attention`). Raises UserError."""
    choose_attention(model, "dilatant" if config.needs_plans else config.attn_implementation)


def choose_attention(model: MultimodalModel, named: str | None = None) -> None:
    """Choose how the language model of `model` attends to packed rows, and prove that training is right under it.

    named: "dilatant" requires attention plans; a name of transformers requires transformers' own mask. None uses plans
    if the family supports them, else transformers' mask, whose cost is the square of the row's length. If samples of a
    row would influence each other in a small copy of the model (see `training_proof`, and `media_proof` for families
    that are not listed), every sample is a separate row. A choice slower than plans is reported by a warning. Raises
    UserError for a requested attention that would be wrong, and for a model of parts about which nothing can be proven.
    """
    for line in () if model.whole is None else model.whole.family.refused:
        warnings.warn(f"model: {line}", stacklevel=4)
    is_read = model.whole is not None and model.whole.family.narrow
    leak = prove_media(model, partial(_choose, named=named)) if is_read else None
    _choose(model, named)
    if leak is not None and model.language.packs_rows:
        model.language.unpacked = f"in a packed row, {leak}"
    for line in (*limits_of(model), *statistics_notes(model.units)):
        warnings.warn(line, stacklevel=4)


def limits_of(model: MultimodalModel) -> tuple[str, ...]:
    """Return the reasons why a model is on a lower rung than 3 (see `hf.check_model`), a line each, the worst first."""
    if (why := _why_one_unit(model)) is not None:
        return (f"rung 0 of 3: the model runs as one unit, sample by sample: its parts train otherwise ({why})",)
    alone = model.language.unpacked
    lines = [] if alone is None else [f"rung 1 of 3: every sample is a row and a microbatch of its own: {alone}"]
    uncut = ((name, unit.uncut) for name, unit in model.units.items() if unit.uncut is not None)
    return (*lines, *(f"rung {1 if lines else 2} of 3: {name} stays one stage: {why}" for name, why in uncut))


def attend_by_default(model: MultimodalModel) -> None:
    """Choose the attention that a config without `attn_implementation` gets."""
    _choose(model, None)


def _why_one_unit(model: MultimodalModel) -> str | None:
    return None if model.whole is None else model.whole.family.one_unit


def _choose(model: MultimodalModel, named: str | None) -> None:
    language, media = model.language, model.media_attention
    if _why_one_unit(model) is not None:
        language.uncut = language.without_plans = "it runs as one unit"
        return
    if language.row_attention is not None:
        named = "dilatant"
    reason = None if named in (None, "dilatant") else f"attn_implementation is {named!r}"
    if named is None:
        reason = why_not(language.model, causal=media == "causal")
    if media != "causal" and reason is not None:
        raise UserError(
            f"model: the tokens of its media see each other as {in_words(media)} says, which transformers' own "
            f"attention does not know: {reason}; leave attn_implementation out"
        )
    if reason is None:
        if named == "dilatant" and (drops := dropout_of(language.model)) is not None:
            raise UserError(f"model.language_model: {drops}; set it to 0 in the model's config")
        proof = _prove(model, "plans")
        if proof.packed is None or proof.unproven is not None:
            use_row_attention(model)
            _settle(model, proof)
            return
        reason = f"with it, {proof.packed}"
        if named == "dilatant" or media != "causal":
            raise UserError(
                f"model.language_model: packed rows would train another model under attention over plans: {reason}"
            )
    language.without_plans = reason
    proof = _prove(model, "mask")
    if proof.alone is not None:
        raise UserError(
            f"model.language_model: {language.family} cannot be trained: even one sample alone, uncut, trains "
            f"otherwise than a causal model in transformers (on a small copy, {proof.alone})"
        )
    leak = leaks_between_samples(language.model) or proof.packed
    if leak is not None:
        language.unpacked = (
            f"samples of a packed row would reach each other ({leak}), and attention over plans, which parts them, "
            f"cannot be used: {reason}"
        )
    _settle(model, proof)
    if leak is None and named is None:
        warnings.warn(
            f"packed rows will pay for the square of the row, under a mask of tokens by tokens: {reason}. Shorter rows "
            "(train.row_tokens) cost less",
            stacklevel=4,
        )


def explicit_attention(model: PreTrainedModel) -> str | None:
    """Return the name of the attention that was set explicitly for a model; None for transformers' default."""
    name = model.config._attn_implementation
    return None if name == ("sdpa" if model._supports_sdpa else "eager") else name


def _prove(model: MultimodalModel, how: Literal["plans", "mask"]) -> Proof:
    # The copy has only text, which has the same mask under all masks of media.
    media = model.media_attention if isinstance(model.media_attention, str) else "causal"
    attach = partial(_attend_over_plans, media=media, units={}) if how == "plans" else None
    proof = prove(model.language, model.whole, f"{how} {media}", attach)
    if proof.unproven is not None and model.whole is None:
        raise UserError(
            f"model.language_model: {model.language.family} cannot be trained: a small copy that would prove how does "
            f"not run in transformers ({proof.unproven}); mend its config if that is the reason, else take another "
            "model or another version of transformers"
        )
    return proof


def _settle(model: MultimodalModel, proof: Proof) -> None:
    """Store the proof, and whether the model may be cut. If no copy of a pretrained multimodal model can be made, cuts
    are allowed, because tests prove them for its family, with media."""
    language = model.language
    language.uncut = None if proof.unproven is not None else proof.cut
    language.proof, language.streams = proof, proof.streams


def run_long_samples_alone(language: LanguageUnit, max_length: int | None) -> str | None:
    """Make every sample a row that ranks do not share, if samples of up to `max_length` tokens (None: of any length)
    would change each other's frequencies. Return the reason, or None. Raises UserError for frequencies that such
    samples would change for good."""
    by_length = (each for each in language.extensions if isinstance(each, RotaryLength))
    found = [each for each in by_length if max_length is None or each.steady < max_length]
    if not found:
        return None
    if kept := next((each for each in found if each.keeps), None):
        raise UserError(
            f"{kept.unit}: a sample beyond {kept.steady:,} tokens would change the rotary frequencies of this model "
            f"(dynamic NTK) for all samples after it; set data.max_length to {kept.steady}"
        )
    why = f"rotary frequencies depend on the longest sample of a row, beyond {found[0].steady:,} tokens"
    language.unpacked, language.unsplit = language.unpacked or why, language.unsplit or why
    return why
