"""When a step counts: at once, or when somebody says that all ranks are to apply it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.training.feeding.decoding import KeptPool


class Gate(Protocol):
    """Stands between gradients and update. By default a step counts as soon as `Runtime.execute` returns, for then all
    ranks have its gradients; whoever wants to outlive ranks lets one party decide."""

    def begin(self, step: int, limit_seconds: float) -> None:
        """This rank has what it needs to compute step number `step`, which should not take it longer than that."""
        ...

    def slow(self, times: float) -> None:
        """This rank is so many times slower than others, which is more than the config bears; 0: no longer."""
        ...

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        """Vote for step number `step`, without waiting for the others; whatever is raised then, this rank does not
        apply it. hashes: layer → hash of the reduced gradients."""
        ...

    def await_commit(self) -> None:
        """Return when the step that was proposed is committed; whatever is raised, this rank does not apply it."""
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


_WORD = torch.int64
_PRIME = 2**61 - 1  # a power of two would lose signs, the highest bits of words
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient_hashes(parameters: Mapping[str, nn.Parameter], layer_of: Mapping[str, str]) -> dict[str, int]:
    """Layer and box → hash of the gradients there, equal on all who hold the same: 61 bits of sums over their bits.

    One pass over memory, on the device, in words of eight bytes: it finds what memory or a network corrupted, not who
    means harm. parameters: logical name or key of a box → parameter; layer_of: logical name → layer.
    """
    names, sums = [], []
    for key, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or not gradient.numel():
            continue
        name, _, box = key.partition("@")
        names.append(f"{layer_of.get(name, name)}@{box}" if box else layer_of.get(name, name))
        sums.append(_halves(gradient.detach().reshape(-1)))
    hashes: dict[str, int] = {}
    for name, (first, second) in zip(names, torch.stack(sums).tolist() if sums else []):
        hashes[name] = (hashes.get(name, 0) * 1_000_003 + first * 31 + second) % _PRIME
    return hashes


def _halves(flat: torch.Tensor) -> torch.Tensor:
    """[2]: sums, modulo 2^64, over the words of each half of `flat`, so that numbers which changed places show as well
    as others. What fills no pair of words counts in the second half."""
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD.itemsize:
        flat = flat.clone()  # words begin at multiples of their size
    pairs = flat.numel() * size // (2 * _WORD.itemsize)
    paired = pairs * 2 * _WORD.itemsize // size
    sums = flat[:paired].view(_WORD).view(2, pairs).sum(1)
    if paired < flat.numel():
        sums[1] += flat[paired:].view(_INTEGERS[size]).sum(dtype=_WORD)
    return sums
