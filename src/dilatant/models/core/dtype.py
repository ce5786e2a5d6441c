"""The dtype in which a unit's weights are held."""

from __future__ import annotations

from typing import Any

import torch

from dilatant.models.core.unit import Unit


@torch.no_grad()
def cast_weights(unit: Unit, dtype: torch.dtype) -> None:
    """Cast the weights of `unit` to `dtype`, including those on the meta device; Parameters stay the same objects.

    As in transformers, modules that the family always keeps in fp32 are not cast, nor are buffers (positions and
    frequencies). Buffers of a user's own module are cast, as in `Module.to`.
    """
    kept = set(getattr(unit.model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in unit.named_parameters():
        if parameter.is_floating_point() and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    for module in unit.modules() if unit.structure is None else ():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.to(dtype)


def dtype_of_config(config: Any) -> torch.dtype:
    """Return the floating dtype that a transformers config gives for its weights; fp32 if it gives none."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
