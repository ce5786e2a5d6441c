"""Language-model unit: its layers, weights, inputs and losses, and its cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import TOKENS, grid_part
from dilatant.models.core.slicing import ShapePlaceholder, slice_model
from dilatant.models.core.stage import Boundary, Loss, RowCount
from dilatant.models.core.structure import find_structure
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_weights
from dilatant.models.language.cross_attention import CrossAttention
from dilatant.models.language.extension import Extension, StageSpan, TextLayout
from dilatant.models.language.language_stage import BeforeLanguageModel, LanguageStage
from dilatant.models.language.merge import without_placeholders
from dilatant.models.language.packed_row import PackedRow, Positions, token_places
from dilatant.models.language.queries import Queries
from dilatant.models.language.rotary_length import RotaryLength
from dilatant.models.language.router_loss import RouterLoss, count_routers, has_router_loss, router_weight
from dilatant.models.language.side_states import BlockInputs


@dataclass(frozen=True, slots=True)
class Proof:
    """Proven properties of a language model; each is None, or a short reason why it does not hold.

    packed: a packed row trains like its samples run one by one. cut: any cut into stages trains like the whole model.
    alone: samples run one by one, uncut, train as in transformers' own forward; if not, the model is not trained.
    unproven: the small copy could not be built or run in transformers, so nothing is known. differences: the largest
    relative ones of the loss and of a gradient. streams: see `LanguageStage`. seconds: duration of the proof. is_kept:
    it was read from a cache.
    """

    packed: str | None
    cut: str | None
    alone: str | None
    unproven: str | None = None
    differences: tuple[float, float] = (0.0, 0.0)
    streams: int = 1
    seconds: float = 0.0
    is_kept: bool = False

    def __str__(self) -> str:
        """Summarise the proof in half a line."""
        when = "proven earlier" if self.is_kept else f"{self.seconds:.1f} s"
        if self.unproven is not None:
            return f"packed rows and stages could not be proven on a small copy ({self.unproven}; {when})"
        held = [name for name, why in (("packed rows", self.packed), ("stages", self.cut)) if why is None]
        failed = [f"{name} do not ({why})" for name, why in (("packed rows", self.packed), ("stages", self.cut)) if why]
        said = [f"{' and '.join(held)} train a small copy as transformers does"] if held else []
        return f"{'; '.join([*said, *failed])} ({when})"


class LanguageUnit(Unit, LanguageStage):
    """The language model: layers `embedding`, `layers.<i>`, `head` (final norm and language-model head)."""

    parts: tuple[str, ...] = ("model",)
    model: PreTrainedModel
    generating_attention: str | None
    """The attention implementation for `generate`, if it differs from the model's own."""
    proof: Proof | None = None
    """Proven properties of the model with the chosen attention (see `row_attention.choose_attention`)."""
    unpacked: str | None = None
    """The reason why every sample is a row and a microbatch of its own; None if samples share rows."""
    queries: Queries
    """The learned queries, if they are one of `parts`."""
    without_plans: str | None = None
    """The reason why the model does not attend by attention plans, if that was decided."""
    unsplit: str | None = None
    """The reason why ranks cannot share the tokens of a row, found by a trial (see `runtime.rank_trial`)."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        placeholder_ids: Mapping[str, int],
        before_language_model: BeforeLanguageModel | None = None,
        outputs: Mapping[str, int] | None = None,
        queries: Mapping[str, int] | None = None,
        decoder: str | None = None,
        positions: Positions | None = None,
        units_with_grids: Sequence[str] = (),
        extensions: Sequence[Extension] = (),
    ) -> None:
        """outputs: see `TextLayout`. queries: unit of `outputs` that uses learned queries → queries per item. decoder:
        path of the text model in a multimodal model. units_with_grids: the units whose grids `positions` or an
        extension reads. extensions: those that the family needs."""
        structure = find_structure(model)
        is_part = decoder is not None
        if not is_part:  # the text model has another name than the base in some families (Llama 4)
            decoder = structure.containers[-1] if model.base_model is model else model.base_model_prefix
        causal = _causal_in(model, decoder or "") if is_part and model.base_model is model else ""
        is_whole = is_part and not causal
        container = model.base_model_prefix if is_whole else structure.containers[-1].removeprefix(f"{causal}.")
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        layer, outputs, extensions = f"{name}.embedding", outputs or {}, list(extensions)
        listed = structure.blocks.removeprefix(f"{decoder}.")
        extensions += BlockInputs.recorded(model.get_submodule(decoder or ""), listed)
        if (by_length := RotaryLength.of(name, model.config.get_text_config())) is not None:
            extensions.append(by_length)
        crossing = next((each for each in extensions if isinstance(each, CrossAttention)), None)
        apart = None if crossing is None else crossing.unit
        merged = {unit: id_ for unit, id_ in placeholder_ids.items() if unit != apart}
        losses = {name: Loss(target_tokens)}
        if has_router_loss(model):
            in_all = RowCount(name, rows=count_routers(model))
            losses[f"{name}.router"] = Loss(in_all, router_weight(model))
            extensions.append(RouterLoss(f"{name}.router", cast(Any, model.config).num_experts_per_tok))
        if queries:
            with torch.device("meta"):
                extensions.insert(0, Queries(queries, width))
        super().__init__(
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in ("embedding", *blocks, "head")),
            weights=(
                *(Weight(f"{layer}.queries.{unit}", layer, "queries", unit) for unit in queries or ()),
                *name_weights(name, model, structure, "head", None),
            ),
            model=model,
            text=TextLayout(
                # In a multimodal model, the head runs after the module that contains encoders and text model.
                container=container,
                decoder=decoder or "",
                blocks=structure.blocks,
                placeholder_ids=merged,
                outputs=outputs,
                unembedded=(*merged.values(), *(outputs[unit] for unit in queries or ())),
                positions=positions,
                causal=causal,
            ),
            span=StageSpan(0, structure.num_blocks),
            extensions=extensions,
        )
        self.crossing = crossing
        self.before_language_model = before_language_model
        self.structure = structure
        self.width = width
        self.parts = ("model", "queries") if queries else ("model",)
        self.inputs = tuple(placeholder_ids)
        self.losses = losses
        self.generating_attention = None
        self._grids = frozenset(map(grid_part, units_with_grids))
        self._freeze_at_start()

    @property
    def packs_rows(self) -> bool:
        """True if samples may share a row."""
        return self.unpacked is None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Switch to an attention implementation that supports a KV cache, for `generate`."""
        own = self.model.config._attn_implementation
        if self.generating_attention is not None:
            self.model.set_attn_implementation(self.generating_attention)
        try:
            yield
        finally:
            if self.generating_attention is not None:
                self.model.set_attn_implementation(own)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        ids = torch.arange(tokens, device=device)[None] % self.config.vocab_size
        ids = without_placeholders(ids, [*self.text.placeholder_ids.values()])
        positions = torch.arange(tokens, device=device)[None]
        given = {"position_ids": positions, **self.attention_of([ids[0].cpu().numpy()])}
        if layer == 0:
            return ids, given
        width = self.width * self.streams + self._behind(layer)
        hidden = torch.randn(1, tokens, width, device=device)
        return hidden, {**given, "labels": ids} if layer == len(self.layers) - 1 else given

    def packed_example(self, layer: int, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make the input of a block like `example`, for a packed row of text samples with these token counts."""
        placeholders, count = [*self.text.placeholder_ids.values()], self.config.vocab_size
        ids = [without_placeholders(torch.arange(n) % count, placeholders).numpy() for n in lengths]
        samples = [EncodedSample("", own, own, sizes={self.unit: len(own)}) for own in ids]
        row = PackedRow.of(samples, self.unit, {}, self.text.positions)
        hidden = torch.randn(1, len(row.ids), self.width * self.streams + self._behind(layer), device=device)
        positions = row.position_ids.unsqueeze(-2).to(device)
        return hidden, {"position_ids": positions, **self.attention_over(samples)}

    def part_name(self, part: str) -> str:
        return self.unit if len(self.parts) == 1 else f"{self.unit}.{part}"

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield from super().pieces()
        if "queries" in self.parts:
            yield self.layers[0], "queries"

    def freeze(self) -> None:
        """Freeze the language model."""
        self.freeze_parts("model")

    def element_of_row(self, other: str, sample: EncodedSample, rows: int) -> NDArray[np.int64]:
        tokens, crossing = sample.sizes[self.unit], self.crossing
        if crossing is not None and other == crossing.unit:
            return crossing.token_of_rows(sample, tokens)
        if other == self.unit:
            beside = [] if crossing is None or rows == tokens else [crossing.token_of_rows(sample, tokens)]
            return np.concatenate([np.arange(tokens), *beside])
        if other in self.inputs:
            return np.flatnonzero(sample.input_ids == self.text.placeholder_ids[other])
        return token_places([sample], other, self.text.outputs[other])

    def reads(self, first: int, end: int) -> frozenset[str]:
        # The first stage reads ids, the last one labels; stages in between need ids to separate the samples of a row.
        return frozenset({TOKENS}) | self._grids

    def boundary(self, end: int, consumer: str) -> Boundary:
        crosses = consumer == self.unit and self.crossing is not None and self.crossing.passes(end - 1)
        count = partial(_rows_sent, consumer, self.crossing if crosses else None)
        return Boundary(self.width * self.streams + self._behind(end), self.row_dtype, count)

    def _behind(self, layer: int) -> int:
        """Return the number of columns that extensions append to the hidden states before a layer."""
        return sum(extension.width(layer - 1) for extension in self.extensions)

    def stage(self, first: int, end: int) -> LanguageStage:
        first_block, end_block = self._blocks(first, end)
        is_first, is_last = first == 0, end == len(self.layers)
        assert self.structure is not None
        stage = LanguageStage(
            unit=self.unit,
            layers=self.layers[first:end],
            weights=self._weights_between(first, end),
            model=slice_model(
                self.model,
                self.structure,
                first_block,
                end_block,
                keep_before=is_first,
                keep_after=is_last,
                stand_in=ShapePlaceholder,
            ),
            text=self.text,
            span=StageSpan(first_block, end_block, is_first, is_last),
            extensions=[each for each in self.extensions if is_first or not isinstance(each, nn.Module)],
        )
        stage.before_language_model = self.before_language_model
        stage.row_attention, stage.loss_chunk = self.row_attention, self.loss_chunk
        stage.token_loss, stage.pair_loss = self.token_loss, self.pair_loss
        stage.streams = self.streams
        return stage


def _causal_in(model: PreTrainedModel, decoder: str) -> str:
    """Return the path of the causal language model around the text model at `decoder`, inside a multimodal model that
    has no base; "" if there is none."""
    *parts, _ = decoder.split(".")
    paths = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    found = (
        path
        for path in paths
        if isinstance(inner := model.get_submodule(path), PreTrainedModel) and inner.get_output_embeddings() is not None
    )
    return next(found, "")


def target_tokens(sample: EncodedSample) -> int:
    """Return the number of tokens of a sample that have a loss."""
    return sample.target_tokens


def _rows_sent(unit: str, crossing: CrossAttention | None, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0) + (0 if crossing is None else crossing.count(sample))
