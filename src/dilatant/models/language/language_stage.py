"""Stages of the language model: from packed rows to the loss, and to rows for generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.attention.masks.packing import share_beginnings
from dilatant.attention.masks.placement import place_row
from dilatant.data.sample import EncodedSample
from dilatant.models.core.loss import IGNORED, cross_entropy, divide_loss, positions_with_targets, shift_labels
from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.slicing import run_slice
from dilatant.models.core.stage import Predictions, Stage, StageInputs, StageOutput, StepData
from dilatant.models.core.weights import Weight
from dilatant.models.language.chunked_head import (
    LOSS_CHUNK,
    Vocabulary,
    chunked_loss,
    chunked_predictions,
    head_of,
    logits_of,
)
from dilatant.models.language.extension import Extension, LanguageForward, StageSpan, TextLayout
from dilatant.models.language.merge import find_places, merge_rows, without_placeholders
from dilatant.models.language.packed_row import PackedRow
from dilatant.models.language.pair_loss import PairLoss
from dilatant.models.language.token_loss import TokenLoss
from dilatant.models.parallel.shared_samples import share_by_size
from dilatant.models.parallel.tensor_parallel import VocabularyShard

BeforeLanguageModel = Callable[[dict[str, Tensor], StageInputs], StageInputs]


class PlansAttention(Protocol):
    """Interface that computes the attention keywords of every stage (see `row_attention.RowAttention`)."""

    @property
    def placement(self) -> str:
        """The policy by which context-parallel ranks divide a row (see `attention.masks.placement`)."""

    def __call__(
        self, samples: Sequence[Any], padding: Sequence[int] | None = None, prefixes: Sequence[int] | None = None
    ) -> Mapping[str, Any]:
        """Return the keywords for a packed row of samples with these `input_ids`. padding: padding tokens before each
        sample. prefixes: tokens of each sample before its first target (default: all)."""

    def padded(self, input_ids: Any, attention_mask: Any | None) -> Mapping[str, Any]:
        """Return the keywords for a padded batch, [batch, tokens] both."""


@dataclass(frozen=True, slots=True)
class MultimodalOutput:
    """The output of the last stage. loss: scalar, or None without labels. logits: [batch, tokens, vocabulary], or None
    if not requested."""

    loss: Tensor | None
    logits: Tensor | None

    def __getitem__(self, key: Any) -> Any:
        """Access by name, or by index among the fields that are not None, as transformers' Trainer does."""
        if isinstance(key, str):
            return getattr(self, key)
        return tuple(value for value in (self.loss, self.logits) if value is not None)[key]


