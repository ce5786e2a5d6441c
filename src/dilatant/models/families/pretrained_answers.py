"""Generation by transformers' own class for an exported pretrained multimodal model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dilatant.config.errors import UserError
from dilatant.models.adapters.lora import merged_by_peft
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_inputs import composite_inputs


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
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{str(folder)!r} cannot be loaded: {reason}") from None

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
        given = composite_inputs(self._whole, input_ids, encoder_inputs or {}, self._model.dtype)
        written = self._model.generate(attention_mask=attention_mask, **given, **generation)
        return written[:, input_ids.shape[1] :]
