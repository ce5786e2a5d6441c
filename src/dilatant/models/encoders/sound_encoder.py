"""Audio encoders for sounds of any length: the frames of all sounds are packed in one row, not padded to a window.

For Qwen's Whisper-like encoders: two convolutions halve the frames, blocks attend inside a sound (or inside its chunks,
if the encoder has them), and neighbours are averaged at the end. The result equals the family's, which pads to 30 s,
because each sound includes the padding frames that influence its end (see `data.media_units.sound_unit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from dilatant.data.media_units.sound_unit import FRAMES
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import grid_part
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.stage import Boundary, in_dtype_of
from dilatant.models.core.structure import find_structure
from dilatant.models.core.weights import name_weights
from dilatant.models.encoders.encoder import Callbacks, EncoderStage
from dilatant.models.encoders.packed_encoder import PackedEncoderStage, PackedEncoderUnit

FEATURES = "input_features"
TYPICAL_FRAMES = 1000
"""Frames of the sound with which layers are measured: 10 s."""


class NamedModule(nn.Module):
    """Holds a module under its name in the whole model, because adapters need a parent of the linear layer."""

    drawn_by: PreTrainedModel
    """The model that initialises the weights."""

    def __init__(self, name: str, module: nn.Module, tower: PreTrainedModel) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, module)
        # Not registered: the encoder is another part of the unit.
        self.__dict__["drawn_by"] = tower

    def forward(self, hidden: Tensor) -> Tensor:
        return self.get_submodule(self._name)(hidden)


class SoundStage(PackedEncoderStage):
    """Layers of an audio encoder and its projector, run on all frames of the samples in one row."""

    sizes_name = FRAMES
    blocks_path = "layers"

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode frames. inputs: `feature_lens` int64 [sounds, 2], frames of each sound without and with its padding;
        for the first stage `input_features` [frames with padding, mel bins]. hidden: [rows, width]. Returns such hidden
        states; after the norm, half as many; after the projector, rows of the text."""
        inputs = inputs or {}
        if self.model is not None:
            fed = inputs[FEATURES] if hidden is None else hidden
            with self.recording(self.model, [fed]):
                hidden = self._encode_sounds(self.model, fed, inputs[FRAMES], hidden is not None)
        assert hidden is not None
        return hidden if self.projector is None else self.projector(in_dtype_of(self.projector, hidden))

    def _encode_sounds(self, model: nn.Module, fed: Tensor, lengths: Tensor, is_hidden: bool) -> Tensor:
        hidden = in_dtype_of(model, fed)
        if not is_hidden:
            hidden = _convolved(model, hidden, lengths)
        hidden = _through_blocks(model, in_dtype_of(model, hidden), lengths[:, 0])
        return _averaged(model, hidden, lengths[:, 0]) if f"{self.unit}.norm" in self.layers else hidden


