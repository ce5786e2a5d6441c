"""Pretrained multimodal models as units: parts of one composite transformers model, each in a separate shell module.

The weights of all units correspond one to one to the composite's keys, so reading and exporting only renames them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE, LoraConfig
from dilatant.data.media_units.anyres_image_unit import CLIP, AnyresShape
from dilatant.data.media_units.native_image_unit import GRID, STEP
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import inject, plain_key
from dilatant.models.core.cross_attention import accept_cross_rows
from dilatant.models.core.geometry import encoder_geometry, height_and_width
from dilatant.models.core.slicing import Placeholder, slice_model
from dilatant.models.core.structure import find_structure
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.anyres_encoder import AnyresEncoderUnit, images_of_samples
from dilatant.models.encoders.conformer_encoder import ConformerEncoderUnit
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.encoders.native_encoder import MERGERS, native_encoder_with_merger
from dilatant.models.encoders.pooled_encoder import OF_END, pooled_encoder_unit
from dilatant.models.encoders.sound_encoder import NamedModule, SoundEncoderUnit
from dilatant.models.encoders.tiled_encoder import TiledEncoderUnit
from dilatant.models.families.families import Family, MediaAttention, PretrainedEncoder, family_of
from dilatant.models.language.cross_attention import CrossAttention
from dilatant.models.language.extension import Extension
from dilatant.models.language.packed_row import Positions, spatial_positions
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
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"model: {self.config.model_type} cannot be built: {reason}") from None
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
        accept_cross_rows(model)
        return model

    def encoder(self, name: str) -> EncoderUnit:
        """Build the unit of an encoder and its projector, on the meta device. Raises UserError."""
        tower = self.family.towers[name]
        model = self._adapted()
        if tower.crossing:
            tiled = cast(PreTrainedModel, model.get_submodule(tower.path))
            held = NamedModule(*_named(model, tower.projector[0]), tiled)
            return TiledEncoderUnit(name, tiled, held, self.config.get_text_config().hidden_size)
        if tower.native:
            native = cast(PreTrainedModel, model.get_submodule(tower.path))
            if tower.pooled:
                width = self.config.get_text_config().hidden_size
                return pooled_encoder_unit(name, native, _named(model, tower.projector[0]), width)
            if tower.kind == "image":
                return native_encoder_with_merger(name, native)
            (place,) = tower.projector
            projector = model.get_submodule(place)
            last = place.rpartition(".")[2]
            if place.startswith(f"{tower.path}."):
                native._modules[last] = Placeholder(projector)
            held = NamedModule(last, projector, native)
            of_sounds = ConformerEncoderUnit if tower.conformer else SoundEncoderUnit
            width = self.config.get_text_config().hidden_size
            return of_sounds(name, native, held, width, self.placeholder_ids[name])
        encoder = _used_part(self.config, cast(PreTrainedModel, model.get_submodule(tower.path)))
        geometry = encoder_geometry(encoder.config)
        projection = Projection(model, tower, self.anyres_shape if tower.anyres else None)
        rows = torch.empty(2, geometry.encoder_tokens, geometry.width, device="meta")
        if tower.anyres:
            side = geometry.height
            merged, width = projection(rows, torch.tensor([[side, side, 0]] * 2)).shape
            geometry = replace(geometry, tokens_per_row=merged // 2)
            unit = AnyresEncoderUnit(name, encoder, projection, geometry, width)
            unit.shape, unit.placeholder_id = self.anyres_shape, self.placeholder_ids[name]
            return unit
        _, merged, width = projection(rows).shape
        geometry = replace(geometry, tokens_per_row=merged)
        return EncoderUnit(name, encoder, projection, geometry, width)

    @property
    def anyres_shape(self) -> AnyresShape:
        """The rule that maps an image's shape to its tiles and rows."""
        vision = self.config.vision_config
        return AnyresShape(
            pinpoints=tuple((int(height), int(width)) for height, width in self.config.image_grid_pinpoints),
            tile=vision.image_size,
            side=vision.image_size // vision.patch_size,
            most=int(self.config.vision_aspect_ratio.removeprefix("anyres_max_")),
        )

    def key_of(self, unit: Unit, weight: Weight) -> str:
        """Return the key of a unit's weight in the composite's state dict."""
        tower = self.family.towers.get(unit.unit)
        key = plain_key(weight.key)
        if tower is None or not (tower.native or tower.crossing or weight.part == "model"):
            return key
        if tower.pooled and key.startswith(OF_END):
            return f"{tower.path}.{key.removeprefix(OF_END)}"
        is_held = weight.part == "projector" and tower.projector
        return f"{tower.projector[0].rpartition('.')[0] if is_held else tower.path}.{key}"

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The user's names of parts → their paths in the composite."""
        found: dict[str, tuple[str, ...]] = {}
        for name, tower in self.family.towers.items():
            inside = MERGERS if tower.native and tower.kind == "image" and not tower.pooled else ()
            projector = (*tower.projector, *(f"{tower.path}.{path}" for path in inside))
            if tower.native:
                special = "pooled" if tower.pooled else "conformer" if tower.conformer else tower.kind
                blocks = [f"{tower.path}.{path}" for path in _PARTS[special]]
            else:
                blocks = [tower.path]
            found |= {f"{name}.encoder": tuple(blocks), f"{name}.projector": projector}
            found[name] = (*blocks, *projector)
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
    def crossing(self) -> CrossAttention | None:
        """The cross-attention of the text model; None without any."""
        for name, tower in self.family.towers.items():
            if tower.crossing:
                return CrossAttention.of(self.config, name, self.placeholder_ids[name])
        return None

    @property
    def of_language(self) -> dict[str, Any]:
        """Keyword arguments for the text model's unit, in addition to the model and its placeholders."""
        return {
            "decoder": self.family.decoder,
            "positions": self.positions,
            "units_with_grids": self.units_with_grids,
            "extensions": self.extensions,
        }

    @property
    def extensions(self) -> list[Extension]:
        """The optional features of the text model's stages."""
        return [extension for extension in (self.crossing, self.carried) if extension is not None]

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
            or self.extensions
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
    def seconds_scale(self) -> float | None:
        """Positions per second of a clip; None if positions follow its frames."""
        path = self.family.seconds
        return float(attrgetter(path)(self.config)) if path else None

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


