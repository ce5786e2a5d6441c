"""Image-feature targets: a frozen vision model's patch tokens (no class or register tokens), arranged as a picture with
one channel per feature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
