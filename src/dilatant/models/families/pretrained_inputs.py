"""Inputs of transformers' own forward of a pretrained multimodal model, converted from our units' inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.data.media_units.anyres_image_unit import CLIP, SHAPES
from dilatant.data.media_units.aspect_image_unit import RATIOS, TILES
from dilatant.data.media_units.native_image_unit import GRID, STEP
from dilatant.data.media_units.sound_unit import FRAMES
from dilatant.models.core.cross_attention import visible_tiles
from dilatant.models.encoders.anyres_encoder import images_of_samples
from dilatant.models.encoders.pooled_encoder import padded_patches
from dilatant.models.families.pretrained import PretrainedModel


def composite_inputs(
    whole: PretrainedModel,
    input_ids: Tensor,
    encoder_inputs: Mapping[str, Mapping[str, Tensor]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the keywords, without the mask, for `input_ids` [batch, tokens]; floating ones in `dtype`."""
    given: dict[str, Tensor] = {"input_ids": input_ids}
    for name, inputs in encoder_inputs.items():
        tower = whole.family.towers[name]
        if tower.kind == "audio":
            given |= _sounds(whole, inputs, dtype)
            continue
        if tower.crossing:
            given |= _looked_at(whole, input_ids, inputs, dtype)
            continue
        if tower.pooled:
            side = whole.config.vision_config.pooling_kernel_size
            given |= padded_patches(inputs["pixel_values"].to(dtype), inputs[GRID], side)
            continue
        for keyword, tensor in inputs.items():
            if keyword == STEP:
                continue
            if keyword == SHAPES:
                continue
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            tensor = tensor.flatten(1) if tower.native else tensor
            given[keyword] = tensor[None] if tower.batched else tensor
        if SHAPES in inputs:
            given = _part_tiles(whole, given, inputs[SHAPES].tolist())
    kinds = torch.zeros_like(input_ids)
    for name, placeholder in whole.placeholder_ids.items():
        if whole.family.towers[name].kind == "image":
            kinds += input_ids == placeholder
    if GRID in given and bool((given[GRID][:, 0] > 1).any()):
        kinds = _part_clips(whole, given, kinds, encoder_inputs)
    if whole.media_attention == "bidirectional":
        given["token_type_ids"] = kinds
    if whole.media_attention == "prefix":
        given["token_type_ids"] = torch.zeros_like(input_ids)
    if whole.media_attention == "in_windows":
        given["mm_token_type_ids"] = kinds
    if whole.family.spatial and "audio" not in whole.family.towers:
        given["mm_token_type_ids"] = kinds
    return given


def _looked_at(
    whole: PretrainedModel, input_ids: Tensor, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the image inputs of a cross-attention model; all prompts must have equally many images."""
    samples = len(input_ids)
    apart = {name: tensor.unflatten(0, (samples, -1)) for name, tensor in inputs.items()}
    (placeholder,) = whole.placeholder_ids.values()
    seen = [
        visible_tiles(ids.cpu().numpy(), placeholder, tiles.cpu().numpy())
        for ids, tiles in zip(input_ids, apart[TILES], strict=True)
    ]
    return {
        "pixel_values": apart["pixel_values"].to(dtype),
        RATIOS: apart[RATIOS].squeeze(-1),
        TILES: apart[TILES],
        "cross_attention_mask": torch.from_numpy(np.stack(seen)).long().to(input_ids.device),
    }


def _part_clips(
    whole: PretrainedModel,
    given: dict[str, Tensor],
    kinds: Tensor,
    encoder_inputs: Mapping[str, Mapping[str, Tensor]],
) -> Tensor:
    """Move clips from the image inputs in `given` to clip inputs; return the kind of each token."""
    (unit,) = whole.spatial_units
    grids, is_clip = given[GRID], given[GRID][:, 0] > 1
    patches = given.pop("pixel_values").split(grids.prod(1).tolist())
    merged = (grids.prod(1) // whole.config.vision_config.spatial_merge_size**2).tolist()
    places = (given["input_ids"] == whole.placeholder_ids[unit]).nonzero().split(merged)
    ids, kinds = given["input_ids"].clone(), kinds.clone()
    del given[GRID]
    for clip, pixels, grid in (
        (False, "pixel_values", GRID),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        numbers = (is_clip == clip).nonzero()[:, 0].tolist()
        if numbers:
            given[pixels] = torch.cat([patches[number] for number in numbers])
            given[grid] = grids[numbers]
        for number in numbers if clip else ():
            ids[places[number].unbind(1)] = whole.config.video_token_id
            kinds[places[number].unbind(1)] = 2
    if whole.seconds_scale is not None:
        steps = encoder_inputs[unit][STEP][is_clip].float()
        given[whole.family.seconds_keyword] = steps / whole.seconds_scale
    given["input_ids"] = ids
    return kinds


def _part_tiles(
    whole: PretrainedModel, given: dict[str, Tensor], shapes: list[list[int]]
) -> dict[str, Tensor]:
    """Separate the tiles of images from the frames of clips, as LLaVA-OneVision takes them, and mark clip tokens."""
    anyres, kinds = whole.anyres_shape, [kind for _, _, kind in shapes]
    tiles = given.pop("pixel_values").split([anyres.tiles_of(shape) for shape in shapes])
    images = [number for number, kind in enumerate(kinds) if kind != CLIP]
    clips = [tile for tile, kind in zip(tiles, kinds, strict=True) if kind == CLIP]
    if images:
        own = torch.tensor([shapes[number] for number in images])
        given |= {
            "pixel_values": torch.cat([tiles[number] for number in images]),
            SHAPES: own[:, :2],
            "batch_num_images": torch.tensor(images_of_samples(own[:, 2])),
        }
    if not clips:
        return given
    if len({len(clip) for clip in clips}) > 1:
        raise UserError(
            "clips of unlike numbers of frames in one prompt, which transformers' own model takes in one tensor; set "
            "num_frames under model.processor, or ask about one clip at a time"
        )
    (unit,) = whole.family.towers
    ids = given["input_ids"].clone()
    places = (ids == whole.placeholder_ids[unit]).nonzero()
    rows = [anyres.rows_of(np.asarray([shape])) for shape in shapes]
    for kind, own_places in zip(kinds, places.split(rows), strict=True):
        if kind == CLIP:
            ids[own_places.unbind(1)] = whole.config.video_token_id
    return {**given, "input_ids": ids, "pixel_values_videos": torch.stack(clips)}


def _sounds(whole: PretrainedModel, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Pad sounds to one length, which is a fixed window if the encoder needs one."""
    config = whole.config.audio_config
    frames, given = inputs[FRAMES].T.tolist()
    sounds = list(inputs["input_features"].to(dtype).split(given))
    if whole.family.towers["audio"].conformer:
        features = nn.utils.rnn.pad_sequence(sounds, batch_first=True)
        is_there = torch.arange(features.shape[1]) < torch.tensor(frames)[:, None]
        return {"input_features": features, "input_features_mask": is_there.to(features.device)}
    window = max(given) if hasattr(config, "n_window") else 2 * config.max_source_positions
    sounds.append(sounds[0].new_zeros(window, sounds[0].shape[1]))
    padded = nn.utils.rnn.pad_sequence(sounds, batch_first=True)[:-1]
    mask = torch.arange(window) < torch.tensor(frames)[:, None]
    return {
        "input_features": padded.transpose(1, 2),
        "feature_attention_mask": mask.long().to(padded.device),
    }
