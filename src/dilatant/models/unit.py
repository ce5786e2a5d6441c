"""Units: an encoder with its projector, or the language model, with named layers that can be cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.models.adapters import ADAPTERS, Adapter
from dilatant.models.freeze import freeze
from dilatant.models.probe import unused_parameters
from dilatant.models.slicing import slice_model
from dilatant.models.stage import Callbacks, EncoderStage, Inputs, LanguageStage, Stage
from dilatant.models.structure import Structure, find_structure
from dilatant.models.weights import Part, Weight, name_weights

if TYPE_CHECKING:
    from dilatant.models.row_attention import RowAttention


class Unit(Stage):
    """A stage that holds every layer of its unit, and can be cut."""

    model: PreTrainedModel
    structure: Structure
    parts: tuple[Part, ...]
    frozen: frozenset[str]
    """Logical names of the parameters that do not train (see `freeze`)."""

    def stage(self, first: int, end: int) -> Stage:
        """Layers `first <= layer < end` as a module that shares this unit's weights. Raises ValueError."""
        raise NotImplementedError

    def part_name(self, part: Part) -> str:
        """How a user calls a part: "vision.encoder", "vision.projector", "language"."""
        raise NotImplementedError

    @property
    def tied(self) -> dict[str, str]:
        """Logical name of a weight that is held a second time → the name that it shares."""
        return {weight.name: weight.tied_to for weight in self.weights if weight.tied_to is not None}

    def pieces(self) -> Iterator[tuple[str, str]]:
        """(logical layer, module path) for every module that belongs to one layer, in layer order."""
        first, *_ = self.layers
        for path in self.structure.before:
            yield first, f"model.{path}"
        for index in range(self.structure.num_blocks):
            yield self.layers[1 + index], f"model.{self.structure.blocks}.{index}"
        for path in self.structure.after:
            yield self.layers[1 + self.structure.num_blocks], f"model.{path}"

    def gradient_checkpointing(self, enabled: bool = True) -> None:
        """Recompute the activations of every block in the backward pass, or keep them. Raises UserError."""
        model = self.model
        if not model.supports_gradient_checkpointing:
            if enabled:
                raise UserError(
                    f"{self.unit}: {type(model).__name__} does not support gradient checkpointing"
                )
            return
        # transformers of later versions calls it activation checkpointing and warns of the older name.
        if enabled:
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
            # It also makes embeddings require gradients, for reentrant checkpoints: a needless backward here.
            model.disable_input_require_grads()
        else:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        self.train(self.training)

    def _blocks(self, first: int, end: int) -> tuple[int, int]:
        """Blocks of the layers [first, end): layer 0 is the embedding, blocks begin at layer 1."""
        if not 0 <= first < end <= len(self.layers):
            raise ValueError(
                f"unit {self.unit!r} has layers 0 to {len(self.layers)}; [{first}, {end}) is not a stage of it"
            )
        count = self.structure.num_blocks
        return min(max(first - 1, 0), count), min(end - 1, count)

    def _weights_between(self, first: int, end: int) -> tuple[Weight, ...]:
        """Weights of the layers, with the keys they have in the slice, where blocks are counted from 0."""
        held = set(self.layers[first:end])
        first_block, _ = self._blocks(first, end)
        blocks = self.structure.blocks + "."
        weights = []
        for weight in self.weights:
            if weight.layer in held:
                if weight.part == "model" and weight.key.startswith(blocks):
                    index, rest = weight.key[len(blocks) :].split(".", 1)
                    weight = replace(weight, key=f"{blocks}{int(index) - first_block}.{rest}")
                weights.append(weight)
        return tuple(weights)

    def _freeze_at_start(self, names: frozenset[str] = frozenset()) -> None:
        """Freeze `names`, and keep frozen what a family never trains or the user froze before."""
        given = {name for name, parameter in self.named_logical_parameters() if not parameter.requires_grad}
        self.frozen = frozenset(given)
        if names:
            freeze({self.unit: self}, names)


