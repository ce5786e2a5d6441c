"""Slicing: build a transformers model with fewer blocks, with the same forward and the same weights.

The slice shares every parameter with the original model. Only the modules on the path to the blocks are copied (as
shells), so that they can hold a shorter list; placeholders replace modules that run on other stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.models.core.structure import DEPTH_KEYS, PER_LAYER_KEYS, Structure


class Placeholder(nn.Module):
    """Placeholder for a module that runs on another stage; it forwards attribute access (a dtype, a patch size).

    The caller adds an embedding table's output to its input, so the placeholder of an embedding returns 0; every other
    placeholder returns its first argument.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # not registered: the stage must not hold the original's weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self._original[0], nn.Embedding):
            return torch.zeros((), device=hidden_states.device)
        return hidden_states


def shell_of(
    module: nn.Module,
    children: Mapping[str, nn.Module | None] | None = None,
    keeps: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """Return a shallow copy of `module` whose registries are its own: it shares the children, parameters and buffers
    that `keeps` accepts by name, and holds `children` in place of those with their names."""
    shell = copy.copy(module)
    for registry in ("_modules", "_parameters", "_buffers"):
        entries = module.__dict__[registry].items()
        shell.__dict__[registry] = {name: entry for name, entry in entries if keeps(name)}
    shell._modules.update(children or {})
    return shell


def slice_model(
    model: PreTrainedModel,
    structure: Structure,
    first: int,
    end: int,
    keep_before: bool,
    keep_after: bool,
    passes: bool = False,
) -> PreTrainedModel:
    """Return a module of the same class with blocks `first <= block < end`, sharing weights with `model`.

    Without `keep_before` (`keep_after`) the modules before (after) the blocks are placeholders. passes: a slice without
    blocks has the config of one block, because it runs with an identity block (see `passage.PassingBlock`). Choose the
    attention implementation before slicing: the slice has its own config, the blocks keep theirs.
    """
    configs: dict[int, Any] = {}
    shown = (min(first, structure.num_blocks - 1), max(end, 1)) if passes and first == end else (first, end)
    root = shell = _shorter(model, structure, configs, *shown)
    original: nn.Module = model
    *containers, name = structure.blocks.split(".")
    for part in containers:
        original = getattr(original, part)
        child = _shorter(original, structure, configs, *shown)
        setattr(shell, part, child)
        shell = child
    setattr(shell, name, nn.ModuleList(list(getattr(original, name))[first:end]))
    for paths, keep in ((structure.before, keep_before), (structure.after, keep_after)):
        if not keep:
            for path in paths:
                parent, _, child_name = path.rpartition(".")
                setattr(root.get_submodule(parent), child_name, Placeholder(model.get_submodule(path)))
    if not keep_before:
        # Parameters registered on a container itself (class tokens, position tables) belong to the embedding.
        for path in structure.containers:
            container = root.get_submodule(path)
            container._parameters = {}
    return cast(PreTrainedModel, root)


def _shorter(
    module: nn.Module, structure: Structure, configs: dict[int, Any], first: int, end: int
) -> nn.Module:
    """Copy `module`, sharing its children that have weights, with the config of a model of fewer blocks."""
    # Copy dropout between layers: it may be in training mode in one slice and not in another.
    stateless = {
        name: copy.copy(child)
        for name, child in module._modules.items()
        if child is not None
        and not (any(True for _ in child.parameters()) or any(True for _ in child.buffers()))
    }
    shell: Any = shell_of(module, stateless)
    config = getattr(module, "config", None)
    if config is not None:
        if id(config) not in configs:
            configs[id(config)] = _shorter_config(config, structure.num_blocks, first, end)
        shell.config = configs[id(config)]
    return shell


def _shorter_config(config: Any, num_blocks: int, first: int, end: int) -> Any:
    shorter = copy.deepcopy(config)
    for key in PER_LAYER_KEYS:
        entries = getattr(shorter, key, None)
        own = getattr(type(shorter), shorter.attribute_map.get(key, key), None)
        if isinstance(own, property) and own.fset is None:  # derived from the depth
            continue
        if entries is not None and len(entries) == num_blocks:
            setattr(shorter, key, list(entries)[first:end])
    for key in DEPTH_KEYS:
        if getattr(shorter, key, None) == num_blocks:
            setattr(shorter, key, end - first)
    return shorter