class LanguageStage(Stage):
    """Layers of the language model.

    model: slice of the causal language model. text: its modules and token ids. span: the stage's blocks. extensions:
    the optional features that the model needs; those with weights are modules of this stage, too.
    """

    row_attention: PlansAttention | None = None
    """Computes the attention keywords of every stage from the `input_ids` of a packed row's samples; None if positions
    alone separate samples. Set by `row_attention.use_row_attention`."""
    vocabulary: Vocabulary | VocabularyShard = Vocabulary()
    """Computes loss and argmax from logits; if the head is tensor parallel, over all ranks' shards."""
    loss_chunk: int | None = LOSS_CHUNK
    """See `chunked_head.chunked_loss`."""
    token_loss: TokenLoss | None = None
    """The loss of training steps, if it is not the cross entropy; see `MultimodalModel.use_loss`."""
    pair_loss: PairLoss | None = None
    """The loss of training steps on pairs; see `MultimodalModel.use_preferences`."""
    streams: int = 1
    """Number of vectors that pass between blocks for each token (several with hyper-connections; Zhu et al. 2024)."""
    before_language_model: BeforeLanguageModel | None = None
    """before_language_model(rows, inputs) → inputs: called by the first stage before rows are merged; may replace
    "input_ids", or merge rows itself and return "inputs_embeds" [batch, tokens, hidden]."""

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        model: PreTrainedModel,
        text: TextLayout,
        span: StageSpan,
        extensions: Sequence[Extension] = (),
    ) -> None:
        super().__init__(unit, layers, weights)
        self.model = model
        self.text = text
        self.span = span
        self.extensions = list(extensions)
        for extension in extensions:
            if isinstance(extension, nn.Module):
                self.add_module(extension.part, extension)

    def attention_of(
        self, samples: Sequence[Any], padding: Sequence[int] | None = None, prefixes: Sequence[int] | None = None
    ) -> Mapping[str, Any]:
        """Return the attention keywords of every stage for a packed row (see `PlansAttention`)."""
        return {} if self.row_attention is None else self.row_attention(samples, padding, prefixes)

    def attention_over(self, packed: Sequence[EncodedSample]) -> Mapping[str, Any]:
        """Return the attention keywords of every stage for a row of whole samples; answers of a pair are kept apart."""
        sequences = [sample.sequences() for sample in packed]
        alone = [each for of_sample in sequences for each in of_sample]
        keywords = self.attention_of(
            [each.input_ids for each in alone], prefixes=[each.prefix_tokens for each in alone]
        )
        shared = [sample.shared_tokens for sample in packed]
        if PLAN_KEYWORD not in keywords or not any(shared):
            return keywords
        lengths = [[len(each.input_ids) for each in of_sample] for of_sample in sequences]
        join = partial(share_beginnings, lengths=lengths, shared=shared)
        return {**keywords, PLAN_KEYWORD: keywords[PLAN_KEYWORD].derived(join)}

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Run the samples packed in one row; under context parallelism, this rank's tokens of it."""
        own = self.chosen(data, samples)
        packed = [data.samples[sample] for sample in own] or [self._dummy()]
        forward = self._begin({}, inbound.get(self.unit), **self.attention_over(packed))
        # Units without rows on this rank are included, so that all ranks of the stage differentiate the same graph.
        having = [name for name in inbound if any(data.samples[sample].sizes.get(name) for sample in samples)]
        forward.rows = {name: inbound[name] for name in having if name != self.unit}
        # Ids and targets are searched on the host, because reading them from the device would block.
        forward.row = PackedRow.of(packed, self.unit, self.text.outputs, self.text.positions)
        forward.data, forward.samples, forward.is_part = data, packed, self.context.size > 1
        if self.training and not data.predicts:
            forward.draws = partial(self.draws, data, samples)
        for extension in self.extensions:
            extension.begin(forward)
        row = forward.row = forward.row if own else replace(forward.row, sample_of=forward.row.sample_of[:0])
        forward.keywords["position_ids"] = to_device(row.position_ids.unsqueeze(-2), data.device)
        if self.span.is_first:
            forward.ids = to_device(row.ids[None], data.device)
            lengths = row.lengths if row.share is None else None
            names = [sample.id for sample in packed] if row.share is None else None
            places = find_places(row.ids.numpy(), self.text.placeholder_ids, data.device)
            forward.hidden = self._embed(forward, lengths, names, places)
        else:
            assert forward.hidden is not None
            forward.hidden = row.padded(forward.hidden)[None]
        hidden = self._run_blocks(forward)
        if not self.span.is_last:
            rows = row.unpadded(hidden[0])
            for extension in self.extensions:
                rows = extension.send(forward, rows)
            return StageOutput(rows, forward.losses)
        # The head runs only at targets, because the vocabulary is large.
        with_target = positions_with_targets(row.targets)
        at = to_device(with_target, hidden.device)
        targets = to_device(row.targets[with_target], hidden.device)
        if data.predicts:
            tokens, losses = chunked_predictions(self.head, hidden[0, at], targets, self.loss_chunk, self.vocabulary)
            return StageOutput(predicted=Predictions(row.whole_row(tokens, at), row.whole_row(losses, at)))
        numbers = torch.tensor([samples.index(sample) for sample in own], dtype=torch.int64)
        sample_of = to_device(numbers[row.sample_of[with_target]], hidden.device)
        at_targets = torch.stack([row.sample_of, row.index_in_sample + 1], dim=1)[with_target]
        losses = self._losses(self.head, hidden[0, at], targets, packed, at_targets)
        if self.pair_loss is not None and own:
            total, sums = self.pair_loss(losses, row, with_target, packed)
            loss = divide_loss(total, row.targets, data.counts[self.unit])
            measured = {name: each / data.counts[name] for name, each in sums.items()}
            return StageOutput(losses={self.unit: loss, **measured, **forward.losses})
        loss = divide_loss(losses.sum(), row.targets, data.counts[self.unit])
        by_sample: dict[str, Tensor] = {}
        if self.token_loss is None or self.token_loss.is_per_token:
            summed = losses.new_zeros(len(samples)).index_add_(0, sample_of, losses.detach())
            by_sample = {self.unit: summed}
        outputs = {unit: hidden[0, to_device(at, hidden.device)] for unit, at in row.outputs.items()}
        return StageOutput(outputs or None, {self.unit: loss, **forward.losses}, sample_losses=by_sample)

    def _losses(
        self, head: PreTrainedModel, hidden: Tensor, targets: Tensor, packed: Sequence[EncodedSample], places: Tensor
    ) -> Tensor:
        """Return the losses of the positions with a target, fp32, to be summed. hidden: [positions, width].
        targets: int64 [positions]. places: int64 [positions, 2], on the host: the target's sample in `packed`, and the
        target's index in it."""
        own = self.token_loss
        if own is None:
            return chunked_loss(head, hidden, targets, self.loss_chunk, self.vocabulary.cross_entropy)
        if not len(targets):  # it may be undefined there; the graph stays that of the other ranks
            return hidden.float().sum(-1)
        counts = torch.tensor([sample.target_tokens for sample in packed])
        known = to_device(torch.cat([counts[places[:, :1]], places], dim=1), hidden.device)
        about = torch.cat([targets[:, None], known], dim=1)
        if own.is_of_hidden:
            return own(self.vocabulary.whole, packed, hidden, about)
        return chunked_loss(head, hidden, about, self.loss_chunk, partial(own, self.vocabulary.whole, packed))

    def owners(self, data: StepData, samples: tuple[int, ...], size: int, groups: int = 1) -> list[NDArray[np.integer]]:
        if groups > 1:
            return self._owners_in_groups(data, samples, size // groups, groups)
        packed = [data.samples[sample] for sample in samples]
        mask = self.attention_over(packed)[PLAN_KEYWORD].mask
        lengths = [sample.sizes[self.unit] for sample in packed]
        assert self.row_attention is not None
        return np.split(place_row(mask, size, self.row_attention.placement).owners, np.cumsum(lengths)[:-1])

    def _owners_in_groups(
        self, data: StepData, samples: tuple[int, ...], each: int, groups: int
    ) -> list[NDArray[np.integer]]:
        """Return `owners` for groups of `each` parts, which run whole samples with about equally many tokens."""
        lengths = [data.samples[sample].sizes[self.unit] for sample in samples]
        group_of = [int(group[0]) for group in share_by_size(lengths, groups)]
        found: dict[int, NDArray[np.integer]] = {}
        for group in sorted(set(group_of)):
            own = tuple(sample for sample, of_sample in zip(samples, group_of) if of_sample == group)
            if each > 1:
                parts = self.owners(data, own, each)
            else:
                parts = [np.zeros(data.samples[sample].sizes[self.unit], np.int64) for sample in own]
            found |= {sample: group * each + part for sample, part in zip(own, parts)}
        return [found[sample] for sample in samples]

    def chosen(self, data: StepData, samples: tuple[int, ...]) -> tuple[int, ...]:
        if self.context.groups == 1:
            return samples
        each = self.context.size // self.context.groups
        owners = self.owners(data, samples, self.context.size, self.context.groups)
        group = self.context.index // each
        return tuple(sample for sample, parts in zip(samples, owners) if parts[0] // each == group)

    def _dummy(self) -> EncodedSample:
        """Return the sample that a rank without samples runs, so that it computes for the experts of other ranks."""
        number = next(number for number in count() if number not in self.text.placeholder_ids.values())
        return EncodedSample("", np.array([number]), np.array([IGNORED]), sizes={self.unit: 1})

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return SampleLayout(packed=True, lengths=tuple(data.samples[sample].sizes[self.unit] for sample in samples))

    @property
    def undeferred(self) -> tuple[nn.Module, ...]:
        """The head, because its weight gradient needs tensors as large as all logits."""
        head = self.model.get_output_embeddings() if self.span.is_last else None
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
        labels: Tensor | None = None,
        loss_denominator: float | Tensor | None = None,
        return_logits: bool = True,
        **keywords: Any,
    ) -> Tensor | MultimodalOutput:
        """Run the stage on a batch. Return hidden states or, on the last stage, the loss (see
        `MultimodalModel.forward`) and logits, if requested. Inputs and keywords: see `hidden_states`."""
        hidden = self.hidden_states(input_ids, rows, hidden, **keywords)
        if not self.span.is_last:
            return hidden
        logits = logits_of(self.head, hidden) if return_logits else None
        if labels is None:
            return MultimodalOutput(None, logits)
        positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
        packed = keywords.get("lengths") if labels.shape[0] == 1 and mask is None else None
        targets = shift_labels(labels, positions, mask, packed).flatten()
        if logits is not None:
            losses = cross_entropy(logits.flatten(0, 1), to_device(targets, hidden.device))
        else:
            at = positions_with_targets(targets)
            chosen = hidden.flatten(0, 1)[to_device(at, hidden.device)]
            targets_there = to_device(targets[at], hidden.device)
            losses = chunked_loss(self.head, chosen, targets_there, self.loss_chunk, self.vocabulary.cross_entropy)
        return MultimodalOutput(divide_loss(losses.sum(), targets, loss_denominator), logits)

    def hidden_states(
        self,
        input_ids: Tensor | None = None,
        rows: Mapping[str, Tensor] | None = None,
        hidden: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Run the stage on a batch without the head: [batch, tokens, hidden].

        The first stage takes `input_ids` [batch, tokens] and `rows`, unit → [encoder tokens, hidden]; later stages take
        `hidden` [batch, tokens, hidden]. keywords (position_ids, attention_mask, those of attention) go to every stage;
        an attention plan among them replaces the mask. lengths and sample_ids: see `merge_rows`. Raises UserError if
        rows do not fit.
        """
        forward = self._begin(rows or {}, hidden, **keywords)
        forward.ids = input_ids
        if self.span.is_first:
            forward.hidden = self._embed(forward, lengths, sample_ids)
        return self._run_blocks(forward)

    def embed(self, input_ids: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Return token embeddings with encoder rows and queries merged in: [batch, tokens, hidden]."""
        forward = self._begin(rows, None)
        forward.ids = input_ids
        return self._embed(forward)

    @property
    def head(self) -> PreTrainedModel:
        """The model that computes logits of hidden states."""
        return head_of(cast(PreTrainedModel, self.model.get_submodule(self.text.causal)), self.text.container)

    @property
    def _decoder(self) -> nn.Module:
        """The text model, or this stage's slice of it."""
        return self.model.get_submodule(self.text.decoder)

    @property
    def block_list(self) -> nn.Module:
        return self.model.get_submodule(self.text.blocks)

    def _begin(self, rows: Mapping[str, Tensor], hidden: Tensor | None, **keywords: Any) -> LanguageForward:
        return LanguageForward(self.text, self.span, self._decoder, self.shards, dict(rows), hidden, keywords)

    def _run_blocks(self, forward: LanguageForward) -> Tensor:
        """Run the blocks, and on the last stage the final norm: [batch, tokens, width]."""
        for extension in self.extensions:
            extension.enter(forward)
        keywords = {"attention_mask": None, "position_ids": None, "use_cache": False, **forward.keywords}
        if PLAN_KEYWORD in keywords:
            keywords["attention_mask"] = None
        assert forward.hidden is not None
        width = forward.hidden.shape[-1] // (1 if self.span.is_first else self.streams)
        with forward.closing:
            hidden = run_slice(
                lambda hidden: forward.decoder(inputs_embeds=hidden[..., :width], **keywords).last_hidden_state,
                forward.hidden,
                self.block_list,
                enters=not self.span.is_first,
                ends=not self.span.is_last,
            ).flatten(2)  # streams
        for extension in self.extensions:
            hidden = extension.leave(forward, hidden)
        return hidden

    def _embed(
        self,
        forward: LanguageForward,
        lengths: Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
        places: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return token embeddings with everything merged in, [batch, tokens, width]; see `merge_rows`."""
        ids = forward.ids
        assert ids is not None
        if self.before_language_model is not None:
            given = {"input_ids": ids}
            for name in ("position_ids", "attention_mask"):
                if forward.keywords.get(name) is not None:
                    given[name] = forward.keywords[name]
            given = self.before_language_model(dict(forward.rows), given)
            if given.get("inputs_embeds") is not None:
                return given["inputs_embeds"]
            if given["input_ids"] is not ids:
                forward.ids, places = given["input_ids"], None
                ids = forward.ids
        look_up = self.model.get_input_embeddings()
        embeddings = look_up(without_placeholders(ids, self.text.unembedded))
        for extension in self.extensions:
            embeddings = extension.embed(forward, embeddings)
        placeholders = self.text.placeholder_ids
        return merge_rows(embeddings, ids, placeholders, forward.rows, lengths, sample_ids, places)
