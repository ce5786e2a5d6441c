"""Generic families: multimodal models that `families.FAMILIES` does not list, read by transformers' own interface.

`get_decoder` returns the text model, `get_image_features` and `get_audio_features` run an encoder and its projector,
and the config names the token that one row replaces. A family that is read here is proven before the first training
(see `media_proof`).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import AutoModelForImageClassification

from dilatant.config.errors import UserError, one_line, reason_of
from dilatant.models.core.structure import find_structure, on_meta
from dilatant.models.encoders.generic_encoder import GenericSoundTower, GenericTower
from dilatant.models.encoders.narrow_encoder import UncutError, auto_class, known_to, method_of, reads_clips, token_key
from dilatant.models.families.families import FAMILIES, Family
from dilatant.models.families.shrink import narrow_json


def opens_whole(config: Any) -> bool:
    """Return True if a model with this config may open with its encoders: its family is listed here, or can be read."""
    config = getattr(config, "thinker_config", config)
    text = config.get_text_config()
    parts = [getattr(config, key, None) for key in config.sub_configs]
    is_multimodal = auto_class(config) is not None and any(part not in (None, text) for part in parts)
    return config.model_type in FAMILIES or is_multimodal


def classifier_of(config: Any) -> str | None:
    """Return the name of the class of transformers to which a model's weights belong if it classifies instead of
    writing text; None otherwise."""
    classifiers: Any = AutoModelForImageClassification._model_mapping
    named = [classifiers[type(config)].__name__] if type(config) in classifiers else []
    return next((name for name in (*(config.architectures or ()), *named) if name.endswith("Classification")), None)


def read_family(config: Any, where: str) -> Family:
    """Read the family of a model from the model itself. Raises UserError if the model's interface differs."""
    try:
        with on_meta():
            model: Any = auto_class(config).from_config(copy.deepcopy(config))
    except Exception as error:
        problem = f"transformers cannot build it from its config ({one_line(error)}), so correct its config.json"
        raise UserError(f"{where}: {config.model_type!r} does not open whole: {problem}") from None
    if getattr(config.get_text_config(), "is_encoder_decoder", False) or config.is_encoder_decoder:
        raise refusal(config, where, "its text model is an encoder with a decoder")
    decoder = _innermost(model)
    holder = next((each for each in (model.base_model, model) if _kinds_of(each)), None)
    if holder is None:
        raise refusal(config, where, f"it has neither {' nor '.join(map(method_of, _TOWERS))}")
    if decoder is holder or decoder is model:
        raise refusal(config, where, "its text model is no part of its own")
    paths = {id(module): path for path, module in model.named_modules()}
    prefix = f"{paths[id(holder)]}." if holder is not model else ""
    spatial = hasattr(type(holder), "get_rope_index")
    narrow = narrow_json(config, spatial)
    towers: dict[str, GenericTower] = {}
    problems: list[str] = []
    for kind in _kinds_of(holder):
        token, touched = token_key(config, kind), _touched(holder, kind)
        modules = [name for name in touched if isinstance(getattr(holder, name), nn.Module)]
        unit, of_kind = _TOWERS[kind]
        if "get_input_embeddings" in inspect.getsource(inspect.unwrap(getattr(type(holder), method_of(kind)))):
            problems.append(f"{_MEDIA[kind]} are not read: their rows are the text model's own embeddings")
            continue
        if token is None or not modules:
            lacks = "no encoder of them" if token else f"no {kind}_token_id in its config"
            problems.append(f"{_MEDIA[kind]} are not read: there is {lacks}")
            continue
        tower, blocks = _tower_in(model, holder, modules, kind)
        projector = tuple(f"{prefix}{name}" for name in touched if name != (tower or modules[0]))
        found = of_kind(
            f"{prefix}{tower or modules[0]}",
            projector,
            token,
            holder=prefix[:-1],
            narrow=narrow,
            inner=blocks,
            uncut=None if tower else "no list of blocks was found in its encoder",
            inputs=_read_of(model, holder, kind),
        )
        try:
            checked = _checked(found, config)
            towers[unit] = replace(checked, **_clips(model, holder, modules)) if kind == "image" else checked
        except Exception as error:
            problems.append(f"{_MEDIA[kind]} are not read: {reason_of(error, 'their encoder does not run')}")
    if not towers:
        raise refusal(config, where, "; ".join(problems))
    held = [path for tower in towers.values() for path in (tower.path, *tower.projector)]
    if len({*held}) < len(held):
        raise refusal(config, where, f"{' and '.join(towers)} share {max(held, key=held.count)}")
    # Modules of other media, such as an encoder of clips. Should the text need one, the proof fails.
    unread = tuple(
        f"{prefix}{name}"
        for name, child in holder.named_children()
        if f"{prefix}{name}" not in held
        and child is not model.get_output_embeddings()
        and decoder not in child.modules()
        and any(True for _ in child.parameters())
    )
    is_spatial = spatial and "vision" in towers
    return Family(towers, paths[id(decoder)], is_spatial, narrow=narrow, unread=unread, refused=tuple(problems))


