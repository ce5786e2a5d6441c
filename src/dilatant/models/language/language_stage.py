"""Stages of the language model: from packed rows to the loss, and to rows for generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.attention.masks.placement import place_row
from dilatant.data.sample import EncodedSample
from dilatant.models.core.cross_attention import STATES, CrossAttentionLayout
from dilatant.models.core.loss import cross_entropy, divide_loss, positions_with_targets, shift_labels
from dilatant.models.core.passage import PassingBlock, run_between
from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.stage import Predictions, Stage, StageInputs, StageOutput, StepData
from dilatant.models.core.weights import Weight
from dilatant.models.language.chunked_head import (
    LOSS_CHUNK,
    chunked_loss,
    chunked_predictions,
    head_of,
    logits_of,
)
from dilatant.models.language.cross_attention_rows import LocalCrossRows
from dilatant.models.language.merge import find_places, merge_rows, without_placeholders
from dilatant.models.language.packed_row import PackedRow, Positions
from dilatant.models.language.queries import Queries, number_queries
from dilatant.models.language.router_loss import router_loss
from dilatant.models.language.side_states import DeepStack, PerLayer, SideStates
from dilatant.models.parallel.tensor_parallel import VocabularyShard

BeforeLanguageModel = Callable[[dict[str, Tensor], StageInputs], StageInputs]


class PlansAttention(Protocol):
    """Interface that computes the attention keywords of every stage (see `row_attention.RowAttention`)."""

    @property
    def placement(self) -> str:
        """The policy by which context-parallel ranks divide a row (see `attention.masks.placement`)."""
        ...

    def __call__(
        self,
        samples: Sequence[Any],
        padding: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Return the keywords for a packed row of samples with these `input_ids`. padding: padding tokens before each
        sample. prefixes: tokens of each sample before its first target (default: all)."""
        ...

    def padded(self, input_ids: Any, attention_mask: Any | None) -> Mapping[str, Any]:
        """Return the keywords for a padded batch, [batch, tokens] both."""
        ...


@dataclass(frozen=True, slots=True)
class MultimodalOutput:
    """The output of the last stage. loss: scalar, or None without labels. logits: [batch, tokens, vocabulary], or None
    if not requested. hidden: [batch, tokens, hidden], the head's input, if requested. predicted: int64 [positions], the
    likeliest next tokens, if requested. token_losses: fp32 [targets] of a packed row, undivided and detached."""

    loss: Tensor | None
    logits: Tensor | None
    hidden: Tensor | None = None
    predicted: Tensor | None = None
    token_losses: Tensor | None = None

    def __getitem__(self, key: Any) -> Any:
        """Access by name, or by index among the fields that are not None, as transformers' Trainer does."""
        if isinstance(key, str):
            return getattr(self, key)
        values = (self.loss, self.logits, self.hidden, self.predicted, self.token_losses)
        return tuple(value for value in values if value is not None)[key]