class SoundEncoderUnit(PackedEncoderUnit):
    """An audio encoder: layers `embedding`, `layers.<i>`, `norm`, `projector`."""

    stage_type = SoundStage

    def __init__(
        self, name: str, tower: PreTrainedModel, projector: nn.Module, width_out: int, placeholder_id: int
    ) -> None:
        config: Any = tower.config
        rows = rows_of(TYPICAL_FRAMES)
        geometry = EncoderGeometry(
            kind="audio",
            input_name=FEATURES,
            tokens_per_row=rows // 2,
            encoder_tokens=rows,
            leading_tokens=0,
            width=config.d_model,
            mel_bins=config.num_mel_bins,
            frames=TYPICAL_FRAMES,
        )
        self._hold(name, tower, projector, geometry, width_out, placeholder_id)
        # Omni's encoder has embeddings of audio begin and end, but the thinker uses text tokens for them.
        self.unused = frozenset(weight.name for weight in self.weights if "audio_bos_eos_token" in weight.key)
        self._freeze_at_start(self.unused)

    def _hold(
        self,
        name: str,
        tower: PreTrainedModel,
        projector: nn.Module,
        geometry: EncoderGeometry,
        width_out: int,
        placeholder_id: int,
    ) -> None:
        structure = find_structure(tower)
        layers = ("embedding", *(f"layers.{i}" for i in range(structure.num_blocks)), "norm", "projector")
        EncoderStage.__init__(
            self,
            unit=name,
            layers=tuple(f"{name}.{layer}" for layer in layers),
            weights=name_weights(name, tower, structure, "norm", projector),
            model=tower,
            projector=projector,
            geometry=geometry,
            callbacks=Callbacks(),
        )
        self.structure = structure
        self.width = geometry.width
        self.width_out = width_out
        self.placeholder_id = placeholder_id

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make sounds of the typical length, and one shorter sound from the remainder."""
        one = self.geometry.encoder_tokens
        merges = layer == len(self.layers) - 1
        rows = [one] * (tokens // one) + (
            [max(2, tokens % one // 2 * 2)] if tokens % one or tokens < one else []
        )
        frames = torch.tensor([[2 * each, 2 * each] for each in rows], device=device)
        if layer == 0:
            return torch.randn(2 * sum(rows), self.geometry.mel_bins, device=device), {FRAMES: frames}
        count = sum(rows) // 2 if merges else sum(rows)
        return torch.randn(count, self.geometry.width, device=device), {FRAMES: frames}

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit if first == 0 else grid_part(self.unit)})

    def boundary(self, end: int, consumer: str) -> Boundary:
        is_output = end == len(self.layers)
        halved = end >= len(self.layers) - 1
        return Boundary(
            width=self.width_out if is_output else self.geometry.width,
            dtype=self.row_dtype,
            rows_of=partial(_halved, self.unit, self.placeholder_id) if halved else partial(_rows, self.unit),
        )


def rows_of(frames: Any) -> Any:
    """Return the number of rows of a sound after the convolutions."""
    return (frames - 1) // 2 + 1


def _rows(unit: str, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0)


def _halved(unit: str, placeholder_id: int, sample: EncodedSample) -> int:
    """Count a sample's rows after averaging: per sound, because a sound with an odd number loses its last row; or from
    the text's placeholders if the sounds are not loaded."""
    if not sample.sizes.get(unit, 0):
        return 0
    frames = sample.media.get(unit, {}).get(FRAMES)
    if frames is None:
        return int((sample.input_ids == placeholder_id).sum())
    return int((rows_of(np.asarray(frames)[:, 0]) // 2).sum())


def _convolved(model: Any, features: Tensor, lengths: Tensor) -> Tensor:
    """Embed [frames, mel bins] to [rows, width]."""
    own, given = lengths.T.tolist()
    chunk = 2 * model.n_window if hasattr(model, "n_window") else max(given)
    pieces, rows = [], []
    for sound, frames in zip(features.split(given), own, strict=True):
        parts = sound.split(chunk)
        pieces += parts
        rows += [rows_of(min(len(part), frames - chunk * number)) for number, part in enumerate(parts)]
    padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2)
    within = torch.arange(padded.shape[2]) < torch.tensor([len(piece) for piece in pieces])[:, None]
    hidden = functional.gelu(model.conv1(padded)) * within[:, None].to(padded.device)
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
        borders = rows_of(torch.tensor(lengths)).cumsum(0)
        borders = functional.pad(borders, (1, 0)).to(hidden.device, torch.int32)
        for block in model.layers:
            (hidden,) = block(hidden, cu_seqlens=borders)
        return hidden
    made = []
    for sound in hidden.split(rows_of(frames).tolist()):
        sound = sound[None]
        for block in model.layers:
            sound = block(sound, None)
        made.append(sound[0])
    return torch.cat(made)


def _averaged(model: Any, hidden: Tensor, frames: Tensor) -> Tensor:
    """Average pairs of neighbours within each sound, dropping an odd last row, and normalise: [rows, width]."""
    pairs = [sound[: len(sound) // 2 * 2] for sound in hidden.split(rows_of(frames).tolist())]
    norm = model.ln_post if hasattr(model, "ln_post") else model.layer_norm
    return norm(torch.cat(pairs).unflatten(0, (-1, 2)).mean(1))
