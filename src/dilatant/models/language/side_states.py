"""Per-token side states: values that blocks pass to later blocks, appended to the hidden state in every token's row.

Stages send side states as part of the row, so any cut into stages is correct and plans are independent of them: encoder
rows for inner blocks (DeepStack; Meng et al. 2024), and what a text model hands to its blocks besides hidden states.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.core.slicing import SkippedBlock, shell_of
from dilatant.models.core.structure import on_meta
from dilatant.models.language.extension import Extension, LanguageForward
from dilatant.models.language.merge import without_placeholders
from dilatant.models.parallel.tensor_regions import SplitPart
from dilatant.models.sources import errors_alone


@dataclass(frozen=True, eq=False)
class DeepStack(Extension):
    """DeepStack: further encoder rows, added to the hidden states after each of the first `taps` blocks, 0 at text
    tokens. Families select tokens by a mask, for which the host waits; here rows are given for all tokens."""

    taps: int
    hidden: int

    def width(self, block: int) -> int:
        return max(0, self.taps - block) * self.hidden

    def embed(self, forward: LanguageForward, embeddings: Tensor) -> Tensor:
        return functional.pad(embeddings, (0, self.width(0)))

    def enter(self, forward: LanguageForward) -> None:
        first, end, shards = forward.span.first, forward.span.end, forward.shards
        forward.hidden, states = _split_off(forward, self.width(first))
        forward.state[self] = states[..., states.shape[-1] - self.width(end) :]
        blocks = _blocks_of(forward)
        for number, rows in zip(range(first, min(end, self.taps)), states.split(self.hidden, -1)):
            if shards is not None and number + 1 < end:  # after its last block a stage has all tokens
                rows = shards.split_beside(rows)
            hook = blocks.get_submodule(f"{number}").register_forward_hook(partial(_add, rows))
            forward.closing.callback(hook.remove)

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        return hidden if forward.span.is_last else torch.cat([hidden, forward.state[self]], dim=-1)


def _split_off(forward: LanguageForward, columns: int) -> tuple[Tensor, Tensor]:
    """Split the last `columns` off the received hidden states."""
    assert forward.hidden is not None
    width = forward.hidden.shape[-1] - columns
    return forward.hidden[..., :width], forward.hidden[..., width:]


def _blocks_of(forward: LanguageForward) -> nn.Module:
    return forward.decoder.get_submodule(forward.text.blocks.removeprefix(f"{forward.text.decoder}."))


def _add(rows: Tensor, block: nn.Module, args: Any, output: Any) -> Any:
    """Add `rows` to the hidden states that a block returns (a forward hook)."""
    hidden, *others = output if isinstance(output, tuple) else (output,)
    hidden = hidden + rows.to(hidden.dtype)
    return (hidden, *others) if isinstance(output, tuple) else hidden


_TOKENS = 7
_USUAL = {
    *("self", "hidden_states", "attention_mask", "position_ids", "position_embeddings", "past_key_values", "cache"),
    *("past_key_value", "use_cache", "cache_position", "output_attentions", "output_router_logits", "kwargs"),
}
"""Parameters of blocks that every stage makes itself."""


@dataclass(frozen=True, eq=False)
class BlockInputs(Extension):
    """Values that a text model hands to its blocks besides hidden states, found by recording a forward: a tensor for
    each block, computed from embeddings and ids (per-layer inputs), and a mapping in which blocks leave keys and values
    for later ones.

    embedding: name of the token embeddings in the text model. place: position or keyword of the tensor, None without
    one. widths: block → its numbers a token. mapping: keyword of the mapping. shared: block → the entries before it, as
    (key, heads, head width).
    """

    embedding: str
    place: int | str | None
    widths: tuple[int, ...]
    mapping: str | None
    shared: tuple[tuple[tuple[Any, int, int], ...], ...]

    @classmethod
    def recorded(cls, text: Any, blocks: str) -> list[BlockInputs]:
        """Record a forward of a text model, whose list of blocks is `blocks`, without weights. Return nothing for
        blocks that take hidden states alone, or if the forward does not run without weights."""
        if {*inspect.signature(text.get_submodule(f"{blocks}.0").forward).parameters} <= _USUAL:
            return []
        try:
            seen = _record(type(text), text.config, blocks)
            places = [key for given in seen for key, each in given.items() if isinstance(each, Tensor)]
            handed: list[Any] = [given.get(next(iter(places), None)) for given in seen]
            is_one = len({id(each) for each in handed}) < len(handed)  # one tensor for several blocks, or none
            widths = tuple(0 if is_one else each[0, 0].numel() for each in handed)
            mapping = next((key for given in seen for key, each in given.items() if isinstance(each, UserDict)), None)
            shared = [
                tuple((key, pair[0].shape[1], pair[0].shape[3]) for key, pair in given.get(mapping, {}).items())
                for given in seen
            ]
            names = [name for name, child in text.named_children() if child is text.get_input_embeddings()]
        except Exception:  # a proof finds what is missing then
            return []
        is_needed = names and (any(widths) or any(shared))
        return [cls(names[0], None if is_one else places[0], widths, mapping, (*shared, ()))] if is_needed else []

    def width(self, block: int) -> int:
        shared = chain.from_iterable(self.shared[block : block + 1])
        return sum(self.widths[block:]) + sum(2 * heads * width for _, heads, width in shared)

    def enter(self, forward: LanguageForward) -> None:
        first, decoder, ids = forward.span.first, forward.decoder, forward.ids
        handed = forward.state[self] = dict[Any, Any]({None: {}})  # the mapping, and block → its tensor
        if not forward.span.is_first:
            forward.hidden, states = _split_off(forward, self.width(first))
            *tensors, shared = states.split([*self.widths[first:], states.shape[-1] - sum(self.widths[first:])], -1)
            handed.update(enumerate(tensors, first))
            handed[None] = self._stored(shared, first, forward.shards)
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        assert ids is not None
        ids = without_placeholders(ids, forward.text.unembedded, cast(Any, decoder.config).pad_token_id or 0)
        for number, block in [*enumerate(_blocks_of(forward).children())][first:]:
            give = partial(self._give, forward, number)
            forward.closing.callback(block.register_forward_pre_hook(give, with_kwargs=True).remove)
            if isinstance(block, SkippedBlock) and forward.span.is_first:
                block.passes = number + 1 < len(self.widths)

        def run(*, inputs_embeds: Tensor, **keywords: Any) -> Any:
            """Run the text model on ids, with `inputs_embeds` in place of its own embeddings."""
            shell = shell_of(decoder)
            vars(shell)[self.embedding] = lambda _: inputs_embeds
            return shell.forward(input_ids=ids, **keywords)  # hooks of the text model run around `run`

        forward.decoder = shell_of(decoder)
        vars(forward.decoder)["forward"] = run

    def _give(self, forward: LanguageForward, number: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace what a block gets by what arrived from other stages (a pre-hook)."""
        handed, given = forward.state[self], {**dict(enumerate(args)), **kwargs}
        if self.mapping is not None:
            given[self.mapping].update(handed[None] if number == forward.span.first else {})
            handed[None] = given[self.mapping]
        if self.place is not None:
            own = handed.setdefault(number, given[self.place])
            shards = forward.shards if number < forward.span.end else None
            given[self.place] = own if shards is None else shards.split_beside(own)
        return tuple(given.pop(place) for place in range(len(args))), given

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        if forward.span.is_last:
            return hidden
        end, shards, handed = forward.span.end, forward.shards, forward.state[self]
        left = [handed[number] for number, width in enumerate(self.widths) if number >= end and width]
        for key, heads, _ in self.shared[end]:
            pair = torch.stack(handed[None][key], 1).permute(0, 3, 1, 2, 4)
            left.append((pair if shards is None else _all_heads(pair, heads, shards)).flatten(2))
        return torch.cat([hidden, *left], -1)

    def _stored(self, states: Tensor, block: int, shards: TokenShards | None) -> dict[Any, tuple[Tensor, ...]]:
        """Return the entries of the mapping before a block. states: the columns that hold them."""
        found: dict[Any, tuple[Tensor, ...]] = {}
        columns = states.split([2 * heads * width for _, heads, width in self.shared[block]], -1)
        for (key, heads, width), own in zip(self.shared[block], columns, strict=False):
            pair = own.unflatten(-1, (2, heads, width))
            pair = pair if shards is None else _local_heads(pair, shards)
            found[key] = tuple(each.transpose(1, 2) for each in pair.unbind(-3))
        return found


