"""Pretrained multimodal models as units: parts of one composite transformers model, each in a separate shell module.

The weights of all units correspond one to one to the composite's keys, so reading and exporting only renames them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.model import LANGUAGE, LoraConfig
from dilatant.data.media_units.native_image_unit import GRID, STEP
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import adapted_key, inject, is_adapter, merged_state, plain_key
from dilatant.models.core.cross_attention import accept_cross_rows
from dilatant.models.core.materialize import allocate_meta_tensors, excluded_from_init, models_of, seeded
from dilatant.models.core.structure import on_meta
from dilatant.models.core.unit import Unit
from dilatant.models.core.weight_files import named_if_damaged
from dilatant.models.core.weights import Weight
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.encoders.generic_encoder import GenericTower, RopePositions
from dilatant.models.encoders.narrow_encoder import auto_class
from dilatant.models.encoders.tower import HostModel
from dilatant.models.families.families import FAMILIES, Family, MediaAttention, family_of
from dilatant.models.families.generic import classifier_of, opens_whole, read_family, refusal
from dilatant.models.language.cross_attention import CrossAttention
from dilatant.models.language.extension import Extension
from dilatant.models.language.packed_row import Positions, spatial_positions
from dilatant.models.language.side_states import DeepStack
from dilatant.models.sources import check_loaded, without_bars


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
        """Find or read the family (see `generic`). Omni is reduced to its thinker, without speech. Raises UserError."""
        config = getattr(config, "thinker_config", config)
        if (kind := classifier_of(config)) is not None:
            raise refusal(config, where, f"its weights are those of {kind}, which does not write text")
        is_read = config.model_type not in FAMILIES and opens_whole(config)
        return cls(config, (read_family if is_read else family_of)(config, where), **options)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Unit → the placeholder id that one of its rows replaces in the text."""
        return {name: int(getattr(self.config, tower.token)) for name, tower in self.family.towers.items()}

    def encoders(self) -> dict[str, Encoder]:
        """Return the encoders as `Encoder` specifications, as if a user had written them; none in one unit."""
        return {
            name: Encoder(self.config, placeholder_id=id_)
            for name, id_ in self.placeholder_ids.items()
            if self.family.one_unit is None
        }

    def as_one_unit(self, why: str) -> PretrainedModel:
        """Return the model as one unit. why: the reason."""
        return replace(self, family=replace(self.family, one_unit=why))

    def without(self, name: str, why: str) -> PretrainedModel:
        """Return the model without the encoder of unit `name`, whose weights stay as they are. why: the reason."""
        own, tower = self.family, self.family.towers[name]
        line = f"{'sounds' if tower.kind == 'audio' else 'images'} are not read: {why}"
        fewer = replace(
            own,
            towers={key: each for key, each in own.towers.items() if key != name},
            spatial=own.spatial and tower.kind != "image",
            unread=(*own.unread, tower.path, *tower.projector),
            refused=(*own.refused, line),
        )
        return replace(self, family=fewer)

    def composite(self, **options: Any) -> PreTrainedModel:
        """Build the model on the meta device, with its own copy of the config. options: of `from_config`. Raises
        UserError."""
        with as_user_error(f"model: {self.config.model_type} cannot be built"), on_meta():
            model = auto_class(self.config).from_config(copy.deepcopy(self.config), dtype=self.dtype, **options)
        modules = dict(model.named_modules())
        for place in (self.family.decoder, *(tower.path for tower in self.family.towers.values())):
            if place not in modules:
                raise UserError(
                    f"model: {self.config.model_type} has no {place} in this version of transformers; install a "
                    "later one"
                )
        return model

    def language_model(self) -> PreTrainedModel:
        """Return the composite without its encoders and projectors; in one unit, the whole composite."""
        model = self._adapted(attn_implementation=self.attn_implementation)
        if self.family.one_unit is not None:
            return model
        encoders = [path for tower in self.family.towers.values() for path in (*tower.projector, tower.path)]
        for path in dict.fromkeys((*encoders, *self.family.unread)):
            _remove(model, path)
        accept_cross_rows(model)
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
            found |= {f"{name}.encoder": encoder, f"{name}.projector": projector, name: (*encoder, *projector)}
        return {**found, LANGUAGE: (self.family.decoder,)}

    def _adapted(self, **options: Any) -> PreTrainedModel:
        model = self.composite(**options)
        if self.lora is not None:
            inject(model, self.lora, self.parts)
        return model

    @property
    def positions(self) -> Positions | None:
        """The function that computes the positions of a sample's tokens; None if they are 0, 1, 2, ..., or if rotary
        positions are these plus a constant, as PaliGemma's."""
        if not self.family.spatial:
            return None
        if isinstance(tower := self.family.towers["vision"], GenericTower):
            narrow, own = json.loads(self.family.narrow), vars(self.config)
            named = [key for key in narrow if key.endswith(("_token_id", "_token_index"))]
            ids = tuple((own[key], narrow[key]) for key in named if isinstance(own.get(key), int))
            towers = self.family.towers.items()
            units = tuple((name, each.kind, self.placeholder_ids[name]) for name, each in towers)
            return RopePositions(tower.shapes, units, ids)
        merge = self.config.vision_config.spatial_merge_size
        spatial = tuple((name, self.placeholder_ids[name]) for name in self.spatial_units)
        return partial(_spatial, spatial, merge, self.family.behind_time)

    @property
    def crossing(self) -> CrossAttention | None:
        """The cross-attention of the text model; None without any."""
        found = [tower.cross_attention(self.host(name)) for name, tower in self.family.towers.items()]
        return next((crossing for crossing in found if crossing is not None), None)

    @property
    def of_language(self) -> dict[str, Any]:
        """Keyword arguments for the text model's unit, in addition to the model and its placeholders."""
        crossing = self.crossing
        return {
            "decoder": self.family.decoder,
            "positions": self.positions,
            "units_with_grids": (*self.spatial_units, *(() if crossing is None else (crossing.unit,))),
            "extensions": self.extensions,
        }

    @property
    def extensions(self) -> list[Extension]:
        """The optional features of the text model's stages: cross-attention, and per-token side states."""
        taps = max(tower.inner_rows(self.config) for tower in self.family.towers.values())
        rows = [DeepStack(taps, self.config.get_text_config().hidden_size)] if taps else []
        return [*([] if self.crossing is None else [self.crossing]), *rows]

    @property
    def media_attention(self) -> MediaAttention:
        """The default mask among the tokens of an item (see `families.Family`)."""
        mask = self.family.media_attention
        text = self.config.get_text_config()
        if mask == "in_windows" and not getattr(text, "use_bidirectional_attention", None):
            return "causal"
        return mask

    @property
    def reads_as_text(self) -> bool:
        """True if encoder rows have the positions and the mask of text tokens."""
        return not (self.family.spatial or self.media_attention in ("prefix", "in_windows") or self.extensions)

    @property
    def spatial_units(self) -> tuple[str, ...]:
        """The units whose tokens have positions in height and width."""
        towers = self.family.towers.items() if self.family.spatial else ()
        return tuple(name for name, tower in towers if tower.kind == "image")


