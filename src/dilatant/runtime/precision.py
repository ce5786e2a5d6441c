"""The device and the number format that one process trains with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dilatant.config import UserError


@dataclass(frozen=True, slots=True)
class Precision:
    """`compute` is the dtype of matrix products; weights and moments stay fp32."""

    compute: torch.dtype

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """The context that forward passes run in."""
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)


def pick_device() -> torch.device:
    """The current accelerator, or the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def pick_precision(setting: str, device: torch.device) -> Precision:
    """The precision that `train.precision` means on `device`. Raises UserError for bf16 on a GPU without it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if setting == "auto":
        return Precision(torch.bfloat16 if has_bf16 else torch.float32)
    if setting == "bf16" and device.type == "cuda" and not has_bf16:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"train.precision is bf16, which {name} does not have; use fp32 or auto")
    return Precision(torch.bfloat16 if setting == "bf16" else torch.float32)
