"""Frozen encoders of a generator's targets.

Autoencoders of diffusers encode pixels to the latents that a denoiser generates, and decode latents. Vision models of
transformers give features: their patch tokens (no class or register tokens), arranged as a picture with one channel per
feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.models.core.geometry import EncoderGeometry, encoder_geometry
from dilatant.models.sources import load_encoder, load_pretrained_config, parse_config


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """A vision model. id: id or folder of its weights; None initialises at random. config: its transformers config."""

    config: Any
    id: str | None = None

    @classmethod
    def read(cls, source: str | Mapping[str, Any], where: str) -> FeatureSource:
        """Read the config. Raises UserError."""
        if isinstance(source, str):
            return cls(load_pretrained_config(source, where), source)
        return cls(parse_config(source, where))

    def build(self, where: str) -> nn.Module:
        """Build the model with initial weights; on the meta device inside of `torch.device`. Raises UserError."""
        hollow: Any = load_encoder(self.config, where)
        return type(hollow)(hollow.config)

    def pretrained(self, where: str) -> nn.Module | None:
        """Load the model with its stored weights; None if it has none. Raises UserError."""
        return None if self.id is None else load_encoder(self.id, where)

    def shapes(self, where: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the shapes of features and picture, both [channels, height, width]. Raises UserError for an encoder
        whose features are no square of image patches."""
        model: Any = self.build(where)
        geometry = encoder_geometry(model.config)
        side = math.isqrt(_patches(geometry))
        if geometry.kind != "image" or side * side != _patches(geometry):
            raise UserError(f"{where}: {model.config.model_type} makes no square of features of an image")
        return (geometry.width, side, side), (geometry.channels, geometry.height, geometry.row_width)


def features(model: Any, pixels: Tensor, noise: Tensor | None) -> Tensor:
    """Return the features [items, width, rows, columns] of pixels [items, channels, height, width], which are prepared
    as by the model's processor. noise is unused: features are deterministic."""
    geometry = encoder_geometry(model.config)
    seen = model(**{geometry.input_name: pixels.to(next(model.parameters()).dtype)}).last_hidden_state
    patches = seen[:, seen.shape[1] - _patches(geometry) :]
    side = math.isqrt(patches.shape[1])
    return patches.transpose(1, 2).unflatten(2, (side, side))


def _patches(geometry: EncoderGeometry) -> int:
    return geometry.encoder_tokens - geometry.leading_tokens


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
