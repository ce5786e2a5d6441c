"""Mllama's image encoder: each image has a fixed number of tiles, some empty, and its rows go to cross-attention
blocks.

The encoder is a single layer and is not cut, because the outputs of several of its blocks are concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.media_units.aspect_image_unit import RATIOS, TILES
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.stage import in_dtype_of
from dilatant.models.core.weights import name_module_weights
from dilatant.models.encoders.encoder import Callbacks, EncoderStage, EncoderUnit
from dilatant.models.encoders.sound_encoder import NamedModule


class TiledStage(EncoderStage):
    """The encoder, its projector, or both."""

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        return self({self.geometry.input_name: value, **given}) if self.is_first else self(None, value)

    def _check_rows(self, inputs: Mapping[str, Tensor]) -> None:
        pass

    def _encode(self, model: nn.Module, inputs: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Encode images. inputs: pixels [images, tiles, channels, height, width], and the tile layout. Returns [images,
        rows, width]."""
        pixels = in_dtype_of(model, inputs[self.geometry.input_name])
        with self.recording(model, [pixels]):
            made = model(pixels[None], inputs[RATIOS][None], inputs[TILES][None]).last_hidden_state
        return made[0].flatten(1, 2)


class TiledEncoderUnit(EncoderUnit):
    """The encoder and its projector: layers `encoder` and `projector`."""

    stage_type = TiledStage

    def __init__(self, name: str, tower: PreTrainedModel, projector: NamedModule, width_out: int) -> None:
        config: Any = tower.config
        rows = config.max_num_tiles * ((config.image_size // config.patch_size) ** 2 + 1)
        geometry = EncoderGeometry(
            kind="image",
            input_name="pixel_values",
            tokens_per_row=rows,
            encoder_tokens=rows,
            leading_tokens=0,
            width=config.vision_output_dim,
            height=config.image_size,
            row_width=config.image_size,
            patch_size=config.patch_size,
            channels=config.num_channels,
        )
        self.tiles = config.max_num_tiles
        parts = {"encoder": ("model", tower), "projector": ("projector", projector)}
        EncoderStage.__init__(
            self,
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in parts),
            weights=name_module_weights(name, parts),
            model=tower,
            projector=projector,
            geometry=geometry,
            callbacks=Callbacks(),
        )
        self.structure = None
        self.width = geometry.width
        self.width_out = width_out
        self._freeze_at_start()

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.stage(0, len(self.layers))(inputs, hidden)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make whole images with all tiles."""
        items = max(1, round(tokens / self.geometry.encoder_tokens))
        if layer > 0:
            return torch.randn(items, self.geometry.encoder_tokens, self.width, device=device), {}
        pixels = torch.randn(items, self.tiles, *self.geometry.row_shape, device=device)
        given = {
            RATIOS: torch.ones(items, 1, dtype=torch.int64, device=device),
            TILES: torch.ones(items, self.tiles, dtype=torch.int64, device=device),
        }
        return pixels, given
