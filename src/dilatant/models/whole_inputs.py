"""What transformers' own forward of a whole model is given, from what our units are given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dilatant.data.native_image_unit import STEP
from dilatant.data.sound_unit import FRAMES
from dilatant.models.whole import Whole


def composite_inputs(
    whole: Whole, input_ids: Tensor, encoder_inputs: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Keywords beside `input_ids` [batch, tokens] and its mask, floating ones in `dtype`."""
    given: dict[str, Tensor] = {}
    for name, inputs in encoder_inputs.items():
        tower = whole.family.towers[name]
        if tower.kind == "audio":
            given |= _sounds(whole, inputs, dtype)
            continue
        for keyword, tensor in inputs.items():
            if keyword == STEP:
                continue
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            tensor = tensor.flatten(1) if tower.native else tensor
            given[keyword] = tensor[None] if tower.batched else tensor
    kinds = torch.zeros_like(input_ids)
    for name, placeholder in whole.placeholder_ids.items():
        if whole.family.towers[name].kind == "image":
            kinds += input_ids == placeholder
    if whole.family.media_attention == "bidirectional":
        given["token_type_ids"] = kinds
    if whole.family.media_attention == "prefix":
        given["token_type_ids"] = torch.zeros_like(input_ids)
    if whole.family.spatial and "audio" not in whole.family.towers:
        given["mm_token_type_ids"] = kinds
    return given


def _sounds(whole: Whole, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Sounds padded to one length, which is a window where the tower asks for one."""
    config = whole.config.audio_config
    frames, given = inputs[FRAMES].T.tolist()
    sounds = list(inputs["input_features"].to(dtype).split(given))
    window = max(given) if hasattr(config, "n_window") else 2 * config.max_source_positions
    sounds.append(sounds[0].new_zeros(window, sounds[0].shape[1]))
    padded = nn.utils.rnn.pad_sequence(sounds, batch_first=True)[:-1]
    mask = torch.arange(window) < torch.tensor(frames)[:, None]
    return {
        "input_features": padded.transpose(1, 2),
        "feature_attention_mask": mask.long().to(padded.device),
    }
