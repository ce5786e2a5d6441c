"""Sampling: generate a picture from noise in denoising steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilatant.models.generators.denoiser_families import MOMENTS
from dilatant.models.generators.diffusion import Diffusion, alphas
from dilatant.models.generators.target_encoders import decode


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings. steps: denoising steps. guidance: classifier-free guidance scale; 1 turns guidance off."""

    steps: int = 20
    guidance: float = 2.0


@torch.no_grad()
def draw(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Sample pictures for the conditions `rows` [items, k, width] from `noise` [items, *model.shape]: pixels, float32
    [items, channels, height, width] in -1 to 1; for a denoiser of features, the features."""
    latents = (
        _flow(model, rows, noise, how) if model.objective == "flow" else _ddim_steps(model, rows, noise, how)
    )
    if model.draws_features:
        return latents.float()
    pixels = latents if model.encoder is None else decode(model.encoder, latents)
    return pixels.float().clamp(-1, 1)


def _flow(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Take Euler steps from noise to picture."""
    seen = noise.float()
    shares = np.linspace(1.0, 0.0, how.steps + 1)
    for share, following in itertools.pairwise(shares):
        seen = seen + (following - share) * _guided_prediction(
            model, seen, share * MOMENTS, rows, how.guidance
        )
    return seen


def _ddim_steps(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Take deterministic DDIM steps (Song, Meng and Ermon): predict picture and noise, then mix them for the next."""
    left = alphas()
    moments = (np.arange(how.steps) * (MOMENTS // how.steps)).round()[::-1].astype(int)
    seen = noise.float()
    for at, following in zip(moments, [*moments[1:], None]):
        predicted = _guided_prediction(model, seen, float(at), rows, how.guidance)
        picture_part, noise_part = left[at] ** 0.5, (1 - left[at]) ** 0.5
        if model.objective == "epsilon":
            noise_of_step, picture = predicted, (seen - noise_part * predicted) / picture_part
        else:
            picture = picture_part * seen - noise_part * predicted
            noise_of_step = picture_part * predicted + noise_part * seen
        then = left[0] if following is None else left[following]
        seen = then**0.5 * picture + (1 - then) ** 0.5 * noise_of_step
    return seen


def _guided_prediction(
    model: Diffusion, seen: Tensor, moment: float, rows: Tensor, guidance: float
) -> Tensor:
    times = torch.full((len(seen),), moment, dtype=torch.float32, device=seen.device)
    if guidance == 1:
        return model.predict(seen, times, rows).float()
    both = torch.cat([rows, torch.zeros_like(rows)])
    conditioned, free = model.predict(seen.repeat(2, 1, 1, 1), times.repeat(2), both).float().chunk(2)
    return free + guidance * (conditioned - free)
