"""Gemma 4's image encoder: images of different sizes without transformers' padding; groups of patches are averaged
before projection."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dilatant.attention.hook import plan_of_items
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.data.media_units.frame_choice import FramedClipUnit
from dilatant.data.media_units.native_image_unit import GRID, NativeImageUnit
from dilatant.data.media_units.soft_token_image_unit import SOFT_TOKENS, soft_token_processor
from dilatant.data.sample import MediaMarkup
from dilatant.models.adapters.lora import plain_key
from dilatant.models.core.slicing import Placeholder, shell_of
from dilatant.models.core.stage import in_dtype_of
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.media import COUNTS, SOFT_TOKENS_OF_FRAMES, frame_choice
from dilatant.models.encoders.native_encoder import NativeEncoderUnit, NativeStage
from dilatant.models.encoders.packed_encoder import NamedModule
from dilatant.models.encoders.tower import ClipOptions, HostModel, Settings, Tensors, Tower

BUFFERS = ("std_bias", "std_scale")
"""Buffers that the end of an encoder uses."""
OF_END = "end."
"""Key prefix of these buffers in the projector."""


class PooledMerger(NamedModule):
    """Average pooling and embedder: [patches, width] to [patches / merged, width of the text].

    Runs the encoder's own forward with placeholders for embedding and blocks, on each group of patches as a separate
    image. tower: the encoder, whose pooling is moved here. name, embedder: the projecting module and its name.
    """

    def __init__(self, tower: PreTrainedModel, name: str, embedder: nn.Module) -> None:
        super().__init__(name, embedder, tower)
        encoder: Any = tower
        done = {"patch_embedder": Placeholder(encoder.patch_embedder), "encoder": _BlocksDone()}
        self.end = shell_of(tower, done, lambda entry: entry in ("pooler", *BUFFERS))
        for buffer in BUFFERS:
            if hasattr(tower, buffer):
                delattr(tower, buffer)
        encoder.config = copy.deepcopy(encoder.config)
        encoder.config.standardize = False
        self._side = int(encoder.config.pooling_kernel_size)

    def forward(self, hidden: Tensor) -> Tensor:
        side = self._side
        place = torch.arange(side, device=hidden.device)
        grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1).flatten(0, 1)
        groups = hidden.unflatten(0, (-1, side**2))
        rows = self.end(pixel_values=groups, pixel_position_ids=grid.expand(len(groups), -1, -1))
        return self.get_submodule(self._name)(inputs_embeds=rows.last_hidden_state)


class _BlocksDone(nn.Module):
    """Placeholder for blocks that have run."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=cast(Any, inputs_embeds))


class PooledStage(NativeStage):
    """A `NativeStage` whose encoder takes positions and an attention plan instead of grids."""

    def _through_blocks(self, model: nn.Module, fed: Tensor, grids: list[list[int]], is_hidden: bool) -> Tensor:
        tower: Any = model
        side = int(tower.config.pooling_kernel_size)
        plan = plan_of_items([t * h * w for t, h, w in grids])
        places = to_device(torch.cat([_places(grid, side) for grid in grids]), fed.device)[None]
        hidden = fed[None]
        if not is_hidden:
            patch = self.geometry.patch_size
            hidden = hidden.unflatten(2, (-1, patch, patch)).movedim(2, -1).flatten(2)  # channels last
            padding = torch.zeros(places.shape[:2], dtype=torch.bool, device=fed.device)
            hidden = tower.patch_embedder(in_dtype_of(model, hidden), places, padding)

        def run(hidden: Tensor) -> Tensor:
            output = tower.encoder(hidden, None, pixel_position_ids=places, attention_plan=plan)
            return output.last_hidden_state

        return self.run_slice(run, in_dtype_of(model, hidden)).flatten(0, -2)


class PooledEncoderUnit(NativeEncoderUnit):
    """The encoder and its embedder: layers `embedding`, `layers.<i>`, `projector` (average pooling, then embedder)."""

    stage_type = PooledStage


def _places(grid: Sequence[int], side: int) -> Tensor:
    """Return (column, row) of each patch, ordered by groups of `side` by `side`: int64 [patches, 2]."""
    frames, rows, columns = grid
    down, across = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([across, down], -1).unflatten(0, (-1, side)).unflatten(2, (-1, side))
    return places.transpose(1, 2).flatten(0, 3).repeat(frames, 1)


class PooledTower(Tower):
    """Gemma 4's image encoder, whose patches are averaged and then projected."""

    blocks = ("patch_embedder", "encoder")

    def build(self, host: HostModel) -> PooledEncoderUnit:
        model, encoder = self.in_model(host)
        config = encoder.config
        merger = PooledMerger(encoder, *self.named_projector(model))
        return PooledEncoderUnit(
            host.name, encoder, merger, config.pooling_kernel_size, 1, config.hidden_size, host.text_width
        )

    def key_of(self, weight: Weight) -> str:
        key = plain_key(weight.key)
        if key.startswith(OF_END):
            return f"{self.path}.{key.removeprefix(OF_END)}"
        return Tower.key_of(self, weight)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> NativeImageUnit:
        vision = host.config.vision_config
        processor = soft_token_processor(settings or {}, patch=vision.patch_size, merge=vision.pooling_kernel_size)
        return NativeImageUnit(host.name, host.placeholder_id, processor, written=written)

    @property
    def clip_settings(self) -> tuple[str, ...]:
        return (*COUNTS, SOFT_TOKENS_OF_FRAMES)

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> FramedClipUnit:
        saved = options.saved
        tokens = options.requested.get(SOFT_TOKENS_OF_FRAMES) or saved.get("max_soft_tokens") or SOFT_TOKENS[0]
        if tokens not in SOFT_TOKENS:
            known = ", ".join(map(str, SOFT_TOKENS))
            raise UserError(f"processor: {SOFT_TOKENS_OF_FRAMES} is {tokens!r}; it must be one of {known}")
        frame = replace(image, processor=replace(image.processor, soft_tokens=tokens))
        choice = frame_choice("timed", saved, options.requested)
        return FramedClipUnit(frame, choice, "timed", written=options.written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """Pad images to equally many patches."""
        pixels, grids = inputs["pixel_values"], inputs[GRID]
        side = host.config.vision_config.pooling_kernel_size
        places = [_places(grid, side).to(pixels.device) for grid in grids.tolist()]
        images = pixels.movedim(1, -1).flatten(1).split(grids.prod(1).tolist())
        pad = nn.utils.rnn.pad_sequence
        return {
            "pixel_values": pad(list(images), batch_first=True),
            "image_position_ids": pad(places, batch_first=True, padding_value=-1),
        }
