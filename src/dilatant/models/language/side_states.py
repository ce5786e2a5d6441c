"""Per-token side states: values that blocks pass to later blocks, appended to the hidden state in every token's row.

Stages send side states as part of the row, so any cut into stages is correct and plans are independent of them. There
are three kinds: encoder rows for inner blocks (DeepStack; Meng et al. 2024) and, in Gemma 4, per-layer embeddings, and
keys and values that later blocks reuse.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.language.extension import Extension, LanguageForward
from dilatant.models.language.merge import without_placeholders
from dilatant.models.parallel.tensor_regions import SplitPart


class SideStates(Extension):
    """The side states of one text model; `block` and stage borders count its blocks from 0."""

    @abstractmethod
    def to_keywords(self, states: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        """Convert side states, [batch, tokens, width(first)], to keywords of the text model with blocks `first <= block
        < end`. shards: sequence parallelism of these blocks; each of its ranks holds the side states of all tokens."""

    @abstractmethod
    def from_keywords(
        self, states: Tensor, keywords: Mapping[str, Any], first: int, end: int, shards: TokenShards | None
    ) -> Tensor:
        """Return the outgoing side states after the model ran with these keywords: [batch, tokens, width(end)], on all
        tensor-parallel ranks."""

    def enter(self, forward: LanguageForward) -> None:
        assert forward.hidden is not None
        first, end = forward.span.first, forward.span.end
        width = forward.hidden.shape[-1] - self.width(first)
        states = forward.hidden[..., width:]
        forward.hidden, forward.state[self] = forward.hidden[..., :width], states
        forward.keywords |= self.to_keywords(states, first, end, forward.shards)

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        if forward.span.is_last:
            return hidden
        first, end = forward.span.first, forward.span.end
        states = self.from_keywords(forward.state[self], forward.keywords, first, end, forward.shards)
        return torch.cat([hidden, states], dim=-1)


@dataclass(frozen=True, eq=False)
class DeepStack(SideStates):
    """DeepStack: further encoder rows, added to the hidden states after each of the first `taps` blocks, 0 at text
    tokens. Families select tokens by a mask, for which the host waits; here rows are given for all tokens."""

    taps: int
    hidden: int

    def width(self, block: int) -> int:
        return max(0, self.taps - block) * self.hidden

    def embed(self, forward: LanguageForward, embeddings: Tensor) -> Tensor:
        return functional.pad(embeddings, (0, self.width(0)))

    def enter(self, forward: LanguageForward) -> None:
        super().enter(forward)
        first, end, shards = forward.span.first, forward.span.end, forward.shards
        blocks = forward.decoder.get_submodule(forward.text.blocks.removeprefix(f"{forward.text.decoder}."))
        for number, rows in zip(range(first, min(end, self.taps)), forward.state[self].split(self.hidden, -1)):
            if shards is not None and number + 1 < end:  # after its last block a stage has all tokens
                rows = shards.split_beside(rows)
            hook = blocks.get_submodule(f"{number}").register_forward_hook(partial(_add, rows))
            forward.closing.callback(hook.remove)

    def to_keywords(self, states: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        return {}

    def from_keywords(
        self, states: Tensor, keywords: Mapping[str, Any], first: int, end: int, shards: TokenShards | None
    ) -> Tensor:
        return states[..., states.shape[-1] - self.width(end) :]


def _add(rows: Tensor, block: nn.Module, args: Any, output: Any) -> Any:
    """Add `rows` to the hidden states that a block returns (a forward hook)."""
    hidden, *others = output if isinstance(output, tuple) else (output,)
    hidden = hidden + rows.to(hidden.dtype)
    return (hidden, *others) if isinstance(output, tuple) else hidden


class SharedStates(NamedTuple):
    """Keys and values that later blocks reuse. store: the block that computes them. last: the last one that reuses
    them."""

    kind: str
    store: int
    last: int
    heads: int
    head_width: int


@dataclass(frozen=True, eq=False)
class PerLayer(SideStates):
    """Side states of Gemma 4. input_width: width of a block's per-token input, or 0."""

    blocks: int
    input_width: int
    shared: tuple[SharedStates, ...] = field(default=())

    @classmethod
    def of(cls, config: Any) -> PerLayer | None:
        """Derive the side states from a text model's config; None if its blocks take only hidden states."""
        each = getattr(config, "hidden_size_per_layer_input", None) or 0
        reusing = getattr(config, "num_kv_shared_layers", None) or 0
        if not (each or reusing) or not hasattr(config, "per_layer_config"):
            return None
        kinds, blocks = list(config.layer_types), config.num_hidden_layers
        own = kinds[: blocks - reusing]
        shared = []
        for kind in dict.fromkeys(kinds[len(own) :]):
            store = len(own) - 1 - own[::-1].index(kind)
            last = blocks - 1 - kinds[::-1].index(kind)
            of_block = config.per_layer_config[store]
            shared.append(SharedStates(kind, store, last, of_block.num_key_value_heads, of_block.head_dim))
        return cls(blocks, each, tuple(shared))

    def _inputs(self, block: int) -> int:
        return (self.blocks - block) * self.input_width

    def _held(self, block: int) -> list[SharedStates]:
        """Return the keys and values that cross the border before a block."""
        return [each for each in self.shared if each.store < block <= each.last]

    def width(self, block: int) -> int:
        return self._inputs(block) + sum(2 * each.heads * each.head_width for each in self._held(block))

    def enter(self, forward: LanguageForward) -> None:
        model: Any = copy.copy(forward.decoder)
        if forward.ids is not None and self.input_width:
            assert forward.hidden is not None
            ids = without_placeholders(forward.ids, forward.text.unembedded, model.config.pad_token_id)
            inputs = model.project_per_layer_inputs(forward.hidden, model.get_per_layer_inputs(ids, None))
            forward.hidden = torch.cat([forward.hidden, inputs.flatten(-2)], dim=-1)
        model.hidden_size_per_layer_input = 0  # otherwise the forward would project its inputs a second time
        forward.decoder = model
        super().enter(forward)

    def to_keywords(self, states: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        stored: UserDict[str, Any] = _storage()
        at = self._inputs(first)
        for kind, _, _, heads, width in self._held(first):
            pair = states[..., at : at + 2 * heads * width].unflatten(-1, (2, heads, width))
            if shards is not None:
                pair = _local_heads(pair, shards)
            stored[kind] = tuple(each.transpose(1, 2) for each in pair.unbind(-3))
            at += 2 * heads * width
        keywords: dict[str, Any] = {"shared_kv_states": stored}
        if self.input_width:
            own = states[..., : (end - first) * self.input_width]
            own = own if shards is None else shards.split_beside(own)
            inputs = own.reshape(*own.shape[:2], end - first, self.input_width)
            keywords["per_layer_inputs"] = functional.pad(inputs, (0, 0, first, self.blocks - end))
        return keywords

    def from_keywords(
        self, states: Tensor, keywords: Mapping[str, Any], first: int, end: int, shards: TokenShards | None
    ) -> Tensor:
        used = self._inputs(first) - self._inputs(end)
        left = [states[..., used : used + self._inputs(end)]]
        for each in self._held(end):
            keys_and_values = torch.stack(keywords["shared_kv_states"][each.kind], 1)
            pair = keys_and_values.permute(0, 3, 1, 2, 4)
            left.append((pair if shards is None else _all_heads(pair, each.heads, shards)).flatten(2))
        return torch.cat(left, -1)


def _local_heads(pair: Tensor, shards: TokenShards) -> Tensor:
    """Slice replicated keys and values of all heads, [..., heads, width], to those of this rank's queries."""
    ranks = shards.ranks
    first, end = SplitPart(pair.shape[-2]).interval(ranks.size, ranks.index)
    return ranks.copy(pair)[..., first:end, :]


def _all_heads(pair: Tensor, heads: int, shards: TokenShards) -> Tensor:
    """Invert `_local_heads` by a sum over ranks; if several ranks hold the same head, the first contributes it."""
    ranks, part = shards.ranks, SplitPart(heads)
    first, end = part.interval(ranks.size, ranks.index)
    if ranks.index and part.interval(ranks.size, ranks.index - 1) == (first, end):
        pair = pair[..., :0, :]
        first = end = 0
    return ranks.sum(functional.pad(pair, (0, 0, first, heads - end)))


def _storage() -> UserDict[str, Any]:
    """Return the container for shared keys and values that this version of transformers passes to blocks unchanged."""
    from transformers import cache_utils

    return getattr(cache_utils, "KVSharingDict", UserDict)()
