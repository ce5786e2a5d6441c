"""Mllama's image encoder: each image has a fixed number of tiles, some empty, and its rows go to cross-attention
blocks.

The encoder is a single layer and is not cut, because the outputs of several of its blocks are concatenated. An item is
a whole image with all tiles, and a batch of its own for the family.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilatant.data.media_units.tiled_image_unit import RATIOS, TILES, AspectImageUnit
from dilatant.data.sample import MediaMarkup
from dilatant.models.core.cross_attention import visible_tiles
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.packed_encoder import NamedModule
from dilatant.models.encoders.tower import HostModel, Settings, Tensors, Tower
from dilatant.models.language.cross_attention import CrossAttention


class TiledTower(Tower):
    """Mllama's encoder, whose rows go to cross-attention blocks of the text model."""

    def build(self, host: HostModel) -> EncoderUnit:
        model, encoder = self.in_model(host)
        config: Any = encoder.config
        tiles, side = config.max_num_tiles, config.image_size
        rows = tiles * ((side // config.patch_size) ** 2 + 1)
        geometry = EncoderGeometry(
            kind="image",
            input_name="pixel_values",
            tokens_per_row=rows,
            encoder_tokens=rows,
            width=config.vision_output_dim,
            height=side,
            row_width=side,
            patch_size=config.patch_size,
            channels=config.num_channels,
            example={
                "pixel_values": torch.zeros(1, 1, tiles, config.num_channels, side, side),
                RATIOS: torch.ones(1, 1, dtype=torch.int64),
                TILES: torch.ones(1, 1, tiles, dtype=torch.int64),
            },
        )
        projector = NamedModule(*self.named_projector(model), encoder)
        return EncoderUnit(host.name, encoder, projector, geometry, host.text_width)

    def cross_attention(self, host: HostModel) -> CrossAttention:
        return CrossAttention.of(host.config, host.name, host.placeholder_id)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> AspectImageUnit:
        geometry = self.build(host).geometry
        place = host.name, host.placeholder_id, geometry.encoder_tokens
        return AspectImageUnit(*place, self.cutting(host, settings, geometry.channels), "<image>", written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """All prompts must have equally many images."""
        by_sample = {name: tensor.flatten(0, 1).unflatten(0, (len(ids), -1)) for name, tensor in inputs.items()}
        seen = [
            visible_tiles(row.cpu().numpy(), host.placeholder_id, tiles.cpu().numpy())
            for row, tiles in zip(ids, by_sample[TILES], strict=True)
        ]
        return {
            "pixel_values": by_sample["pixel_values"],
            RATIOS: by_sample[RATIOS],
            TILES: by_sample[TILES],
            "cross_attention_mask": torch.from_numpy(np.stack(seen)).long().to(ids.device),
        }
