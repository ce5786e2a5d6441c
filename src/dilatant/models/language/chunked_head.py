"""Chunked language-model head: logits of a long row are computed in chunks of targets, never all at once.

Forward and backward take 8 bytes per logit: 10 GB for 8k targets and a vocabulary of 152k tokens. The head runs on
chunks of targets and is recomputed in backward (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), at
the cost of one more forward of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dilatant.models.core.loss import cross_entropy
from dilatant.models.core.slicing import Placeholder, shell_of

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""Maps logits [positions, vocabulary] and what is known of the positions [positions, ...] to a loss per position."""


class Vocabulary:
    """Loss and argmax over logits of the whole vocabulary (see `tensor_parallel.VocabularyShard` for shards of it)."""

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute `loss.cross_entropy`."""
        return cross_entropy(logits, targets)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary."""
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the likeliest token at each position: int64 [positions]."""
        return logits.argmax(dim=-1)


LOSS_CHUNK = 1024
"""Default number of targets whose logits exist at once."""


class _Output:
    """The output of the blocks' module: hidden states, and None for every other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _HiddenStates(Placeholder):
    """Replaces the module that holds the blocks; returns its input hidden states unchanged."""

    def forward(
        self, hidden_states: Tensor | None = None, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> Any:
        return _Output(cast(Tensor, inputs_embeds))


def head_of(model: PreTrainedModel, container: str) -> PreTrainedModel:
    """Return the head of a causal language model with the family's scales and soft caps: the model's own forward around
    an identity in place of the blocks. The head shares the weights of `model`, and is free to create.

    container: path of the module that holds the blocks and ends with the final norm.
    """
    root = shell = shell_of(model)
    *outer, last = container.split(".")
    for part in outer:
        inner = shell_of(shell.get_submodule(part))
        setattr(shell, part, inner)
        shell = inner
    setattr(shell, last, _HiddenStates(shell.get_submodule(last)))
    return cast(PreTrainedModel, root)


def logits_of(head: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return logits [batch, tokens, vocabulary]. hidden: [batch, tokens, width], the output of the final norm."""
    return head(inputs_embeds=hidden, use_cache=False).logits


def chunked_loss(
    head: PreTrainedModel, hidden: Tensor, targets: Tensor, chunk: int | None, cross_entropy: CrossEntropy
) -> Tensor:
    """Compute the cross entropy, or another loss, in fp32: [positions].

    hidden: [positions, width]; targets: int64 [positions], -100 for no target, or what `cross_entropy` takes. chunk:
    positions whose logits exist at once, in backward as well; None: all, saved for backward. Logits of a single chunk
    are also saved.
    """
    run = partial(_loss, head, cross_entropy)
    if chunk is None or len(targets) <= chunk:
        return run(hidden, targets)
    if torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(*some) for some in zip(hidden.split(chunk), targets.split(chunk), strict=True)])


def chunked_predictions(
    head: PreTrainedModel, hidden: Tensor, targets: Tensor, chunk: int | None, vocabulary: Any
) -> tuple[Tensor, Tensor]:
    """Return the likeliest token after each position, int64 [positions], and the cross entropy of its target, fp32
    [positions]. hidden: [positions, width]; targets: int64 [positions]. vocabulary: a `Vocabulary` or its shard."""
    size = chunk or max(1, len(hidden))
    tokens, losses = [], []
    for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        logits = logits_of(head, rows[None])[0]
        tokens.append(vocabulary.argmax(logits))
        losses.append(vocabulary.cross_entropy(logits, wanted))
    return torch.cat(tokens), torch.cat(losses)


def _loss(head: PreTrainedModel, cross_entropy: CrossEntropy, hidden: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits_of(head, hidden[None])[0], targets)
