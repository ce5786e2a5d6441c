"""Mllama's image encoder: each image has a fixed number of tiles, some empty, and its rows go to cross-attention
blocks.

The encoder is a single layer and is not cut, because the outputs of several of its blocks are concatenated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
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

    def _check_rows(self, inputs: Mapping[str, Tensor]) -> None:
        pass

    def _encode(self, model: nn.Module, inputs: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Encode images. inputs: pixels [images, tiles, channels, height, width], and the tile layout. Returns [images,
        rows, width]."""
        pixels = in_dtype_of(model, inputs[self.geometry.input_name])
        with self.recording(model, [pixels]):
            output = model(pixels[None], inputs[RATIOS][None], inputs[TILES][None]).last_hidden_state
        return output[0].flatten(1, 2)


class TiledEncoderUnit(StagedEncoderUnit):
    """The encoder and its projector: layers `encoder` and `projector`."""

    stage_type = TiledStage
    has_blocks = False

    def __init__(self, name: str, tower: PreTrainedModel, projector: NamedModule, width_out: int) -> None:
        config: Any = tower.config
        rows = config.max_num_tiles * ((config.image_size // config.patch_size) ** 2 + 1)
        geometry = EncoderGeometry(
            kind="image",
            input_name="pixel_values",
            tokens_per_row=rows,
            encoder_tokens=rows,
            width=config.vision_output_dim,
            height=config.image_size,
            row_width=config.image_size,
            patch_size=config.patch_size,
            channels=config.num_channels,
        )
        super().__init__(name, tower, projector, geometry, width_out)
        self.tiles = config.max_num_tiles

    def _unused(self, model: nn.Module) -> frozenset[str]:
        return frozenset()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make whole images with all tiles."""
        items = max(1, round(tokens / self.geometry.encoder_tokens))
        if layer > 0:
            return torch.randn(items, self.geometry.encoder_tokens, self.width, device=device), {}
        pixels = torch.randn(items, self.tiles, *self.geometry.row_shape, device=device)
        inputs = {
            RATIOS: torch.ones(items, 1, dtype=torch.int64, device=device),
            TILES: torch.ones(items, self.tiles, dtype=torch.int64, device=device),
        }
        return pixels, inputs


class TiledTower(Tower):
    """Mllama's encoder, whose rows go to cross-attention blocks of the text model."""

    def build(self, host: HostModel) -> TiledEncoderUnit:
        model, encoder = self.in_model(host)
        projector = NamedModule(*self.named_projector(model), encoder)
        return TiledEncoderUnit(host.name, encoder, projector, host.text_width)

    def cross_attention(self, host: HostModel) -> CrossAttention:
        return CrossAttention.of(host.config, host.name, host.placeholder_id)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> AspectImageUnit:
        if settings is None or "image_processor_type" not in settings:
            raise UserError(
                f"model.processor is missing: {host.config.model_type} cuts images into tiles as its own says"
            )
        geometry = self.build(host).geometry
        cutting = HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True), geometry.channels)
        tokens = geometry.encoder_tokens
        return AspectImageUnit(host.name, host.placeholder_id, tokens, cutting, "<image>", written)

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
