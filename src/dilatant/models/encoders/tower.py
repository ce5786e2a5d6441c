"""Towers: the kinds of encoders inside pretrained multimodal models.

Each kind is a subclass in the file of its stage and unit: how the unit is built, which media it takes, and which inputs
transformers' own forward takes instead. A family (`families.families`) names the towers of its models.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.data.media_units.native_clip_unit import CLIP_SETTINGS
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.adapters.lora import plain_key
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.media import COUNTS
from dilatant.models.language.cross_attention import CrossAttention

Settings = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Clips = Literal["patches", "patches apart", "pooled", "counted", "timed", "introduced", "processed"]
"""A clip's layout in the text: temporal patches as one item (Qwen), or apart with text between them; frames whose
neighbouring patches are pooled to one row (LLaVA-OneVision); frames as separate images, with the texts of this name
around them (see `data.media_units.frame_choice.FRAME_TEXTS`); or as the family's own processor writes them."""


@dataclass(frozen=True, slots=True)
class HostModel:
    """The pretrained multimodal model around a tower. name: the tower's unit. config: the model's. placeholder_id: id
    of the text token that one row replaces. build: builds the model on the meta device, with adapters."""

    name: str
    config: Any
    placeholder_id: int
    build: Callable[[], PreTrainedModel]

    @property
    def text_width(self) -> int:
        """Hidden size of the text model."""
        return int(self.config.get_text_config().hidden_size)


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """Options of clips. requested: the user's processor settings, including those of images. saved: the clip settings
    in the model's files. written: the clip's form in texts. words: token whose id the config names → its text."""

    requested: Settings
    saved: Settings
    written: MediaMarkup
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tower(ABC):
    """An encoder inside a pretrained multimodal model; paths are those of the ...ForConditionalGeneration class.

    path: the encoder's. projector: paths of the modules and parameters that project its rows for the text. token:
    config key of the placeholder id that one row replaces. written, opens, closes: see `MediaMarkup`; {key} in them is
    the text of the token whose id is the config's value of `key`; written defaults to the text of `token`. clips:
    layout of clips, if the family reads them.
    """

    path: str
    projector: tuple[str, ...] = ()
    token: str = "image_token_id"
    written: str = ""
    opens: str = ""
    closes: str = ""
    clips: Clips | None = None

    kind: ClassVar[Literal["image", "audio"]] = "image"
    blocks: ClassVar[tuple[str, ...]] = ()
    """Modules of the encoder that are no part of the projector; empty for the whole encoder."""
    mergers: ClassVar[tuple[str, ...]] = ()
    """Modules of the encoder that are part of the projector."""

    @abstractmethod
    def build(self, host: HostModel) -> EncoderUnit:
        """Build the unit of the encoder and its projector, on the meta device."""

    @abstractmethod
    def media_unit(self, host: HostModel, settings: Settings | None, written: MediaMarkup) -> MediaUnit:
        """Build the media unit. settings: the processor's. Raises UserError."""

    @abstractmethod
    def forward_inputs(self, host: HostModel, ids: Tensor, inputs: Tensors) -> Tensors:
        """Return keywords of transformers' own forward for the unit's `inputs`. ids: int64 [batch, tokens], returned as
        `input_ids` if the forward needs others. Raises UserError."""

    def clip_unit(self, host: HostModel, image: Any, options: ClipOptions) -> MediaUnit:
        """Build the media unit of clips that matches the unit of images. Raises UserError."""
        raise NotImplementedError

    @property
    def clip_settings(self) -> tuple[str, ...]:
        """Names of the processor settings for clips."""
        if self.clips is None:
            return ()
        return CLIP_SETTINGS if self.clips in ("patches", "patches apart") else COUNTS

    def inner_rows(self, config: Any) -> int:
        """Return the number of further rows of the text's width in a row, which inner blocks of the text model take."""
        return 0

    def cross_attention(self, host: HostModel) -> CrossAttention | None:
        """Return the cross-attention if rows go to blocks of the text model instead of the text."""
        return None

    def key_of(self, weight: Weight) -> str:
        """Return the key of a weight of the unit in the state dict of the model around it."""
        is_held = weight.part == "projector" and self.projector
        holder = self.projector[0].rpartition(".")[0] if is_held else self.path
        return f"{holder}.{plain_key(weight.key)}"

    @property
    def parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Paths of encoder and projector in the model around them."""
        blocks = tuple(f"{self.path}.{name}" for name in self.blocks) or (self.path,)
        return blocks, (*self.projector, *(f"{self.path}.{name}" for name in self.mergers))

    def in_model(self, host: HostModel) -> tuple[PreTrainedModel, Any]:
        """Return the model around the encoder, on the meta device, and the encoder in it."""
        model = host.build()
        return model, model.get_submodule(self.path)

    def cutting(self, host: HostModel, settings: Settings | None, channels: int) -> HuggingFaceImageProcessor:
        """Return the family's own processor, which cuts images into tiles. Raises UserError if its settings are not
        known."""
        if settings is None or "image_processor_type" not in settings:
            kind = host.config.model_type
            raise UserError(f"model.processor is missing: {kind} cuts images into tiles as its own processor says")
        return HuggingFaceImageProcessor(json.dumps({**settings}, sort_keys=True), channels)

    def named_projector(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Return the name and the module of the only projector."""
        (path,) = self.projector
        return path.rpartition(".")[2], model.get_submodule(path)
