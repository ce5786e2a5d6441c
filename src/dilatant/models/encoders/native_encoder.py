"""Native-resolution encoders: images of different sizes packed in one row of patches, each attending only to itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.media_units.native_image_unit import GRID
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import grid_part
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import Placeholder
from dilatant.models.core.stage import Boundary, in_dtype_of
from dilatant.models.core.structure import find_structure
from dilatant.models.core.weights import name_weights
from dilatant.models.encoders.encoder import Callbacks, EncoderStage
from dilatant.models.encoders.packed_encoder import PackedEncoderStage, PackedEncoderUnit

MERGERS = ("merger", "deepstack_merger_list")
"""Encoder modules that merge patches into rows of the text."""
PATCHES_AT_ONCE = 16_384
"""Maximum number of patches in one pass of the blocks. A device gains no speed beyond some thousands, and frozen blocks
need memory for one pass only, whatever the number of images or frames in a row."""
TYPICAL_GRID = 32
"""Patches on each side of the image with which layers are measured."""


class Merger(nn.Module):
    """The encoder's patch merger: [patches, width * (1 + taps)] to [patches / merged, width of the text * (1 + taps)].

    tower: the encoder; its merger is moved into this module and replaced by a placeholder. taps: hidden states of inner
    blocks, each with a separate merger (DeepStack), concatenated after those of the last block.
    """

    drawn_by: PreTrainedModel
    """The model that initialises the weights."""

    def __init__(self, tower: PreTrainedModel) -> None:
        super().__init__()
        model = cast(Any, tower)
        # Not registered: the encoder is another part of the unit.
        self.__dict__["drawn_by"] = tower
        self.merger = model.merger
        tower._modules["merger"] = Placeholder(model.merger)
        taps = getattr(model, "deepstack_merger_list", None)
        if taps is not None:
            self.deepstack_merger_list = taps
            tower._modules["deepstack_merger_list"] = nn.ModuleList([_PassThrough() for _ in taps])

    def forward(self, hidden: Tensor) -> Tensor:
        mergers = [self.merger, *getattr(self, "deepstack_merger_list", ())]
        parts = hidden.chunk(len(mergers), dim=-1)
        return torch.cat(
            [merge(part.contiguous()) for merge, part in zip(mergers, parts, strict=True)], dim=-1
        )


class _PassThrough(nn.Module):
    """Identity for a block's hidden states."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class NativeStage(PackedEncoderStage):
    """Layers of an encoder and its merger, run on all patches of the samples in one row."""

    sizes_name = GRID
    taps: tuple[int, ...] = ()
    """Numbers (in the whole encoder) of the blocks here whose hidden states are also outputs (DeepStack)."""
    first_block = 0
    end_block = 0
    patches_at_once = PATCHES_AT_ONCE
    """Frames run in groups of at most this many patches; a larger single frame runs alone."""

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode patches. inputs: `image_grid_thw` int64 [images, 3], and for the first stage pixels [patches, ...].
        hidden: [patches, width], followed by taps. Returns hidden states in the form of `hidden`; after the merger,
        rows of the text."""
        inputs = inputs or {}
        if self.model is not None:
            fed = inputs[self.geometry.input_name].flatten(1) if hidden is None else hidden
            with self.recording(self.model, [fed]):
                grids = _groups(inputs[GRID].tolist(), self.patches_at_once)
                parts = fed.split([sum(t * h * w for t, h, w in group) for group in grids])
                made = [
                    self._through_blocks(self.model, part, inputs[GRID].new_tensor(group), hidden is not None)
                    for part, group in zip(parts, grids, strict=True)
                ]
                hidden = made[0] if len(made) == 1 else torch.cat(made)
        assert hidden is not None
        return hidden if self.projector is None else self.projector(in_dtype_of(self.projector, hidden))

    def _through_blocks(self, model: nn.Module, fed: Tensor, grid: Tensor, has_taps: bool) -> Tensor:
        width = self.geometry.width
        fed, taps = (fed[:, :width], [fed[:, width:]]) if has_taps else (fed, [])
        tower = cast(Any, copy.copy(model))
        if hasattr(tower, "deepstack_visual_indexes"):  # of the whole encoder; the stage may have none
            tower.deepstack_visual_indexes = [block - self.first_block for block in self.taps]
        full = getattr(tower, "fullatt_block_indexes", None)
        if full is not None:
            tower.fullatt_block_indexes = [block - self.first_block for block in full]
        output = tower(in_dtype_of(model, fed), grid_thw=grid)
        if f"{self.unit}.merger" in self.layers:
            return cast(Tensor, output.pooler_output)
        hidden = output.last_hidden_state
        if full is not None:
            hidden = _in_order(tower, hidden, grid)
        made = [*(getattr(output, "deepstack_features", None) or ())]
        if self.shards is not None:  # after the last block all tokens are gathered already
            made = [
                each if block + 1 == self.end_block else self.shards.join_beside(each, hidden.shape[:-1])
                for block, each in zip(self.taps, made, strict=True)
            ]
        return torch.cat([hidden, *taps, *made], dim=-1)


class NativeEncoderUnit(PackedEncoderUnit):
    """A native-resolution encoder: layers `embedding`, `layers.<i>`, `projector`. The projector is the encoder's merger
    (see `native_encoder_with_merger` for Qwen's), or another module; in that case the merger is a separate layer
    `merger`."""

    stage_type = NativeStage

    def __init__(
        self,
        name: str,
        tower: PreTrainedModel,
        projector: nn.Module,
        side: int,
        frames: int,
        width: int,
        out: int,
        width_merged: int = 0,
    ) -> None:
        """side: a group of side x side patches becomes one row of the text. frames: number of frames in a patch.
        Widths: width, a hidden state's; width_merged, that of a row from the encoder's own merger; out, that of a row
        of the text."""
        config = cast(Any, tower).config
        structure = find_structure(tower)
        blocks = (f"layers.{i}" for i in range(structure.num_blocks))
        layers = ("embedding", *blocks, *(("merger",) if structure.after else ()), "projector")
        merged = side**2
        self._taps = tuple(getattr(config, "deepstack_visual_indexes", None) or ())
        typical = self._typical = TYPICAL_GRID // side * side
        patches = typical**2
        pixels = getattr(config, "in_channels", 3) * frames * config.patch_size**2
        geometry = EncoderGeometry(
            kind="image",
            input_name="pixel_values",
            tokens_per_row=patches // merged,
            encoder_tokens=patches,
            leading_tokens=0,
            width=width,
            height=typical * config.patch_size,
            row_width=typical * config.patch_size,
            patch_size=config.patch_size,
            channels=getattr(config, "in_channels", 3),
        )
        EncoderStage.__init__(
            self,
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in layers),
            weights=name_weights(name, tower, structure, "merger", projector),
            model=tower,
            projector=projector,
            geometry=geometry,
            callbacks=Callbacks(),
        )
        self.structure = structure
        self.width = width
        self.width_out = out * (1 + len(self._taps))
        self.width_merged = width_merged
        self.merged = merged
        self.numbers_of_patch = pixels
        self._freeze_at_start()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make images of the typical size, and one smaller image from the remainder."""
        side, typical = int(np.sqrt(self.merged)), self._typical
        grids = [(1, typical, typical)] * (tokens // typical**2)
        rest = tokens % typical**2 // (self.merged * typical // side) * side
        grids += [(1, rest, typical)] if rest or not grids else []
        grids = [(1, max(side, height), width) for _, height, width in grids]
        grid = torch.tensor(grids, device=device)
        if layer > self._merging_layer:
            return torch.randn(int(grid.prod(1).sum()) // self.merged, self.width_merged, device=device), {
                GRID: grid
            }
        taps = sum(1 for block in self._taps if block < layer - 1)
        width = self.numbers_of_patch if layer == 0 else self.geometry.width * (1 + taps)
        return torch.randn(int(grid.prod(1).sum()), width, device=device), {GRID: grid}

    @property
    def _merging_layer(self) -> int:
        structure = self.structure
        return len(self.layers) - (2 if structure is not None and structure.after else 1)

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit if first == 0 else grid_part(self.unit)})

    def boundary(self, end: int, consumer: str) -> Boundary:
        is_merged = end > self._merging_layer
        taps = sum(1 for block in self._taps if block < end - 1)
        width = self.width_merged if is_merged else self.geometry.width * (1 + taps)
        return Boundary(
            width=self.width_out if end == len(self.layers) else width,
            dtype=self.row_dtype,
            rows_of=partial(_rows, self.unit, self.merged if is_merged else 1),
        )

    def stage(self, first: int, end: int) -> NativeStage:
        stage = super().stage(first, end)
        assert isinstance(stage, NativeStage)
        first_block, end_block = self._blocks(first, end)
        stage.taps = tuple(block for block in self._taps if first_block <= block < end_block)
        stage.first_block, stage.end_block = first_block, end_block
        return stage


