"""Stages: consecutive layers of a unit as one module, hidden states in, hidden states out.

A stage runs the Hugging Face model's own forward with fewer blocks. A unit is the stage that holds all its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.attention_plan import to_device
from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.models.freeze import quiet_frozen
from dilatant.models.loss import positions_with_targets, shift_labels, summed_cross_entropy
from dilatant.models.merge import merge_rows, without_placeholders
from dilatant.models.weights import Weight

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MultimodalOutput:
    """loss: scalar, or None without labels. logits: [batch, tokens, vocabulary], or None when not wanted."""

    loss: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a user runs around one encoder (Cornstarch, Listing 2). Each may be None.

    before_encoder(inputs) → inputs; after_encoder(inputs, hidden) → hidden, before the projector;
    after_projector(inputs, hidden) → hidden. `inputs` are the encoder's keyword inputs after `before_encoder`; on a
    stage that does not receive them it is empty. hidden: [encoder rows, tokens, width].
    """

    before_encoder: Callable[[Inputs], Inputs] | None = None
    after_encoder: Callable[[Inputs, Tensor], Tensor] | None = None
    after_projector: Callable[[Inputs, Tensor], Tensor] | None = None


class Stage(nn.Module):
    """Layers of one unit, named in `layers`. Its weights are those of the unit, not copies.

    `weights` lists what is held here, with keys into this stage's own modules.
    """

    def __init__(self, unit: str, layers: tuple[str, ...], weights: tuple[Weight, ...]) -> None:
        super().__init__()
        self.unit = unit
        self.layers = layers
        self.weights = weights

    def named_logical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(logical name, parameter) for each parameter held here, every tensor once.

        A tied weight goes by the name it has in the first layer that holds it, also where that layer is elsewhere.
        """
        parameters = {
            part: dict(getattr(self, part).named_parameters(remove_duplicate=False))
            for part in {weight.part for weight in self.weights}
        }
        seen: set[str] = set()
        for weight in self.weights:
            parameter = parameters[weight.part].get(weight.key)
            if parameter is not None and weight.canonical not in seen:
                seen.add(weight.canonical)
                yield weight.canonical, parameter

    def train(self, mode: bool = True) -> Self:
        """As in torch, except that what is frozen stays in evaluation mode (see `quiet_frozen`)."""
        super().train(mode)
        if mode:
            quiet_frozen(self)
        return self


class EncoderStage(Stage):
    """Layers of an encoder and its projector.

    model: slice of the encoder, None on a stage of the projector alone. projector: None before the last stage.
    resume: how a slice without its embedding is run, for families whose forward does more (see adapters).
    """

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        model: nn.Module | None,
        projector: nn.Module | None,
        callbacks: Callbacks,
        input_name: str,
        skip_tokens: int = 0,
        is_first: bool = True,
        resume: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(unit, layers, weights)
        self.model = model
        self.projector = projector
        self.callbacks = callbacks
        self.input_name = input_name
        self.skip_tokens = skip_tokens
        self.is_first = is_first
        self.resume = resume

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """The first stage takes the encoder's keyword `inputs` (first dimension: encoder rows), later ones `hidden`.

        Returns [encoder rows, tokens, width]; after the projector, width is that of the language model.
        """
        given: Inputs = dict(inputs or {})
        if self.is_first and self.callbacks.before_encoder is not None:
            given = self.callbacks.before_encoder(given)
        if self.model is not None:
            hidden = self._encode(self.model, given, hidden)
        assert hidden is not None
        if self.projector is None:
            return hidden
        hidden = hidden[:, self.skip_tokens :] if self.skip_tokens else hidden
        if self.callbacks.after_encoder is not None:
            hidden = self.callbacks.after_encoder(given, hidden)
        hidden = self.projector(_as_dtype_of(self.projector, hidden))
        if self.callbacks.after_projector is not None:
            hidden = self.callbacks.after_projector(given, hidden)
        return hidden

    def _encode(self, model: nn.Module, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        fed = [*inputs.values()] if hidden is None else [hidden]
        # A frozen slice with nothing trainable before it keeps no activations.
        records = any(p.requires_grad for p in model.parameters()) or any(t.requires_grad for t in fed)
        with torch.set_grad_enabled(torch.is_grad_enabled() and records):
            if hidden is None:
                inputs = {name: _as_dtype_of(model, tensor) for name, tensor in inputs.items()}
                return model(**inputs).last_hidden_state
            if self.resume is not None:
                return self.resume(model, hidden)
            return model(**{self.input_name: hidden}).last_hidden_state


class LanguageStage(Stage):
    """Layers of the language model.

    model: slice of the causal language model. placeholder_ids: unit → the id that stands for one token of it.
    before_language_model(rows, inputs) → inputs: called by the first stage before rows are merged; may replace
    "input_ids", or give "inputs_embeds" [batch, tokens, hidden] and so do the merging itself.
    """

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        model: PreTrainedModel,
        placeholder_ids: Mapping[str, int],
        before_language_model: Callable[[dict[str, Tensor], Inputs], Inputs] | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__(unit, layers, weights)
        self.model = model
        self.placeholder_ids = dict(placeholder_ids)
        self.before_language_model = before_language_model
        self.is_first = is_first
        self.is_last = is_last

    def forward(
        self,
        input_ids: Tensor | None = None,
        rows: Mapping[str, Tensor] | None = None,
        hidden: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_denominator: float | Tensor | None = None,
        return_logits: bool = True,
        logits_at: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
        **attention_kwargs: Any,
    ) -> Tensor | MultimodalOutput:
        """The first stage takes `input_ids` [batch, tokens] and `rows`, unit → [encoder tokens, hidden]; later
        stages take `hidden` [batch, tokens, hidden]. Positions, mask and attention_kwargs go to every stage; a plan
        among these says what the mask says.

        Returns hidden states, and on the last stage loss and logits. logits_at: int64 [positions], the only ones for
        which logits are wanted, without labels. places: see `merge_rows`. labels may lie on the host, if `lengths` of a
        packed row are given: then nothing waits for the device to find the targets. Raises UserError where rows do not
        fit.
        """
        if self.is_first:
            assert input_ids is not None
            hidden = self.embed(
                input_ids,
                rows or {},
                position_ids=position_ids,
                attention_mask=attention_mask,
                lengths=lengths,
                sample_ids=sample_ids,
                places=places,
            )
        run: dict[str, Any] = {
            "inputs_embeds": hidden,
            "position_ids": position_ids,
            "attention_mask": None if PLAN_KEYWORD in attention_kwargs else attention_mask,
            "use_cache": False,
            **attention_kwargs,
        }
        if not self.is_last:
            return self.model.base_model(**run).last_hidden_state
        if labels is None:
            return MultimodalOutput(None, self._logits(run, logits_at))
        assert hidden is not None
        packed = lengths if labels.shape[0] == 1 and attention_mask is None else None
        targets = shift_labels(labels, position_ids, attention_mask, packed)
        if not return_logits:
            logits_at = positions_with_targets(targets)
            targets = targets[:, logits_at]
            logits_at = to_device(logits_at, hidden.device)
        targets = to_device(targets, hidden.device)
        logits = self._logits(run, logits_at)
        loss = summed_cross_entropy(logits, targets, loss_denominator)
        return MultimodalOutput(loss, logits if return_logits else None)

    def _logits(self, run: dict[str, Any], positions: Tensor | None) -> Tensor:
        """Logits at `positions`, or everywhere: the vocabulary is large, so the head runs only where it must."""
        if positions is None:
            return self.model(**run).logits
        if self._keeps_logits:
            return self.model(**run, logits_to_keep=positions).logits
        return self.model(**run).logits[:, positions]

    @cached_property
    def _keeps_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def embed(
        self,
        input_ids: Tensor,
        rows: Mapping[str, Tensor],
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
        **inputs: Tensor | None,
    ) -> Tensor:
        """Token embeddings with encoder rows merged in: [batch, tokens, hidden]."""
        if self.before_language_model is not None:
            given = {"input_ids": input_ids, **{k: v for k, v in inputs.items() if v is not None}}
            given = self.before_language_model(dict(rows), given)
            if given.get("inputs_embeds") is not None:
                return given["inputs_embeds"]
            if given["input_ids"] is not input_ids:
                input_ids, places = given["input_ids"], None
        look_up = self.model.get_input_embeddings()
        embeddings = look_up(without_placeholders(input_ids, self.placeholder_ids))
        return merge_rows(embeddings, input_ids, self.placeholder_ids, rows, lengths, sample_ids, places)


def _as_dtype_of(module: nn.Module, tensor: Tensor) -> Tensor:
    """A floating tensor in the dtype of the module's first weight; other tensors unchanged."""
    weight = next(module.parameters(), None)
    return tensor.to(weight.dtype) if weight is not None and tensor.is_floating_point() else tensor
