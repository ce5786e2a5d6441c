"""Commit barrier: a step counts at once, or when one party decides that all ranks apply it; hashes of gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.training.feeding.decoding import PersistentPool


class CommitBarrier(Protocol):
    """Commit barrier between gradients and update. Without one, a step counts as soon as `Runtime.execute` returns,
    since all ranks have its gradients then; a run that survives the loss of ranks lets one party decide."""

    def begin(self, step: int, limit_seconds: float) -> None:
        """Report that this rank is ready to compute step number `step`, which should take at most `limit_seconds`."""
        ...

    def slow(self, times: float) -> None:
        """Report that this rank is slower than others by `times`, above the config's bound; 0: no longer slow."""
        ...

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        """Vote for step number `step` without waiting for the others; if this raises, this rank does not apply the
        step. hashes: layer → hash of the reduced gradients."""
        ...

    def await_commit(self) -> None:
        """Return when the proposed step is committed; if this raises, this rank does not apply the step."""
        ...


@dataclass(frozen=True, slots=True)
class RunMembership:
    """A rank's membership in a run that survives the loss of ranks. node_of: rank → node, in this generation.
    weights_follow: the weights arrive from elsewhere, so none are read or initialised. opened: called with the
    communicator as soon as it exists, so that it can be aborted. reason: why this generation began. keeps_gradients:
    see `Recovery`. pool: data workers, kept for the next generation."""

    generation: int = 0
    node_of: tuple[int, ...] | None = None
    weights_follow: bool = False
    gate: CommitBarrier | None = None
    opened: Callable[[Comm], None] = lambda comm: None
    reason: str = ""
    keeps_gradients: bool = False
    pool: PersistentPool | None = None


FIXED_MEMBERSHIP = RunMembership()
"""Membership in a run that ends when any rank is lost."""


_WORD = torch.int64
_PRIME = 2**61 - 1  # a power of two would lose the sign bits
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient_hashes(parameters: Mapping[str, nn.Parameter], layer_of: Mapping[str, str]) -> dict[str, int]:
    """Map each layer and box to a 61-bit hash of its gradients' bits, equal on all ranks that own the same boxes.
    Ranks that own other boxes of a layer, as in unlike pipelines that shard optimizer state, have other keys.

    One pass over memory, on the device, in words of eight bytes. The hash detects corruption by memory or network, not
    tampering. parameters: logical name or key of a box → parameter; layer_of: logical name → layer.
    """
    names, sums = dict[str, list[str]](), dict[str, torch.Tensor]()
    for key, parameter in sorted(parameters.items()):
        gradient = parameter.grad
        name, _, box = key.partition("@")
        # Also without a gradient, which must differ from a rank that has one.
        names.setdefault(f"{layer_of.get(name, name)}@{box}", []).append(key)
        if gradient is not None and gradient.numel():
            sums[key] = _halves(gradient.detach().reshape(-1))
    halves = dict(zip(sums, torch.stack([*sums.values()]).tolist() if sums else []))
    hashes: dict[str, int] = {}
    for layer, keys in names.items():
        name = f"{layer}#{zlib.crc32(' '.join(keys).encode()):x}"
        for first, second in (halves[key] for key in keys if key in halves):
            hashes[name] = (hashes.get(name, 0) * 1_000_003 + first * 31 + second) % _PRIME
    return hashes


def _halves(flat: torch.Tensor) -> torch.Tensor:
    """Return [2]: sums, modulo 2^64, over the words of each half of `flat`, so that numbers that changed places are
    detected like any other change. Bytes that fill no pair of words count in the second half."""
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD.itemsize:
        flat = flat.clone()  # words begin at multiples of their size
    pairs = flat.numel() * size // (2 * _WORD.itemsize)
    paired = pairs * 2 * _WORD.itemsize // size
    sums = flat[:paired].view(_WORD).view(2, pairs).sum(1)
    if paired < flat.numel():
        sums[1] += flat[paired:].view(_INTEGERS[size]).sum(dtype=_WORD)
    return sums