def native_encoder_with_merger(name: str, tower: PreTrainedModel) -> NativeEncoderUnit:
    """Build the unit of a Qwen encoder with its own language model; the projector is the encoder's merger."""
    config = cast(Any, tower).config
    side, frames = config.spatial_merge_size, config.temporal_patch_size
    width = _width_of_patches(tower, find_structure(tower).before[0])
    return NativeEncoderUnit(name, tower, Merger(tower), side, frames, width, width_of_merged(config))


def native_encoder_with_projector(
    name: str, tower: PreTrainedModel, projector: nn.Module, hidden_size: int
) -> NativeEncoderUnit:
    """Build the unit of a Qwen encoder with another language model; `projector` takes merged rows."""
    config = cast(Any, tower).config
    side, frames = config.spatial_merge_size, config.temporal_patch_size
    width = _width_of_patches(tower, find_structure(tower).before[0])
    merged = width_of_merged(config)
    return NativeEncoderUnit(name, tower, projector, side, frames, width, hidden_size, merged)


def width_of_merged(config: Any) -> int:
    """Return the width of the merged row that a Qwen encoder outputs for a group of patches."""
    return int(getattr(config, "out_hidden_size", None) or config.hidden_size)


def _groups(grids: list[list[int]], most: int) -> list[list[list[int]]]:
    """Split the frames of all items into groups of at most `most` patches (or a single larger frame): for each group,
    (frames, rows, columns) of its items. Frames do not attend to each other, not even within a clip."""
    groups: list[list[list[int]]] = [[]]
    room = most
    for frames, rows, columns in grids:
        while frames:
            count = min(frames, max(room // (rows * columns), not groups[-1]))
            if count:
                groups[-1].append([count, rows, columns])
            frames, room = frames - count, room - count * rows * columns
            if frames:
                groups.append([])
                room = most
    return groups


def _rows(unit: str, merged: int, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0) // merged


def _width_of_patches(tower: PreTrainedModel, embedding: str) -> int:
    """Return the hidden size, whose config key differs between families."""
    weight = next(tower.get_submodule(embedding).parameters())
    return weight.shape[0]


def _in_order(tower: Any, hidden: Tensor, grid: Tensor) -> Tensor:
    """Undo the encoder's window order: return patches in the order of the images."""
    from transformers.vision_utils import get_vision_window_index

    index, _ = get_vision_window_index(
        grid, tower.spatial_merge_size, tower.config.window_size, tower.config.patch_size
    )
    return hidden.unflatten(0, (-1, tower.spatial_merge_size**2))[index.argsort()].flatten(0, 1)
