"""Gemma 4's image encoder: images of different sizes without transformers' padding; groups of patches are averaged
before projection."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dilatant.models.core.slicing import Placeholder
from dilatant.models.core.stage import in_dtype_of
from dilatant.models.encoders.native_encoder import NativeEncoderUnit, NativeStage

BUFFERS = ("std_bias", "std_scale")
"""Buffers that the end of an encoder uses."""
OF_END = "end."
"""Key prefix of these buffers in the projector."""


class PooledMerger(nn.Module):
    """Average pooling and embedder: [patches, width] to [patches / merged, width of the text].

    Runs the encoder's own forward with placeholders for embedding and blocks, on each group of patches as a separate
    image. tower: the encoder, whose pooling is moved here. name, embedder: the projecting module and its name.
    """

    drawn_by: PreTrainedModel
    """The model that initialises the weights."""

    def __init__(self, tower: PreTrainedModel, name: str, embedder: nn.Module) -> None:
        super().__init__()
        # Not registered: the encoder is another part of the unit.
        self.__dict__["drawn_by"] = tower
        end: Any = copy.copy(tower)
        own = {"patch_embedder": Placeholder(cast(Any, tower).patch_embedder), "encoder": _BlocksDone()}
        end.__dict__["_modules"] = {**own, "pooler": cast(Any, tower).pooler}
        end.__dict__["_parameters"] = {}
        end.__dict__["_buffers"] = {
            buffer: tower._buffers.pop(buffer) for buffer in BUFFERS if buffer in tower._buffers
        }
        tower.__dict__["config"] = copy.deepcopy(tower.config)
        tower.config.standardize = False
        self.end = end
        self._side = int(cast(Any, tower).config.pooling_kernel_size)
        self._name = name
        self.add_module(name, embedder)

    def forward(self, hidden: Tensor) -> Tensor:
        side = self._side
        place = torch.arange(side, device=hidden.device)
        grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1).flatten(0, 1)
        groups = hidden.unflatten(0, (-1, side**2))
        rows = self.end(pixel_values=groups, pixel_position_ids=grid.expand(len(groups), -1, -1))
        return cast(Any, self._modules[self._name])(inputs_embeds=rows.last_hidden_state)


class _BlocksDone(nn.Module):
    """Replaces blocks that have run."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=cast(Any, inputs_embeds))


class PooledStage(NativeStage):
    """A `NativeStage` in which images of equally many patches go through the blocks as a batch."""

    def _through_blocks(self, model: nn.Module, fed: Tensor, grid: Tensor, is_hidden: bool) -> Tensor:
        tower: Any = model
        side = int(tower.config.pooling_kernel_size)
        grids = grid.tolist()
        if not is_hidden:  # channels last
            patch = self.geometry.patch_size
            fed = fed.unflatten(1, (-1, patch, patch)).movedim(1, -1).flatten(1)
        parts = fed.split([t * h * w for t, h, w in grids])
        alike: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            alike.setdefault(len(part), []).append(number)
        made: dict[int, Tensor] = {}
        for numbers in alike.values():
            hidden = torch.stack([parts[number] for number in numbers])
            places = torch.stack([_places(grids[number], side, fed.device) for number in numbers])
            if not is_hidden:
                padding = torch.zeros(places.shape[:2], dtype=torch.bool, device=fed.device)
                hidden = tower.patch_embedder(in_dtype_of(model, hidden), places, padding)
            output = tower.encoder(
                inputs_embeds=in_dtype_of(model, hidden), attention_mask=None, pixel_position_ids=places
            )
            made |= dict(zip(numbers, output.last_hidden_state, strict=True))
        return torch.cat([made[number] for number in range(len(parts))])


class PooledEncoderUnit(NativeEncoderUnit):
    """The encoder and its embedder: layers `embedding`, `layers.<i>`, `projector` (average pooling, then embedder)."""

    stage_type = PooledStage


def pooled_encoder_unit(
    name: str, tower: PreTrainedModel, embedder: tuple[str, nn.Module], out: int
) -> PooledEncoderUnit:
    """Build the unit of an encoder. embedder: its name, and the module that projects to `out` features."""
    config = cast(Any, tower).config
    merger = PooledMerger(tower, *embedder)
    return PooledEncoderUnit(name, tower, merger, config.pooling_kernel_size, 1, config.hidden_size, out)


def _places(grid: Sequence[int], side: int, device: torch.device) -> Tensor:
    """Return (column, row) of each patch, ordered by groups of `side` by `side`: int64 [patches, 2]."""
    frames, rows, columns = grid
    down, across = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    places = torch.stack([across, down], -1).unflatten(0, (-1, side)).unflatten(2, (-1, side))
    return places.transpose(1, 2).flatten(0, 3).repeat(frames, 1)


def padded_patches(pixels: Tensor, grids: Tensor, side: int) -> dict[str, Tensor]:
    """Pad images to equally many patches, as transformers' encoder takes them, with the patches' positions. pixels:
    [patches, channels, height, width]; grids: int64 [images, 3]."""
    sizes = grids.prod(1).tolist()
    own = [_places(each, side, pixels.device) for each in grids.tolist()]
    parts = pixels.movedim(1, -1).flatten(1).split(sizes)
    return {
        "pixel_values": nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
        "image_position_ids": nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1),
    }
