"""Denoiser families of diffusers: condition widths and calling conventions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilatant.models.generators.denoiser_cuts import PIXART, SANA, SD3, DenoiserCut, size_of_pictures
from dilatant.models.generators.diffusion import MOMENTS

FOLDED = 2
"""Side length of the squares of latents that Flux packs into one position."""


@dataclass(frozen=True, slots=True)
class DenoiserFamily:
    """A denoiser class of diffusers. width(config): width of a condition row. pooled(config): width of the pooled
    condition, or None. say: calls the denoiser (see `Diffusion`). problems(config): reasons why it is unsupported. cut:
    how to run it in parts; None if every block needs outputs of the first blocks. folded: side length of the squares of
    latents that are packed into one position with `folded`² times the channels. sample_size: default if the config has
    none."""

    width: Callable[[Any], int]
    say: Callable[..., Tensor]
    pooled: Callable[[Any], int | None] = lambda config: None
    problems: Callable[[Any], list[str]] = lambda config: []
    cut: DenoiserCut | None = None
    folded: int = 1
    sample_size: int | None = None


def _predict_sd3(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(
        seen, encoder_hidden_states=rows, pooled_projections=pooled, timestep=times, return_dict=False
    )[0]


def _predict_pixart(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    told = size_of_pictures(net, seen)
    return net(seen, encoder_hidden_states=rows, timestep=times, added_cond_kwargs=told, return_dict=False)[0]


def _predict_sana(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    scale = net.config.timestep_scale
    return net(seen, encoder_hidden_states=rows, timestep=times * scale, return_dict=False)[0]


def _predict_flux(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    """Call Flux; guidance-distilled models get guidance 1, which means no guidance."""
    height, width = (size // FOLDED for size in seen.shape[2:])
    sides = (torch.arange(side, dtype=torch.float32, device=seen.device) for side in (height, width))
    places = torch.cartesian_prod(*sides).reshape(-1, 2)
    said = net(
        F.pixel_unshuffle(seen, FOLDED).flatten(2).transpose(1, 2),
        encoder_hidden_states=rows,
        pooled_projections=pooled,
        timestep=times / MOMENTS,
        img_ids=F.pad(places, (1, 0)),
        txt_ids=places.new_zeros(rows.shape[1], 3),
        guidance=torch.ones_like(times) if net.config.guidance_embeds else None,
        return_dict=False,
    )[0]
    return F.pixel_shuffle(said.transpose(1, 2).unflatten(2, (height, width)), FOLDED)


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
        lambda config: config.joint_attention_dim,
        _predict_sd3,
        lambda config: config.pooled_projection_dim,
        cut=SD3,
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
