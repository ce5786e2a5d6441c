"""Fused kernels: replace norms, gated feed-forward modules and rotations of attention modules of blocks by a library's.

A kernel set maps a kind of module to the modules that may replace one. A replacement is used only if it computes what
the family's module does, which a few random rows show; so no list of families is needed.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.config.memory_modes import Kernels
from dilatant.models.core.slicing import shell_of

KernelSet = Mapping[str, Sequence[Callable[[nn.Module], nn.Module]]]
"""Kind (`rms_norm`, `layer_norm`, `swiglu`, `rope`) → functions that make a replacement of a module, tried in order. A
replacement has the module's parameters and children under the same names."""
_ROTATE = "apply_rotary_pos_emb"
"""Name under which attention modules of transformers call the function that rotates queries and keys."""
_FACTORS = {"gate_proj": 0.7, "up_proj": -1.3, "down_proj": 1.9}
_ROWS = 5
_MANY_ROWS, _NARROW = 1 << 15, 256
"""Rows and channels from and up to which Liger's RMS norm takes other kernels."""


class FusedSwiglu(nn.Module):
    """A gated feed-forward module with the linear layers of `mlp`. product(gate, up) → silu(gate) * up."""

    def __init__(self, mlp: nn.Module, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (mlp.get_submodule(name) for name in _FACTORS)
        self.training = mlp.training
        self.multiply = product

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.multiply(self.gate_proj(hidden), self.up_proj(hidden)))


def rotating(attention: nn.Module, rotate: Callable[..., tuple[Tensor, Tensor]]) -> nn.Module:
    """Return the attention module, with the same children, whose forward calls `rotate` for queries and keys. The name
    is bound in that forward alone; class and module of the library stay as they are."""
    plain = _written_forward(attention)
    fused: Any = copy.copy(attention)
    names = {**plain.__globals__, _ROTATE: rotate}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    fused.forward = MethodType(forward, fused)
    return fused


def kernel_set(how: Kernels, device: torch.device) -> KernelSet:
    """Return the kernels that `train.kernels` asks for on this device. There are none for `auto`: steps with Liger have
    not been compared with others on a GPU yet. Raises UserError."""
    if how != "liger":
        return {}
    if device.type != "cuda":
        raise UserError("train.kernels: liger-kernel runs on GPUs only, and this run is on a CPU; write auto or none")
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("train.kernels: liger needs `pip install 'dilatant[kernels]'`; or write auto or none")
    return liger()


def liger() -> KernelSet:
    """Return the kernels of liger-kernel. Norms are not computed in place: a residual stream's gradient has other
    readers."""
    from liger_kernel.transformers.functional import liger_swiglu
    from liger_kernel.transformers.layer_norm import LigerLayerNorm
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    def rms_norm(offset: float, casting: str) -> Callable[[nn.Module], nn.Module]:
        return lambda norm: _with_weights_of(
            norm, LigerRMSNorm(1, _epsilon(norm), offset, casting_mode=casting, in_place=False)
        )

    rotate = rotating_ahead(liger_rotary_pos_emb)
    return {
        "rms_norm": (rms_norm(0.0, "llama"), rms_norm(1.0, "gemma")),
        "layer_norm": (lambda norm: _with_weights_of(norm, LigerLayerNorm(norm.weight.numel(), _epsilon(norm), True)),),
        "swiglu": (lambda mlp: FusedSwiglu(mlp, liger_swiglu),),
        "rope": (lambda attention: rotating(attention, rotate),),
    }


