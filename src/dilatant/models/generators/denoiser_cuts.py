"""Denoiser cuts: for each family, the part before the blocks, one block, and the part after the blocks.

The forwards of diffusers cannot run in part, because their end needs the height of the input to unfold patches. So each
family defines here its forward's operations before and after the blocks, with the denoiser's own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BLOCKS = "transformer_blocks"
"""The attribute of the block list in all families."""


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """The values between blocks. patches: [items, patches, width]; condition: [items, k, width]; times: [items, n,
    width], the timestep embeddings for the blocks and the end."""

    patches: Tensor
    condition: Tensor
    times: Tensor


@dataclass(frozen=True, slots=True)
class DenoiserCut:
    """The cut of one family. enter(net, seen, times, rows, pooled): the part before the blocks; see `Family.say`.
    block(net, block, between): one block. leave(net, patches, times): the part after them, [items, patches, numbers per
    patch]. last: modules and weights that only `leave` uses. moments: rows of `BlockInputs.times`. fits(config):
    True if settings allow the cut."""

    enter: Callable[..., BlockInputs]
    block: Callable[[Any, Any, BlockInputs], BlockInputs]
    leave: Callable[[Any, Tensor, Tensor], Tensor]
    last: tuple[str, ...]
    moments: int
    fits: Callable[[Any], bool] = lambda config: True


def net_width(config: Any) -> int:
    """Return the width of a row between blocks."""
    return int(config.num_attention_heads * config.attention_head_dim)


def patches_of(config: Any, shape: tuple[int, int, int]) -> int:
    """Return the number of patches of a picture of `shape` [channels, height, width]."""
    return shape[1] // config.patch_size * (shape[2] // config.patch_size)


def unfolded(patches: Tensor, patch: int, shape: tuple[int, int, int]) -> Tensor:
    """Unfold patches [items, patches, patch * patch * channels] to [items, channels, height, width]."""
    height, width = shape[1] // patch, shape[2] // patch
    grid = patches.reshape(len(patches), height, width, patch, patch, -1)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, shape[1], shape[2])


def _enter_sd3(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> BlockInputs:
    patches = net.pos_embed(seen).contiguous()
    moment = net.time_text_embed(times, pooled)
    return BlockInputs(patches, net.context_embedder(rows), moment[:, None])


def _block_sd3(net: Any, block: Any, between: BlockInputs) -> BlockInputs:
    condition, patches = block(
        hidden_states=between.patches, encoder_hidden_states=between.condition, temb=between.times[:, 0]
    )
    if condition is None:  # None after the last block, where it is not needed
        condition = between.condition
    return replace(between, patches=patches, condition=condition)


def _leave_sd3(net: Any, patches: Tensor, times: Tensor) -> Tensor:
    return net.proj_out(net.norm_out(patches, times[:, 0]))


def _enter_pixart(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> BlockInputs:
    patches = net.pos_embed(seen)
    six, one = net.adaln_single(
        times, size_of_pictures(net, seen), batch_size=len(seen), hidden_dtype=patches.dtype
    )
    if net.caption_projection is not None:
        rows = net.caption_projection(rows)
    return BlockInputs(patches, rows, torch.cat([six.unflatten(1, (6, -1)), one[:, None]], dim=1))


def size_of_pictures(net: Any, seen: Tensor) -> dict[str, Tensor | None]:
    """Return PixArt's size conditions."""
    if not net.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    height, width = 8.0 * seen.shape[-2], 8.0 * seen.shape[-1]  # in pixels, for its autoencoder's factor 8
    return {
        "resolution": seen.new_tensor([height, width]).expand(len(seen), 2),
        "aspect_ratio": seen.new_tensor([height / width]).expand(len(seen), 1),
    }


def _block_pixart(net: Any, block: Any, between: BlockInputs) -> BlockInputs:
    moment = between.times[:, :6].flatten(1)
    patches = block(between.patches, encoder_hidden_states=between.condition, timestep=moment)
    return replace(between, patches=patches)


def _leave_pixart(net: Any, patches: Tensor, times: Tensor) -> Tensor:
    shift, scale = (net.scale_shift_table[None] + times[:, 6:]).chunk(2, dim=1)
    return net.proj_out(net.norm_out(patches) * (1 + scale) + shift)


def _enter_sana(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> BlockInputs:
    patches = net.patch_embed(seen)
    moments = times * net.config.timestep_scale
    six, one = net.time_embed(moments, batch_size=len(seen), hidden_dtype=patches.dtype)
    condition = net.caption_norm(net.caption_projection(rows))
    return BlockInputs(patches, condition, torch.cat([six.unflatten(1, (6, -1)), one[:, None]], dim=1))


def _block_sana(net: Any, block: Any, between: BlockInputs) -> BlockInputs:
    size, patch = net.config.sample_size, net.config.patch_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    moment = between.times[:, :6].flatten(1)
    patches = block(between.patches, None, between.condition, None, moment, height // patch, width // patch)
    return replace(between, patches=patches)


def _leave_sana(net: Any, patches: Tensor, times: Tensor) -> Tensor:
    return net.proj_out(net.norm_out(patches, times[:, 6], net.scale_shift_table))


SD3 = DenoiserCut(
    _enter_sd3,
    _block_sd3,
    _leave_sd3,
    ("norm_out", "proj_out"),
    1,
    lambda config: config.caption_projection_dim == net_width(config),
)
PIXART = DenoiserCut(
    _enter_pixart,
    _block_pixart,
    _leave_pixart,
    ("norm_out", "proj_out", "scale_shift_table"),
    7,
    lambda config: config.caption_channels is not None or config.cross_attention_dim == net_width(config),
)
SANA = DenoiserCut(_enter_sana, _block_sana, _leave_sana, ("norm_out", "proj_out", "scale_shift_table"), 7)
