"""Generic families: multimodal models that `families.FAMILIES` does not list, read by transformers' own interface.

`get_decoder` returns the text model, `get_image_features` runs the encoder and its projector, and the config names the
token that one row replaces. A family that is read here is proven before the first training (see `media_proof`).
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from typing import Any

from torch import nn
from transformers import AutoModelForImageTextToText

from dilatant.config.errors import UserError, one_line
from dilatant.models.core.structure import find_structure, on_meta
from dilatant.models.encoders.generic_encoder import GenericTower
from dilatant.models.encoders.narrow_encoder import FEATURES, TOKENS
from dilatant.models.families.families import FAMILIES, Family
from dilatant.models.families.shrink import shrink_widths


def opens_whole(config: Any) -> bool:
    """Return True if a model with this config may open with its encoders: its family is listed here, or can be read."""
    config = getattr(config, "thinker_config", config)
    is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return config.model_type in FAMILIES or (
        is_multimodal and getattr(config, "vision_config", None) is not None
    )


def read_family(config: Any, where: str) -> Family:
    """Read the family of a model from the model itself. Raises UserError if the model's interface differs."""
    try:
        with on_meta():
            model: Any = AutoModelForImageTextToText.from_config(copy.deepcopy(config))
    except Exception as error:
        raise _refusal(config, where, one_line(error)) from None
    if getattr(config.get_text_config(), "is_encoder_decoder", False) or config.is_encoder_decoder:
        raise _refusal(config, where, "its text model is an encoder with a decoder")
    decoder = _innermost(model)
    base = model.base_model
    holder = base if hasattr(type(base), FEATURES) else model
    if decoder is holder or decoder is model:
        raise _refusal(config, where, "its text model is no part of its own")
    if not hasattr(type(holder), FEATURES):
        raise _refusal(config, where, f"it has no {FEATURES}")
    token = next((key for key in TOKENS if isinstance(getattr(config, key, None), int)), None)
    if token is None:
        raise _refusal(config, where, "its config names no image_token_id")
    paths = {id(module): path for path, module in model.named_modules()}
    prefix = f"{paths[id(holder)]}." if holder is not model else ""
    touched = _touched(holder)
    sizes = {name: _size_of_blocks(getattr(holder, name)) for name in touched}
    named = model.get_encoder(modality="image")
    tower = next((name for name in touched if sizes[name] and getattr(holder, name) is named), None)
    tower = tower or max(
        (name for name in touched if sizes[name]), key=lambda name: sizes[name], default=None
    )
    if tower is None:
        raise _refusal(config, where, "no encoder with a list of blocks was found in it")
    others = [
        name
        for name, child in holder.named_children()
        if name not in touched
        and child is not model.get_output_embeddings()
        and decoder not in child.modules()
        and any(True for _ in child.parameters())
    ]
    if others:
        raise _refusal(config, where, f"nothing says what its {', '.join(others)} are for")
    spatial = hasattr(type(holder), "get_rope_index")
    found = GenericTower(
        f"{prefix}{tower}",
        tuple(f"{prefix}{name}" for name in touched if name != tower),
        token,
        holder=prefix.removesuffix("."),
        narrow=json.dumps({**shrink_widths(config, spatial), "model_type": config.model_type}, default=str),
    )
    return Family({"vision": found}, paths[id(decoder)], spatial, generic=found)


def _innermost(model: Any) -> Any:
    """Return the text model without its head."""
    decoder = model.get_decoder()
    while hasattr(decoder, "get_decoder") and decoder.get_decoder() not in (decoder, None):
        decoder = decoder.get_decoder()
    return getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder


def _touched(holder: nn.Module) -> list[str]:
    """Return the modules and parameters of `holder` that its `get_image_features` uses, also indirectly, by name."""
    names: list[str] = []
    methods, waiting = {FEATURES}, [FEATURES]
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


def _size_of_blocks(entry: Any) -> int:
    """Return the number of weights in a module's list of blocks; 0 if it has none."""
    try:
        structure = find_structure(entry)
    except (UserError, AttributeError):
        return 0
    return sum(parameter.numel() for parameter in entry.get_submodule(structure.blocks).parameters())


def _refusal(config: Any, where: str, why: str) -> UserError:
    return UserError(
        f"{where}: {config.model_type!r} does not open whole: {why}. Name its encoder and its language model under "
        "model.encoders and model.language_model, or add a Family to dilatant.models.families.families"
    )
