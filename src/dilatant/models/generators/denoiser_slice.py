"""Denoiser slice: some blocks of a denoiser, with the part before or after them.

Slices exchange rows of one width, equally many per item: patches, condition, timestep embeddings, and the target, which
the first slice computes and the last compares with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.models.core.slicing import shell_of
from dilatant.models.generators.denoiser_families import (
    BLOCKS,
    BlockInputs,
    DenoiserCut,
    net_width,
    patches_of,
    unfolded,
)
from dilatant.models.generators.diffusion import Diffusion


class DenoiserSlice(nn.Module):
    """Blocks `first <= block < end` of `whole`, sharing its weights. enters: includes the part before the blocks (and
    computes targets); leaves: includes the part after them. rows: (condition rows, rows between slices) per item."""

    takes_keys = True

    def __init__(
        self,
        whole: Diffusion,
        cut: DenoiserCut,
        rows: tuple[int, int],
        first: int,
        end: int,
        enters: bool,
        leaves: bool,
    ) -> None:
        super().__init__()
        net: Any = whole.net
        tokens, self.rows = rows
        # Blocks keep their numbers, and so their keys.
        blocks = nn.ModuleDict({str(number): getattr(net, BLOCKS)[number] for number in range(first, end)})
        self.net = shell_of(
            net, {BLOCKS: blocks}, lambda name: leaves if name in cut.last else enters or name == BLOCKS
        )
        self.pool = whole.pool if enters else None
        self.encoder = whole.encoder if enters else None
        self.enters, self.leaves = enters, leaves
        self._whole = (whole,)  # not registered: weights of other stages
        self._cut = cut
        self._parts = (patches_of(net.config, whole.shape), tokens, cut.moments)
        self._patch = int(net.config.patch_size)
        self._width = net_width(net.config)

    def forward(self, value: Tensor, **targets: Any) -> Tensor:
        """Run the slice. value: for the first slice the condition, [items, k, width], for others the previous slice's
        output. targets: for the first slice, see `Diffusion.forward`. Returns rows for the next slice [items, rows,
        width]; the last slice returns the loss of every item, float32 [items]."""
        if self.enters:
            (whole,) = self._whole
            mixed, rows = whole.shown(value, **targets)
            between, target = self.enter(mixed.seen, mixed.times, rows), mixed.target
        else:
            *parts, target = value.split([*self._parts, value.shape[1] - sum(self._parts)], dim=1)
            # Contiguous as in the uncut denoiser: kernels round differently on strided memory.
            between = BlockInputs(*(part.contiguous() for part in parts))
        for block in getattr(self.net, BLOCKS).children():
            between = self._cut.block(self.net, block, between)
        if self.enters and not self.leaves:
            target = pack(target, value.dtype, self._width)
        if not self.leaves:
            return torch.cat([between.patches, between.condition, between.times, target], dim=1)
        wanted = target if self.enters else unpack(target, self._whole[0].shape)
        return (self.leave(between) - wanted).square().flatten(1).mean(dim=1)

    def enter(self, seen: Tensor, times: Tensor, rows: Tensor) -> BlockInputs:
        """Return the input of the first block; see `Diffusion.predict`."""
        pooled = None if self.pool is None else self.pool(rows.mean(dim=1))
        return self._cut.enter(self.net, seen.to(rows.dtype), times, rows, pooled)

    def leave(self, between: BlockInputs) -> Tensor:
        """Return the prediction, float32 [items, channels, height, width], without the second half of the channels (a
        learned variance)."""
        shape = self._whole[0].shape
        patches = self._cut.leave(self.net, between.patches, between.times)
        return unfolded(patches, self._patch, shape)[:, : shape[0]].float()


def rows_between(model: Diffusion, cut: DenoiserCut, tokens: int, dtype: torch.dtype) -> int:
    """Return the number of rows of an item between slices."""
    config: Any = model.net.config
    target = math.ceil(math.prod(model.shape) * _pieces(dtype) / net_width(config))
    return patches_of(config, model.shape) + tokens + cut.moments + target


def pack(target: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Represent float32 [items, ...] exactly as sums of numbers of `dtype`, in rows [items, n, width]."""
    rest, pieces = target.detach().flatten(1), []
    for _ in range(_pieces(dtype)):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1].float()
    numbers = torch.cat(pieces, dim=1)
    padded = nn.functional.pad(numbers, (0, -numbers.shape[1] % width))
    return padded.unflatten(1, (-1, width))


def unpack(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `pack`: float32 [items, *shape]."""
    count, size = _pieces(rows.dtype), math.prod(shape)
    numbers = rows.detach().flatten(1)[:, : count * size].float().unflatten(1, (count, size))
    total = numbers[:, -1]
    for piece in reversed(range(count - 1)):  # from the smallest, so each sum is exact
        total = numbers[:, piece] + total
    return total.unflatten(1, shape)


def _pieces(dtype: torch.dtype) -> int:
    """Return the number of summands of a dtype that represent the 24 bits of a float32."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ceil(24 / bits)