class LanguageStage(Stage):
    """Layers of the language model.

    model: slice of the causal language model. placeholder_ids: unit → the id of the tokens that its rows replace.
    outputs: unit that takes rows from here → the id of the tokens whose last hidden states it takes. queries: learned
    inputs at the tokens of some of these units on the first stage; their ids are outside the vocabulary. container:
    path of the module that holds the blocks. routers: name of the routers' load-balancing loss; None without one.
    loss_chunk: see `chunked_head.chunked_loss`. decoder: path of the text model in a multimodal model; None if it is
    the base model. positions: see `PackedRow.of`; grids: the parts of samples that `positions` reads. blocks_path: path
    of the list of blocks. carried: the per-token side states after the hidden states; blocks_before: number of blocks
    on earlier stages. crossing: the cross-attention layout.

    before_language_model(rows, inputs) → inputs: called by the first stage before rows are merged; may replace
    "input_ids", or merge rows itself and return "inputs_embeds" [batch, tokens, hidden].
    """

    row_attention: PlansAttention | None
    """Computes the attention keywords of every stage from the `input_ids` of a packed row's samples; None if positions
    alone separate samples. Set by `row_attention.use_row_attention`."""
    vocabulary: VocabularyShard | None = None
    """This rank's shard of the vocabulary, if the head is tensor parallel: computes loss and argmax over all ranks."""

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        model: PreTrainedModel,
        placeholder_ids: Mapping[str, int],
        outputs: Mapping[str, int],
        container: str,
        before_language_model: BeforeLanguageModel | None = None,
        row_attention: PlansAttention | None = None,
        is_first: bool = True,
        is_last: bool = True,
        loss_chunk: int | None = LOSS_CHUNK,
        routers: str | None = None,
        queries: Queries | None = None,
        decoder: str | None = None,
        positions: Positions | None = None,
        grids: frozenset[str] = frozenset(),
        carried: SideStates | None = None,
        crossing: CrossAttentionLayout | None = None,
        blocks_before: int = 0,
        blocks_path: str = "",
    ) -> None:
        super().__init__(unit, layers, weights)
        self.model = model
        self.queries = queries
        self.placeholder_ids = dict(placeholder_ids)
        self.outputs = dict(outputs)
        self.container = container
        self.before_language_model = before_language_model
        self.row_attention = row_attention
        self.is_first = is_first
        self.is_last = is_last
        self.loss_chunk = loss_chunk
        self.routers = routers
        self.decoder = decoder
        self.positions = positions
        self.grids = grids
        self.carried = carried
        self.crossing = crossing
        self.blocks_before = blocks_before
        self.blocks_path = blocks_path
        self.passing: PassingBlock | None = None  # the block of a stage without blocks

    def attention_of(
        self,
        samples: Sequence[Any],
        padding: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Return the attention keywords of every stage for a packed row (see `PlansAttention`)."""
        return {} if self.row_attention is None else self.row_attention(samples, padding, prefixes)

    def attention_over(self, packed: Sequence[EncodedSample]) -> Mapping[str, Any]:
        """Return the attention keywords of every stage for a row of whole samples."""
        ids = [sample.input_ids for sample in packed]
        return self.attention_of(ids, prefixes=[sample.prefix_tokens for sample in packed])

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Run the samples packed in one row; under context parallelism, this rank's tokens of it."""
        packed = [data.samples[sample] for sample in samples]
        # Ids and targets are searched on the host, because reading them from the device would block.
        row = PackedRow.of(packed, self.unit, self.outputs, self.positions)
        given = {name: rows for name, rows in inbound.items() if name != self.unit and rows.shape[0]}
        attention = self.attention_over(packed)
        arrived = inbound.get(self.unit)
        query_of = None
        if self.is_first and self.queries is not None:
            query_of = number_queries(row.ids.numpy(), self.outputs, self.queries.counts)
        if self.context.ranks is not None:
            assert self.row_attention is not None
            row = row.shared(
                attention[PLAN_KEYWORD],
                self.context.ranks,
                [*self.placeholder_ids.values()],
                self.row_attention.placement,
            )
            assert row.share is not None
            query_of = None if query_of is None else row.share.take(query_of, -1)
            attention = {PLAN_KEYWORD: row.share}
            # Include units without rows on this rank, so that all ranks differentiate the same graph.
            having = [n for n in inbound if n != self.unit and any(sample.sizes.get(n) for sample in packed)]
            given = {name: inbound[name] for name in having}
        crossing = None if self.crossing is None else LocalCrossRows.of(self.crossing, packed, row)
        if crossing is not None:
            if self.is_first:
                crossing.rows = given.pop(crossing.unit, None)
            elif crossing.passes(self.blocks_before):
                assert arrived is not None
                arrived = crossing.split(arrived)
            # Tensor-parallel ranks communicate in every block, even if there are no encoder rows.
            seen = crossing.look(self.blocks_before, self._end_block, self.shards is not None)
            attention = attention if seen is None else {**attention, STATES: seen}
        wanted = positions_with_targets(row.targets) if data.predicts and self.is_last else None
        router_logits: list[Tensor] | None = None if self.routers is None or data.predicts else []
        output = self(
            to_device(row.ids[None], data.device) if self.is_first else None,
            given,
            None if arrived is None or self.is_first else row.padded(arrived)[None],
            position_ids=to_device(row.position_ids.unsqueeze(-2), data.device),
            targets=row.targets if self.is_last else None,
            loss_denominator=data.counts[self.unit] if self.is_last else None,
            return_logits=False,
            return_hidden=bool(self.outputs) and not data.predicts,
            lengths=row.lengths if row.share is None else None,
            sample_ids=[sample.id for sample in packed] if row.share is None else None,
            places=find_places(row.ids.numpy(), self.merged_ids, data.device) if self.is_first else None,
            predicted_at=None if wanted is None else to_device(wanted, data.device),
            router_logits=router_logits,
            query_of=query_of,
            **attention,
        )
        losses = {}
        if router_logits:
            assert self.routers is not None
            logits = [row.unpadded(each) for each in router_logits]
            add_up = None if row.share is None else row.share.sum
            chosen = self.model.config.num_experts_per_tok
            of_routers = router_loss(logits, row.sample_of, row.lengths, chosen, add_up)
            losses[self.routers] = of_routers / data.counts[self.routers]
        if isinstance(output, Tensor):
            hidden = row.unpadded(output[0])
            if crossing is not None and crossing.passes(self._end_block):
                hidden = crossing.join(hidden)
            return StageOutput(hidden, losses)
        if wanted is not None:
            assert output.token_losses is not None
            at = wanted.to(data.device)
            losses_there = row.whole_row(output.token_losses, at)
            return StageOutput(predicted=Predictions(row.whole_row(output.predicted, at), losses_there))
        rows = None
        if output.hidden is not None:
            rows = {unit: output.hidden[0, at.to(data.device)] for unit, at in row.outputs.items()}
        assert output.token_losses is not None
        sample_of = row.sample_of[positions_with_targets(row.targets)].to(data.device)
        by_sample = output.token_losses.new_zeros(len(samples)).index_add_(0, sample_of, output.token_losses)
        return StageOutput(rows, {self.unit: output.loss, **losses}, sample_losses={self.unit: by_sample})

    def owners(self, data: StepData, samples: tuple[int, ...], size: int) -> list[NDArray[np.integer]]:
        packed = [data.samples[sample] for sample in samples]
        mask = self.attention_over(packed)[PLAN_KEYWORD].mask
        lengths = [sample.sizes[self.unit] for sample in packed]
        assert self.row_attention is not None
        return np.split(place_row(mask, size, self.row_attention.placement).owners, np.cumsum(lengths)[:-1])

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return SampleLayout(
            packed=True, lengths=tuple(data.samples[sample].sizes[self.unit] for sample in samples)
        )

    @property
    def undeferred(self) -> tuple[nn.Module, ...]:
        """The head, because its weight gradient needs tensors as large as all logits."""
        head = self.model.get_output_embeddings() if self.is_last else None
        return () if head is None else (head,)

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        if not value.is_floating_point():
            return self(value, **given)
        output = self(None, None, value, return_logits=False, **given)
        return output if isinstance(output, Tensor) else output.loss

    def forward(
        self,
        input_ids: Tensor | None = None,
        rows: Mapping[str, Tensor] | None = None,
        hidden: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        loss_denominator: float | Tensor | None = None,
        return_logits: bool = True,
        return_hidden: bool = False,
        predicted_at: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
        router_logits: list[Tensor] | None = None,
        query_of: Tensor | None = None,
        **attention_kwargs: Any,
    ) -> Tensor | MultimodalOutput:
        """Run the stage on a batch or a packed row.

        The first stage takes `input_ids` [batch, tokens] and `rows`, unit → [encoder tokens, hidden]; later stages take
        `hidden` [batch, tokens, hidden]. Positions, mask and attention_kwargs go to every stage; an attention plan
        among them replaces the mask. Returns hidden states, or on the last stage the loss, logits and, if requested,
        the head's input.

        predicted_at: int64 [positions] of a packed row; returns only the likeliest next tokens there. places: see
        `merge_rows`; query_of: see `Queries.put`. router_logits: a list that collects the logits of each router here,
        [tokens, experts]. targets: int64 [tokens] of a packed row, shifted labels. Targets (and labels, if the
        `lengths` of a packed row are passed) may be on the host, so that selecting positions does not wait for the
        device. Raises UserError if rows do not fit.
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
                query_of=query_of,
            )
        run: dict[str, Any] = {
            "inputs_embeds": hidden,
            "position_ids": position_ids,
            "attention_mask": None if PLAN_KEYWORD in attention_kwargs else attention_mask,
            "use_cache": False,
            **attention_kwargs,
        }
        behind: Tensor | None = None
        decoder = self._decoder
        carried, end = self.carried, self._end_block
        if self.crossing is not None:
            decoder = self.crossing.prepare(decoder, self.blocks_before)
        if carried is not None:
            assert hidden is not None
            width = hidden.shape[-1] - carried.width(self.blocks_before)
            run["inputs_embeds"], behind = hidden[..., :width], hidden[..., width:]
            run |= carried.into(behind, self.blocks_before, end, self.shards)
            decoder = carried.prepare(decoder)
        if router_logits is not None:
            run["output_router_logits"] = True
        output, hidden = run_between(
            decoder,
            cast(nn.ModuleList, self.model.get_submodule(self.blocks_path)),
            run,
            enters=not self.is_first,
            leaves=not self.is_last,
            passing=self.passing,
            behind=self.behind_blocks,
        )
        if router_logits is not None:
            router_logits += output.router_logits or ()
        if not self.is_last:
            if carried is None:
                return hidden
            assert behind is not None
            return torch.cat([hidden, carried.beyond(behind, run, end, self.shards)], dim=-1)
        # The head runs only at targets, because the vocabulary is large.
        head = head_of(self.model, self.container)
        predicted = loss = logits = token_losses = None
        of_targets = cross_entropy if self.vocabulary is None else self.vocabulary.cross_entropy
        if predicted_at is not None:
            assert targets is not None
            argmax = {} if self.vocabulary is None else {"argmax": self.vocabulary.argmax}
            there = to_device(targets, hidden.device)[predicted_at]
            chosen = hidden[0, predicted_at]
            predicted, token_losses = chunked_predictions(
                head, chosen, there, self.loss_chunk, cross_entropy=of_targets, **argmax
            )
        elif labels is not None or targets is not None:
            if targets is None:
                assert labels is not None
                packed = lengths if labels.shape[0] == 1 and attention_mask is None else None
                targets = shift_labels(labels, position_ids, attention_mask, packed).flatten()
            if return_logits:
                logits = logits_of(head, hidden)
                losses = cross_entropy(logits.flatten(0, 1), to_device(targets, hidden.device))
            else:
                at = positions_with_targets(targets)
                chosen = hidden.flatten(0, 1)[to_device(at, hidden.device)]
                wanted = to_device(targets[at], hidden.device)
                losses = chunked_loss(head, chosen, wanted, self.loss_chunk, of_targets)
                token_losses = losses.detach()
            loss = divide_loss(losses.sum(), targets, loss_denominator)
        elif return_logits:
            logits = logits_of(head, hidden)
        return MultimodalOutput(loss, logits, hidden if return_hidden else None, predicted, token_losses)

    @property
    def _end_block(self) -> int:
        """The index, in the whole model, of the block after this stage's last block."""
        return self.blocks_before + len(cast(Any, self.model.get_submodule(self.blocks_path)))

    @property
    def merged_ids(self) -> dict[str, int]:
        """Units whose rows are merged into the text → their placeholder ids."""
        crossing = None if self.crossing is None else self.crossing.unit
        return {unit: id_ for unit, id_ in self.placeholder_ids.items() if unit != crossing}

    @property
    def behind_blocks(self) -> nn.Module | None:
        """The final norm under DeepStack, because the text model adds DeepStack rows to hidden states after blocks."""
        return cast(Any, self._decoder).norm if isinstance(self.carried, DeepStack) else None

    @property
    def _decoder(self) -> nn.Module:
        """The text model, or this stage's slice of it."""
        return self.model.base_model if self.decoder is None else self.model.get_submodule(self.decoder)

    @property
    def _outside_vocabulary(self) -> dict[str, int]:
        """Unit → the id of its tokens, for tokens whose embeddings are not looked up."""
        asked = () if self.queries is None else self.queries.counts
        return {**self.merged_ids, **{name: self.outputs[name] for name in asked}}

    def embed(
        self,
        input_ids: Tensor,
        rows: Mapping[str, Tensor],
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
        query_of: Tensor | None = None,
        **inputs: Tensor | None,
    ) -> Tensor:
        """Return token embeddings with encoder rows and queries merged in: [batch, tokens, hidden]."""
        if self.before_language_model is not None:
            given = {"input_ids": input_ids, **{k: v for k, v in inputs.items() if v is not None}}
            given = self.before_language_model(dict(rows), given)
            if given.get("inputs_embeds") is not None:
                return given["inputs_embeds"]
            if given["input_ids"] is not input_ids:
                input_ids, places = given["input_ids"], None
        look_up = self.model.get_input_embeddings()
        embeddings = look_up(without_placeholders(input_ids, self._outside_vocabulary))
        if self.queries is not None:
            if query_of is None:
                ids = input_ids.flatten().cpu().numpy()
                query_of = number_queries(ids, self.outputs, self.queries.counts)
            embeddings = self.queries.put(embeddings, query_of, self.context.ranks is not None)
        width = embeddings.shape[-1]
        deep = isinstance(self.carried, DeepStack)
        first = {name: each[:, :width] for name, each in rows.items()} if deep else rows
        merged = merge_rows(embeddings, input_ids, self.merged_ids, first, lengths, sample_ids, places)
        if self.carried is None:
            return merged
        if isinstance(self.carried, PerLayer):
            padding = self.carried.config.pad_token_id
            texts = without_placeholders(input_ids, self._outside_vocabulary, padding)
            behind = self.carried.at_start(self._decoder, texts, merged)
            return torch.cat([merged, behind], dim=-1)
        behind = embeddings.new_zeros(*embeddings.shape[:2], self.carried.width(0))
        besides = {name: each[:, width:] for name, each in rows.items()}
        behind = merge_rows(behind, input_ids, self.merged_ids, besides, lengths, sample_ids, places)
        return torch.cat([merged, behind], dim=-1)
