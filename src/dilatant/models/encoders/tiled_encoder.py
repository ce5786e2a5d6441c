"""Mllama's image encoder: each image has a fixed number of tiles, some empty, and its rows go to cross-attention
blocks.

The encoder is a single layer and is not cut, because the outputs of several of its blocks are concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.data.media_units.tiled_image_unit import RATIOS, TILES, AspectImageUnit
from dilatant.data.sample import MediaMarkup
from dilatant.models.core.cross_attention import visible_tiles
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.stage import in_dtype_of
from dilatant.models.encoders.encoder import EncoderStage
from dilatant.models.encoders.packed_encoder import NamedModule, StagedEncoderUnit
from dilatant.models.encoders.tower import HostModel, Settings, Tensors, Tower
from dilatant.models.language.cross_attention import CrossAttention


class TiledStage(EncoderStage):
    """The encoder, its projector, or both."""

    def _encode(self, model: nn.Module, inputs: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Encode images. inputs: pixels [images, tiles, channels, height, width], and the tile layout. Returns [images,
        rows, width]."""
        pixels = in_dtype_of(model, inputs[self.geometry.input_name])
        with self.recording(model, [pixels]):
            output = model(pixels[None], inputs[RATIOS][None], inputs[TILES][None]).last_hidden_state
        return output[0].flatten(1, 2)


class TiledEncoderUnit(StagedEncoderUnit):
    """The encoder and its projector: layers `encoder` and `projector`. An item is a whole image with all tiles."""

    stage_type = TiledStage
    has_blocks = False

    def _unused(self, model: nn.Module) -> frozenset[str]:
        return frozenset()


class TiledTower(Tower):
    """Mllama's encoder, whose rows go to cross-attention blocks of the text model."""

    def build(self, host: HostModel) -> TiledEncoderUnit:
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
                "pixel_values": torch.zeros(1, tiles, config.num_channels, side, side),
                RATIOS: torch.ones(1, 1, dtype=torch.int64),
                TILES: torch.ones(1, tiles, dtype=torch.int64),
            },
        )
        projector = NamedModule(*self.named_projector(model), encoder)
        return TiledEncoderUnit(host.name, encoder, projector, geometry, host.text_width)

    def cross_attention(self, host: HostModel) -> CrossAttention:
        return CrossAttention.of(host.config, host.name, host.placeholder_id)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> AspectImageUnit:
        geometry = self.build(host).geometry
        place = host.name, host.placeholder_id, geometry.encoder_tokens
        return AspectImageUnit(*place, self.cutting(host, settings, geometry.channels), "<image>", written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """All prompts must have equally many images."""
        by_sample = {name: tensor.unflatten(0, (len(ids), -1)) for name, tensor in inputs.items()}
        seen = [
            visible_tiles(row.cpu().numpy(), host.placeholder_id, tiles.cpu().numpy())
            for row, tiles in zip(ids, by_sample[TILES], strict=True)
        ]
        return {
            "pixel_values": by_sample["pixel_values"],
            RATIOS: by_sample[RATIOS].squeeze(-1),
            TILES: by_sample[TILES],
            "cross_attention_mask": torch.from_numpy(np.stack(seen)).long().to(ids.device),
        }
