"""Native-resolution encoders: images of different sizes packed in one row of patches, each attending only to itself."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, vision_utils

from dilatant.attention.hook import attend_to_items, borders_of_items
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.data.media_units.native_clip_unit import NativeClipUnit
from dilatant.data.media_units.native_image_unit import GRID, STEP, NativeImageUnit
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import Placeholder, keep_output
from dilatant.models.core.stage import Boundary, RowCount, in_dtype_of
from dilatant.models.core.structure import find_structure
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.media import native_limits, patches_of
from dilatant.models.encoders.packed_encoder import PackedEncoderStage, PackedEncoderUnit, TowerProjector
from dilatant.models.encoders.tower import ClipOptions, HostModel, Settings, Tensors, Tower

MERGERS = ("merger", "deepstack_merger_list")
"""Encoder modules that merge patches into rows of the text."""
PATCHES_AT_ONCE = 16_384
"""Maximum number of patches in one pass of the blocks. A device gains no speed beyond some thousands, and frozen blocks
need memory for one pass only, whatever the number of images or frames in a row."""
TYPICAL_GRID = 32
"""Patches on each side of the typical image (see `EncoderGeometry`), before rounding down to whole groups."""


class Merger(TowerProjector):
    """The encoder's patch merger: [patches, width * (1 + taps)] to [patches / merged, width of the text * (1 + taps)].

    tower: the encoder; its merger is moved into this module and replaced by a placeholder. taps: hidden states of inner
    blocks, each with a separate merger (DeepStack), concatenated after those of the last block.
    """

    def __init__(self, tower: PreTrainedModel) -> None:
        super().__init__(tower)
        model = cast(Any, tower)
        self.merger = model.merger
        model.merger = Placeholder(self.merger)
        taps = getattr(model, "deepstack_merger_list", None)
        if taps is not None:
            self.deepstack_merger_list = taps
            model.deepstack_merger_list = nn.ModuleList([nn.Identity() for _ in taps])

    def forward(self, hidden: Tensor) -> Tensor:
        mergers = [self.merger, *getattr(self, "deepstack_merger_list", ())]
        parts = hidden.chunk(len(mergers), dim=-1)
        return torch.cat([merge(part.contiguous()) for merge, part in zip(mergers, parts, strict=True)], dim=-1)


class PatchConvolution(nn.Conv3d):
    """A convolution with stride = kernel, computed as a matrix product for items of one patch. This is many times
    faster in bf16, for which libraries lack kernels for such convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-3:] != self.weight.shape[-3:]:
            return super().forward(input)
        rows = F.linear(input.flatten(-4), self.weight.flatten(1), self.bias)
        return rows[..., None, None, None]


def multiply_patches(model: nn.Module) -> None:
    """Turn convolutions that cut their input into patches into `PatchConvolution`s; weights keep names and shapes."""
    for module in model.modules():
        if (
            type(module) is nn.Conv3d
            and module.stride == module.kernel_size
            and (module.padding, module.dilation, module.groups) == ((0, 0, 0), (1, 1, 1), 1)
        ):
            module.__class__ = PatchConvolution


class NativeStage(PackedEncoderStage):
    """Layers of an encoder and its merger, run on all patches of the samples in one row."""

    sizes_name = GRID
    taps: tuple[int, ...] = ()
    """Numbers (in the whole encoder) of the blocks here whose hidden states are also outputs (DeepStack)."""
    end_block = 0
    patches_at_once = PATCHES_AT_ONCE
    """Frames run in groups of at most this many patches; a larger single frame runs alone."""

    def encode_items(self, model: nn.Module, fed: Tensor, sizes: Tensor, is_hidden: bool) -> Tensor:
        """Run the stage on patches. sizes: int64 [images, 3]. Hidden states are followed by taps."""
        groups = _groups(sizes.tolist(), self.patches_at_once)
        parts = fed.split([sum(t * h * w for t, h, w in group) for group in groups])
        encoded = [
            self._through_blocks(model, part, group, is_hidden) for part, group in zip(parts, groups, strict=True)
        ]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded)

    def _through_blocks(self, model: nn.Module, fed: Tensor, grids: list[list[int]], has_taps: bool) -> Tensor:
        width, tower = self.geometry.width, cast(Any, model)
        fed, taps = (fed[:, :width], [fed[:, width:]]) if has_taps else (fed, [])
        tapped: dict[int, Tensor] = {}
        ends_merged = f"{self.unit}.merger" in self.layers
        tables = _tables(tower, grids, fed.device)

        def run(given: Tensor) -> Tensor:
            output = tower(in_dtype_of(model, given), grid_thw=torch.tensor(grids), **tables)
            if ends_merged:
                return output.pooler_output
            hidden = output.last_hidden_state
            if "window_index" not in tables:
                return hidden
            # Undo the encoder's window order.
            groups = hidden.unflatten(0, (-1, tower.spatial_merge_size**2))
            return groups[tables["window_index"].argsort()].flatten(0, 1)

        with ExitStack() as closing:
            for block in self.taps:
                module = tower.get_submodule(f"{self.blocks_path}.{block}")
                keep = partial(keep_output, tapped, block)
                closing.callback(module.register_forward_hook(keep).remove)
            hidden = self.run_slice(run, fed)
        if self.shards is not None:  # after the last block all tokens are gathered already
            for block in self.taps:
                if block + 1 != self.end_block:
                    tapped[block] = self.shards.join_beside(tapped[block], fed.shape[:-1])
        parts = [hidden, *taps, *(tapped[block] for block in self.taps)]
        # A stage that merges has fewer rows than `taps`, which has no columns there.
        return torch.cat([part for part in parts if part.shape[-1]], dim=-1)


