"""Common types of the attention kernels: settings of the scores, gradients, and the kernel signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dilatant.config.errors import UserError


class AttentionError(UserError):
    """Error for an unsupported attention call; the message says what does not fit and the remedy."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Formula of scores from query and key: `softcap * tanh(scale * q.k / softcap)`; `scale * q.k` without a cap."""

    scale: float
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise AttentionError(f"attention scale must be positive, got {self.scale}")
        if self.softcap is not None and self.softcap <= 0:
            raise AttentionError(f"attention softcap must be positive or None, got {self.softcap}")


class Gradients(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def seen_by_none(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the output of a row of padding: zeros that depend on all three inputs, since it needs gradients as
    well."""
    return query[..., :1].expand(*query.shape[:2], value.shape[2]) * 0 + key.sum() * 0 + value.sum() * 0


class Kernel(NamedTuple):
    """A forward and a backward over one packed row, with the signatures of `blockwise.forward` and `.backward`."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., Gradients]
