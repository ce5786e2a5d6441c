"""Pretrained multimodal models as units: parts of one composite transformers model, each in a separate shell module.

The weights of all units correspond one to one to the composite's keys, so reading and exporting only renames them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

from dilatant.config.errors import UserError, one_line
from dilatant.config.model import LANGUAGE, LoraConfig
from dilatant.data.media_units.native_image_unit import GRID, STEP
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import inject, plain_key
from dilatant.models.core.cross_attention import CrossAttentionLayout
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.encoders.tower import HostModel
from dilatant.models.families.families import Family, MediaAttention, family_of
from dilatant.models.language.packed_row import Positions
from dilatant.models.language.positions import spatial_positions
from dilatant.models.language.side_states import DeepStack, PerLayer, SideStates


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A pretrained multimodal model: its config and family. attn_implementation: that of its text model. lora: settings
    of the adapters of its units; only adapters train."""

    config: Any
    family: Family
    attn_implementation: str | None = None
    dtype: torch.dtype = torch.float32
    lora: LoraConfig | None = None

    @classmethod
    def of(cls, config: Any, where: str, **options: Any) -> PretrainedModel:
        """Recognise the family. Raises UserError for an unknown one. Omni is reduced to its thinker, without speech."""
        config = getattr(config, "thinker_config", config)
        return cls(config, family_of(config, where), **options)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Unit → the placeholder id that one of its rows replaces in the text."""
        return {name: int(getattr(self.config, tower.token)) for name, tower in self.family.towers.items()}

    def encoders(self) -> dict[str, Encoder]:
        """Return the encoders as `Encoder` specifications, as if a user had written them."""
        return {
            name: Encoder(self.config, placeholder_id=self.placeholder_ids[name])
            for name, tower in self.family.towers.items()
        }

    def composite(self, **options: Any) -> PreTrainedModel:
        """Build the model on the meta device, with its own copy of the config. options: of `from_config`. Raises
        UserError."""
        try:
            with torch.device("meta"):
                model = auto_class(self.config).from_config(
                    copy.deepcopy(self.config), dtype=self.dtype, **options
                )
        except Exception as error:
            raise UserError(f"model: {self.config.model_type} cannot be built: {one_line(error)}") from None
        modules = dict(model.named_modules())
        for place in (self.family.decoder, *(tower.path for tower in self.family.towers.values())):
            if place not in modules:
                raise UserError(
                    f"model: {self.config.model_type} has no {place} in this version of transformers; install a "
                    "later one"
                )
        return model

    def language_model(self) -> PreTrainedModel:
        """Return the composite without its encoders and projectors."""
        model = self._adapted(attn_implementation=self.attn_implementation)
        for tower in self.family.towers.values():
            for path in (*tower.projector, tower.path):
                _remove(model, path)
        return model

    def host(self, name: str) -> HostModel:
        """Return the model as the tower of unit `name` needs it."""
        return HostModel(name, self.config, self.placeholder_ids[name], self._adapted)

    def encoder(self, name: str) -> EncoderUnit:
        """Build the unit of an encoder and its projector, on the meta device. Raises UserError."""
        return self.family.towers[name].build(self.host(name))

    def key_of(self, unit: Unit, weight: Weight) -> str:
        """Return the key of a unit's weight in the composite's state dict."""
        tower = self.family.towers.get(unit.unit)
        return plain_key(weight.key) if tower is None else tower.key_of(weight)

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The user's names of parts → their paths in the composite."""
        found: dict[str, tuple[str, ...]] = {}
        for name, tower in self.family.towers.items():
            encoder, projector = tower.parts
            found |= {
                f"{name}.encoder": encoder,
                f"{name}.projector": projector,
                name: (*encoder, *projector),
            }
        return {**found, LANGUAGE: (self.family.decoder,)}

    def _adapted(self, **options: Any) -> PreTrainedModel:
        model = self.composite(**options)
        if self.lora is not None:
            inject(model, self.lora, self.parts)
        return model

    @property
    def positions(self) -> Positions | None:
        """The function that computes the positions of a sample's tokens; None if they are 0, 1, 2, ..."""
        if not self.family.spatial:
            first = self.family.first_position
            return partial(_counted, first) if first else None
        merge = self.config.vision_config.spatial_merge_size
        units = tuple((name, self.placeholder_ids[name]) for name in self.spatial_units)
        return partial(_spatial, units, merge, self.family.behind_time)

    @property
    def crossing(self) -> CrossAttentionLayout | None:
        """The cross-attention layout of the text model; None without cross-attention."""
        layouts = [tower.cross_attention(self.host(name)) for name, tower in self.family.towers.items()]
        return next((layout for layout in layouts if layout is not None), None)

    @property
    def of_language(self) -> dict[str, Any]:
        """Keyword arguments for the text model's unit, in addition to the model and its placeholders."""
        return {
            "decoder": self.family.decoder,
            "positions": self.positions,
            "units_with_grids": self.units_with_grids,
            "crossing": self.crossing,
            "carried": self.carried,
        }

    @property
    def media_attention(self) -> MediaAttention:
        """The default mask among the tokens of an item (see `families.Family`)."""
        own = self.family.media_attention
        if own == "in_windows" and not self.config.get_text_config().use_bidirectional_attention:
            return "causal"
        return own

    @property
    def reads_as_text(self) -> bool:
        """True if encoder rows have the positions and the mask of text tokens."""
        family = self.family
        return not (
            family.spatial
            or family.first_position
            or self.media_attention in ("prefix", "in_windows")
            or self.carried
            or self.crossing
        )

    @property
    def spatial_units(self) -> tuple[str, ...]:
        """The units whose tokens have positions in height and width."""
        towers = self.family.towers.items() if self.family.spatial else ()
        return tuple(name for name, tower in towers if tower.kind == "image")

    @property
    def units_with_grids(self) -> tuple[str, ...]:
        """The units whose items' shapes the text model needs."""
        crossing = self.crossing
        return (*self.spatial_units, *(() if crossing is None else (crossing.unit,)))

    @property
    def taps(self) -> int:
        """Number of first blocks of the text model that receive further encoder rows (DeepStack)."""
        vision = getattr(self.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def carried(self) -> SideStates | None:
        """The per-token side states of the text model (see `side_states`); None without any."""
        text = self.config.get_text_config()
        return DeepStack(self.taps, text.hidden_size) if self.taps else PerLayer.of(text)


def auto_class(config: Any) -> Any:
    """Return the Auto class of transformers that builds and loads multimodal models of such a config."""
    images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if images else AutoModelForSeq2SeqLM


def _counted(first: int, sample: EncodedSample) -> NDArray[np.int64]:
    return np.arange(first, first + len(sample.input_ids))


def _spatial(
    placeholders: tuple[tuple[str, int], ...], merge: int, behind_time: bool, sample: EncodedSample
) -> NDArray[np.int64]:
    media = [
        sample.media[name] for name, _ in placeholders if sample.sizes.get(name, 0) and name in sample.media
    ]
    grids = np.concatenate([np.empty((0, 3), np.int64), *(np.asarray(each[GRID]) for each in media)])
    steps = [
        step
        for each in media
        for step in np.asarray(each.get(STEP, np.ones(len(np.asarray(each[GRID]))))).tolist()
    ]
    try:
        ids = [id_ for _, id_ in placeholders]
        return spatial_positions(sample.input_ids, ids, grids, merge, steps, behind_time)
    except ValueError as error:
        raise UserError(f"sample {sample.id!r}: {error}") from None


def _remove(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    if isinstance(getattr(holder, name), nn.Module):
        setattr(holder, name, None)
    else:  # families initialise empty entries and would fail on None
        delattr(holder, name)
        setattr(holder, name, torch.empty(0, device="cpu"))
