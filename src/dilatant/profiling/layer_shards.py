"""One tensor-parallel rank's share of a unit: the same model with fewer heads, a narrower feed-forward and a part of
the vocabulary. The hidden size, the size of a head, norms and projectors stay whole.

Most families build that from their config. Where the size of a head follows from the number of heads, dividing heads
would give wider ones, so there the projections of attention are narrowed in the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dilatant.attention.hook import use_dilatant_attention
from dilatant.config import UserError, list_problems
from dilatant.models.tensor_plan import degree_problems, dropout_problems, tensor_plan
from dilatant.models.unit import Unit
from dilatant.profiling.describe_model import ModelDescription

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
_SIZES = (
    *("intermediate_size", "encoder_ffn_dim", "ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""What a tensor-parallel rank has a share of: attributes of configs."""

_INTO_HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value")
_OUT_OF_HEADS = ("o_proj", "out_proj", "projection_layer", "dense")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")
"""The projections of an attention module, and where it keeps its number of heads."""


def check_tensor_degrees(model: ModelDescription, degrees: Iterable[int]) -> None:
    """Raise UserError, naming the unit and the degrees it takes, unless ranks can share every unit at every degree,
    in training as well."""
    wanted, problems = sorted(set(degrees) - {1}), []
    for unit in dict.fromkeys(entry.unit for entry in model.types):
        plan = tensor_plan(unit)
        problems += [problem for degree in wanted for problem in degree_problems(unit, plan, degree)]
        problems += dropout_problems(unit, plan) if wanted else []
    if problems:
        raise list_problems(
            "tensor-parallel degrees (plan.tensor_parallel, --tp):", list(dict.fromkeys(problems))
        )


def tensor_shard(unit: Unit, degree: int) -> Unit:
    """The unit as one of `degree` ranks holds it, on the meta device; itself if `degree` is 1.

    `degree` must divide (see `check_tensor_degrees`); of a vocabulary that it does not divide, the largest share.
    Raises UserError for a family whose blocks are not known to be divided.
    """
    if degree == 1 or unit.structure is None:
        return unit
    model = _built(unit, degree, divide_heads=True)
    if _head_sizes(unit, model) != _head_sizes(unit, _whole(unit)):
        model = _built(unit, degree, divide_heads=False)
        _narrow_attention(unit, model, degree)
    _refuse_whole(unit, model)
    if getattr(unit, "row_attention", None) is not None:
        use_dilatant_attention(model)
    shard = copy.deepcopy(unit, {id(unit.model): model})  # all but the model is as it was
    shard.shared_by = degree
    return shard


def _built(unit: Unit, degree: int, divide_heads: bool) -> PreTrainedModel:
    """The unit's model on the meta device, from its config with everything divided that a config can say."""
    config = copy.deepcopy(_whole(unit).config)
    own = config.get_text_config()
    if divide_heads and getattr(own, "head_dim", None) is None:
        own.head_dim = own.hidden_size // own.num_attention_heads
    # All read before one is written: some configs know one number by two names.
    whole = {
        name: getattr(own, name) for name in _counted(own, (*_HEADS, *_SIZES) if divide_heads else _SIZES)
    }
    for name, count in whole.items():
        setattr(own, name, max(1, count // degree))  # fewer key/value heads than ranks: several hold one
    if _whole(unit).get_output_embeddings() is not None:
        own.vocab_size = -(-own.vocab_size // degree)
        if own.pad_token_id is not None:
            own.pad_token_id = 0  # an embedding refuses one outside its table
    with torch.device("meta"):
        model: PreTrainedModel = type(_whole(unit))(config)
    return model


def _whole(unit: Unit) -> PreTrainedModel:
    return cast(PreTrainedModel, unit.model)


def _blocks(unit: Unit, model: nn.Module) -> nn.Module:
    assert unit.structure is not None
    return model.get_submodule(unit.structure.blocks)


def _head_sizes(unit: Unit, model: PreTrainedModel) -> dict[str, int]:
    """By module of the blocks that has heads: the size of a head."""
    blocks = _blocks(unit, model)
    found = {path: getattr(module, "head_dim", None) for path, module in blocks.named_modules()}
    return {path: size for path, size in found.items() if isinstance(size, int)}


def _narrow_attention(unit: Unit, model: PreTrainedModel, degree: int) -> None:
    """Give the projections of attention the width of one rank's heads, in place."""
    for module in _blocks(unit, model).modules():
        linears = {name: part for name, part in module.named_children() if isinstance(part, nn.Linear)}
        into = [name for name in _INTO_HEADS if name in linears]
        out_of = [name for name in _OUT_OF_HEADS if name in linears]
        if len(into) != 3 or len(out_of) != 1:
            continue
        for name in into + out_of:
            whole = linears[name]
            ins, outs = whole.in_features, whole.out_features
            ins, outs = (ins, outs // degree) if name in into else (ins // degree, outs)
            setattr(module, name, nn.Linear(ins, outs, whole.bias is not None, "meta", whole.weight.dtype))
        for name in _counted(module, _HEAD_COUNTS):
            setattr(module, name, max(1, getattr(module, name) // degree))


def _refuse_whole(unit: Unit, model: PreTrainedModel) -> None:
    """Raise UserError if a matrix that ranks surely share, one as large as the hidden size both ways, is whole."""
    hidden = unit.width
    before = dict(_blocks(unit, unit.model).named_parameters())
    for name, parameter in _blocks(unit, model).named_parameters():
        large = parameter.dim() > 1 and min(parameter.shape[-2:]) >= hidden
        if large and parameter.shape == before[name].shape:
            raise UserError(
                f"{unit.unit}: how tensor-parallel ranks share {name.split('.', 1)[1]!r} of {type(model).__name__} is "
                "not known, so it can be measured at tp = 1 only"
            )


def _counted(holder: object, names: Iterable[str]) -> list[str]:
    """Those of the attributes that `holder` has, and that are a number of it."""
    return [name for name in names if isinstance(getattr(holder, name, None), int)]
