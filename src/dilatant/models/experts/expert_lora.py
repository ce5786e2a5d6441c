"""LoRA on experts whose weights are one tensor, as peft's `target_parameters`: one pair of matrices for each expert.

A module of experts gets parameters `lora_A.<weight>` [experts, r, in] and `lora_B.<weight>` [experts, out, r], and
computes with them (see `grouped_experts`). In adapter files they have peft's layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.config.model import LoraConfig
from dilatant.models.experts.grouped_experts import WEIGHTS, fused_experts, group_experts


def inject_experts(model: nn.Module, config: LoraConfig, roots: Iterable[str]) -> None:
    """Add adapters to the weights of experts that `config` selects below the `roots`. Raises UserError if a name
    selects nothing, or for what peft has not on experts."""
    wanted, below = config.target_parameters, tuple(f".{root}." if root else "." for root in roots)
    there = [(path, module) for path, module in fused_experts(model) if f".{path}.".startswith(below)]
    chosen = {(path, name) for path, _ in there for name in WEIGHTS if f".{path}.{name}".endswith(_ends(wanted))}
    if idle := [end for end in wanted if not any(f".{path}.{name}".endswith(_ends([end])) for path, name in chosen)]:
        raise UserError(
            f"model.lora.target_parameters: {idle[0]!r} names no weight of experts that share a tensor; "
            + (f"there are {' and '.join(f'experts.{name}' for name in WEIGHTS)}" if there else "there are none")
        )
    if chosen and (config.use_dora or config.lora_dropout):
        key = "use_dora" if config.use_dora else "lora_dropout"
        raise UserError(f"model.lora.{key}: peft has none of it on experts; leave it out, or target_parameters")
    for path, module in there:
        names = [name for name in WEIGHTS if (path, name) in chosen]
        if names:
            _add(module, names, config)


def _ends(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names)


def _add(module: nn.Module, names: Iterable[str], config: LoraConfig) -> None:
    sides: dict[str, dict[str, nn.Parameter]] = {"lora_A": {}, "lora_B": {}}
    for name in names:
        weight: Tensor = getattr(module, name)
        experts, out, features = weight.shape
        for side, shape in (("lora_A", (experts, config.r, features)), ("lora_B", (experts, out, config.r))):
            sides[side][name] = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
    grouped: Any = group_experts(module)
    grouped.lora_A, grouped.lora_B = (nn.ParameterDict(own) for own in sides.values())
    grouped.lora_scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


@torch.no_grad()
def reset_expert_adapters(module: nn.Module) -> None:
    """Initialise the adapters of all experts in a module as peft does: A at random, B at 0."""
    for _, experts in _adapted(module):
        for name, weight in experts.lora_A.items():
            nn.init.kaiming_uniform_(weight.view(-1, weight.shape[-1]), a=math.sqrt(5))
            nn.init.zeros_(experts.lora_B[name])


def merged_experts(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of experts in a module with their adapters merged into them, by key."""
    return {
        f"{path}.{name}" if path else name: (
            getattr(experts, name).float() + experts.lora_scale * (experts.lora_B[name].float() @ own.float())
        ).to(own.dtype)
        for path, experts in _adapted(module)
        for name, own in experts.lora_A.items()
    }


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of experts with adapters."""
    return ((path, experts) for path, experts in fused_experts(module) if hasattr(experts, "lora_A"))


def is_of_experts(key: str) -> bool:
    """Return True for the key, or logical name, of an adapter of experts."""
    return key.rpartition(".lora_")[2][2:] in WEIGHTS


def expert_key(key: str, adapted: Collection[str]) -> str:
    """Return the key in peft's file of an adapter of experts. adapted: keys of all weights with adapters. peft wraps
    experts once for each weight, the last one outside."""
    path, _, rest = key.rpartition(".lora_")
    side, _, name = rest.partition(".")
    outer = [one for one in WEIGHTS if f"{path}.{one}" in adapted]
    return f"{path}{'.base_layer' * (len(outer) - 1 - outer.index(name))}.lora_{side}.weight"


def to_peft(key: str, tensor: Tensor) -> Tensor:
    """Return an adapter of experts as peft stores it: A [experts x r, in], B [out, r x experts]."""
    return tensor.flatten(0, 1) if ".lora_A." in key else tensor.permute(1, 2, 0).flatten(1)


def from_peft(key: str, tensor: Tensor, experts: int) -> Tensor:
    """Undo `to_peft`."""
    if ".lora_A." in key:
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1).contiguous()