_TOWERS: Mapping[str, tuple[str, type[GenericTower]]] = {
    "image": ("vision", GenericTower),
    "audio": ("audio", GenericSoundTower),
}
"""Kinds of media: the name of their unit, and its tower."""
_MEDIA = {"image": "images", "audio": "sounds"}


def _kinds_of(holder: Any) -> list[str]:
    return [kind for kind in _TOWERS if hasattr(type(holder), method_of(kind))]


def _clips(model: Any, holder: Any, modules: Iterable[str]) -> dict[str, Any]:
    """Return what a tower of images also needs for clips; nothing unless it encodes both in the same modules, and the
    family's positions can tell them apart by `mm_token_type_ids`."""
    rope = getattr(type(holder), "get_rope_index", None)
    touched = [name for name in _touched(holder, "video") if isinstance(getattr(holder, name), nn.Module)]
    if not touched or not {*touched} <= {*modules} or not reads_clips(model.config):
        return {}
    if rope is not None and "mm_token_type_ids" not in known_to(rope):
        return {}
    merge = getattr(type(holder), "get_placeholder_mask", type(holder).forward)
    named = re.findall(
        r"special_video_mask = input_ids == self\.config\.(\w+)", inspect.getsource(inspect.unwrap(merge))
    )
    key = named[0] if named else token_key(model.config, "video")
    return {} if key is None else {"clips": "processed", "token_of_clips": key}


def _checked(tower: GenericTower, config: Any) -> GenericTower:
    """Return an encoder that can be built: as it is, or as one layer. Raises the error of the latter."""
    try:
        tower.check(config)
    except Exception as error:
        if tower.inner is None or (isinstance(error, UserError) and not isinstance(error, UncutError)):  # of its media
            raise
        tower = replace(tower, inner=None, uncut=reason_of(error, "its encoder does not run in stages"))
        tower.check(config)
    return tower


def _read_of(model: Any, holder: Any, kind: str) -> tuple[str, ...]:
    """Return the names of the inputs that a model reads besides its text."""
    methods = (method_of(kind), *((method_of("video"),) if kind == "image" else ()), "get_rope_index")
    found = [known_to(getattr(type(holder), name)) for name in methods if hasattr(type(holder), name)]
    names = known_to(type(model).forward).union(*found) - _OF_TEXT
    return tuple(sorted(names))


_OF_TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "labels", "token_type_ids"})


def _tower_in(model: Any, holder: Any, touched: Iterable[str], kind: str) -> tuple[str | None, str | None]:
    """Return the touched module that encodes media, what transformers names or that with most weights in blocks, and
    the path of the blocks in it; None without blocks."""
    named = model.get_encoder(modality=kind)
    found: list[tuple[bool, int, str, str]] = []
    for name in touched:
        with suppress(UserError, AttributeError):
            module = getattr(holder, name)
            blocks = find_structure(module).blocks
            size = sum(parameter.numel() for parameter in module.get_submodule(blocks).parameters())
            found.append((module is named, size, name, blocks))
    return max(found)[2:] if found else (None, None)


def _innermost(model: Any) -> Any:
    """Return the text model without its head."""
    decoder = model.get_decoder()
    while hasattr(decoder, "get_decoder") and decoder.get_decoder() not in (decoder, None):
        decoder = decoder.get_decoder()
    return getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder


def _touched(holder: nn.Module, kind: str) -> list[str]:
    """Return the modules and parameters of `holder` that its method for a kind of media uses, also indirectly, by
    name; none without such a method."""
    names: list[str] = []
    methods = {method_of(kind)}
    waiting = [each for each in methods if hasattr(type(holder), each)]
    while waiting:
        source = inspect.getsource(inspect.unwrap(getattr(type(holder), waiting.pop())))
        for name in re.findall(r"\bself\.(\w+)", source):
            if isinstance(getattr(holder, name, None), nn.Module | nn.Parameter):
                names.append(name)
            elif inspect.isfunction(getattr(type(holder), name, None)) and name not in methods:
                methods.add(name)
                waiting.append(name)
    decoder = _innermost(holder)
    return [name for name in dict.fromkeys(names) if not _contains(getattr(holder, name), decoder)]


def _contains(entry: Any, module: nn.Module) -> bool:
    return isinstance(entry, nn.Module) and any(each is module for each in entry.modules())


def refusal(config: Any, where: str, why: str) -> UserError:
    """Return the error of a family that cannot be read, or trains otherwise than in transformers."""
    return UserError(
        f"{where}: {config.model_type!r} does not open whole: {why}. Name its encoder and its language model under "
        "model.encoders and model.language_model, or add a Family to dilatant.models.families.families"
    )
