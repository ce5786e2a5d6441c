"""Gemma 4's audio encoder: convolutions turn four frames into one row; conformer blocks attend to a limited past."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.data.media_units.sound_unit import FRAMES
from dilatant.data.sample import EncodedSample
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.stage import Boundary, in_dtype_of
from dilatant.models.encoders.sound_encoder import FEATURES, TYPICAL_FRAMES, SoundEncoderUnit, SoundStage

EMBEDDING = "subsample_conv_projection"
PADDED = 0.25
"""Maximum padding of the shortest sound in a batch, as a fraction of the longest."""


class ConformerStage(SoundStage):
    """Layers of the audio encoder and its embedder; runs the encoder's forward, with placeholders for other stages."""

    def _encode_sounds(self, model: nn.Module, fed: Tensor, lengths: Tensor, is_hidden: bool) -> Tensor:
        counts = lengths[:, 0].tolist()
        counts = [conformer_rows(count) for count in counts] if is_hidden else counts
        sounds = in_dtype_of(model, fed).split(counts)
        made: dict[int, Tensor] = {}
        for group in _alike(counts):
            padded = nn.utils.rnn.pad_sequence([sounds[number] for number in group], batch_first=True)
            own = torch.tensor([counts[number] for number in group], device=padded.device)
            is_there = torch.arange(padded.shape[1], device=padded.device) < own[:, None]
            output = _around(model, is_hidden)(padded, is_there).last_hidden_state
            for number, sound in zip(group, output, strict=True):
                made[number] = sound[: counts[number] if is_hidden else conformer_rows(counts[number])]
        return torch.cat([made[number] for number in range(len(sounds))])


class ConformerEncoderUnit(SoundEncoderUnit):
    """Layers `embedding`, `layers.<i>`, `norm` (the encoder's last projection), `projector` (its embedder)."""

    stage_type = ConformerStage

    def __init__(
        self, name: str, tower: PreTrainedModel, projector: nn.Module, width_out: int, placeholder_id: int
    ) -> None:
        config: Any = tower.config
        # transformers 5.17 builds a correct mask only for sdpa; later versions support only eager.
        config._attn_implementation = "sdpa" if tower._supports_sdpa else "eager"
        rows = conformer_rows(TYPICAL_FRAMES)
        geometry = EncoderGeometry(
            kind="audio",
            input_name=FEATURES,
            tokens_per_row=rows,
            encoder_tokens=rows,
            leading_tokens=0,
            width=config.hidden_size,
            mel_bins=mel_bins_of(config),
            frames=TYPICAL_FRAMES,
        )
        self._hold(name, tower, projector, geometry, width_out, placeholder_id)
        self.width_projected = config.output_proj_dims
        self.unused = frozenset()
        self._freeze_at_start()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make sounds of the typical length, and one shorter sound from the remainder."""
        one = self.geometry.encoder_tokens
        rows = [one] * (tokens // one) + ([tokens % one] if tokens % one else [])
        given = {FRAMES: torch.tensor([[4 * each] * 2 for each in rows], device=device)}
        if layer == 0:
            return torch.randn(4 * sum(rows), self.geometry.mel_bins, device=device), given
        width = self.width_projected if layer == len(self.layers) - 1 else self.width
        return torch.randn(sum(rows), width, device=device), given

    def boundary(self, end: int, consumer: str) -> Boundary:
        last = len(self.layers)
        width = {last: self.width_out, last - 1: self.width_projected}.get(end, self.width)
        return Boundary(width=width, dtype=self.row_dtype, rows_of=partial(_rows, self.unit))


def mel_bins_of(config: Any) -> int:
    """Return the number of mel bins: the convolutions reduce it to a quarter."""
    return int(config.subsampling_conv_channels[0])


def conformer_rows(frames: int) -> int:
    """Return the number of rows of a sound after the convolutions."""
    return -(-frames // 4)


def _rows(unit: str, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0)


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
    """Replaces the convolutions on stages after them."""

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, mask


def _around(model: nn.Module, is_hidden: bool) -> Any:
    """Return the encoder or, if its convolutions have run, a copy with a placeholder that passes hidden states and
    mask."""
    if not is_hidden:
        return model
    tower = cast(Any, copy.copy(model))
    tower.__dict__["_modules"] = {**model._modules, EMBEDDING: _ConvolutionsDone()}
    return tower
