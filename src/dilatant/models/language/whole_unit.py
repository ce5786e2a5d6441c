"""A multimodal model as one unit: the family's own forward of a sample, encoders included.

For families that are right only whole, because their forward reads media in more places than where the text has them.
The unit is one layer, which ranks neither cut nor share, and every sample is a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import TOKENS
from dilatant.models.core.stage import Loss
from dilatant.models.core.weights import mark_tied, name_module_weights
from dilatant.models.language.extension import LanguageForward, StageSpan
from dilatant.models.language.language import LanguageUnit, target_tokens
from dilatant.models.language.language_stage import LanguageStage

InputsOf = Callable[[EncodedSample, torch.device], Mapping[str, Tensor]]
"""Returns the keywords of the family's own forward of a sample, without the mask."""


class _Logits(nn.Module):
    """The head behind logits: returns them."""

    def forward(self, inputs_embeds: Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=cast(Any, inputs_embeds))


class WholeStage(LanguageStage):
    """The one layer of a multimodal model that runs whole: hidden states are its logits."""

    inputs_of: InputsOf

    @property
    def head(self) -> PreTrainedModel:
        return cast(PreTrainedModel, _Logits())

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        output = self(value, labels=value, return_logits=False)
        return output.loss

    def _embed(
        self,
        forward: LanguageForward,
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        assert forward.ids is not None
        return forward.ids  # the family's own forward embeds them

    def _run_blocks(self, forward: LanguageForward) -> Tensor:
        given: Mapping[str, Any] = {
            "input_ids": forward.hidden,
            "attention_mask": forward.keywords.get("attention_mask"),
        }
        if forward.data is not None:  # a training step
            (sample,) = forward.samples
            given = self.inputs_of(sample, forward.data.device)
        return self.model(**given, use_cache=False).logits


class WholeUnit(LanguageUnit, WholeStage):
    """A multimodal model as one layer. inputs_of: see `InputsOf`. media: the units whose media it reads."""

    undivided = "it runs as one unit"

    def __init__(self, name: str, model: PreTrainedModel, inputs_of: InputsOf, media: Sequence[str]) -> None:
        super().__init__(name, model, {}, decoder="")
        self.layers = (f"{name}.encoder",)
        self.weights = mark_tied(model, [*name_module_weights(name, {"encoder": ("model", model)})])
        self.structure = None
        self.extensions = []
        self.losses = {name: Loss(target_tokens)}
        self.inputs_of = inputs_of
        self.unpacked = "it runs as one unit"
        self._media = frozenset(media)
        self._freeze_at_start()

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make a text."""
        return super().example(0, tokens, device)[0], {}

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({TOKENS}) | self._media

    def stage(self, first: int, end: int) -> WholeStage:
        self._check_stage(first, end)
        stage = WholeStage(self.unit, self.layers, self.weights, self.model, self.text, StageSpan(0, 0))
        stage.inputs_of, stage.loss_chunk = self.inputs_of, self.loss_chunk
        stage.token_loss, stage.pair_loss = self.token_loss, self.pair_loss
        return stage
