"""The training loss: the sum over target tokens divided by a denominator that is fixed for the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def shift_labels(
    labels: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, lengths: Sequence[int] | None = None
) -> Tensor:
    """Return the target of each position: int64 [batch, tokens], -100 without a target.

    `labels` are aligned with the tokens, as in transformers. A token at position 0 begins a sample, so it is no target
    of the previous token; padding is no target either. With `lengths` of a packed row's samples, positions are not
    read, so labels may be on the host while positions are on the device.
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
    """Return the indices in `targets` [positions] that have a target, ascending: int64."""
    return (targets != IGNORED).nonzero().squeeze(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy in fp32: [positions], 0 without a target. logits: [positions, vocabulary]; targets:
    [positions], shifted. Saves only the logits for backward and uses 4 more bytes per logit as workspace (8 in fp32);
    torch's version saves 4 more and uses 8."""
    return _CrossEntropy.apply(logits, targets)


def smoothed_cross_entropy(smoothing: float, logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy with label smoothing in fp32: [positions]. The target's token has the share `1 -
    smoothing` of the loss, and all tokens of the vocabulary have the rest alike. All positions have a target."""
    return functional.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        has_target = targets != IGNORED
        picked = targets.where(has_target, 0)[:, None]
        highest = logits.amax(dim=-1, keepdim=True).to(_wide(logits))
        total = highest + _wide_copy(logits).sub_(highest).exp_().sum(dim=-1, keepdim=True).log_()
        ctx.save_for_backward(logits, total, picked, has_target)
        loss = total - logits.gather(-1, picked)
        return loss[:, 0].where(has_target, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, total, picked, has_target = ctx.saved_tensors
        share = (gradient * has_target)[:, None]
        slope = _wide_copy(logits).sub_(total).exp_().mul_(share)
        slope.scatter_add_(-1, picked, -share)
        return slope.to(logits.dtype), None


def _wide_copy(logits: Tensor) -> Tensor:
    return logits.to(_wide(logits), copy=True)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def divide_loss(total: Tensor, targets: Tensor, denominator: float | Tensor | None) -> Tensor:
    """Divide `total` by `denominator` (default: the number of targets). Without a target the loss is 0. If nothing
    trains (text only, frozen language model), the result still supports backward."""
    if denominator is None:
        denominator = torch.clamp((targets != IGNORED).sum(), min=1)
    loss = total / denominator
    return loss.requires_grad_() if torch.is_grad_enabled() and not loss.requires_grad else loss