class NativeEncoderUnit(PackedEncoderUnit):
    """A native-resolution encoder of Qwen: layers `embedding`, `layers.<i>`, `projector`. The projector is the
    encoder's merger; or another module that takes merged rows, and then the merger is a separate layer `merger`."""

    stage_type = NativeStage
    tail = "merger"

    def __init__(
        self, name: str, tower: PreTrainedModel, projector: nn.Module | None = None, width_out: int = 0
    ) -> None:
        """projector: for a language model of hidden size `width_out`; None for the encoder's own language model."""
        multiply_patches(tower)
        attend_to_items(tower)
        config = cast(Any, tower).config
        self.merged = config.spatial_merge_size**2
        self._typical = typical = TYPICAL_GRID // config.spatial_merge_size * config.spatial_merge_size
        channels = getattr(config, "in_channels", 3)
        geometry = EncoderGeometry(
            kind="image",
            input_name="pixel_values",
            tokens_per_row=typical**2 // self.merged,
            encoder_tokens=typical**2,
            # The hidden size, whose config key differs between families.
            width=next(tower.get_submodule(find_structure(tower).before[0]).parameters()).shape[0],
            height=typical * config.patch_size,
            row_width=typical * config.patch_size,
            patch_size=config.patch_size,
            channels=channels,
        )
        self._taps = _taps_in(config)
        width = width_of_merged(config) if projector is None else width_out
        own = Merger(tower) if projector is None else projector
        super().__init__(name, tower, own, geometry, width * (1 + len(self._taps)))
        self.width_merged = 0 if projector is None else width_of_merged(config)
        self.numbers_of_patch = channels * config.temporal_patch_size * config.patch_size**2

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make images of the typical size, and one smaller image from the remainder."""
        side, typical = int(np.sqrt(self.merged)), self._typical
        grids = [(1, typical, typical)] * (tokens // typical**2)
        rest = tokens % typical**2 // (self.merged * typical // side) * side
        grids += [(1, rest, typical)] if rest or not grids else []
        grids = [(1, max(side, height), width) for _, height, width in grids]
        grid = torch.tensor(grids)
        if layer > self._merging_layer:
            return torch.randn(int(grid.prod(1).sum()) // self.merged, self.width_merged, device=device), {GRID: grid}
        taps = sum(1 for block in self._taps if block < layer - 1)
        width = self.numbers_of_patch if layer == 0 else self.geometry.width * (1 + taps)
        return torch.randn(int(grid.prod(1).sum()), width, device=device), {GRID: grid}

    @property
    def _merging_layer(self) -> int:
        structure = self.structure
        return len(self.layers) - (2 if structure is not None and structure.after else 1)

    def boundary(self, end: int, consumer: str) -> Boundary:
        is_merged = end > self._merging_layer
        taps = sum(1 for block in self._taps if block < end - 1)
        width = self.width_merged if is_merged else self.geometry.width * (1 + taps)
        return Boundary(
            width=self.width_out if end == len(self.layers) else width,
            dtype=self.row_dtype,
            rows_of=RowCount(self.unit, self.merged if is_merged else 1),
        )

    def stage(self, first: int, end: int) -> NativeStage:
        stage = super().stage(first, end)
        assert isinstance(stage, NativeStage)
        first_block, end_block = self._blocks(first, end)
        stage.taps = tuple(block for block in self._taps if first_block <= block < end_block)
        stage.end_block = end_block
        return stage


def _taps_in(config: Any) -> tuple[int, ...]:
    """Return the blocks whose outputs are merged for inner blocks of the text model (DeepStack)."""
    return tuple(getattr(config, "deepstack_visual_indexes", None) or ())


def width_of_merged(config: Any) -> int:
    """Return the width of the merged row that a Qwen encoder outputs for a group of patches."""
    return int(getattr(config, "out_hidden_size", None) or config.hidden_size)


def _groups(grids: list[list[int]], most: int) -> list[list[list[int]]]:
    """Split the frames of all items into groups of at most `most` patches (or a single larger frame): for each group,
    (frames, rows, columns) of its items. Frames do not attend to each other, not even within a clip."""
    groups: list[list[list[int]]] = [[]]
    left = most
    for frames, rows, columns in grids:
        while frames:
            count = min(frames, max(left // (rows * columns), not groups[-1]))
            if count:
                groups[-1].append([count, rows, columns])
            frames, left = frames - count, left - count * rows * columns
            if frames:
                groups.append([])
                left = most
    return groups


def _tables(tower: Any, grids: list[list[int]], device: torch.device) -> dict[str, Any]:
    """Return all that the encoder's forward derives from (frames, rows, columns) of its items, computed on the host, as
    keywords. Otherwise the forward computes it on the device, and the host waits for lengths in every block."""
    grid, side = torch.tensor(grids), tower.spatial_merge_size
    frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
    tables = {"position_ids": vision_utils.get_vision_position_ids(grid, side)}
    windows: dict[str, Any] = {}
    if hasattr(tower, "num_grid_per_side"):
        places = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=side,
        )
        tables |= dict(zip(("interp_indices", "interp_weights"), places, strict=True))
    if hasattr(tower, "fullatt_block_indexes"):
        tables["window_index"], borders = vision_utils.get_vision_window_index(
            grid, side, tower.window_size, tower.patch_size
        )
        lengths = borders.diff().numpy()
        windows = {"cu_window_seqlens": borders_of_items(lengths), "max_window_seqlen": int(lengths.max())}
    uploaded = {name: to_device(table, device) for name, table in tables.items()}
    return {**uploaded, "cu_seqlens": borders_of_items(frames), "max_seqlen": max(frames), **windows}


@dataclass(frozen=True)
class NativeTower(Tower):
    """Qwen's image encoder, which projects its rows itself. seconds: config path of the positions per second of a clip;
    empty if positions count its frames; seconds_keyword: the forward's keyword for the seconds per temporal patch."""

    seconds: str = ""
    seconds_keyword: str = ""

    blocks = ("patch_embed", "blocks")
    mergers = MERGERS

    def inner_rows(self, config: Any) -> int:
        return len(_taps_in(config.vision_config))

    def build(self, host: HostModel) -> EncoderUnit:
        _, encoder = self.in_model(host)
        return NativeEncoderUnit(host.name, encoder)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> NativeImageUnit:
        patches = patches_of(host.config.vision_config, settings or {})
        return NativeImageUnit(host.name, host.placeholder_id, patches, written=written)

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> MediaUnit:
        is_apart = self.clips == "patches apart"
        settings = {**options.saved, **options.requested}
        return NativeClipUnit(
            host.name,
            host.placeholder_id,
            *native_limits(host.config.vision_config, settings, options.saved, is_apart),
            self.seconds_scale(host.config),
            is_apart,
            written=options.written,
        )

    def seconds_scale(self, config: Any) -> float | None:
        """Return the positions per second of a clip; None if positions follow its frames."""
        return float(attrgetter(self.seconds)(config)) if self.seconds else None

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """Pass clips, which are items of several frames, under their own keywords and with their own tokens."""
        grids, patches = inputs[GRID], inputs["pixel_values"].flatten(1)
        is_clip = grids[:, 0] > 1
        if not bool(is_clip.any()):
            return {"pixel_values": patches, GRID: grids}
        sizes = grids.prod(1)
        of_items = patches.split(sizes.tolist())
        merged = (sizes // host.config.vision_config.spatial_merge_size**2).tolist()
        places = (ids == host.placeholder_id).nonzero().split(merged)
        ids = ids.clone()
        found = {"input_ids": ids}
        for clip, pixels, grid in ((False, "pixel_values", GRID), (True, "pixel_values_videos", "video_grid_thw")):
            numbers = (is_clip == clip).nonzero()[:, 0].tolist()
            if numbers:
                found[pixels] = torch.cat([of_items[number] for number in numbers])
                found[grid] = grids[numbers]
            for number in numbers if clip else ():
                ids[places[number].unbind(1)] = host.config.video_token_id
        scale = self.seconds_scale(host.config)
        if scale is not None:
            found[self.seconds_keyword] = inputs[STEP][is_clip].float() / scale
        return found
