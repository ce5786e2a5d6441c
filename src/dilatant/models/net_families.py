"""Families of nets that draw pictures, from diffusers: how wide their conditions are, how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dilatant.models.net_cuts import PIXART, SANA, SD3, Cut, size_of_pictures


@dataclass(frozen=True, slots=True)
class Family:
    """A class of diffusers. width(config): of a row of its condition. pooled(config): of the condition that it is told
    once for a picture, None for none. say: how it is called, see `Diffusion`. problems(config): why we cannot. cut: how
    it runs in parts; None where every block needs what the first ones made."""

    width: Callable[[Any], int]
    say: Callable[..., Tensor]
    pooled: Callable[[Any], int | None] = lambda config: None
    problems: Callable[[Any], list[str]] = lambda config: []
    cut: Cut | None = None


def _say_sd3(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(
        seen, encoder_hidden_states=rows, pooled_projections=pooled, timestep=times, return_dict=False
    )[0]


def _say_pixart(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    told = size_of_pictures(net, seen)
    return net(seen, encoder_hidden_states=rows, timestep=times, added_cond_kwargs=told, return_dict=False)[0]


def _say_sana(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    scale = net.config.timestep_scale
    return net(seen, encoder_hidden_states=rows, timestep=times * scale, return_dict=False)[0]


def _say_unet(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(seen, times, encoder_hidden_states=rows, return_dict=False)[0]


def _unet_problems(config: Any) -> list[str]:
    names = ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
    return [f"{name} is {config[name]!r}, which nobody tells it here" for name in names if config.get(name)]


def _sana_problems(config: Any) -> list[str]:
    return ["guidance_embeds is true, which nobody tells it here"] if config.get("guidance_embeds") else []


FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": Family(
        lambda config: config.joint_attention_dim,
        _say_sd3,
        lambda config: config.pooled_projection_dim,
        cut=SD3,
    ),
    "PixArtTransformer2DModel": Family(
        lambda config: config.caption_channels or config.cross_attention_dim, _say_pixart, cut=PIXART
    ),
    "SanaTransformer2DModel": Family(
        lambda config: config.caption_channels, _say_sana, problems=_sana_problems, cut=SANA
    ),
    "UNet2DConditionModel": Family(
        lambda config: _one(config.cross_attention_dim), _say_unet, problems=_unet_problems
    ),
}
AUTOENCODERS = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)
