"""Hashes of gradients, by which ranks that own the same parts detect corruption."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from dilatant.runtime.state.owned_weights import OwnedWeights

_WORD = torch.int64
_PRIME = 2**61 - 1  # a power of two would lose the sign bits
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def owned_gradients(owned: OwnedWeights) -> dict[str, torch.Tensor | None]:
    """Return the gradients of what a rank owns, by key; None without a gradient. They come in the parts of which every
    node has a rank with the same: in unlike pipelines, nodes may shard optimizer state differently."""
    found: dict[str, torch.Tensor | None] = {}
    for key, parameter in owned.parameters.items():
        gradient, box = parameter.grad, owned.boxes[key]
        for piece in owned.pieces.get(key, (box,)):
            found[piece.key] = gradient if gradient is None or piece == box else gradient[box.place(piece)]
    return found


def gradient_hashes(gradients: Mapping[str, torch.Tensor | None], layer_of: Mapping[str, str]) -> dict[str, int]:
    """Map each layer, and each part of a weight, to a 61-bit hash of its gradients' bits, equal on all ranks that own
    the same.

    One pass over memory, on the device, in words of eight bytes. The hash detects corruption by memory or network, not
    tampering. gradients: logical name or key of a box → gradient; layer_of: logical name → layer.
    """
    names, sums = dict[str, list[str]](), dict[str, torch.Tensor]()
    for key in sorted(gradients):
        gradient, name = gradients[key], key.partition("@")[0]
        # Also without a gradient, which must differ from a rank that has one. Parts are hashed alone: others may own
        # other parts besides.
        names.setdefault(layer_of.get(name, name) if name == key else key, []).append(key)
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
