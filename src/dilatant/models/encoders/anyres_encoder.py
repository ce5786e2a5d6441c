"""Any-resolution tile encoder: the image's shape decides its tiles and its rows in the text (LLaVA-OneVision)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.data.media_units.anyres_image_unit import (
    AMONG,
    CLIP,
    SHAPES,
    AnyresClipUnit,
    AnyresImageUnit,
    AnyresShape,
)
from dilatant.data.sample import MediaMarkup
from dilatant.models.core.geometry import encoder_geometry
from dilatant.models.core.slicing import ShapePlaceholder
from dilatant.models.core.stage import Boundary
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.fixed_tower import FixedTower, Projection, used_part
from dilatant.models.encoders.media import frame_choice, resized_frames
from dilatant.models.encoders.packed_encoder import PackedEncoderStage, PackedEncoderUnit, rows_of_items
from dilatant.models.encoders.tower import ClipOptions, HostModel, Settings, Tensors


class AnyresStage(PackedEncoderStage):
    """Layers of the encoder, run on tiles, and its projector, which arranges the tiles' rows by image shape."""

    sizes_name = SHAPES

    def encode_items(self, model: nn.Module, fed: Tensor, sizes: Tensor, is_hidden: bool) -> Tensor:
        """Run the stage on tiles. sizes: int64 [items, 3] (see `SHAPES`)."""
        if is_hidden:
            return self._encode(model, {}, self._tiles(fed)).flatten(0, 1)
        tiles = fed.unflatten(1, self.geometry.row_shape)
        return self._encode(model, {self.geometry.input_name: tiles}, None).flatten(0, 1)

    def project(self, hidden: Tensor, sizes: Tensor) -> Tensor:
        assert self.projector is not None
        return self.projector(self._tiles(hidden), sizes)

    def _tiles(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(0, (-1, self.geometry.encoder_tokens))


class AnyresEncoderUnit(PackedEncoderUnit):
    """An `EncoderUnit` whose items differ in tiles and in rows of the text, both determined by the image's shape."""

    stand_in = ShapePlaceholder
    stage_type = AnyresStage
    shape: AnyresShape
    placeholder_id: int

    def _unused(self, model: nn.Module) -> frozenset[str]:
        return EncoderUnit._unused(self, model)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make a sample of several images, which have one tile each."""
        value, inputs = super().example(layer, max(tokens, 2 * self.geometry.encoder_tokens), device)
        count = len(value) // (self.geometry.encoder_tokens if layer else 1)
        return value, {**inputs, SHAPES: torch.tensor([[self.geometry.height] * 2 + [AMONG]] * count, device=device)}

    def boundary(self, end: int, consumer: str) -> Boundary:
        if end < len(self.layers):
            return super().boundary(end, consumer)
        rows_of = partial(rows_of_items, self.unit, self.placeholder_id, self._rows_of_text)
        return Boundary(self.width_out, self.row_dtype, rows_of)

    def _rows_of_text(self, media: Mapping[str, Any]) -> int:
        return self.shape.rows_of(np.asarray(media[SHAPES]))


class AnyresProjection(Projection):
    """Projects images and clips, each by the family's own method, in their order. shape: set by the tower."""

    shape: AnyresShape

    def forward(self, hidden: Tensor, shapes: Tensor | None = None) -> Tensor:
        """Project the rows of tiles. shapes: int64 [items, 3] (see `SHAPES`). Returns [rows, width], the rows of all
        items concatenated."""
        assert shapes is not None
        tiles_of = list(hidden.split([self.shape.tiles_of(shape) for shape in shapes.tolist()]))
        rows: dict[int, Tensor] = {}
        images = (shapes[:, 2] != CLIP).nonzero()[:, 0].tolist()
        if images:
            tiles = torch.cat([tiles_of[number] for number in images])
            of_images = shapes[images]
            found = self.around(tiles).get_image_features(
                self.pixels(len(tiles)),
                image_sizes=of_images[:, :2],
                batch_num_images=images_of_samples(of_images[:, 2]),
            )
            rows |= dict(zip(images, found.pooler_output, strict=True))
        for number, frames in enumerate(tiles_of):
            if number in rows:
                continue
            count = len(frames)
            clip = self.around(frames).get_video_features(self.pixels(count)[None]).pooler_output[0]
            if len(clip) < self.shape.clip_rows(count):  # some versions append the end marker after this method
                clip = torch.cat([clip, cast(Any, self.model).image_newline[None].to(clip.dtype)])
            rows[number] = clip
        return torch.cat([rows[number] for number in range(len(tiles_of))])


def images_of_samples(alone: Tensor) -> list[int]:
    """Count the images of each sample from its `ALONE` flags; adjacent multi-image samples may be counted as one."""
    return [
        count
        for is_alone, run in groupby(alone.tolist())
        for count in ([1] * len(list(run)) if is_alone else [len(list(run))])
    ]


class AnyresTower(FixedTower):
    """LLaVA-OneVision's encoder, whose images have tiles and rows that depend on their shape."""

    def build(self, host: HostModel) -> AnyresEncoderUnit:
        model, encoder = self.in_model(host)
        encoder = used_part(host.config, encoder)
        geometry, shape = encoder_geometry(encoder.config), shape_of(host.config)
        projection = AnyresProjection(model, self.path, self.projector)
        projection.shape = shape
        rows = torch.empty(2, geometry.encoder_tokens, geometry.width, device="meta")
        merged, width = projection(rows, torch.tensor([[geometry.height] * 2 + [AMONG]] * 2)).shape
        geometry = replace(geometry, tokens_per_row=merged // 2)
        unit = AnyresEncoderUnit(host.name, encoder, projection, geometry, width)
        unit.shape, unit.placeholder_id = shape, host.placeholder_id
        return unit

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> AnyresImageUnit:
        geometry = self.build(host).geometry
        cutting = self.cutting(host, settings, geometry.channels)
        place = host.name, host.placeholder_id, geometry.encoder_tokens
        return AnyresImageUnit(*place, shape_of(host.config), cutting, written=written)

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> AnyresClipUnit:
        choice = frame_choice("pooled", options.saved, options.requested)
        tile, settings = image.shape.tile, {**options.requested, **options.saved}
        frames = resized_frames(tile, tile, image.processor.channels, settings)
        place = image.name, image.placeholder_id, image.tokens_per_tile
        return AnyresClipUnit(*place, image.shape, frames, choice, written=options.written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """Pass tiles of images and frames of clips under separate keywords and with different tokens."""
        shape, shapes = shape_of(host.config), inputs[SHAPES].tolist()
        kinds = [kind for _, _, kind in shapes]
        tiles = inputs["pixel_values"].split([shape.tiles_of(each) for each in shapes])
        images = [number for number, kind in enumerate(kinds) if kind != CLIP]
        clips = [tile for tile, kind in zip(tiles, kinds, strict=True) if kind == CLIP]
        found: dict[str, Tensor] = {}
        if images:
            of_images = torch.tensor([shapes[number] for number in images])
            found = {
                "pixel_values": torch.cat([tiles[number] for number in images]),
                SHAPES: of_images[:, :2],
                "batch_num_images": torch.tensor(images_of_samples(of_images[:, 2])),
            }
        if not clips:
            return found
        if len({len(clip) for clip in clips}) > 1:
            raise UserError(
                "clips of unlike numbers of frames in one prompt, which transformers' own model takes in one tensor; "
                "set num_frames under model.processor, or ask about one clip at a time"
            )
        ids = ids.clone()
        rows = [shape.rows_of(np.asarray([each])) for each in shapes]
        for kind, places in zip(kinds, (ids == host.placeholder_id).nonzero().split(rows), strict=True):
            if kind == CLIP:
                ids[places.unbind(1)] = host.config.video_token_id
        return {**found, "input_ids": ids, "pixel_values_videos": torch.stack(clips)}


def shape_of(config: Any) -> AnyresShape:
    """Return the rule that maps an image's shape to its tiles and rows, from the config of the whole model."""
    vision = config.vision_config
    return AnyresShape(
        pinpoints=tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints),
        tile=vision.image_size,
        side=vision.image_size // vision.patch_size,
        most=int(config.vision_aspect_ratio.removeprefix("anyres_max_")),
    )
