"""Attention backends: choose the implementation that runs an attention call, and explain why.

| backend    | devices           | what it is                                                        |
|------------|-------------------|-------------------------------------------------------------------|
| sdpa       | any               | PyTorch's scaled_dot_product_attention: plain rows only           |
| varlen     | NVIDIA GPUs       | PyTorch's varlen_attn (flash attention 2): ragged rows, one call  |
| flash3     | NVIDIA Hopper     | the same of the package flash_attn_interface                      |
| triton     | NVIDIA GPUs       | our kernels: every mask, deterministic gradients                  |
| flex       | NVIDIA GPUs       | PyTorch's FlexAttention on our tables: every mask, not on ranks   |
| cudnn_flex | Hopper, Blackwell | cuDNN's Flex (cudnn.flex_attention): intervals of keys of a query |
| magi       | NVIDIA Hopper     | MagiAttention's kernels: slices of the mask, causal or full       |
| blockwise  | any               | the same tables in plain PyTorch: CPUs, float64, a reference      |

What `dilatant profile` measured on a device decides there (`measured.py`), else `PREFERENCE`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.mask_class import MaskClass
from dilatant.attention.kernels.measured import MeasuredRow, measured_row, measured_rows
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.kernels.triton_tuning import MAX_HEAD_DIM
from dilatant.attention.masks.packing import RowLayout, document_causal, media_mask
from dilatant.config.environment import interprets_triton

PREFERENCE = {
    "cpu": ("sdpa", "triton", "blockwise", "varlen", "flash3", "flex", "cudnn_flex", "magi"),
    "cuda": ("triton", "varlen", "sdpa", "blockwise", "flash3", "flex", "cudnn_flex", "magi"),
}
"""Order of the automatic choice by device where nothing was measured; as on a CPU for other devices and for rows that
are one dense batch. On an H100 our kernels run packed causal rows in 0.74 to 1.0 of the time of flash attention 2
(`benchmarks/attention/attention.py`)."""

KERNELS = ("triton", "blockwise")

MOST_KEY_RUNS = 512
"""Runs of keys in a sample up to which intervals of keys are exact (see `block_table`) and their tables are small."""

HEAD_DIM = 128
SAFE_ASSEMBLER = (13, 1)
"""ptxas 12.8, 12.9 and partly 13.0 miscompile Triton's kernels for Hopper (flash-linear-attention issue 1262, triton
issue 11781); 13.1 and later pass."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The properties of one attention call. group: query heads of a KV head. row: the class of the row's mask.
    gradients: a backward may follow."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    row: MaskClass
    group: int = 1
    softcap: bool = False
    sinks: bool = False
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class MachineCapabilities:
    """Capabilities of the machine. They are the compute `capability` of the GPU (None without one), the optional
    `packages`, whether Triton's interpreter mode (kernels run on the CPU) is on, and what was `measured` on it."""

    packages: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None
    interpreter: bool = False
    measured: tuple[MeasuredRow, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen backend, the reason, and why each of the others that are installed was not chosen."""

    name: str
    reason: str
    others: dict[str, str] = field(default_factory=dict)


def unsupported_reason(name: str, request: AttentionCall, installed: MachineCapabilities) -> str | None:
    """Return why backend `name` cannot run the request; None if it can."""
    return _OBSTACLES[name](request, installed)


def choose_backend(request: AttentionCall, installed: MachineCapabilities, wanted: str = "auto") -> BackendChoice:
    """Return the backend for a request on a machine; a pure function, which `dilatant doctor` shows. Raises
    AttentionError if `wanted` is unknown or cannot run the request, with the reason and the alternatives."""
    if wanted != "auto" and wanted not in _OBSTACLES:
        raise AttentionError(f"unknown attention backend {wanted!r}; known are auto, {', '.join(_OBSTACLES)}")
    is_one = request.row.kind == "equal" or request.device not in PREFERENCE
    row = measured_row(installed.measured, request.row.kind, request.dtype, request.group, request.head_dim)
    seconds = {} if row is None else row.seconds
    preferred = PREFERENCE["cpu" if is_one else request.device]
    order = sorted(preferred, key=lambda name: seconds.get(name, math.inf))  # a stable sort
    obstacles = {
        name: unsupported_reason(name, request, installed)
        for name in order
        if name == wanted or name not in _LIBRARIES or _LIBRARIES[name].package in installed.packages
    }
    able = [name for name, why in obstacles.items() if why is None]
    if wanted != "auto" and obstacles[wanted] is not None:
        raise AttentionError(
            f"attention backend {wanted!r} cannot run this: {obstacles[wanted]}. "
            f"Use {' or '.join(repr(name) for name in able) or 'another device'}"
        )
    if not able:
        raise AttentionError(
            "no attention backend can run this: " + "; ".join(f"{name}: {why}" for name, why in obstacles.items())
        )
    chosen = able[0] if wanted == "auto" else wanted
    others = {name: why or f"{chosen} is preferred" for name, why in obstacles.items() if name != chosen}
    if wanted != "auto":
        return BackendChoice(chosen, "asked for", {name: why for name, why in others.items() if obstacles[name]})
    return BackendChoice(chosen, "the fastest here" if chosen in seconds else _REASONS[chosen], others)


def capable_backends(request: AttentionCall, installed: MachineCapabilities) -> list[str]:
    """Return all backends that can run a request on a machine."""
    return [name for name in _OBSTACLES if unsupported_reason(name, request, installed) is None]


def choose_kernel(request: AttentionCall, installed: MachineCapabilities, wanted: str = "auto") -> str:
    """Return the backend among our own kernels, whose forward and backward can be called separately. Raises
    AttentionError if `wanted` is none of them or cannot run the request."""
    if wanted not in ("auto", *KERNELS):
        raise AttentionError(f"attention backend {wanted!r} has no separate backward; use one of {', '.join(KERNELS)}")
    for name in KERNELS:
        if wanted == "auto" and unsupported_reason(name, request, installed) is None:
            return name
    return choose_backend(request, installed, wanted).name


def request_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_tokens: int | None = None,
) -> AttentionCall:
    """Return the request for these tensors; `key_tokens` is the expected number of keys if not all of the plan's.
    Raises AttentionError listing every mismatch in shapes, dtypes and devices."""
    problems = []
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            problems.append(f"{name} must be [tokens, heads, head_dim], got {list(tensor.shape)}")
    if not problems:
        if query.shape[0] != plan.mask.num_tokens:
            problems.append(f"query has {query.shape[0]} tokens, the mask {plan.mask.num_tokens}")
        key_tokens = plan.keys.num_tokens if key_tokens is None else key_tokens
        if key.shape[0] != key_tokens:
            problems.append(f"key has {key.shape[0]} tokens, the mask {key_tokens}")
        if key.shape[:2] != value.shape[:2]:
            problems.append(f"key is {list(key.shape)} but value {list(value.shape)}")
        if query.shape[2] != key.shape[2]:
            problems.append(f"query has head_dim {query.shape[2]}, key {key.shape[2]}")
        if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
            problems.append(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} KV heads")
        if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
            problems.append(f"sinks must be [{query.shape[1]}], one a query head, got {list(sinks.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        problems.append(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: they must agree")
    if not query.device == key.device == value.device:
        problems.append(f"query is on {query.device}, key on {key.device}, value on {value.device}")
    if problems:
        raise AttentionError("attention: " + "; ".join(problems))
    return AttentionCall(
        device=query.device.type,
        dtype=query.dtype,
        head_dim=query.shape[2],
        value_dim=value.shape[2],
        row=plan.mask_class,
        group=query.shape[1] // key.shape[1],
        softcap=softcap is not None,
        sinks=sinks is not None,
        gradients=torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)),
    )


def installed(device: torch.device) -> MachineCapabilities:
    """Return what this machine offers for tensors on `device`. Deterministic runs do not depend on measurements."""
    is_free = not torch.are_deterministic_algorithms_enabled()
    return MachineCapabilities(
        packages=_packages(),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        interpreter=interprets_triton(),
        measured=measured_rows(device.type, device.index) if is_free else (),
    )


@functools.cache
def _packages() -> frozenset[str]:
    return frozenset(filter(_is_here, ["triton", *(library.package for library in _LIBRARIES.values())]))


def _is_here(module: str) -> bool:
    """Return whether a module is installed. Its package is not imported, because some load a GPU's libraries."""
    package, *inner = module.split(".")
    found = importlib.util.find_spec(package)
    places = [Path(place, *inner) for place in (found and found.submodule_search_locations) or ()]
    return found is not None and (not inner or any(at.is_dir() or at.with_suffix(".py").is_file() for at in places))


def explain_here(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return a line per kind of row, for layers with head dimension 128 in `dtype`, and one about Triton's compiler."""
    text, pictures = RowLayout.of_lengths([3, 2]), [[("text", 2), ("image", 2), ("text", 2)]]
    masks = {
        "packed text": document_causal(text),
        "sliding window": document_causal(text).with_window(2),
        "text and images": media_mask(RowLayout.of_samples(pictures), "embedded"),
    }
    lines = {}
    for name, mask in masks.items():
        call = AttentionCall(device.type, dtype, HEAD_DIM, HEAD_DIM, AttentionPlan(mask).mask_class)
        choice = choose_backend(call, installed(device))
        others = "".join(f"; not {other}: {why}" for other, why in choice.others.items())
        lines[name] = f"{choice.name} ({choice.reason}){others}"
    note = compiler_note(installed(device).capability)
    return {**lines, "compiler": note} if note else lines


def compiler_note(capability: tuple[int, int] | None) -> str | None:
    """Return the assembler's version for a GPU, with a warning if it is known to fail; None without Triton."""
    if capability is None or "triton" not in _packages():
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


def _triton(request: AttentionCall, installed: MachineCapabilities) -> str | None:
    if "triton" not in installed.packages:
        return "Triton is not installed (pip install 'dilatant[gpu]')"
    if request.device == "cpu" and not installed.interpreter:
        return "the tensors are on a CPU"
    if request.device not in ("cpu", "cuda"):
        return f"there are no kernels for {request.device} devices"
    if installed.capability is not None and installed.capability < (8, 0):
        return f"the GPU's compute capability is {installed.capability[0]}.{installed.capability[1]}, below 8.0"
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bfloat16, float16 and float32, not {request.dtype}"
    if request.device == "cpu" and request.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly"
    if request.head_dim > MAX_HEAD_DIM:
        return f"head_dim {request.head_dim} is above {MAX_HEAD_DIM}"
    if request.value_dim != request.head_dim:
        return f"values have {request.value_dim} channels, keys {request.head_dim}"
    return None


def _blockwise(request: AttentionCall, installed: MachineCapabilities) -> str | None:
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return f"it takes floating-point tensors, not {request.dtype}"
    return None


def _sdpa(request: AttentionCall, installed: MachineCapabilities) -> str | None:
    if request.device == "meta":
        return "without values it would store all scores"
    if request.row.not_plain is not None:
        return f"SDPA knows only whole and causal samples, and {request.row.not_plain}"
    return _no_options("SDPA", request)


def _no_options(name: str, request: AttentionCall) -> str | None:
    if request.softcap:
        return f"{name} cannot cap scores"
    return f"{name} has no attention sinks" if request.sinks else None


def _library(name: str, request: AttentionCall, installed: MachineCapabilities) -> str | None:
    """Return why the kernels of an optional library cannot run the request; None if they can."""
    library = _LIBRARIES[name]
    if library.package not in installed.packages:
        return f"there is no {library.package} here (it comes with {library.source})"
    if request.device != "cuda" or installed.capability is None:
        return "the tensors are not on an NVIDIA GPU"
    if not library.runs_on(installed.capability):
        return f"the GPU's compute capability is {'.'.join(map(str, installed.capability))}, not {library.capabilities}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    return library.obstacle(request)


def _ragged(request: AttentionCall) -> str | None:
    if request.row.row is None:
        return f"it takes samples that all attend alike, and {request.row.not_plain or 'these do not'}"
    if request.head_dim % 8 or request.head_dim > 256 or request.value_dim != request.head_dim:
        return f"heads have {request.head_dim} and {request.value_dim} channels, not one multiple of 8 up to 256"
    return _no_options("flash attention", request)


def _magi(request: AttentionCall) -> str | None:
    if max(request.head_dim, request.value_dim) > 128:
        return f"heads have {request.head_dim} and {request.value_dim} channels, more than 128"
    return _many_runs(request)


def _cudnn_flex(request: AttentionCall) -> str | None:
    channels = request.head_dim, request.value_dim
    if channels not in ((192, 128), (256, 256)) and (max(channels) > 128 or any(each % 8 for each in channels)):
        return f"heads have {channels[0]} and {channels[1]} channels, not multiples of 8 up to 128"
    return _no_options("cuDNN's Flex", request) or _many_runs(request)


def _many_runs(request: AttentionCall) -> str | None:
    runs = request.row.key_runs
    return f"a sample has {runs} runs of keys, more than {MOST_KEY_RUNS}" if runs > MOST_KEY_RUNS else None


def _flex(request: AttentionCall, installed: MachineCapabilities) -> str | None:
    if request.device == "cpu" and request.gradients:
        return "FlexAttention has no backward on CPUs"
    if request.device == "cuda" and "triton" not in installed.packages:
        return "Triton, to which it compiles, is not installed"
    if request.device not in ("cpu", "cuda"):
        return f"it was not tried on {request.device} devices"
    return "there are no attention sinks in it" if request.sinks else None


class _Library(NamedTuple):
    """Kernels of an optional package: where the package comes from, the GPUs that they run on by compute capability,
    and what else is in their way."""

    package: str
    source: str
    capabilities: str
    runs_on: Callable[[tuple[int, int]], bool]
    obstacle: Callable[[AttentionCall], str | None]


_LIBRARIES = {
    "varlen": _Library("torch.nn.attention.varlen", "torch", "8.0 or above", lambda gpu: gpu >= (8, 0), _ragged),
    "flash3": _Library("flash_attn_interface", "flash attention 3", "9.x", lambda gpu: gpu[0] == 9, _ragged),
    "cudnn_flex": _Library(
        "cudnn.flex_attention", "nvidia-cudnn-frontend on PyPI",
        "9.0, 10.0 or 10.3", lambda gpu: gpu in ((9, 0), (10, 0), (10, 3)), _cudnn_flex,
    ),
    "magi": _Library(
        "magi_attention.functional.flex_flash_attn", "github.com/SandAI-org/MagiAttention",
        "9.0", lambda gpu: gpu == (9, 0), _magi,
    ),
}  # fmt: skip
_OBSTACLES: dict[str, Callable[[AttentionCall, MachineCapabilities], str | None]] = {
    "sdpa": _sdpa,
    "triton": _triton,
    "flex": _flex,
    "blockwise": _blockwise,
    **{name: functools.partial(_library, name) for name in _LIBRARIES},
}
_REASONS = {
    "sdpa": "samples are plainly full or causal, which PyTorch's own kernels do at the cost of their squares",
    "varlen": "samples that attend alike are one call of flash attention",
    "flash3": "samples that attend alike are one call of flash attention",
    "triton": "our kernels take every mask and give the same gradients every time",
    "flex": "FlexAttention takes every mask",
    "cudnn_flex": "cuDNN's Flex takes every mask",
    "magi": "MagiAttention takes every mask",
    "blockwise": "our block tables in plain PyTorch, the only one that takes every mask here",
}