class EncoderUnit(Unit, EncoderStage):
    """An encoder and its projector: layers `embedding`, `layers.<i>`, `norm` (if it has any), `projector`."""

    parts = ("model", "projector")
    model: PreTrainedModel
    projector: nn.Module

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        projector: nn.Module,
        callbacks: Callbacks | None = None,
        skip_tokens: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        structure = find_structure(model)
        adapter = adapter or ADAPTERS.get(model.config.model_type)
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        layers = ("embedding", *blocks, *(("norm",) if structure.after else ()), "projector")
        super().__init__(
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in layers),
            weights=name_weights(name, model, structure, "norm", projector),
            model=model,
            projector=projector,
            callbacks=callbacks or Callbacks(),
            input_name=model.main_input_name,
            skip_tokens=skip_tokens,
            resume=adapter.resume if adapter else None,
        )
        self.structure = structure
        # Pooling heads and mask tokens cannot influence the tokens we use: they never get a gradient.
        unused = unused_parameters(model)
        self._freeze_at_start(frozenset(weight.name for weight in self.weights if weight.key in unused))

    def part_name(self, part: Part) -> str:
        return f"{self.unit}.encoder" if part == "model" else f"{self.unit}.projector"

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield from super().pieces()
        yield self.layers[-1], "projector"

    def freeze(self, part: Literal["encoder", "projector", "all"] = "encoder") -> None:
        """Stop the encoder from training and leave its projector trainable, or as `part` says."""
        freeze({self.unit: self}, [self.unit if part == "all" else f"{self.unit}.{part}"])

    def stage(self, first: int, end: int) -> EncoderStage:
        first_block, end_block = self._blocks(first, end)
        last = len(self.layers) - 1
        model = slice_model(
            self.model, self.structure, first_block, end_block, keep_before=first == 0, keep_after=end >= last
        )
        return EncoderStage(
            unit=self.unit,
            layers=self.layers[first:end],
            weights=self._weights_between(first, end),
            model=model if first < last else None,
            projector=self.projector if end > last else None,
            callbacks=self.callbacks,
            input_name=self.input_name,
            skip_tokens=self.skip_tokens,
            is_first=first == 0,
            resume=self.resume,
        )


class LanguageUnit(Unit, LanguageStage):
    """The language model: layers `embedding`, `layers.<i>`, `head` (final norm and language-model head)."""

    parts = ("model",)
    model: PreTrainedModel
    row_attention: RowAttention | None
    """What makes keywords for the attention of every stage from the `input_ids` of a packed row's samples; None where
    positions alone keep samples apart. Set by `row_attention.use_row_attention`."""
    generating_attention: str | None
    """The attention implementation that `generate` decodes with, where it is not the model's own."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        placeholder_ids: Mapping[str, int],
        before_language_model: Callable[[dict[str, Tensor], Inputs], Inputs] | None = None,
    ) -> None:
        structure = find_structure(model)
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        super().__init__(
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in ("embedding", *blocks, "head")),
            weights=name_weights(name, model, structure, "head", None),
            model=model,
            placeholder_ids=placeholder_ids,
            before_language_model=before_language_model,
        )
        self.structure = structure
        self.row_attention = None
        self.generating_attention = None
        self._freeze_at_start()

    def attention_of(self, samples: Sequence[Any], padding: Sequence[int] | None = None) -> Mapping[str, Any]:
        """Keywords for the attention of every stage over a packed row of samples with these `input_ids`, each after so
        many tokens of padding."""
        return {} if self.row_attention is None else self.row_attention(samples, padding)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """The model as `generate` needs it: with an attention implementation that takes a cache."""
        own = self.model.config._attn_implementation
        if self.generating_attention is not None:
            self.model.set_attn_implementation(self.generating_attention)
        try:
            yield
        finally:
            if self.generating_attention is not None:
                self.model.set_attn_implementation(own)

    def part_name(self, part: Part) -> str:
        return self.unit

    def freeze(self) -> None:
        """Stop the language model from training."""
        freeze({self.unit: self}, [self.unit])

    def stage(self, first: int, end: int) -> LanguageStage:
        first_block, end_block = self._blocks(first, end)
        is_first, is_last = first == 0, end == len(self.layers)
        return LanguageStage(
            unit=self.unit,
            layers=self.layers[first:end],
            weights=self._weights_between(first, end),
            model=slice_model(
                self.model, self.structure, first_block, end_block, keep_before=is_first, keep_after=is_last
            ),
            placeholder_ids=self.placeholder_ids,
            before_language_model=self.before_language_model,
            is_first=is_first,
            is_last=is_last,
        )
