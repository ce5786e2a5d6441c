"""Denoiser families of diffusers: condition widths, calling conventions, and how a denoiser runs in parts.

The forwards of diffusers cannot run in part, because their end needs the height of the input to unfold patches. So a
family that can be cut defines here its forward's operations before and after the blocks, with the denoiser's own
modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOMENTS = 1000
"""Scale of the timesteps passed to denoisers; the number of steps for epsilon and velocity."""
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
    """The cut of one family. enter(net, seen, times, rows, pooled): the part before the blocks; see `Diffusion`.
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
    six, one = net.adaln_single(times, size_of_pictures(net, seen), batch_size=len(seen), hidden_dtype=patches.dtype)
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
FOLDED = 2
"""Side length of the squares of latents that Flux packs into one position."""


@dataclass(frozen=True, slots=True)
class DenoiserFamily:
    """A denoiser class of diffusers. width(config): width of a condition row. pooled(config): width of the pooled
    condition, or None. predict: calls the denoiser (see `Diffusion`). problems(config): reasons why it is unsupported.
    cut: how to run it in parts; None if every block needs outputs of the first blocks. folded: side length of the
    squares of latents that are packed into one position with `folded`² times the channels. sample_size: default if the
    config has none."""

    width: Callable[[Any], int]
    predict: Callable[..., Tensor]
    pooled: Callable[[Any], int | None] = lambda config: None
    problems: Callable[[Any], list[str]] = lambda config: []
    cut: DenoiserCut | None = None
    folded: int = 1
    sample_size: int | None = None


def _predict_sd3(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(seen, encoder_hidden_states=rows, pooled_projections=pooled, timestep=times, return_dict=False)[0]


def _predict_pixart(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    sizes = size_of_pictures(net, seen)
    return net(seen, encoder_hidden_states=rows, timestep=times, added_cond_kwargs=sizes, return_dict=False)[0]


def _predict_sana(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    scale = net.config.timestep_scale
    return net(seen, encoder_hidden_states=rows, timestep=times * scale, return_dict=False)[0]


def _predict_flux(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    """Call Flux; guidance-distilled models get guidance 1, which means no guidance."""
    height, width = (size // FOLDED for size in seen.shape[2:])
    sides = (torch.arange(side, dtype=torch.float32, device=seen.device) for side in (height, width))
    places = torch.cartesian_prod(*sides).reshape(-1, 2)
    patches = net(
        F.pixel_unshuffle(seen, FOLDED).flatten(2).transpose(1, 2),
        encoder_hidden_states=rows,
        pooled_projections=pooled,
        timestep=times / MOMENTS,
        img_ids=F.pad(places, (1, 0)),
        txt_ids=places.new_zeros(rows.shape[1], 3),
        guidance=torch.ones_like(times) if net.config.guidance_embeds else None,
        return_dict=False,
    )[0]
    return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (height, width)), FOLDED)


def _predict_unet(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(seen, times, encoder_hidden_states=rows, return_dict=False)[0]


def _unet_problems(config: Any) -> list[str]:
    names = ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
    return [f"{name} is {config[name]!r}, which nobody tells it here" for name in names if config.get(name)]


def _flux_problems(config: Any) -> list[str]:
    problems = []
    if config.patch_size != 1:
        problems.append(f"patch_size is {config.patch_size}; its channels hold patches already, so it is 1")
    if config.in_channels % FOLDED**2:
        problems.append(f"in_channels is {config.in_channels}, which is no multiple of {FOLDED**2}")
    return problems


def _sana_problems(config: Any) -> list[str]:
    return ["guidance_embeds is true, which nobody tells it here"] if config.get("guidance_embeds") else []


FAMILIES: dict[str, DenoiserFamily] = {
    "SD3Transformer2DModel": DenoiserFamily(
        lambda config: config.joint_attention_dim, _predict_sd3, lambda config: config.pooled_projection_dim, cut=SD3
    ),
    "PixArtTransformer2DModel": DenoiserFamily(
        lambda config: config.caption_channels or config.cross_attention_dim, _predict_pixart, cut=PIXART
    ),
    "SanaTransformer2DModel": DenoiserFamily(
        lambda config: config.caption_channels, _predict_sana, problems=_sana_problems, cut=SANA
    ),
    "FluxTransformer2DModel": DenoiserFamily(
        lambda config: config.joint_attention_dim,
        _predict_flux,
        lambda config: config.pooled_projection_dim,
        problems=_flux_problems,
        folded=FOLDED,
        sample_size=128,
    ),
    "UNet2DConditionModel": DenoiserFamily(
        lambda config: _one(config.cross_attention_dim), _predict_unet, problems=_unet_problems
    ),
}
AUTOENCODERS = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)