_PARTS = {
    "image": ("patch_embed", "blocks"),
    "pooled": ("patch_embedder", "encoder"),
    "audio": ("conv1", "conv2", "layers"),
    "conformer": ("subsample_conv_projection", "layers", "output_proj"),
}
"""Modules of native encoders that are not part of the projector."""
_NORMED_LAST = ("internvl",)
"""Families whose last feature layer (-1) is the normalised output instead of the last block's."""


class Projection(nn.Module):
    """A family's projection of encoder rows for the text: [items, tokens, width] to [items, rows, width of the text].

    The family's own method runs with a placeholder encoder that returns the input rows, so the treatment of class
    tokens, pooling and shuffles is the family's. The module's state has the composite's keys.
    """

    def __init__(
        self, model: PreTrainedModel, tower: PretrainedEncoder, anyres: AnyresShape | None = None
    ) -> None:
        super().__init__()
        self.model = cast(PreTrainedModel, model.base_model)
        own = f"{model.base_model_prefix}."
        keeps = {path.removeprefix(own) for path in tower.projector}
        for name in [name for name, _ in self.model.named_children() if name not in keeps]:
            self.model._modules[name] = None
        for name in [name for name, _ in self.model.named_parameters(recurse=False) if name not in keeps]:
            self.model._parameters[name] = None
        self._tower = tower
        self._anyres = anyres
        self._place = tower.path.removeprefix(own)

    @property
    def drawn_by(self) -> PreTrainedModel:
        """The model that initialises the weights."""
        return self.model

    def forward(self, hidden: Tensor, shapes: Tensor | None = None) -> Tensor:
        """Project rows. shapes: int64 [items, 3], for items in tiles (see `SHAPES`); the result is then [rows, width],
        the rows of all items concatenated."""
        if self._anyres is not None and shapes is not None:
            return self._items(hidden, shapes, self._anyres)
        project = getattr(self._around(hidden), self._tower.features)
        found = project(self._pixels(len(hidden))).pooler_output
        rows = found if isinstance(found, Tensor) else torch.cat(list(found))
        return rows.reshape(len(hidden), -1, rows.shape[-1])

    def _around(self, hidden: Tensor) -> Any:
        """Return the model with a placeholder encoder that outputs `hidden`."""
        model = copy.copy(self.model)
        model.__dict__["_modules"] = {**self.model._modules, self._place: _Rows(hidden)}
        return model

    def _items(self, hidden: Tensor, shapes: Tensor, anyres: AnyresShape) -> Tensor:
        """Project images and clips, each by the family's own method, in their order."""
        of_items = list(hidden.split([anyres.tiles_of(shape) for shape in shapes.tolist()]))
        rows: dict[int, Tensor] = {}
        numbers = (shapes[:, 2] != CLIP).nonzero()[:, 0].tolist()
        if numbers:
            tiles = torch.cat([of_items[number] for number in numbers])
            own = shapes[numbers]
            found = self._around(tiles).get_image_features(
                self._pixels(len(tiles)),
                image_sizes=own[:, :2],
                batch_num_images=images_of_samples(own[:, 2]),
            )
            rows |= dict(zip(numbers, found.pooler_output, strict=True))
        for number, frames in enumerate(of_items):
            if number in rows:
                continue
            made = self._around(frames).get_video_features(self._pixels(len(frames))[None]).pooler_output[0]
            if len(made) < anyres.clip_rows(
                len(frames)
            ):  # some versions append the end marker after this method
                made = torch.cat([made, cast(Any, self.model).image_newline[None].to(made.dtype)])
            rows[number] = made
        return torch.cat([rows[number] for number in range(len(of_items))])

    def _pixels(self, items: int) -> Tensor:
        """Return dummy pixels of `items` images, which the placeholder ignores: on the host, where shape checks do not
        wait for a device. They are not black, because families drop black images."""
        shape = (1, items) if self._tower.batched else (items,)
        patch = self.model.config.vision_config.patch_size
        return torch.ones(*shape, 1, *height_and_width(patch))


class _Rows(nn.Module):
    """Replaces an encoder that has run: returns its output as the hidden states of every layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(
            last_hidden_state=self._hidden, hidden_states=_SameForEveryItem(self._hidden)
        )


class _SameForEveryItem(tuple):
    """A tuple that returns one tensor at every index."""

    def __new__(cls, hidden: Tensor) -> _SameForEveryItem:
        return super().__new__(cls, (hidden,))

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


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


def _used_part(config: Any, encoder: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder without the blocks and norms after the layer whose hidden states the family uses. The omitted
    modules influence no output, never train, and are exported as they were read."""
    layer = getattr(config, "vision_feature_layer", None)
    structure = find_structure(encoder)
    if layer is None or (layer == -1 and config.model_type in _NORMED_LAST):
        return encoder
    blocks = layer if layer >= 0 else structure.num_blocks + 1 + layer
    return slice_model(encoder, structure, 0, blocks, keep_before=True, keep_after=False)


def _named(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    return path.rpartition(".")[2], model.get_submodule(path)


def _remove(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    if name in holder._modules:
        holder._modules[name] = None
    else:  # families initialise empty entries and would fail on None
        del holder._parameters[name]
        holder.__dict__[name] = torch.empty(0, device="cpu")
