"""What goes from block to block beside the hidden states of a text model, behind them in every token's row: so that any
cut is right, and no plan need know of it.

Rows of an encoder for inner blocks (DeepStack; Meng et al. 2024), inputs of their own that blocks have for every token
(Gemma 3n's and 4's per-layer embeddings), and keys and values that later blocks take from earlier ones (Gemma 4).
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.parallel.tensor_regions import Part


class Carried(Protocol):
    """Of one text model; `block` counts its blocks from 0, and so do the borders of a stage."""

    def width(self, block: int) -> int:
        """Numbers behind a token's hidden state before a block."""
        ...

    def into(self, behind: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        """Keywords for the text model with blocks `first <= block < end`, from what lies behind the hidden states:
        [batch, tokens, width(first)]. shards: of ranks that share these blocks and all have what lies behind."""
        ...

    def beyond(
        self, behind: Tensor, keywords: Mapping[str, Any], end: int, shards: TokenShards | None
    ) -> Tensor:
        """What lies behind the hidden states that leave, after the model ran with these keywords: [batch, tokens,
        width(end)], on all ranks that share the blocks."""
        ...

    def prepare(self, decoder: nn.Module) -> nn.Module:
        """A slice of the text model as it is run, for it keeps numbers of blocks."""
        ...


@dataclass(frozen=True, slots=True)
class DeepStack:
    """Rows that as many blocks as `taps` are given, from the first on: 0 at text."""

    taps: int
    hidden: int

    def width(self, block: int) -> int:
        return max(0, self.taps - block) * self.hidden

    def into(self, behind: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        used = min(behind.shape[-1], (end - first) * self.hidden)
        if not used:
            return {}
        behind = behind[..., :used]
        behind = behind if shards is None else shards.split_beside(behind)
        rows = behind.split(self.hidden, -1)
        return {
            "deepstack_visual_embeds": [each.flatten(0, 1) for each in rows],
            "visual_pos_masks": torch.ones(behind.shape[:2], dtype=torch.bool, device=behind.device),
        }

    def beyond(
        self, behind: Tensor, keywords: Mapping[str, Any], end: int, shards: TokenShards | None
    ) -> Tensor:
        return behind[..., behind.shape[-1] - self.width(end) :]

    def prepare(self, decoder: nn.Module) -> nn.Module:
        return decoder


class SharedStates(NamedTuple):
    """Keys and values of a block that later ones take. store: the block. last: of those that take them."""

    kind: str
    store: int
    last: int
    heads: int
    head_width: int


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Of Gemma 4. each: numbers of a block's own input of a token; 0 where there are none. config: of the whole text
    model."""

    config: Any
    blocks: int
    each: int
    shared: tuple[SharedStates, ...] = field(default=())

    @classmethod
    def of(cls, config: Any) -> PerLayer | None:
        """From the config of a text model; None where its blocks take nothing beside hidden states."""
        each = getattr(config, "hidden_size_per_layer_input", None) or 0
        reusing = getattr(config, "num_kv_shared_layers", None) or 0
        if not (each or reusing):
            return None
        kinds, blocks = list(config.layer_types), config.num_hidden_layers
        own = kinds[: blocks - reusing]
        shared = []
        for kind in dict.fromkeys(kinds[len(own) :]):
            store = len(own) - 1 - own[::-1].index(kind)
            last = blocks - 1 - kinds[::-1].index(kind)
            of_block = config.per_layer_config[store]
            shared.append(SharedStates(kind, store, last, of_block.num_key_value_heads, of_block.head_dim))
        return cls(config, blocks, each, tuple(shared))

    def _inputs(self, block: int) -> int:
        return (self.blocks - block) * self.each

    def _held(self, block: int) -> list[SharedStates]:
        """Keys and values that pass the border before a block."""
        return [each for each in self.shared if each.store < block <= each.last]

    def width(self, block: int) -> int:
        return self._inputs(block) + sum(2 * each.heads * each.head_width for each in self._held(block))

    def at_start(self, decoder: nn.Module, ids: Tensor, embeddings: Tensor) -> Tensor:
        """What lies behind the embeddings, [batch, tokens, hidden], of `ids`; those of media are padding."""
        if not self.each:
            return embeddings[..., :0]
        whole: Any = copy.copy(decoder)  # of all blocks, as far as it asks its config
        whole.__dict__["config"] = self.config
        inputs = whole.get_per_layer_inputs(ids, None)
        return whole.project_per_layer_inputs(embeddings, inputs).flatten(-2)

    def into(self, behind: Tensor, first: int, end: int, shards: TokenShards | None) -> dict[str, Any]:
        states: UserDict[str, Any] = _storage()
        at = self._inputs(first)
        for kind, _, _, heads, width in self._held(first):
            pair = behind[..., at : at + 2 * heads * width].unflatten(-1, (2, heads, width))
            if shards is not None:
                pair = _own_heads(pair, shards)
            states[kind] = tuple(each.transpose(1, 2) for each in pair.unbind(-3))
            at += 2 * heads * width
        keywords: dict[str, Any] = {"shared_kv_states": states}
        if self.each and end > first:
            own = behind[..., : (end - first) * self.each]
            own = own if shards is None else shards.split_beside(own)
            keywords["per_layer_inputs"] = own.unflatten(-1, (end - first, self.each))
        return keywords

    def beyond(
        self, behind: Tensor, keywords: Mapping[str, Any], end: int, shards: TokenShards | None
    ) -> Tensor:
        inputs = keywords.get("per_layer_inputs")
        used = 0 if inputs is None else inputs.shape[-2] * self.each
        left = [behind[..., used : used + self._inputs(end)]]
        for each in self._held(end):
            keys_and_values = torch.stack(keywords["shared_kv_states"][each.kind], 1)
            pair = keys_and_values.permute(0, 3, 1, 2, 4)
            left.append((pair if shards is None else _all_heads(pair, each.heads, shards)).flatten(2))
        return torch.cat(left, -1)

    def prepare(self, decoder: nn.Module) -> nn.Module:
        model: Any = copy.copy(decoder)
        # Else it would project inputs that were, and look for its own blocks under the whole model's numbers.
        model.hidden_size_per_layer_input = 0
        model.first_kv_shared_layer_idx = -1
        return model


def _own_heads(pair: Tensor, shards: TokenShards) -> Tensor:
    """Of keys and values of all heads, [..., heads, width], which all ranks have, those that own queries see."""
    ranks = shards.ranks
    first, end = Part(pair.shape[-2]).interval(ranks.size, ranks.index)
    return ranks.copy(pair)[..., first:end, :]


def _all_heads(pair: Tensor, heads: int, shards: TokenShards) -> Tensor:
    """The reverse. Of ranks that have the same head the first one gives it."""
    ranks, part = shards.ranks, Part(heads)
    first, end = part.interval(ranks.size, ranks.index)
    if ranks.index and part.interval(ranks.size, ranks.index - 1) == (first, end):
        pair = pair[..., :0, :]
        first = end = 0
    return ranks.sum(functional.pad(pair, (0, 0, first, heads - end)))


def _storage() -> UserDict[str, Any]:
    """What the version of transformers hands on as it is."""
    from transformers import cache_utils

    return getattr(cache_utils, "KVSharingDict", UserDict)()
