"""The attention section of `dilatant doctor`: which backend each kind of row gets on this machine, and why."""

from __future__ import annotations

import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.backends import explain_backend, installed
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout, document_causal, embedded, sliding_window

HEAD_DIM = 128
SAFE_ASSEMBLER = (13, 1)
"""ptxas 12.8, 12.9 and partly 13.0 miscompile Triton's kernels for Hopper (flash-linear-attention issue 1262, triton
issue 11781); 13.1 and later pass."""


def explain_here(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return a line per kind of row, for layers with head dimension 128 in `dtype`, and one about Triton's compiler."""
    plans = {name: AttentionPlan(mask) for name, mask in _examples().items()}
    lines = {}
    for name, plan in plans.items():
        choice = explain_backend(str(device), dtype, HEAD_DIM, plan)
        others = "".join(f"; not {other}: {why}" for other, why in choice.others.items())
        lines[name] = f"{choice.name} ({choice.reason}){others}"
    note = compiler_note(installed(device).capability)
    return {**lines, "compiler": note} if note else lines


def _examples() -> dict[str, AttentionMask]:
    text = RowLayout.of_lengths([3, 2])
    return {
        "packed text": document_causal(text),
        "sliding window": sliding_window(text, 2),
        "text and images": embedded(RowLayout.of_samples([[("text", 2), ("image", 2), ("text", 2)]])),
    }


def compiler_note(capability: tuple[int, int] | None) -> str | None:
    """Return the assembler's version for a GPU, with a warning if it is known to fail; None without Triton."""
    if capability is None or not installed(torch.device("cpu")).triton:
        return None
    from triton.backends.nvidia.compiler import get_ptxas

    version = get_ptxas(10 * capability[0] + capability[1]).version
    found = tuple(int(part) for part in version.split(".")[:2])
    if capability[0] != 9 or found >= SAFE_ASSEMBLER:
        return f"ptxas {version}"
    return (
        f"ptxas {version}: versions before {'.'.join(map(str, SAFE_ASSEMBLER))} have miscompiled kernels for Hopper; "
        "run `pytest -m gpu tests/attention`, and if it fails point TRITON_PTXAS_PATH at a later ptxas"
    )
