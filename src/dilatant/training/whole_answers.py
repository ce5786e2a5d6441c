"""A whole model that was exported, as transformers loads it, answering."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dilatant.config.errors import UserError
from dilatant.models.lora import merged_by_peft
from dilatant.models.whole import Whole


class WholeAnswers:
    """transformers' own model and `generate`, with the inputs that `MultimodalModel.generate` takes."""

    def __init__(self, model: Any, whole: Whole) -> None:
        self._model = model.eval()
        self._whole = whole

    @classmethod
    def open(cls, source: str, whole: Whole, adapter: Path | None = None) -> Self:
        """The model of a folder or id, with the adapter that lies in another folder merged in. Raises UserError."""
        folder = source if adapter is None else adapter
        try:
            model = AutoModelForImageTextToText.from_pretrained(source)
            if adapter is not None:
                model = merged_by_peft(model, adapter)
            return cls(model, whole)
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{str(folder)!r} cannot be loaded: {reason}") from None

    def to(self, device: torch.device) -> Self:
        """On this device."""
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
        """New token ids [batch, new tokens]; prompts are padded on the left."""
        given: dict[str, Tensor] = {}
        for name, inputs in (encoder_inputs or {}).items():
            tower = self._whole.family.towers[name]
            for keyword, tensor in inputs.items():
                tensor = tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor
                tensor = tensor.flatten(1) if tower.native else tensor
                given[keyword] = tensor[None] if tower.batched else tensor
        kinds = torch.zeros_like(input_ids)
        for placeholder in self._whole.placeholder_ids.values():
            kinds += input_ids == placeholder
        if self._whole.family.media_attention == "bidirectional":
            given["token_type_ids"] = kinds
        if self._whole.family.spatial:
            given["mm_token_type_ids"] = kinds
        written = self._model.generate(
            input_ids=input_ids, attention_mask=attention_mask, **given, **generation
        )
        return written[:, input_ids.shape[1] :]
