"""Generation by transformers' own class for an exported pretrained multimodal model, with its own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dilatant.config.errors import UserError, one_line
from dilatant.data.media.pixels import as_array
from dilatant.data.media_units.native_image_unit import STEP
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import merged_by_peft
from dilatant.models.encoders.narrow_encoder import forward_of, known_to
from dilatant.models.families.pretrained import PretrainedModel


class PretrainedGeneration:
    """transformers' own model and `generate`, with the same inputs as `MultimodalModel.generate`."""

    def __init__(self, model: Any, whole: PretrainedModel) -> None:
        self._model = model.eval()
        self._whole = whole

    @classmethod
    def open(cls, source: str, whole: PretrainedModel, adapter: Path | None = None) -> Self:
        """Load the model of a folder or id, and merge the adapter of another folder into it. Raises UserError."""
        folder = source if adapter is None else adapter
        try:
            model = type(whole.composite()).from_pretrained(source)
            if adapter is not None:
                model = merged_by_peft(model, adapter)
            return cls(model, whole)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{str(folder)!r} cannot be loaded: {one_line(error)}") from None

    def to(self, device: torch.device) -> Self:
        """Move the model to a device."""
        self._model.to(device)
        return self

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        encoder_inputs: Mapping[str, Mapping[str, Tensor]] | None = None,
        attention_mask: Tensor | None = None,
        **generation: Any,
    ) -> Tensor:
        """Generate token ids [batch, new tokens]; prompts are padded on the left."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs = composite_inputs(self._whole, input_ids, encoder_inputs or {}, self._model.dtype)
        generated = self._model.generate(attention_mask=attention_mask, **inputs, **generation)
        return generated[:, input_ids.shape[1] :]


def inputs_of_sample(whole: PretrainedModel, sample: EncodedSample, device: torch.device) -> dict[str, Tensor]:
    """Return the keywords of the family's own forward of a sample alone."""
    ids = torch.as_tensor(sample.input_ids)[None]
    media = {
        name: {key: torch.as_tensor(as_array(each)) for key, each in inputs.items()}
        for name, inputs in sample.media.items()
    }
    keywords = composite_inputs(whole, ids, media, whole.dtype)
    keywords["attention_mask"] = torch.ones_like(ids)  # some compute positions from it
    if whole.media_attention == "prefix":  # tokens before the first target attend to each other, later ones do not
        keywords["token_type_ids"] = (torch.arange(ids.shape[1]) >= sample.prefix_tokens).long()[None]
    return {name: each.to(device) for name, each in keywords.items()}


def composite_inputs(
    whole: PretrainedModel, input_ids: Tensor, encoder_inputs: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the keywords, without the mask, for `input_ids` [batch, tokens]; floating ones in `dtype`."""
    keywords = {"input_ids": input_ids}
    for name, inputs in encoder_inputs.items():
        inputs = {k: t.to(dtype) if t.is_floating_point() and k != STEP else t for k, t in inputs.items()}
        keywords |= whole.family.towers[name].forward_inputs(whole.host(name), input_ids, inputs)
    kinds = torch.zeros_like(input_ids)
    for name, placeholder in whole.placeholder_ids.items():
        if whole.family.towers[name].kind == "image":
            kinds += input_ids == placeholder
    kinds[keywords["input_ids"] != input_ids] = 2  # clips
    known = known_to(forward_of(whole.config))
    if whole.media_attention == "bidirectional" and "token_type_ids" in known:
        keywords["token_type_ids"] = kinds
    if whole.media_attention == "prefix":
        keywords["token_type_ids"] = torch.zeros_like(input_ids)
    own = keywords.pop("mm_token_type_ids", kinds)
    if "mm_token_type_ids" in known or (whole.family.spatial and "audio" not in whole.family.towers):
        keywords["mm_token_type_ids"] = own
    return keywords
