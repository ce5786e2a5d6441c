"""Token-by-token generation of answers by a whole model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.text.encode import EncodedPrompt
from dilatant.models.core.stage import on_device


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[EncodedPrompt],
    device: torch.device,
    max_new_tokens: int,
    stop_ids: Collection[int] | None = None,
    **generation: Any,
) -> list[str]:
    """Return the model's answer to each prompt, up to one of `stop_ids` (default: the tokenizer's end-of-text token);
    greedy unless `generation` says otherwise. model: a `MultimodalModel`, or a whole model as transformers loads it."""
    if stop_ids is None:
        stop_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    longest = max(len(prompt.sample.input_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), pad or 0)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt.sample.input_ids)
        input_ids[row, longest - len(ids) :] = ids
        attention_mask[row, longest - len(ids) :] = 1
    written = model.generate(
        input_ids.to(device),
        encoder_inputs=encoder_inputs(prompts, device),
        attention_mask=attention_mask.to(device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=list(stop_ids) or None,
        **{"do_sample": False, **generation},
    )
    return [decode_answer(tokenizer, row, stop_ids) for row in written.tolist()]


def decode_answer(tokenizer: Any, written: Sequence[int], stop_ids: Collection[int]) -> str:
    """Decode an answer without the token that ends it, which may not be flagged as special."""
    end = next((at for at, token in enumerate(written) if token in stop_ids), len(written))
    return str(tokenizer.decode(written[:end], skip_special_tokens=True))


def encoder_inputs(
    prompts: Sequence[EncodedPrompt], device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    """Collect the media of all prompts as encoder inputs: unit → keyword → [items, ...]."""
    collected: dict[str, dict[str, list[EncoderInput]]] = {}
    for prompt in prompts:
        for unit, inputs in prompt.sample.media.items():
            for name, values in inputs.items():
                collected.setdefault(unit, {}).setdefault(name, []).append(values)
    return {
        unit: {name: on_device(values, device) for name, values in inputs.items()}
        for unit, inputs in collected.items()
    }