def row_counts(processors: int, width: int) -> list[int]:
    """Return row counts that stand for all variants of an RMS norm of Liger. Triton compiles it for numbers that are 1,
    multiples of 16, or others: the rows, and the rows of each of `processors` programs. Many narrow rows take kernels
    of their own."""
    counts = [each * processors // 16 * 16 for each in (1, 3, 16)] + [_MANY_ROWS] * (width <= _NARROW)
    return [1, *counts, *(count + 1 if count == _MANY_ROWS else count - 1 for count in counts)]


def compile_ahead(norm: nn.Module, processors: int) -> None:
    """Run an RMS norm forward and backward on so many rows that Triton compiles it for all others, so that no later
    step, which has a short deadline, waits for the compiler."""
    weight = next(norm.parameters())
    for count in row_counts(processors, weight.numel()):
        rows = torch.zeros(count, weight.numel(), dtype=weight.dtype, device=weight.device, requires_grad=True)
        with torch.enable_grad():
            torch.autograd.grad(norm(rows).sum(), rows)


def rotating_ahead(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a rotation that compiles its variants for all row lengths when heads of a shape first come, as
    `compile_ahead` does for norms: Triton compiles it for lengths that are 1, multiples of 16, or others."""
    known = set[Any]()

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        heads = tuple((part.dtype, part.device, part.shape[:-2], part.shape[-1]) for part in inputs)
        if heads not in known:
            known.add(heads)
            for tokens in (1, 16, 17):
                rows = [part.new_zeros(*part.shape[:-2], tokens, part.shape[-1]) for part in inputs]
                with torch.enable_grad():
                    pair = rotate(*(part.requires_grad_() for part in rows[:2]), *rows[2:])
                    torch.autograd.grad([part.sum() for part in pair], rows[:2])
        return rotate(*inputs)

    return run


@dataclass(frozen=True, slots=True)
class FusedModules:
    """Modules that were replaced: (parent, attribute name, original module)."""

    places: tuple[tuple[nn.Module, str, nn.Module], ...]

    def restore(self) -> None:
        """Put the original modules back, with the weights and children that their replacements have now."""
        for parent, name, original in self.places:
            current = parent._modules[name]
            assert current is not None
            original._parameters.update(current._parameters)
            original._modules.update(current._modules)
            original.train(current.training)
            parent._modules[name] = original


def fuse(blocks: Iterable[nn.Module], kernels: KernelSet) -> FusedModules:
    """Replace the modules of `blocks` for which `kernels` has an equal; modules with hooks are left alone."""
    places = []
    for block in blocks if kernels else ():
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                kind = _kind_of(child)
                found = next((new for make in kernels.get(kind, ()) if _equals(child, new := make(child), kind)), None)
                if found is not None:
                    if kind == "rms_norm" and (weight := next(found.parameters())).is_cuda:
                        compile_ahead(found, torch.cuda.get_device_properties(weight.device).multi_processor_count)
                    places.append((parent, name, child))
                    parent._modules[name] = found
    return FusedModules(tuple(places))


def _kind_of(module: nn.Module) -> str:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return ""
    own, children = dict(module.named_parameters(recurse=False)), dict(module.named_children())
    code = getattr(_written_forward(module), "__code__", None)
    if code is not None and _ROTATE in code.co_names and hasattr(module, "head_dim"):
        return "" if "forward" in module.__dict__ else "rope"
    if type(module) is nn.LayerNorm:
        return "layer_norm" if set(own) == {"weight", "bias"} and len(module.normalized_shape) == 1 else ""
    if len(inspect.signature(module.forward).parameters) != 1:
        return ""
    if type(module).__name__.endswith("RMSNorm") and set(own) == {"weight"} and not children and _epsilon(module):
        return "rms_norm"
    return "swiglu" if not own and set(children) == {*_FACTORS, "act_fn"} else ""


@torch.no_grad()
def _equals(module: nn.Module, other: nn.Module, kind: str) -> bool:
    """Return True if both compute the same of a few random rows, up to rounding. Norms have random weights there, and
    linear layers, which may communicate, are replaced by factors; of attention only the rotations are compared."""
    draw = torch.Generator().manual_seed(0)
    like = next((weight for weight in module.parameters() if weight.is_floating_point()), None)
    if like is None:
        return False
    if kind == "rope":
        size: Any = module.head_dim
        rows = torch.randn(1, 4, _ROWS, size, generator=draw).to(like)
        angles = torch.randn(1, _ROWS, size // 2, generator=draw).repeat(1, 1, 2).to(like)
        rotations = [forward.__globals__[_ROTATE] for forward in (_written_forward(module), other.forward)]
        try:
            pair = [
                torch.cat(one(rows.clone(), rows[:, :2].clone(), angles.cos(), angles.sin()), 1) for one in rotations
            ]
        except RuntimeError:  # the family's angles have another shape
            return False
    elif kind == "swiglu":
        scales = {name: _Scale(factor) for name, factor in _FACTORS.items()}
        rows = torch.randn(_ROWS, 64, generator=draw).to(like)
        pair = [shell_of(one, scales)(rows) for one in (module, other)]
    else:
        weights = dict(module.named_parameters())
        random = {name: torch.randn(weight.shape, generator=draw).to(weight) for name, weight in weights.items()}
        rows = torch.randn(_ROWS, weights["weight"].numel(), generator=draw).to(weights["weight"])
        pair = [torch.func.functional_call(one, random, (rows,)) for one in (module, other)]
    # A few roundings of numbers of size 1, and in fp32 another order of a sum.
    allowed = max(1e-5, 4 * torch.finfo(rows.dtype).eps)
    return torch.allclose(pair[0].float(), pair[1].float(), rtol=allowed, atol=allowed)


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.factor


def _written_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, without decorators that accept former names of its arguments."""
    return inspect.unwrap(type(module).forward)


def _with_weights_of(module: nn.Module, replacement: nn.Module) -> nn.Module:
    replacement._parameters.update(module._parameters)
    return replacement.train(module.training)


def _epsilon(norm: Any) -> float:
    """Return the epsilon of a norm, under the name that its family gives it; 0 if it has none."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0
