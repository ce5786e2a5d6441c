"""Language-model unit: its layers, weights, inputs and losses, and its cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import TOKENS, grid_part
from dilatant.models.core.cross_attention import CrossAttentionLayout, accept_cross_rows
from dilatant.models.core.passage import PassingBlock
from dilatant.models.core.slicing import slice_model
from dilatant.models.core.stage import Boundary, Loss
from dilatant.models.core.structure import find_structure
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_weights
from dilatant.models.language.language_stage import BeforeLanguageModel, LanguageStage
from dilatant.models.language.packed_row import PackedRow, Positions, token_places
from dilatant.models.language.proven_traits import Proof
from dilatant.models.language.queries import Queries
from dilatant.models.language.router_loss import count_routers, has_router_loss, router_weight
from dilatant.models.language.side_states import SideStates


class LanguageUnit(Unit, LanguageStage):
    """The language model: layers `embedding`, `layers.<i>`, `head` (final norm and language-model head)."""

    parts: tuple[str, ...] = ("model",)
    model: PreTrainedModel
    generating_attention: str | None
    """The attention implementation for `generate`, if it differs from the model's own."""
    proof: Proof | None = None
    """Proven properties of the model with the chosen attention (see `row_attention.choose_attention`)."""
    packs_rows: bool = True
    """True if samples may share a row; otherwise every sample is a microbatch of its own."""
    uncut: str | None = None
    """The reason why the model cannot be cut into stages; None if it can."""
    without_plans: str | None = None
    """The reason why the model does not attend by attention plans, if that was decided."""

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
        carried: SideStates | None = None,
        crossing: CrossAttentionLayout | None = None,
    ) -> None:
        """queries: unit of `outputs` that uses learned queries → queries per item. units_with_grids: the units whose
        grids `positions` or `crossing` reads."""
        if crossing is not None:
            accept_cross_rows(model)
        structure = find_structure(model)
        is_part = decoder is not None
        if (
            not is_part and model.base_model is model
        ):  # its text model has another name than its base (Llama 4)
            decoder = structure.containers[-1]
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        asked = None
        if queries:
            with torch.device("meta"):
                asked = Queries(queries, width)
        weights = name_weights(name, model, structure, "head", None)
        layer = f"{name}.embedding"
        own = tuple(Weight(f"{layer}.queries.{unit}", layer, "queries", unit) for unit in queries or ())
        super().__init__(
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in ("embedding", *blocks, "head")),
            weights=(*own, *weights),
            model=model,
            placeholder_ids=placeholder_ids,
            outputs=outputs or {},
            # In a multimodal model, the head runs after the module that contains encoders and text model.
            container=model.base_model_prefix if is_part else structure.containers[-1],
            before_language_model=before_language_model,
            queries=asked,
            decoder=decoder,
            positions=positions,
            grids=frozenset(map(grid_part, units_with_grids)),
            carried=carried,
            crossing=crossing,
            blocks_path=structure.blocks,
        )
        self.structure = structure
        self.width = width
        self.parts = ("model",) if asked is None else ("model", "queries")
        self.inputs = tuple(placeholder_ids)
        self.losses = {name: Loss(_target_tokens)}
        self.routers = f"{name}.router" if has_router_loss(model) else None
        if self.routers is not None:
            in_all = partial(_tokens_of_routers, name, count_routers(model))
            self.losses[self.routers] = Loss(in_all, router_weight(model))
        self.generating_attention = None
        self._freeze_at_start()

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
        positions = torch.arange(tokens, device=device)[None]
        given = {"position_ids": positions, **self.attention_of([ids[0].cpu().numpy()])}
        if layer == 0:
            return ids, given
        width = self.width + self._behind(layer)
        hidden = torch.randn(1, tokens, width, device=device)
        return hidden, {**given, "labels": ids} if layer == len(self.layers) - 1 else given

    def packed_example(
        self, layer: int, lengths: Sequence[int], device: torch.device
    ) -> tuple[Tensor, dict[str, Any]]:
        """Make the input of a block like `example`, for a packed row of text samples with these token counts."""
        ids = [np.arange(length) % self.config.vocab_size for length in lengths]
        samples = [EncodedSample("", own, own, sizes={self.unit: len(own)}) for own in ids]
        row = PackedRow.of(samples, self.unit, {}, self.positions)
        hidden = torch.randn(1, len(row.ids), self.width + self._behind(layer), device=device)
        positions = row.position_ids.unsqueeze(-2).to(device)
        return hidden, {"position_ids": positions, **self.attention_over(samples)}

    def part_name(self, part: str) -> str:
        if self.queries is None:
            return self.unit
        return f"{self.unit}.{part}"

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield from super().pieces()
        if self.queries is not None:
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
        if other in self.placeholder_ids:
            return np.flatnonzero(sample.input_ids == self.placeholder_ids[other])
        return token_places([sample], other, self.outputs[other])

    def reads(self, first: int, end: int) -> frozenset[str]:
        # The first stage reads ids, the last one labels; stages in between need ids to separate the samples of a row.
        return frozenset({TOKENS}) | self.grids

    def boundary(self, end: int, consumer: str) -> Boundary:
        count = partial(_tokens, consumer)
        if consumer == self.unit and self.crossing is not None and self.crossing.passes(end - 1):
            count = partial(_tokens_and_rows, consumer, self.crossing)
        return Boundary(self.width + self._behind(end), self.row_dtype, count)

    def _behind(self, layer: int) -> int:
        """Return the width of the per-token side states that are appended to the hidden states before a layer."""
        return 0 if self.carried is None else self.carried.width(layer - 1)

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
                passes=True,
            ),
            placeholder_ids=self.placeholder_ids,
            outputs=self.outputs,
            container=self.container,
            before_language_model=self.before_language_model,
            row_attention=self.row_attention,
            is_first=is_first,
            is_last=is_last,
            loss_chunk=self.loss_chunk,
            routers=self.routers,
            queries=self.queries if is_first else None,
            decoder=self.decoder,
            positions=self.positions,
            grids=self.grids,
            carried=self.carried,
            crossing=self.crossing,
            blocks_before=first_block,
            blocks_path=self.blocks_path,
        )
        if first_block == end_block:
            stage.passing = PassingBlock(self.blocks[min(first_block, len(self.blocks) - 1)])
        return stage


def _target_tokens(sample: EncodedSample) -> int:
    return sample.target_tokens


def _tokens(unit: str, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0)


def _tokens_and_rows(unit: str, crossing: CrossAttentionLayout, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0) + crossing.count(sample)


def _tokens_of_routers(unit: str, routers: int, sample: EncodedSample) -> int:
    return routers * sample.sizes.get(unit, 0)
