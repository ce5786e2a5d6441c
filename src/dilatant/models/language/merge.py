"""Merging encoder outputs into the text: projected rows replace the embeddings of their placeholders, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilatant.attention.kernels.attention_plan import upload
from dilatant.config.errors import list_problems
from dilatant.models.core.loss import IGNORED


def merge_rows(
    embeddings: Tensor,
    input_ids: Tensor,
    placeholder_ids: Mapping[str, int],
    rows: Mapping[str, Tensor],
    lengths: Sequence[int] | None = None,
    sample_ids: Sequence[str] | None = None,
    places: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return `embeddings` with the projected rows of every unit at that unit's placeholders.

    embeddings: [batch, tokens, hidden]; input_ids: [batch, tokens]; rows: unit → [encoder tokens, hidden], in the order
    of the placeholders. A unit that is absent from `rows` must have no placeholder. lengths and sample_ids name the
    samples of a packed row (or of a batch) in errors. places: unit → int64 [placeholders], their indices in the
    flattened batch, on its device; a caller that computes them on the host avoids a wait for the device. Raises
    UserError if counts differ.
    """
    if not placeholder_ids:
        return embeddings
    if places is None:
        flat = input_ids.flatten()
        places = {unit: (flat == id_).nonzero().squeeze(-1) for unit, id_ in placeholder_ids.items()}
    wrong = [
        f"{unit}: the projector gives width {encoded.shape[-1]}, the language model takes {embeddings.shape[-1]}"
        for unit, encoded in rows.items()
        if encoded.shape[-1] != embeddings.shape[-1]
    ]
    wrong += [
        _explain(unit, input_ids == placeholder_ids[unit], rows.get(unit), lengths, sample_ids)
        for unit, at in places.items()
        if at.shape[0] != (rows[unit].shape[0] if unit in rows else 0)
    ]
    if wrong:
        raise list_problems("encoder tokens do not fit into the text:", wrong)
    merged = embeddings.flatten(0, 1)
    for unit, at in places.items():
        if unit in rows:
            # masked_scatter would wait for the device in its backward.
            merged = merged.index_copy(0, at, rows[unit].to(merged.dtype))
    return merged.view_as(embeddings)


def find_places(row: NDArray[np.int64], placeholder_ids: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Find the `places` of a row of tokens on the host."""
    return {unit: upload(np.flatnonzero(row == id_), device) for unit, id_ in placeholder_ids.items()}


def without_placeholders(input_ids: Tensor, placeholders: Sequence[int], instead: int = 0) -> Tensor:
    """Replace every placeholder in `input_ids`, so that ids outside the vocabulary are never looked up."""
    for placeholder in placeholders:
        input_ids = input_ids.masked_fill(input_ids == placeholder, instead)
    return input_ids


def _explain(
    unit: str, mask: Tensor, rows: Tensor | None, lengths: Sequence[int] | None, sample_ids: Sequence[str] | None
) -> str:
    """Describe both counts, and the sample at which rows run out (or all samples with placeholders if rows are
    left)."""
    tokens = 0 if rows is None else rows.shape[0]
    flat = mask.reshape(-1).cpu()
    spans = list(lengths) if lengths is not None else [mask.shape[-1]] * mask.shape[0]
    per_sample = [int(part.sum()) for part in flat[: sum(spans)].split(spans)]
    names = [repr(sample_ids[index]) if sample_ids is not None else f"number {index}" for index in range(len(spans))]
    text = f"{unit}: {sum(per_sample)} placeholders in the text, {tokens} tokens from the encoder"
    used = 0
    for name, count in zip(names, per_sample, strict=True):
        used += count
        if used > tokens:
            return f"{text}; sample {name} needs {count} and only {max(tokens - used + count, 0)} are left for it"
    with_some = [f"{name} ({count})" for name, count in zip(names, per_sample, strict=True) if count]
    listed = ", ".join(with_some[:8]) + (", ..." if len(with_some) > 8 else "")
    where = f"placeholders are in sample {listed}" if with_some else f"no placeholder in sample {', '.join(names[:8])}"
    return f"{text}; {where}"


def prepend_placeholders(
    input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None, tokens: Mapping[int, int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Insert placeholders before every text of a padded batch (after any padding on the left).

    tokens: placeholder id → number inserted into every row of the batch. Returns input_ids, attention_mask and labels
    [batch, placeholders + tokens]; inserted tokens are attended and carry no loss.
    """
    inserted = torch.cat([input_ids.new_full((count,), placeholder) for placeholder, count in tokens.items()])
    batch, length = input_ids.shape
    if attention_mask is None:
        start = input_ids.new_zeros(batch)
    else:
        start = attention_mask.argmax(dim=1)
    places = torch.arange(length + len(inserted), device=input_ids.device)
    is_new = (places >= start[:, None]) & (places < start[:, None] + len(inserted))

    def spread(old: Tensor, new: Tensor | int) -> Tensor:
        wide = old.new_empty(is_new.shape)
        wide[~is_new] = old.flatten()
        wide[is_new] = new.repeat(batch).to(old.dtype) if isinstance(new, Tensor) else new
        return wide

    return (
        spread(input_ids, inserted),
        None if attention_mask is None else spread(attention_mask, 1),
        None if labels is None else spread(labels, IGNORED),
    )
