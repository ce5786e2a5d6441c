"""The dtype in which a unit's weights are held, and four-bit weights of stages.

Four-bit weights are quantised at load time and not saved in checkpoints; a rank that joins later reads them from the
model's source.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Set
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.models.adapters.four_bit import FourBitLinear
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.core.parallel_linear import ParallelFourBit, ParallelLinear
from dilatant.models.core.running_statistics import has_statistics
from dilatant.models.core.stage import Stage
from dilatant.models.core.unit import Unit

TILE = 16
"""Sizes of a weight that FP8 kernels multiply by are multiples of this."""
_ROUTERS = {"router", "gate"}


@torch.no_grad()
def cast_weights(unit: Unit, dtype: torch.dtype) -> None:
    """Cast the weights of `unit` to `dtype`, including those on the meta device; Parameters stay the same objects.

    As in `from_pretrained`, weights that the family keeps in fp32 (under this dtype) are not cast, nor are buffers
    (positions and frequencies). Running statistics are cast, as weights are, and so are buffers of a user's own module,
    as in `Module.to`.
    """
    for parameter in cast_parameters(unit, dtype):
        parameter.data = parameter.data.to(dtype)
    for module in unit.modules():
        if unit.config is not None and not has_statistics(module):
            continue
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                weight = next(module.parameters(recurse=False), None)
                setattr(module, key, buffer.to(dtype if weight is None else weight.dtype))


def cast_parameters(unit: Unit, dtype: torch.dtype) -> Iterator[nn.Parameter]:
    """Yield the parameters that `cast_weights` casts to `dtype`."""
    patterns = [*(getattr(unit.model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:
        patterns += getattr(unit.model, "_keep_in_fp32_modules", None) or ()
    in_fp32 = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns) or "$^")
    for name, parameter in unit.named_parameters():
        if parameter.is_floating_point() and not (name.startswith("model.") and in_fp32.search(name)):
            yield parameter


def dtype_of_config(config: Any) -> torch.dtype:
    """Return the floating dtype that a transformers config gives for its weights; fp32 if it gives none."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def require_four_bit() -> None:
    """Raise UserError if bitsandbytes is not installed, without importing it."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.lora.load_in_4bit needs bitsandbytes, which is not installed; `pip install 'dilatant[bnb]'`, or "
            "leave the key out"
        )


def four_bit_names(unit: Unit) -> frozenset[str]:
    """Return the logical names of the weights that a unit holds in four bits: frozen linear layers of its blocks."""
    return frozenset(
        name
        for name, module in _linears(unit)
        if not any(parameter.requires_grad for parameter in module.parameters()) and name not in unit.tied.values()
    )


def choose_fp8(units: Mapping[str, Unit], precision: str) -> None:
    """Choose the weights by which `units` multiply in FP8, under precision "fp8". They are those of the linear layers
    in their blocks, without adapters, routers and gates of less than a tile. Experts and sizes that are no multiples of
    a tile are left out with a warning. Raises UserError for four-bit weights."""
    for name, unit in units.items() if precision == "fp8" else ():
        if unit.four_bit:
            raise UserError(f"train.precision: fp8 multiplies by no 4-bit weights, which {name} has; write bf16")
        shapes = {
            key: tuple(module.weight.shape)
            for key, module in _linears(unit)
            if not is_adapter(key) and not _ROUTERS & {*key.split(".")} and module.out_features >= TILE
        }
        unit.fp8 = frozenset(key for key, shape in shapes.items() if not any(size % TILE for size in shape))
        experts = {key: tuple(each.shape) for key, each in unit.named_logical_parameters() if ".experts." in key}
        shapes |= {key: shape for key, shape in experts.items() if len(shape) == 3 and not is_adapter(key)}
        if left := {re.sub(r"\.\d+\.", ".*.", key): shape for key, shape in shapes.items() if key not in unit.fp8}:
            listed = ", ".join(f"{key} ({' x '.join(map(str, shape))})" for key, shape in left.items())
            takes = f"takes linear layers in multiples of {TILE}"
            warnings.warn(f"train.precision: fp8 {takes}; these stay in bf16: {listed}", stacklevel=2)


def _linears(unit: Unit) -> Iterator[tuple[str, nn.Linear]]:
    """Yield logical name of the weight, and module, of the plain linear layers in a unit's blocks."""
    names = {weight.key: weight.canonical for weight in unit.weights if weight.part == "model"}
    for path, module in unit.model.named_modules():
        if unit.structure is not None and path.startswith(unit.structure.blocks + ".") and type(module) is nn.Linear:
            yield names[f"{path}.weight"], module


@torch.no_grad()
def quantize(stage: Stage, names: Set[str], device: torch.device, weights: Mapping[str, Tensor] | None = None) -> None:
    """Quantise a stage's weights with logical `names` to four bits on `device`, one by one, from the stage's own values
    or from `weights`. Raises UserError for a weight of another shape."""
    for weight in stage.weights:
        if weight.part != "model" or weight.canonical not in names:
            continue
        model: Any = stage.model
        parent, _, last = weight.key.removesuffix(".weight").rpartition(".")
        linear = model.get_submodule(f"{parent}.{last}" if parent else last)
        values = (weights or {}).get(weight.canonical, linear.weight)
        require_shape(weight.canonical, values, linear.weight)
        four_bit = ParallelFourBit if isinstance(linear, ParallelLinear) else FourBitLinear
        holder = model.get_submodule(parent)
        setattr(holder, last, four_bit(linear, values.to(device, linear.weight.dtype)))


def drop_four_bit(unit: Unit) -> None:
    """Replace the unit's four-bit layers by plain linear layers on the meta device."""
    for parent in list(unit.model.modules()):
        for last, layer in parent.named_children():
            if isinstance(layer, FourBitLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(plain.weight.to(layer.dtype), requires_grad=False)
                plain.bias = layer.bias
                setattr(parent, last, plain)


def require_shape(name: str, read: Tensor, held: Tensor) -> None:
    """Raise UserError if the shapes differ, because a copy could broadcast silently."""
    if read.shape != held.shape:
        raise UserError(
            f"weight {name!r} has shape {list(read.shape)} where it is read, and {list(held.shape)} in the model"
        )
