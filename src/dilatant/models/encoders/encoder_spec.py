"""Encoder specification: the user's settings of an encoder, and the unit built from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError, list_problems, one_line
from dilatant.config.signatures import require_call
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS, EncoderGeometry, Features, encoder_geometry
from dilatant.models.core.materialize import seeded
from dilatant.models.core.stage import StageInputs
from dilatant.models.core.structure import Structure, find_structure
from dilatant.models.encoders.encoder import Callbacks, EncoderUnit
from dilatant.models.encoders.native_encoder import NativeEncoderUnit, width_of_merged
from dilatant.models.encoders.packed_encoder import OwnItemsUnit
from dilatant.models.encoders.projector import build_projector
from dilatant.models.encoders.sound_encoder import SoundEncoderUnit
from dilatant.models.sources import load_encoder

_CALLED = {
    "before_encoder": ("inputs",),
    "after_encoder": ("inputs", "hidden"),
    "after_projector": ("inputs", "hidden"),
}
"""The arguments of callbacks."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """The user's specification of one encoder.

    model: a transformers model, a config (random weights), or an id or folder; or any module that maps keyword tensors
    [rows, ...] to [rows, tokens, width]. projector: "linear", "mlp", "identity", or a module from the encoder's width
    to the language model's. placeholder_id: the id of the text token that one encoder token replaces; by default an id
    outside the vocabulary, so that any tokenizer works. merge: at the placeholders, or in front of the text. features:
    "patch" drops class and register tokens. Callbacks: see `Callbacks`. processor: saved with the model.

    Another module is cut at its list of blocks if that changes nothing (see `_own_structure`), otherwise it is one
    layer. It also needs: kind, "image", "audio" or a name of your own, which the built-in readers do not support;
    input_name, the keyword of the forward (default as in transformers); row_shape, the shape of an encoder row,
    [channels, height, width], [mel_bins, frames], or any shape for another kind; width, that of an output token;
    tokens_per_row, the number of output tokens per row. example: instead of input_name and row_shape, one row of each
    input, keyword → tensor [1, ...] of any rank and dtype; the layer is measured with it, so ids in it must be valid.
    If a projector or callback of yours changes the number of tokens, tokens_per_row is the number after it.
    tokens_of: for items of unlike sizes, instead of tokens_per_row: the number of tokens of a sample's items, from its
    inputs (keyword → array); the module then maps the inputs of all items, concatenated, to [tokens, width], and the
    example has the inputs of one item.
    """

    model: Any
    projector: str | nn.Module = "mlp"
    placeholder_id: int | None = None
    merge: Literal["placeholder", "prepend"] = "placeholder"
    features: Features = "all"
    before_encoder: Callable[[StageInputs], StageInputs] | None = None
    after_encoder: Callable[[StageInputs, Tensor], Tensor] | None = None
    after_projector: Callable[[StageInputs, Tensor], Tensor] | None = None
    processor: Any = None
    kind: str | None = None
    input_name: str | None = None
    row_shape: tuple[int, ...] | None = None
    width: int | None = None
    tokens_per_row: int | None = None
    example: Mapping[str, Tensor] | None = None
    tokens_of: Callable[[Mapping[str, Any]], int] | None = None


def build_encoder(name: str, encoder: Encoder, hidden_size: int) -> EncoderUnit:
    """Build the unit, with a projector to `hidden_size`; new modules are on the meta device. Raises UserError."""
    where = f"encoder {name!r}"
    if isinstance(encoder.model, nn.Module) and not isinstance(encoder.model, PreTrainedModel):
        model: nn.Module = encoder.model
        geometry = _stated_geometry(encoder, where)
    else:
        model = load_encoder(encoder.model, where)
        if model.config.model_type in PATCH_MERGER_ENCODERS:
            return _build_patch_merger(name, model, encoder, hidden_size, where)
        geometry = encoder_geometry(model.config, encoder.features)
        _refuse_stated(encoder, where)
        if encoder.tokens_per_row is not None:
            geometry = replace(geometry, tokens_per_row=encoder.tokens_per_row)
    for key, takes in _CALLED.items():
        if (callback := getattr(encoder, key)) is not None:
            require_call(f"{where}: {key}", callback, *takes)
    projector = _projector_of(encoder, geometry.encoder_tokens, geometry.width, hidden_size, where)
    make = partial(
        EncoderUnit if encoder.tokens_of is None else OwnItemsUnit,
        name,
        projector=projector,
        geometry=geometry,
        width_out=hidden_size,
        callbacks=Callbacks(encoder.before_encoder, encoder.after_encoder, encoder.after_projector),
        skip_tokens=geometry.leading_tokens if encoder.features == "patch" else 0,
    )
    if isinstance(model, PreTrainedModel) or encoder.tokens_of is not None:
        return make(model)
    is_plain = isinstance(encoder.projector, str) and not (encoder.after_encoder or encoder.after_projector)
    return make(model, structure=_own_structure(make, model, where, is_plain))


@torch.no_grad()
@seeded(0, "own module")
def _own_structure(make: Callable[..., EncoderUnit], model: nn.Module, where: str, is_plain: bool) -> Structure | None:
    """Find the blocks of a user's own module. Return None, which makes it one layer, if it has no list of blocks, or if
    in a copy with random weights its layers one by one give other hidden states than its own forward. is_plain: nothing
    behind it changes the number of tokens. Raises UserError if it gives other tokens than stated."""
    try:
        structure = find_structure(model)
        unit = make(_random_copy(model), structure=structure)
        drawn = tuple(f"{path.removeprefix('model.')}." for _, path in unit.pieces())
        if any(t.is_meta and not n.startswith(drawn) for n, t in (*model.named_parameters(), *model.named_buffers())):
            return None
        value, inputs = unit.example(0, 1, torch.device("cpu"))
        fed, end = {unit.geometry.input_name: value, **inputs}, len(unit.layers) - 1
        whole, hidden = unit.stage(0, end).eval()(fed), [unit.stage(0, 1).eval()(fed)]
        for layer in range(1, end):
            hidden.append(unit.stage(layer, layer + 1).eval()(None, hidden[-1]))
        is_same = {each.shape for each in hidden} == {whole.shape} and torch.allclose(whole, hidden[-1], 1e-3, 1e-4)
    except Exception:  # such as blocks that pass on more than hidden states
        return None
    found, stated = [*whole.shape], [1, unit.geometry.encoder_tokens, unit.geometry.width]
    if found != stated and is_plain:
        raise UserError(
            f"{where}: its forward gives {found} for one row, not {stated}; let it return tokens, not pooled"
        )
    return structure if is_same and found == stated else None


def _random_copy(model: nn.Module) -> nn.Module:
    """Copy a module to the CPU with random weights: initial scales near 0 would hide what blocks do."""
    copied = copy.deepcopy(model).to_empty(device="cpu")
    for parameter in copied.parameters():
        parameter.normal_(std=min(0.1, (parameter.shape or (1,))[-1] ** -0.5))
    for buffer in copied.buffers():
        buffer.fill_(1)
    return copied


def _build_patch_merger(
    name: str, tower: PreTrainedModel, encoder: Encoder, hidden_size: int, where: str
) -> EncoderUnit:
    """Build the unit of a Qwen-VL or Qwen-Audio encoder: items of different sizes are packed in one row, and the
    encoder itself merges tokens before a new projector takes them."""
    _refuse_stated(encoder, where)
    assert encoder.placeholder_id is not None
    options = {key: getattr(encoder, key) is not None for key in (*_CALLED, "tokens_per_row")}
    options |= {"merge: prepend": encoder.merge == "prepend", "features: patch": encoder.features == "patch"}
    problems = [
        f"{option}: its items are of unlike sizes, which this needs to be one; leave it out"
        for option, is_given in options.items()
        if is_given
    ]
    if problems:
        raise list_problems(f"{where} cannot have:", problems)
    is_audio = PATCH_MERGER_ENCODERS[tower.config.model_type] == "audio"
    width = int(tower.config.d_model) if is_audio else width_of_merged(tower.config)
    projector = _projector_of(encoder, 1, width, hidden_size, where)
    if is_audio:
        return SoundEncoderUnit(name, tower, projector, hidden_size, encoder.placeholder_id)
    return NativeEncoderUnit(name, tower, projector, hidden_size)


def _stated_geometry(encoder: Encoder, where: str) -> EncoderGeometry:
    kind, example, tokens = encoder.kind or "", encoder.example, encoder.tokens_per_row
    usual = {"image": "pixel_values", "audio": "input_features"}
    name = next(iter(example), None) if example else encoder.input_name or usual.get(kind)
    shape = encoder.row_shape if example is None else tuple(next(iter(example.values()), torch.empty(0)).shape[1:])
    problems = []
    if encoder.tokens_of is not None:
        if example is None or tokens is not None:
            problems.append("tokens_of needs an example, the inputs of one item, and no tokens_per_row")
        if encoder.merge == "prepend":
            problems.append("merge 'prepend' is for items of one size, without tokens_of")
        tokens = 1 if example is None else int(encoder.tokens_of(example))
    problems += [
        f"{key} is missing; {what}"
        for key, what, stated in (
            ("kind", "'image', 'audio' or a word of your own", encoder.kind),
            ("row_shape", "of one encoder row: (channels, height, width) or (mel_bins, frames)", shape),
            ("input_name", "the keyword of its forward", name or not kind),
            ("width", "of one output token", encoder.width),
            ("tokens_per_row", "how many tokens one row gives", tokens),
        )
        if not stated and stated != ()
    ]
    if example is not None:
        if encoder.row_shape is not None or encoder.input_name is not None:
            problems.append("row_shape and input_name are told by the example; leave them out")
        problems += [
            f"the example of {key!r} is no tensor of one row: [1, ...]"
            for key, row in example.items()
            if not isinstance(row, Tensor) or not row.shape or (row.shape[0] != 1 and encoder.tokens_of is None)
        ]
    dimensions = {"image": 3, "audio": 2}.get(kind)
    if shape is not None and dimensions not in (None, len(shape)):
        problems.append(f"row_shape is {shape}; rows of kind {kind!r} have {dimensions} dimensions")
    if encoder.features == "patch":
        problems.append("features 'patch' is for transformers encoders; leave out those tokens in the module")
    if problems:
        raise list_problems(f"{where}: of {type(encoder.model).__name__} cannot be told:", problems)
    assert shape is not None
    assert name is not None
    assert encoder.width is not None
    assert tokens is not None
    of_kind = {"image": ("channels", "height", "row_width"), "audio": ("mel_bins", "frames")}.get(kind, ())
    return EncoderGeometry(
        kind=kind,
        input_name=name,
        tokens_per_row=tokens,
        encoder_tokens=tokens,
        width=encoder.width,
        example=example if example is not None or of_kind else {name: torch.zeros(1, *shape)},
        **dict(zip(of_kind, shape)),
    )


def _refuse_stated(encoder: Encoder, where: str) -> None:
    stated = [
        key
        for key in ("kind", "input_name", "row_shape", "width", "example", "tokens_of")
        if getattr(encoder, key) is not None
    ]
    if stated:
        raise UserError(
            f"{where}: {', '.join(stated)} is for a module of your own; a transformers model's config says it"
        )


def _projector_of(encoder: Encoder, tokens: int, width: int, hidden_size: int, where: str) -> nn.Module:
    """Return a new projector of the kind that the user names, or the user's module after a trial."""
    if isinstance(encoder.projector, str):
        with torch.device("meta"):
            return build_projector(encoder.projector, width, hidden_size, where)
    if encoder.after_encoder is None:
        _check_projector(encoder.projector, tokens, width, hidden_size, where)
    return encoder.projector


@torch.no_grad()
def _check_projector(projector: nn.Module, tokens: int, width: int, hidden_size: int, where: str) -> None:
    weight = next(projector.parameters(), torch.empty(0))
    rows = torch.zeros(1, tokens, width, dtype=weight.dtype, device=weight.device)
    try:
        width_out = projector(rows).shape[-1]
    except Exception as error:
        raise UserError(
            f"{where}: the projector does not take the encoder's width {width}: {one_line(error, 200)}"
        ) from None
    if width_out != hidden_size:
        raise UserError(f"{where}: the projector gives width {width_out}, the language model takes {hidden_size}")
