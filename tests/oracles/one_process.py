"""The step of one process, written as plainly as possible: samples one by one through the Hugging Face models.

Shares no code with the runtime, nor with the stages, merging and loss of the model room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def loss_of_batch(
    language_model: Any,
    encoders: Mapping[str, tuple[Any, Any, int]],
    placeholder_ids: Mapping[str, int],
    samples: Sequence[Any],
    seen_in: Callable[[Any], Any] | None = None,
) -> Tensor:
    """The global batch's loss: the sum over all target tokens divided by their number.

    encoders: name → (Hugging Face encoder, projector, leading tokens to leave out). samples: each with `input_ids`,
    `labels` (not shifted) and `media` (name → input name → array with one row an item). seen_in: sample → which token
    sees which, bool [tokens, tokens]; default: those before it.
    """
    targets = sum(int((torch.as_tensor(sample.labels)[1:] != -100).sum()) for sample in samples)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.as_tensor(sample.input_ids)
        embed = language_model.get_input_embeddings()
        rows = {}
        for name, (encoder, projector, skip) in encoders.items():
            inputs = {key: torch.as_tensor(array) for key, array in sample.media.get(name, {}).items()}
            if inputs:
                projected = projector(encoder(**inputs).last_hidden_state[:, skip:])
                rows[name] = iter(projected.reshape(-1, projected.shape[-1]))
        tokens = []
        for token in ids.tolist():
            found = [name for name, placeholder in placeholder_ids.items() if placeholder == token]
            tokens.append(next(rows[found[0]]) if found else embed(torch.tensor(token)))
        mask = None if seen_in is None else torch.as_tensor(seen_in(sample))[None, None]
        embedded = torch.stack(tokens)[None]
        logits = language_model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits[0]
        for position, label in enumerate(torch.as_tensor(sample.labels)[1:].tolist()):
            if label != -100:
                total = total - torch.log_softmax(logits[position], dim=-1)[label] / targets
    return total
