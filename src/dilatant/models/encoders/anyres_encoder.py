"""Any-resolution tile encoder: the image's shape decides its tiles and its rows in the text (LLaVA-OneVision)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilatant.config.errors import UserError
from dilatant.data.media_units.anyres_image_unit import SHAPES, AnyresShape
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import grid_part
from dilatant.models.core.stage import Boundary, StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.encoders.encoder import EncoderStage, EncoderUnit


class AnyresStage(EncoderStage):
    """Layers of the encoder, run on tiles, and its projector, which arranges the tiles' rows by image shape."""

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        if not any(data.samples[sample].sizes.get(self.unit, 0) for sample in samples):
            return StageOutput()
        if self.is_first:
            output = self(media_of(data, samples, self))
        else:
            names = () if self.projector is None else (SHAPES,)
            hidden = inbound[self.unit].unflatten(0, (-1, self.geometry.encoder_tokens))
            output = self(media_of(data, samples, self, names=names) if names else {}, hidden)
        return StageOutput(output if self.projector is not None else output.flatten(0, 1))

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        return self({self.geometry.input_name: value, **given}) if self.is_first else self(given, value)

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode tiles. inputs: `pixel_values` [tiles, ...], and for the projector `image_sizes` int64 [items, 3].
        Returns [tiles, tokens, width]; after the projector rows of the text, [rows, width]."""
        given = dict(inputs or {})
        shapes = given.pop(SHAPES, None)
        if self.model is not None:
            hidden = self._encode(self.model, given, hidden)
        assert hidden is not None
        return (
            hidden if self.projector is None else self.projector(in_dtype_of(self.projector, hidden), shapes)
        )


class AnyresEncoderUnit(EncoderUnit):
    """An `EncoderUnit` whose items differ in tiles and in rows of the text, both determined by the image's shape."""

    packs = True
    stage_type = AnyresStage
    shape: AnyresShape
    placeholder_id: int

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.stage(0, len(self.layers))(inputs, hidden)

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        return self.stage(0, len(self.layers)).run(data, samples, inbound)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make a sample of several images, which have one tile each."""
        value, given = super().example(layer, max(tokens, 2 * self.geometry.encoder_tokens), device)
        side = self.geometry.height
        return value, {**given, SHAPES: torch.tensor([[side, side, 0]] * len(value), device=device)}

    def reads(self, first: int, end: int) -> frozenset[str]:
        if first == 0:
            return frozenset({self.unit})
        return frozenset({grid_part(self.unit)} if end == len(self.layers) else ())

    def boundary(self, end: int, consumer: str) -> Boundary:
        if end < len(self.layers):
            return super().boundary(end, consumer)
        rows_of = partial(_rows, self.unit, self.placeholder_id, self.shape)
        return Boundary(self.width_out, self.row_dtype, rows_of)

    def element_of_row(self, other: str, sample: EncodedSample, rows: int) -> NDArray[np.int64]:
        raise UserError(
            f"{self.unit}: its images have unlike shapes, and ranks cannot share them; give it cp: 1"
        )


def images_of_samples(alone: Tensor) -> list[int]:
    """Count the images of each sample from its `ALONE` flags; adjacent multi-image samples may be counted as one."""
    return [
        count
        for is_alone, run in groupby(alone.tolist())
        for count in ([1] * len(list(run)) if is_alone else [len(list(run))])
    ]


def _rows(unit: str, placeholder_id: int, shape: AnyresShape, sample: EncodedSample) -> int:
    """Count a sample's rows: from the image shapes if the media are loaded, otherwise from the text's placeholders."""
    if not sample.sizes.get(unit, 0):
        return 0
    shapes = sample.media.get(unit, {}).get(SHAPES)
    if shapes is None:
        return int((sample.input_ids == placeholder_id).sum())
    return shape.rows_of(np.asarray(shapes))
