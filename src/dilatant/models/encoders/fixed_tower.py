"""Towers with items of one size: plain encoders whose rows transformers' own code projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dilatant.data.media_units.frame_choice import FramedClipUnit
from dilatant.data.media_units.image_unit import ImageUnit
from dilatant.data.media_units.processors import fixed_size
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit, check_tiles
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.adapters.lora import plain_key
from dilatant.models.core.geometry import encoder_geometry, height_and_width
from dilatant.models.core.slicing import shell_of, with_blocks
from dilatant.models.core.structure import find_structure
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.media import frame_choice, media_unit, resized_frames
from dilatant.models.encoders.tower import ClipOptions, HostModel, Settings, Tensors, Tower

_NORMED_LAST = ("internvl",)
"""Families whose last feature layer (-1) is the normalised output instead of the last block's."""


@dataclass(frozen=True)
class FixedTower(Tower):
    """An image encoder whose input has one size. batched: True if the family's method takes pixels as [samples, images,
    ...] instead of [images, ...]. settings: overrides of the image processor."""

    batched: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, host: HostModel) -> EncoderUnit:
        model, encoder = self.in_model(host)
        encoder = used_part(host.config, encoder)
        projection = Projection(model, self.path, self.projector, self.batched)
        geometry = encoder_geometry(encoder.config)
        rows = torch.empty(2, geometry.encoder_tokens, geometry.width, device="meta")
        _, merged, width = projection(rows).shape
        geometry = replace(geometry, tokens_per_row=merged)
        return EncoderUnit(host.name, encoder, projection, geometry, width)

    def key_of(self, weight: Weight) -> str:
        return plain_key(weight.key) if weight.part == "projector" else Tower.key_of(self, weight)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        geometry = self.build(host).geometry
        if settings is not None and "image_processor_type" in settings:
            settings = {**settings, **self.settings}
            if fixed_size(settings, geometry.channels) is None:
                cutting = self.cutting(host, settings, geometry.channels)
                shape = (geometry.channels, geometry.height, geometry.row_width)
                check_tiles(cutting, shape)
                tokens = geometry.encoder_tokens, geometry.tokens_per_row
                return TiledImageUnit(host.name, host.placeholder_id, *tokens, shape, cutting, written=written)
        unit = media_unit(
            host.name,
            geometry,
            processor=settings,
            placeholder_id=host.placeholder_id,
            marker="<image>",
            merge="placeholder",
        )
        return replace(unit, written=written)

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> MediaUnit:
        """Frames of a "counted" clip are one tile each, even if images are cut into tiles."""
        assert self.clips is not None
        choice = frame_choice(self.clips, options.saved, options.requested)
        if self.clips == "counted":
            geometry = self.build(host).geometry
            settings = {**options.requested, **options.saved}
            size = geometry.height, geometry.row_width, geometry.channels
            image = ImageUnit(
                image.name,
                image.placeholder_id,
                geometry.encoder_tokens,
                resized_frames(*size, settings),
                geometry.tokens_per_row,
                written=image.written,
            )
        return FramedClipUnit(image, choice, self.clips, written=options.written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        return {name: tensor[None] if self.batched else tensor for name, tensor in inputs.items()}


class Projection(nn.Module):
    """A family's projection of encoder rows for the text: [items, tokens, width] to [items, rows, width of the text].

    The family's own method runs with a placeholder encoder that returns the input rows, so the treatment of class
    tokens, pooling and shuffles is the family's. The module's state has the composite's keys.
    """

    def __init__(self, model: PreTrainedModel, path: str, projector: tuple[str, ...], batched: bool = False) -> None:
        """path: the encoder's. projector: paths of the modules that project its rows. batched: see `FixedTower`."""
        super().__init__()
        self.model = cast(PreTrainedModel, model.base_model)
        prefix = f"{model.base_model_prefix}."
        keeps = {place.removeprefix(prefix) for place in projector}
        tensors = self.model.named_parameters(recurse=False)
        for name in [name for name, _ in (*self.model.named_children(), *tensors) if name not in keeps]:
            setattr(self.model, name, None)
        self._place = path.removeprefix(prefix)
        self._batched = batched

    @property
    def drawn_by(self) -> PreTrainedModel:
        """The model that initialises the weights."""
        return self.model

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.around(hidden).get_image_features(self.pixels(len(hidden))).pooler_output
        rows = found if isinstance(found, Tensor) else torch.cat(list(found))
        return rows.reshape(len(hidden), -1, rows.shape[-1])

    def around(self, hidden: Tensor) -> Any:
        """Return the model with a placeholder encoder that outputs `hidden`."""
        return shell_of(self.model, {self._place: _Rows(hidden)})

    def pixels(self, items: int) -> Tensor:
        """Return dummy pixels of `items` images, which the placeholder ignores: on the host, where shape checks do not
        wait for a device. They are not black, because families drop black images."""
        shape = (1, items) if self._batched else (items,)
        patch = self.model.config.vision_config.patch_size
        return torch.ones(*shape, 1, *height_and_width(patch))


class _Rows(nn.Module):
    """Replaces an encoder that has run: returns its output as the hidden states of every layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self._hidden, hidden_states=_SameForEveryItem(self._hidden))


class _SameForEveryItem(tuple):
    """A tuple that returns one tensor at every index."""

    def __new__(cls, hidden: Tensor) -> _SameForEveryItem:
        return super().__new__(cls, (hidden,))

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def used_part(config: Any, encoder: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder without the blocks and norms after the layer whose hidden states the family uses. The omitted
    modules influence no output, never train, and are exported as they were read."""
    layer = getattr(config, "vision_feature_layer", None)
    structure = find_structure(encoder)
    if layer is None or (layer == -1 and config.model_type in _NORMED_LAST):
        return encoder
    blocks = layer if layer >= 0 else structure.num_blocks + 1 + layer
    used = [*encoder.get_submodule(structure.blocks).children()][:blocks]
    return with_blocks(encoder, structure, used, keep_before=True, keep_after=False)
