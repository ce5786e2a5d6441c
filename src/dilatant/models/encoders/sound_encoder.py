"""Audio encoders for sounds of any length: the frames of all sounds are packed in one row, not padded to a window.

For Qwen's Whisper-like encoders: two convolutions halve the frames, blocks attend inside a sound (or inside its chunks,
if the encoder has them), and neighbours are averaged at the end. The result equals the family's, which pads to 30 s,
because each sound includes the padding frames that influence its end (see `data.media_units.sound_unit`).

The family's forward takes whole windows only. Therefore the functions at the end of this file call its modules one by
one: convolutions, blocks, average and norm. They repeat what the forward does between its modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from dilatant.attention.hook import attend_to_items, borders_of_items, plan_of_items
from dilatant.attention.kernels.attention_plan import to_device
from dilatant.data.media_units.processors import sound_processor
from dilatant.data.media_units.sound_unit import FRAMES, SoundUnit
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.slicing import Placeholder, held_blocks
from dilatant.models.core.stage import Boundary, RowCount, in_dtype_of
from dilatant.models.encoders.packed_encoder import NamedModule, PackedEncoderStage, PackedEncoderUnit, rows_of_items
from dilatant.models.encoders.tower import HostModel, Settings, Tensors, Tower

FEATURES = "input_features"
TYPICAL_FRAMES = 1000
"""Frames of the typical sound (see `EncoderGeometry`): 10 s."""


class SoundStage(PackedEncoderStage):
    """Layers of an audio encoder and its projector, run on all frames of the samples in one row."""

    sizes_name = FRAMES

    def encode_items(self, model: nn.Module, fed: Tensor, sizes: Tensor, is_hidden: bool) -> Tensor:
        """Run the stage on frames. sizes: int64 [sounds, 2], frames of each sound without and with its padding. After
        the norm there are half as many rows."""
        hidden = in_dtype_of(model, fed)
        if not is_hidden:
            hidden = _convolved(model, hidden, sizes)
        hidden = _through_blocks(model, in_dtype_of(model, hidden), sizes[:, 0])
        return _averaged(model, hidden, sizes[:, 0]) if f"{self.unit}.norm" in self.layers else hidden


class SoundEncoderUnit(PackedEncoderUnit):
    """An audio encoder: layers `embedding`, `layers.<i>`, `norm`, `projector`."""

    stage_type = SoundStage

    def __init__(
        self, name: str, tower: PreTrainedModel, projector: nn.Module, width_out: int, placeholder_id: int
    ) -> None:
        attend_to_items(tower)
        rows, config = rows_of(TYPICAL_FRAMES), cast(Any, tower.config)
        geometry = EncoderGeometry(
            kind="audio",
            input_name=FEATURES,
            tokens_per_row=rows // 2,
            encoder_tokens=rows,
            width=config.d_model,
            mel_bins=config.num_mel_bins,
            frames=TYPICAL_FRAMES,
        )
        super().__init__(name, tower, projector, geometry, width_out)
        self.placeholder_id = placeholder_id

    def _unused(self, model: nn.Module) -> frozenset[str]:
        # Omni's encoder has embeddings of audio begin and end, but the thinker uses text tokens for them.
        return frozenset(weight.name for weight in self.weights if "audio_bos_eos_token" in weight.key)

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make sounds of the typical length, and one shorter sound from the remainder."""
        one = self.geometry.encoder_tokens
        merges = layer == len(self.layers) - 1
        rows = [one] * (tokens // one) + ([max(2, tokens % one // 2 * 2)] if tokens % one or tokens < one else [])
        frames = torch.tensor([[2 * each, 2 * each] for each in rows])
        if layer == 0:
            return torch.randn(2 * sum(rows), self.geometry.mel_bins, device=device), {FRAMES: frames}
        count = sum(rows) // 2 if merges else sum(rows)
        return torch.randn(count, self.geometry.width, device=device), {FRAMES: frames}

    def boundary(self, end: int, consumer: str) -> Boundary:
        is_output = end == len(self.layers)
        halved = end >= len(self.layers) - 1
        return Boundary(
            width=self.width_out if is_output else self.geometry.width,
            dtype=self.row_dtype,
            rows_of=partial(rows_of_items, self.unit, self.placeholder_id, _halved) if halved else RowCount(self.unit),
        )


def rows_of(frames: Any) -> Any:
    """Return the number of rows of a sound after the convolutions."""
    return (frames - 1) // 2 + 1


def _halved(media: Mapping[str, Any]) -> int:
    """Count the rows of sounds after averaging: per sound, because a sound with an odd number loses its last row."""
    return int((rows_of(np.asarray(media[FRAMES])[:, 0]) // 2).sum())


def _convolved(model: Any, features: Tensor, lengths: Tensor) -> Tensor:
    """Embed [frames, mel bins] to [rows, width]."""
    real_frames, padded_frames = lengths.T.tolist()
    chunk = 2 * model.n_window if hasattr(model, "n_window") else max(padded_frames)
    pieces, rows = [], []
    for sound, frames in zip(features.split(padded_frames), real_frames, strict=True):
        parts = sound.split(chunk)
        pieces += parts
        rows += [rows_of(min(len(part), frames - chunk * number)) for number, part in enumerate(parts)]
    padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2)
    within = torch.arange(padded.shape[2]) < torch.tensor([len(piece) for piece in pieces])[:, None]
    hidden = functional.gelu(model.conv1(padded)) * to_device(within[:, None], padded.device)
    hidden = functional.gelu(model.conv2(hidden)).transpose(1, 2)
    places = getattr(model, "embed_positions", None)
    table = places.weight if places is not None else model.positional_embedding.positional_embedding
    hidden = hidden + table[: hidden.shape[1]].to(hidden.dtype)
    return torch.cat([piece[:count] for piece, count in zip(hidden, rows, strict=True)])


def _through_blocks(model: Any, hidden: Tensor, frames: Tensor) -> Tensor:
    """Run the blocks on `hidden` [rows, width]; each sound, or chunk of a sound, attends only to itself."""
    if hasattr(model, "n_window"):
        chunk = 2 * model.n_window
        lengths = [min(chunk, each - at) for each in frames.tolist() for at in range(0, each, chunk)]
        borders = borders_of_items(rows_of(np.array(lengths)))
        for block in held_blocks(model.layers):
            (hidden,) = block(hidden, cu_seqlens=borders)
        return hidden
    plan, hidden = plan_of_items(rows_of(frames)), hidden[None]
    for block in held_blocks(model.layers):
        hidden = block(hidden, plan)
    return hidden[0]


def _averaged(model: Any, hidden: Tensor, frames: Tensor) -> Tensor:
    """Average pairs of neighbours within each sound, dropping an odd last row, and normalise: [rows, width]."""
    pairs = [sound[: len(sound) // 2 * 2] for sound in hidden.split(rows_of(frames).tolist())]
    norm = model.ln_post if hasattr(model, "ln_post") else model.layer_norm
    return norm(torch.cat(pairs).unflatten(0, (-1, 2)).mean(1))


def sound_unit(
    name: str,
    placeholder_id: int,
    config: Any,
    settings: Mapping[str, Any] | None,
    marker: str = "<audio>",
    written: MediaMarkup | None = None,
) -> SoundUnit:
    """Build the media unit of an encoder with this config. Raises UserError."""
    # An encoder with chunks has positions only inside them.
    longest = None if hasattr(config, "n_window") else 2 * config.max_source_positions
    mel = sound_processor(settings, frames=longest or 3000, mel_bins=config.num_mel_bins)
    return SoundUnit(name, placeholder_id, mel, longest, 0 if longest is None else 2, marker, written)


class SoundTower(Tower):
    """Qwen's audio encoder."""

    kind = "audio"
    blocks = ("conv1", "conv2", "layers")

    def build(self, host: HostModel) -> SoundEncoderUnit:
        model, encoder = self.in_model(host)
        name, projector = self.named_projector(model)
        if self.projector[0].startswith(f"{self.path}."):
            setattr(encoder, name, Placeholder(projector))
        held = NamedModule(name, projector, encoder)
        return SoundEncoderUnit(host.name, encoder, held, host.text_width, host.placeholder_id)

    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        config = host.config.audio_config
        return sound_unit(host.name, host.placeholder_id, config, settings, written=written)

    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """Pad sounds to one length, which is a fixed window if the encoder needs one."""
        config = host.config.audio_config
        frames, padded = inputs[FRAMES].T.tolist()
        sounds = [*inputs[FEATURES].split(padded)]
        window = max(padded) if hasattr(config, "n_window") else 2 * config.max_source_positions
        sounds.append(sounds[0].new_zeros(window, sounds[0].shape[1]))
        features = nn.utils.rnn.pad_sequence(sounds, batch_first=True)[:-1]
        mask = torch.arange(window) < torch.tensor(frames)[:, None]
        return {FEATURES: features.transpose(1, 2), "feature_attention_mask": mask.long().to(features.device)}
