"""When a step counts: at once, or when somebody says that all ranks are to apply it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.training.decoding import KeptPool


class Gate(Protocol):
    """Stands between gradients and update. By default a step counts as soon as `Runtime.execute` returns, for then all
    ranks have its gradients; whoever wants to outlive ranks lets one party decide."""

    def begin(self, step: int, limit_seconds: float) -> None:
        """This rank has what it needs to compute step number `step`, which should not take it longer than that."""
        ...

    def slow(self, times: float) -> None:
        """This rank is so many times slower than others, which is more than the config bears; 0: no longer."""
        ...

    def vote(self, step: int, hashes: Mapping[str, int]) -> None:
        """Return when step number `step` is committed; whatever is raised, this rank does not apply it. hashes: layer →
        hash of the reduced gradients."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in a run that goes on when others are lost. node_of: rank → node, in this generation.
    weights_follow: whether the weights come from elsewhere, so that none need be read or drawn. opened: told of the
    communication as soon as there is some, to end it. reason: why there is a new generation. keeps_gradients: see
    `Runtime`. pool: of data workers, for this generation and the next."""

    generation: int = 0
    node_of: tuple[int, ...] | None = None
    weights_follow: bool = False
    gate: Gate | None = None
    opened: Callable[[Comm], None] = lambda comm: None
    reason: str = ""
    keeps_gradients: bool = False
    pool: KeptPool | None = None


ALONE = Membership()
"""Of a run that ends with its first rank."""


def gradient_hashes(parameters: Mapping[str, nn.Parameter], layer_of: Mapping[str, str]) -> dict[str, int]:
    """Layer and box → hash of the gradients there, equal on all who hold the same: 63 bits of sums over their bits.

    One pass over memory, on the device: it finds what memory or a network corrupted, not who means harm. parameters:
    logical name or key of a box → parameter; layer_of: logical name → layer.
    """
    names, sums = [], []
    for key, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or not gradient.numel():
            continue
        name, _, box = key.partition("@")
        names.append(f"{layer_of.get(name, name)}@{box}" if box else layer_of.get(name, name))
        bits = (
            gradient.detach().reshape(-1).view(torch.int32 if gradient.element_size() == 4 else torch.int16)
        )
        # Two moments of the bits, so that swapped numbers show as well as changed ones.
        half = bits.numel() // 2
        sums.append(torch.stack([bits.sum(dtype=torch.int64), bits[:half].sum(dtype=torch.int64)]))
    hashes: dict[str, int] = {}
    for name, (whole, first) in zip(names, torch.stack(sums).tolist() if sums else []):
        hashes[name] = (hashes.get(name, 0) * 1_000_003 + whole * 31 + first) & (2**63 - 1)
    return hashes
