"""The number format that a unit's weights are held in."""

from __future__ import annotations

from typing import Any

import torch

from dilatant.models.core.unit import Unit


@torch.no_grad()
def hold_in(unit: Unit, dtype: torch.dtype) -> None:
    """Hold the weights of `unit` in `dtype`, those on the meta device included; the Parameters stay the same objects.

    As when transformers builds a model in `dtype`: what a family keeps in fp32 stays so, and so do buffers, which are
    positions and frequencies there. Those of modules of the user's own follow, as in `Module.to`.
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
    """The floating dtype that a transformers config says its weights are kept in; fp32 where it says none."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
