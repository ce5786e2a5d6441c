"""Gemma 4's audio encoder: convolutions turn four frames into one row; conformer blocks attend to a limited past."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.media_units.sound_unit import FRAMES, UsmSoundUnit, usm_processor
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import shell_of
from dilatant.models.core.stage import Boundary, in_dtype_of
from dilatant.models.encoders.packed_encoder import rows_of_unit
from dilatant.models.encoders.sound_encoder import (
    FEATURES,
    TYPICAL_FRAMES,
    SoundEncoderUnit,
    SoundStage,
    SoundTower,
    sound_geometry,
)
from dilatant.models.encoders.tower import HostModel, Settings, Tensors

EMBEDDING = "subsample_conv_projection"
PADDED = 0.25
"""Maximum padding of the shortest sound in a batch, as a fraction of the longest."""


class ConformerStage(SoundStage):
    """Layers of the audio encoder and its embedder; runs the encoder's forward, with placeholders for other stages."""

    runs_blocks_once = False

    def encode_items(self, model: nn.Module, fed: Tensor, sizes: Tensor, is_hidden: bool) -> Tensor:
        counts = sizes[:, 0].tolist()
        counts = [conformer_rows(count) for count in counts] if is_hidden else counts
        sounds = in_dtype_of(model, fed).split(counts)
        # After the convolutions, a placeholder in their place passes on hidden states and mask.
        encoder: Any = shell_of(model, {EMBEDDING: _ConvolutionsDone()}) if is_hidden else model

        def run(is_there: Tensor, padded: Tensor) -> Tensor:
            return encoder(padded, is_there).last_hidden_state

        rows: dict[int, Tensor] = {}
        for group in _alike(counts):
            padded = nn.utils.rnn.pad_sequence([sounds[number] for number in group], batch_first=True)
            lengths = torch.tensor([counts[number] for number in group], device=padded.device)
            is_there = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
            output = self.run_slice(partial(run, is_there), padded)
            for number, sound in zip(group, output, strict=True):
                rows[number] = sound[: counts[number] if is_hidden else conformer_rows(counts[number])]
        return torch.cat([rows[number] for number in range(len(sounds))])


class ConformerEncoderUnit(SoundEncoderUnit):
    """Layers `embedding`, `layers.<i>`, `norm` (the encoder's last projection), `projector` (its embedder)."""

    stage_type = ConformerStage

    def __init__(
        self, name: str, tower: PreTrainedModel, projector: nn.Module, width_out: int, placeholder_id: int
    ) -> None:
        super().__init__(name, tower, projector, width_out, placeholder_id)
        self.width_projected = cast(Any, tower.config).output_proj_dims

    def _choose_attention(self, tower: PreTrainedModel) -> None:
        # transformers 5.17 builds a correct mask only for sdpa; later versions support only eager.
        tower.config._attn_implementation = "sdpa" if tower._supports_sdpa else "eager"

    def _geometry_of(self, config: Any) -> EncoderGeometry:
        rows = conformer_rows(TYPICAL_FRAMES)
        return sound_geometry(rows, rows, config.hidden_size, mel_bins_of(config))

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make sounds of the typical length, and one shorter sound from the remainder."""
        one = self.geometry.encoder_tokens
        rows = [one] * (tokens // one) + ([tokens % one] if tokens % one else [])
        inputs = {FRAMES: torch.tensor([[4 * each] * 2 for each in rows])}
        if layer == 0:
            return torch.randn(4 * sum(rows), self.geometry.mel_bins, device=device), inputs
        width = self.width_projected if layer == len(self.layers) - 1 else self.width
        return torch.randn(sum(rows), width, device=device), inputs

    def boundary(self, end: int, consumer: str) -> Boundary:
        last = len(self.layers)
        width = {last: self.width_out, last - 1: self.width_projected}.get(end, self.width)
        return Boundary(width=width, dtype=self.row_dtype, rows_of=partial(rows_of_unit, self.unit, 1))


def mel_bins_of(config: Any) -> int:
    """Return the number of mel bins: the convolutions reduce it to a quarter."""
    return int(config.subsampling_conv_channels[0])


def conformer_rows(frames: int) -> int:
    """Return the number of rows of a sound after the convolutions."""
    return -(-frames // 4)


def _alike(counts: Sequence[int]) -> list[list[int]]:
    """Group the indices of sounds of similar length."""
    groups: list[list[int]] = []
    for number in sorted(range(len(counts)), key=lambda number: -counts[number]):
        if groups and counts[number] >= (1 - PADDED) * counts[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class _ConvolutionsDone(nn.Module):
    """Placeholder for the convolutions on stages after them."""

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, mask


class ConformerTower(SoundTower):
    """Gemma 4's audio encoder."""

    blocks = (EMBEDDING, "layers", "output_proj")
    unit_type = ConformerEncoderUnit

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        usm = usm_processor(settings, mel_bins_of(host.config.audio_config))
        return UsmSoundUnit(host.name, host.placeholder_id, usm, written=written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        frames, padded = inputs[FRAMES].T.tolist()
        features = nn.utils.rnn.pad_sequence(inputs[FEATURES].split(padded), batch_first=True)
        is_there = torch.arange(features.shape[1]) < torch.tensor(frames)[:, None]
        return {FEATURES: features, "input_features_mask": is_there.to(features.device)}
