"""Answers of a whole model, token by token, with texts and pictures: where the model writes a generator's start text,
the generator draws a picture."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.text.encode import EncodedPrompt
from dilatant.models.core.stage import StepData, in_dtype_of, on_device
from dilatant.models.generators.diffusion import Diffusion, SamplingSettings, draw, generator_of
from dilatant.models.generators.generator import GeneratorUnit
from dilatant.models.language.side_states import BlockInputs
from dilatant.models.multimodal import MultimodalModel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    Drawn = Image | NDArray[np.float32]


class _Announced(StoppingCriteria):
    """Stopping criterion that ends a text where it announces a picture."""

    def __init__(self, tokenizer: Any, targets: Sequence[ImageTarget]) -> None:
        self._tokenizer = tokenizer
        self._starts = tuple(target.start for target in targets)
        self._longest = max((len(start.encode()) for start in self._starts), default=0)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        # A token may be as short as a byte, so this many tokens suffice.
        tails = self._tokenizer.batch_decode(input_ids[:, -self._longest :], skip_special_tokens=True)
        ends = [bool(self._starts) and tail.endswith(self._starts) for tail in tails]
        return torch.tensor(ends, device=input_ids.device)


MOST_PICTURES = 8
"""Most pictures in one answer: a model that never stops drawing is stopped."""


@torch.no_grad()
def answer_with_pictures(
    model: MultimodalModel,
    tokenizer: Any,
    prompt: EncodedPrompt,
    targets: Sequence[ImageTarget],
    device: torch.device,
    max_new_tokens: int,
    how: SamplingSettings,
    seed: int = 0,
    **generation: Any,
) -> list[str | Drawn]:
    """Return the texts and pictures of the model's answer, in order; texts lack the start text that announces a
    picture. Features are float32 [feature width, grid height, grid width]. Greedy unless `generation` says otherwise.
    seed: of the noise. Raises UserError for more than MOST_PICTURES pictures."""
    reads_ids = any(isinstance(each, BlockInputs) for each in model.language.extensions)
    if model.whole is not None and (reads_ids or not model.whole.reads_as_text):
        return [_picture_at_once(model, tokenizer, prompt, targets, how, seed)]
    ids = torch.as_tensor(prompt.sample.input_ids)[None].to(device)
    inputs = encoder_inputs([prompt], device)
    parts: list[str | Drawn] = []
    for number in range(MOST_PICTURES + 1):
        # Encoders do not read drawn pictures: the model knows them by the query tokens in their places.
        written = model.generate(
            ids,
            encoder_inputs=inputs,
            max_new_tokens=max_new_tokens,
            stopping_criteria=StoppingCriteriaList([_Announced(tokenizer, targets)]),
            pad_token_id=tokenizer.pad_token_id,
            **{"do_sample": False, "eos_token_id": tokenizer.eos_token_id, **generation},
        )
        text = tokenizer.decode(written[0], skip_special_tokens=True)
        target = next((target for target in targets if text.endswith(target.start)), None)
        shown = text if target is None else text[: -len(target.start)]
        parts += [shown] if shown else []
        if target is None:
            return parts
        if number == MOST_PICTURES:
            break
        places = torch.full((1, target.tokens_per_item), target.placeholder_id, device=device)
        ids = torch.cat([ids, written, places], dim=1)
        rows = rows_behind(model, ids, inputs, target)
        parts.append(_drawn(model[target.name], rows, how, f"picture {number}", seed))
    raise UserError(f"the model draws more than {MOST_PICTURES} pictures in one answer")


def _picture_at_once(
    model: MultimodalModel,
    tokenizer: Any,
    prompt: EncodedPrompt,
    targets: Sequence[ImageTarget],
    how: SamplingSettings,
    seed: int,
) -> Drawn:
    """Draw a picture as the whole answer of a pretrained VLM whose positions or masks `generate` does not know: the
    model's own stages read the prompt, as in training. Raises UserError for several generators."""
    if len(targets) > 1:
        raise UserError("a whole model of such a family draws at once, and this one has several generators")
    (target,) = targets
    start = tokenizer.encode(target.start, add_special_tokens=False)
    places = [target.placeholder_id] * target.tokens_per_item
    ids = np.array([*prompt.sample.input_ids.tolist(), *start, *places])
    sizes = {**prompt.sample.sizes, LANGUAGE: len(ids)}
    question = replace(prompt.sample, input_ids=ids, labels=np.full(len(ids), -100), sizes=sizes)
    data = StepData.of([question], model.graph.losses, model.language.model.device, draws=["prompt"])
    model.eval()
    rows: dict[str, Tensor] = {}
    for name in model.encoders:
        if question.sizes.get(name):
            encoded = model[name].run(data, (0,), {}).rows_for(LANGUAGE)
            assert encoded is not None
            rows[name] = encoded
    hidden = model.language.run(data, (0,), rows).rows_for(target.name)
    assert hidden is not None
    return _drawn(model[target.name], hidden[None], how, "picture 0", seed)


def rows_behind(
    model: MultimodalModel, ids: Tensor, inputs: dict[str, dict[str, Tensor]], target: ImageTarget
) -> Tensor:
    """Return the language model's hidden states at the last item's places, which end texts of one length: [texts, k,
    hidden]. ids: [texts, tokens]."""
    was_training = model.training
    model.eval()
    try:
        hidden = model.language.hidden_states(
            ids, model.encode(inputs), attention_mask=torch.ones_like(ids), **model.attention_of_batch(ids)
        )
    finally:
        model.train(was_training)
    return hidden[:, -target.tokens_per_item :]


def generate_pictures(
    unit: GeneratorUnit, rows: Tensor, how: SamplingSettings, keys: Sequence[str], seed: int = 0
) -> Tensor:
    """Draw pictures for language-model rows [items, k, hidden]: float32 [items, channels, height, width], -1 to 1.
    keys: of their noise."""
    net = unit.model
    assert isinstance(net, Diffusion)
    unit.eval()
    with torch.no_grad():
        condition = unit.connector(in_dtype_of(unit.connector, rows))
        noise = [
            torch.from_numpy(generator_of(seed, key, unit.unit).standard_normal(net.shape, np.float32)) for key in keys
        ]
        return draw(net, in_dtype_of(net, condition), torch.stack(noise).to(rows.device), how)


def _drawn(unit: GeneratorUnit, rows: Tensor, how: SamplingSettings, key: str, seed: int) -> Drawn:
    (found,) = generate_pictures(unit, rows, how, [key], seed)
    assert isinstance(unit.model, Diffusion)
    return found.cpu().numpy() if unit.model.draws_features else to_image(found)


def to_image(pixels: Tensor) -> Image:
    """Convert pixels [channels, height, width], -1 to 1, to a picture."""
    from PIL import Image

    values = ((pixels.cpu().numpy() + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    return Image.fromarray(values[0] if len(values) == 1 else np.moveaxis(values, 0, -1))


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


def encoder_inputs(prompts: Sequence[EncodedPrompt], device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Collect the media of all prompts as encoder inputs: unit → keyword → [items, ...]."""
    collected: dict[str, dict[str, list[EncoderInput]]] = {}
    for prompt in prompts:
        for unit, inputs in prompt.sample.media.items():
            for name, values in inputs.items():
                collected.setdefault(unit, {}).setdefault(name, []).append(values)
    return {
        unit: {name: on_device(values, device) for name, values in inputs.items()} for unit, inputs in collected.items()
    }
