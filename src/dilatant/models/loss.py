"""The training loss: a sum over target tokens over a denominator that the caller fixes for the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def shift_labels(
    labels: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """What each position must predict: int64 [batch, tokens], -100 where there is nothing to learn.

    `labels` are aligned with the tokens, as in transformers. A token at position 0 begins a sample: nothing before
    it may predict it. Nor may padding. With `lengths`, those of a packed row's samples, positions are not asked: labels
    may then lie on the host though positions do not.
    """
    if position_ids is not None and lengths is not None:
        firsts = [first for first in (0, *accumulate(lengths)) if first < labels.shape[1]]
        labels = labels.index_fill(1, torch.tensor(firsts, device=labels.device), IGNORED)
    elif position_ids is not None:
        labels = labels.masked_fill(position_ids.expand_as(labels) == 0, IGNORED)
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if attention_mask is not None:
        targets = targets.masked_fill(attention_mask == 0, IGNORED)
    return targets


def positions_with_targets(targets: Tensor) -> Tensor:
    """Places in `targets` [positions], ascending, that have a target: int64."""
    return (targets != IGNORED).nonzero().squeeze(-1)


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over targets. logits: [positions, vocabulary]; targets: [positions], shifted."""
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def divide_loss(total: Tensor, targets: Tensor, denominator: float | Tensor | None) -> Tensor:
    """`total` over `denominator` (default: the number of targets). Without a target the loss is 0.

    Where nothing before it trains (text only, language model frozen), it can be differentiated all the same.
    """
    if denominator is None:
        denominator = torch.clamp((targets != IGNORED).sum(), min=1)
    loss = total / denominator
    return loss.requires_grad_() if torch.is_grad_enabled() and not loss.requires_grad else loss
