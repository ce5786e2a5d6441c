"""Frozen autoencoders of diffusers: they encode pixels to the latents that a denoiser generates, and decode latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def encode(vae: Any, pixels: Tensor, noise: Tensor | None) -> Tensor:
    """Encode pixels to scaled latents: [items, channels, height, width]. noise: to sample from a variational
    autoencoder; None takes the mean."""
    return latents_of(vae, spread_of(vae, pixels), noise)


def spread_of(vae: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    """Encode pixels to the mean and log-variance of a variational autoencoder, or else to latents; both unscaled."""
    output = vae.encode(pixels.to(next(vae.parameters()).dtype))
    spread = getattr(output, "latent_dist", None)
    if spread is not None:
        return spread.mean, spread.logvar
    latents = getattr(output, "latents", None)
    return (output.latent if latents is None else latents,)


def latents_of(vae: Any, spread: Sequence[Tensor], noise: Tensor | None) -> Tensor:
    """Sample and scale latents from the output of `spread_of`."""
    latents, *more = spread
    if more and noise is not None:
        latents = latents + torch.exp(0.5 * more[0]) * noise.to(latents)
    config = vae.config
    shift = getattr(config, "shift_factor", None) or 0.0
    return (latents - shift) * (getattr(config, "scaling_factor", None) or 1.0)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents (the reverse of `encode`): pixels [items, channels, height, width] of about -1 to 1."""
    config = vae.config
    shift = getattr(config, "shift_factor", None) or 0.0
    scaled = latents / (getattr(config, "scaling_factor", None) or 1.0) + shift
    return vae.decode(scaled.to(next(vae.parameters()).dtype)).sample.float()
