"""Choose the device and the dtype in which one process trains, and kernels whose results repeat."""

from __future__ import annotations

import torch

from dilatant.config import UserError


def pick_device() -> torch.device:
    """Return the current accelerator, or the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def pick_precision(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights, activations and rows on `device` under `train.precision`. Raises UserError for bf16
    or fp8 on a GPU that does not support it."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if setting == "auto":
        return torch.bfloat16 if has_bf16 else torch.float32
    if device.type == "cuda" and not (has_fp8(device) if setting == "fp8" else has_bf16 or setting != "bf16"):
        other = "bf16" if has_bf16 else "fp32"
        name = torch.cuda.get_device_name(device)
        raise UserError(f"train.precision is {setting}, which {name} does not have; use {other} or auto")
    return torch.float32 if setting == "fp32" else torch.bfloat16


def has_fp8(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU that multiplies E4M3: compute capability 8.9 (Ada), 9.0 (Hopper) and later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def compute_repeatably(device: torch.device) -> None:
    """On a GPU, run only operations that repeat their results bit for bit, else raise RuntimeError, in this process.
    cuBLAS also needs `environment.prepare_torch`; our attention kernels always repeat."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