def _spatial(
    placeholders: tuple[tuple[str, int], ...], merge: int, behind_time: bool, sample: EncodedSample
) -> NDArray[np.int64]:
    media = [sample.media[name] for name, _ in placeholders if sample.sizes.get(name, 0) and name in sample.media]
    grids = np.concatenate([np.empty((0, 3), np.int64), *(np.asarray(each[GRID]) for each in media)])
    steps = [
        step for each in media for step in np.asarray(each.get(STEP, np.ones(len(np.asarray(each[GRID]))))).tolist()
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


def weights_of(
    weights: Iterable[tuple[Unit, Weight]], whole: PretrainedModel
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return the weights by the composite's key, with adapters merged in, and the keys of frozen weights without
    adapter. weights: see `MultimodalModel.weights_of_whole`."""
    held = tuple(weights)
    merged = {(unit, part): merged_state(getattr(unit, part)) for unit, part in {(u, w.part) for u, w in held}}
    trains = {name for unit in {unit for unit, _ in held} for name in unit.trained_names}
    adapted = {(unit, adapted_key(weight.key)) for unit, weight in held if is_adapter(weight.key)}
    state: dict[str, Tensor] = {}
    frozen = set()
    for unit, weight in held:
        if is_adapter(weight.key):
            continue
        key = whole.key_of(unit, weight)
        state[key] = merged[unit, weight.part][plain_key(weight.key)]
        if weight.canonical not in trains and (unit, plain_key(weight.key)) not in adapted:
            frozen.add(key)
    return state, frozenset(frozen)


def load_pretrained_weights(whole: PretrainedModel, source: str) -> dict[str, Tensor]:
    """Load all weights of a pretrained model by its own keys, as transformers reads them. Raises UserError."""
    with named_if_damaged(f"the weights of {source!r} cannot be loaded", source), without_bars(source):
        loader: Any = type(whole.composite())
        model, found = loader.from_pretrained(source, dtype="auto", output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{source!r} lacks {missing[0]!r}{more} of the weights of its model; fetch it again, or begin with random "
            "weights (model.config)"
        )
    check_loaded(model, repr(source))
    return model.state_dict()


@torch.no_grad()
def composite_of(weights: Iterable[tuple[Unit, Weight]], whole: PretrainedModel) -> PreTrainedModel:
    """Build transformers' own model around the units' tensors, on their device; weights that no unit has (blocks after
    the feature layer) are initialised at random. Raises UserError."""
    composite = whole.composite()
    state, _ = weights_of(weights, whole)
    composite.load_state_dict(state, strict=False, assign=True)
    composite.tie_weights()
    held = [parameter for parameter in composite.parameters() if not parameter.is_meta]
    owners = models_of(composite)
    with seeded(0, "unread"), excluded_from_init(held):  # also computed buffers, such as rotary frequencies
        for module in reversed([*composite.modules()]):
            if allocate_meta_tensors(module):
                owners[id(module)]._init_weights(module)
    device: Any = held[0].device  # transformers types `to` wrongly
    return composite.to(device)


def stored_keys(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map keys of a model's state to the keys under which they are stored, without weights that transformers computes
    from several stored ones. If its conversion table cannot be read, only equal keys are mapped."""
    state = dict(model.state_dict())
    keys = list(stored)
    found = {key: key for key in keys if key in state}
    inner = "thinker."  # of Omni's files, which also hold the speech model
    listens = any(key.startswith(inner) for key in keys)
    try:
        # No public API: if it changes, the caller loads the whole model instead.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        table: list[Any] = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        for key in keys:
            if key not in state and (key.startswith(inner) or not listens):
                plain = key.removeprefix(inner)
                name, converted = rename_source_key(plain, renamings, converters, model.base_model_prefix, state)
                if converted is None and name in state:
                    found[name] = key
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return found