@torch.random.fork_rng(devices=[])
def _record(kind: type[PreTrainedModel], config: Any, blocks: str) -> list[dict[Any, Any]]:
    """Run a text model on the meta device. Return for each block its arguments, by position or keyword, that are
    computed for each token from embeddings or weights, or are filled by blocks; without hidden states."""
    seen: list[dict[Any, Any]] = []

    def record(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args, 1)), **kwargs}
        found = {key: UserDict(each) for key, each in given.items() if isinstance(each, UserDict)}
        tensors = {key: each for key, each in given.items() if isinstance(each, Tensor) and each.requires_grad}
        seen.append(found | {key: each for key, each in tensors.items() if each.shape[:2] == (1, _TOKENS)})
        try:
            return forward(hidden, *args, **kwargs)
        except (RuntimeError, NotImplementedError):  # experts read the values of their inputs
            return hidden

    with errors_alone(), on_meta():
        model: Any = kind(copy.deepcopy(config))
        model.set_attn_implementation("eager")  # kernels may not support the meta device
    for block in model.get_submodule(blocks).children():
        block.forward = partial(record, block.forward)
    with errors_alone(), torch.device("meta"), torch.enable_grad():
        mask = torch.zeros(1, 1, _TOKENS, _TOKENS)  # masks are not made without values
        model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), attention_mask=mask, use_cache=False)
    return seen


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
