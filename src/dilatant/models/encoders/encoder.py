"""Encoders: a transformers encoder, or any module, with the projector to the language model's width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.models.adapters.lora import adapted_key
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import Placeholder, ShapePlaceholder, run_slice, slice_model
from dilatant.models.core.stage import (
    Boundary,
    RowCount,
    Stage,
    StageInputs,
    StageOutput,
    StepData,
    in_dtype_of,
    media_of,
)
from dilatant.models.core.structure import Structure, find_structure, unused_parameters
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_module_weights, name_weights


@dataclass(frozen=True, slots=True)
class Callbacks:
    """User functions that are called around one encoder (Cornstarch, Listing 2). Each may be None.

    before_encoder(inputs) → inputs; after_encoder(inputs, hidden) → hidden, before the projector;
    after_projector(inputs, hidden) → hidden. `inputs` are the encoder's keyword inputs after `before_encoder`, empty on
    a stage that does not receive them. hidden: [encoder rows, tokens, width].
    """

    before_encoder: Callable[[StageInputs], StageInputs] | None = None
    after_encoder: Callable[[StageInputs, Tensor], Tensor] | None = None
    after_projector: Callable[[StageInputs, Tensor], Tensor] | None = None


class EncoderStage(Stage):
    """Layers of an encoder and its projector, run on all items of the samples in one batch.

    model: the encoder or a slice of it, None on a stage with only the projector. projector: None before the last stage.
    """

    blocks_path: str | None = None
    """Path of the list of blocks in `model`; None for an encoder of one layer."""
    is_through = True
    """True if the stage holds the encoder's modules after its blocks."""

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        model: nn.Module | None,
        projector: nn.Module | None,
        geometry: EncoderGeometry,
        callbacks: Callbacks,
        skip_tokens: int = 0,
        is_first: bool = True,
    ) -> None:
        super().__init__(unit, layers, weights)
        self.model = model
        self.projector = projector
        self.geometry = geometry
        self.callbacks = callbacks
        self.skip_tokens = skip_tokens
        self.is_first = is_first

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Run all items of the samples in one batch; no rows if no sample has any."""
        if not any(data.samples[sample].sizes.get(self.unit, 0) for sample in samples):
            return StageOutput()
        items = self.own(data, samples)
        if items is not None and not items.size:
            return StageOutput()
        if self.is_first:
            output = self(media_of(data, samples, self, items))
        else:
            output = self(None, inbound[self.unit].unflatten(0, (-1, self.geometry.encoder_tokens)))
        return StageOutput(output.flatten(0, -2))

    def items(self, sizes: Mapping[str, int]) -> int:
        return sizes.get(self.unit, 0) // self.geometry.encoder_tokens

    def one_layer(self, value: Tensor, **inputs: Any) -> Tensor:
        return self({self.geometry.input_name: value, **inputs}) if self.is_first else self(inputs, value)

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode. The first stage takes the encoder's keyword `inputs` (first dimension: encoder rows), later ones
        `hidden`. Returns [encoder rows, tokens, width]; after the projector, width is that of the language model."""
        fed: StageInputs = dict(inputs or {})
        if self.is_first and self.callbacks.before_encoder is not None:
            fed = self.callbacks.before_encoder(fed)
        if self.is_first:
            self._check_rows(fed)
        if self.model is not None:
            hidden = self._encode(self.model, fed, hidden)
        assert hidden is not None
        if self.projector is None:
            return hidden
        hidden = hidden[:, self.skip_tokens :] if self.skip_tokens else hidden
        if self.callbacks.after_encoder is not None:
            hidden = self.callbacks.after_encoder(fed, hidden)
        hidden = self.projector(in_dtype_of(self.projector, hidden))
        if self.callbacks.after_projector is not None:
            hidden = self.callbacks.after_projector(fed, hidden)
        return hidden

    def recording(self, model: nn.Module, fed: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Disable autograd around a forward of `model` on `fed` if neither needs gradients, so frozen encoders save
        nothing."""
        records = any(p.requires_grad for p in model.parameters()) or any(t.requires_grad for t in fed)
        return torch.set_grad_enabled(torch.is_grad_enabled() and records)

    def _check_rows(self, inputs: StageInputs) -> None:
        """Raise UserError for rows of another shape than the encoder's."""
        name, expected = self.geometry.input_name, self.geometry.row_shape
        shape = tuple(inputs[name].shape[1:]) if name in inputs else expected
        if shape != expected:
            raise UserError(
                f"{self.unit}: rows of {name!r} have the shape {list(shape)}, but this encoder takes {list(expected)}; "
                "resize them, as the encoder's processor does"
            )
        for name, like in (self.geometry.example or {}).items():
            row = inputs.get(name)
            found = None if row is None else (row.shape[1:], row.is_floating_point())
            if row is None or found != (like.shape[1:], like.is_floating_point()):
                what = "missing" if row is None else f"{list(row.shape[1:])} of {row.dtype}"
                raise UserError(
                    f"{self.unit}: rows of {name!r} are {what}, but its example says {list(like.shape[1:])} of "
                    f"{like.dtype}"
                )

    def _encode(self, model: nn.Module, inputs: StageInputs, hidden: Tensor | None) -> Tensor:
        if hidden is not None:  # the forward reads only the shapes of its inputs
            rows = self.geometry.example or {self.geometry.input_name: hidden.new_ones(1, *self.geometry.row_shape)}
            inputs = {name: torch.cat([row.to(hidden.device)] * len(hidden)) for name, row in rows.items()}
        inputs = {name: in_dtype_of(model, tensor) for name, tensor in inputs.items()}
        given = next(iter(inputs.values())) if hidden is None else hidden

        def forward(given: Tensor) -> Tensor:
            output = model(**inputs)  # a tensor, or a transformers output
            return output if isinstance(output, Tensor) else output.last_hidden_state

        with self.recording(model, [*inputs.values()] if hidden is None else [hidden]):
            encoded = self.run_slice(forward, given)
        is_whole = self.blocks_path is None and encoded.ndim < 4  # not with tokens in several dimensions
        return encoded if is_whole else encoded.reshape(len(given), -1, encoded.shape[-1])

    def run_slice(
        self, forward: Callable[[Tensor], Tensor], given: Tensor, taps: Mapping[int, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Run the `forward` of the stage's slice on its input or, after the first stage, on hidden states."""
        if self.blocks_path is None:
            return forward(given)
        assert self.model is not None
        blocks = self.model.get_submodule(self.blocks_path)
        return run_slice(forward, given, blocks, enters=not self.is_first, ends=not self.is_through, taps=taps)


class EncoderUnit(Unit, EncoderStage):
    """An encoder and its projector. The layers are `embedding`, `layers.<i>`, `norm` (if it has any) and `projector`;
    or `encoder` and `projector` if the encoder is not cut.

    width_out: the language model's width. skip_tokens: number of leading output tokens that are dropped. structure:
    where a module that is not of transformers is cut; None: nowhere.
    """

    parts = ("model", "projector")
    stage_type: type[EncoderStage] = EncoderStage
    stand_in: type[Placeholder] = ShapePlaceholder
    """Class of the placeholders for modules before the blocks, on later stages."""
    tail = "norm"
    """Name of the layer that holds the modules after the blocks."""
    model: nn.Module
    projector: nn.Module
    geometry: EncoderGeometry

    def __init__(
        self,
        name: str,
        model: nn.Module,
        projector: nn.Module,
        geometry: EncoderGeometry,
        width_out: int,
        callbacks: Callbacks | None = None,
        skip_tokens: int = 0,
        structure: Structure | None = None,
    ) -> None:
        if geometry.example is None and isinstance(model, PreTrainedModel):
            structure = find_structure(model)
        if structure is not None:
            blocks = (f"layers.{i}" for i in range(structure.num_blocks))
            layers = ("embedding", *blocks, *((self.tail,) if structure.after else ()), "projector")
            weights = name_weights(name, model, structure, self.tail, projector)
        else:
            layers = ("encoder", "projector")
            weights = name_module_weights(name, {"encoder": ("model", model), "projector": ("projector", projector)})
        super().__init__(
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in layers),
            weights=weights,
            model=model,
            projector=projector,
            geometry=geometry,
            callbacks=callbacks or Callbacks(),
            skip_tokens=skip_tokens,
        )
        self.structure = structure
        self.blocks_path = None if structure is None else structure.blocks
        self.width = geometry.width
        self.width_out = width_out
        self.unused = self._unused(model)
        self._freeze_at_start(self.unused)

    def _unused(self, model: nn.Module) -> frozenset[str]:
        """Return the weights that do not influence the output tokens (pooling heads, mask tokens) and therefore never
        get a gradient."""
        if not isinstance(model, PreTrainedModel):
            return frozenset()
        keys = unused_parameters(model, self.geometry.input_name, self.geometry.row_shape)
        return frozenset(w.name for w in self.weights if w.part == "model" and adapted_key(w.key) in keys)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make a batch of whole items with about `tokens` tokens."""
        rows = max(1, round(tokens / self.geometry.encoder_tokens))
        if layer == 0 and self.geometry.example is not None:
            inputs = {k: torch.cat([v.to(device)] * rows) for k, v in self.geometry.example.items()}
            return inputs.pop(self.geometry.input_name), inputs
        shape = self.geometry.row_shape if layer == 0 else (self.geometry.encoder_tokens, self.geometry.width)
        value = torch.randn(rows, *shape, device=device)
        return (value.flatten(0, 1) if layer and self.packs else value), {}

    def part_name(self, part: str) -> str:
        return f"{self.unit}.encoder" if part == "model" else f"{self.unit}.projector"

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield from super().pieces()
        yield self.layers[-1], "projector"

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit} if first == 0 else ())

    def freeze(self, part: Literal["encoder", "projector", "all"] = "encoder") -> None:
        """Freeze the encoder, by default without its projector. part: the part to freeze."""
        self.freeze_parts(*{"encoder": ("model",), "projector": ("projector",), "all": ("model", "projector")}[part])

    def boundary(self, end: int, consumer: str) -> Boundary:
        is_output = end == len(self.layers)
        tokens = self.geometry.tokens_per_row if is_output else self.geometry.encoder_tokens
        return Boundary(
            width=self.width_out if is_output else self.geometry.width,
            dtype=self.row_dtype,
            rows_of=RowCount(self.unit, *(1, 1) if self.packs else (self.geometry.encoder_tokens, tokens)),
        )

    def stage(self, first: int, end: int) -> EncoderStage:
        self._check_stage(first, end)
        last = len(self.layers) - 1
        model: nn.Module | None = None
        if first < last:
            model = self._slice(self.model, first, end)
        stage = self.stage_type(
            unit=self.unit,
            layers=self.layers[first:end],
            weights=self._weights_between(first, end),
            model=model,
            projector=self.projector if end > last else None,
            geometry=self.geometry,
            callbacks=self.callbacks,
            skip_tokens=self.skip_tokens,
            is_first=first == 0,
        )
        stage.blocks_path, stage.is_through = self.blocks_path, end >= last
        stage.training = self.training
        return stage

    def _slice(self, model: nn.Module, first: int, end: int) -> nn.Module:
        if self.structure is None:
            return model
        first_block, end_block = self._blocks(first, end)
        return slice_model(
            cast(PreTrainedModel, model),
            self.structure,
            first_block,
            end_block,
            keep_before=first == 0,
            keep_after=end >= len(self.layers) - 1,
            stand_in=self.stand_in,
        )
