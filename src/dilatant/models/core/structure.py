"""Structure of a transformers model: the modules before its blocks, the blocks, and the modules after them.

The structure is found from the model itself, so a plain family needs no code here: the blocks are the outermost
ModuleList with most parameters; modules registered before it (or called an embedding) run before it, modules registered
after it (or called final) run after it. For siblings of the blocks, a config's `base_model_pp_plan` takes precedence.
Without any ModuleList, an `nn.Sequential` of modules of one class (as in timm) counts.

Properties that only a forward shows are found by running the model on the meta device, which computes nothing. Some
families draw a random number per block even there, so torch's generator is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from dilatant.config.errors import UserError, one_line

# Config keys that hold the number of blocks.
DEPTH_KEYS = ("num_hidden_layers", "encoder_layers", "num_layers", "n_layer", "depth")

FIRST_NAMES = ("embed_", "per_layer_")
"""Name prefixes of modules that run before the blocks wherever they are registered (Gemma's per-layer inputs)."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Module paths inside one transformers model.

    blocks: path of the ModuleList. before, after: modules with weights that run before the first and after the last
    block, in order. Modules without weights (rotary embeddings) are in neither: every stage has them.
    """

    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_blocks: int

    @property
    def containers(self) -> tuple[str, ...]:
        """Paths from the root ("") down to the module that holds the ModuleList."""
        parts = self.blocks.split(".")[:-1]
        return tuple(".".join(parts[:depth]) for depth in range(len(parts) + 1))


def find_structure(model: nn.Module, blocks: str = "") -> Structure:
    """Find the structure of a transformers model, around the list of `blocks` if it is known. Raises UserError if it
    has no list of blocks."""
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in _module_lists(model)
        if len(module) > 0 and blocks in ("", name)
    ]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of blocks and cannot be cut into stages")
    _, blocks, module_list = max(lists, key=lambda entry: (isinstance(entry[2], nn.ModuleList), entry[0]))
    before: list[str] = []
    after: list[str] = []
    *outer, last = blocks.split(".")
    container, path = model, ""
    for part in [*outer, last]:
        plan = _pipeline_plan(model) if part == last else {}
        passed = False
        for name, child in container.named_children():
            if name == part:
                passed = True
            elif any(True for _ in child.parameters()) or child.state_dict():
                is_after = plan.get(name, (passed or name.startswith("final")) and not name.startswith(FIRST_NAMES))
                (after if is_after else before).append(path + name)
        container, path = getattr(container, part), f"{path}{part}."
    # Outer modules that run after the blocks run after the inner ones.
    after.sort(key=lambda name: -name.count("."))
    return Structure(blocks, tuple(before), tuple(after), len(module_list))


def _module_lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Yield the outermost ModuleLists, and Sequentials of several modules of one class, with their paths."""
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential) and len(child) > 1 and len({type(each) for each in child}) == 1:
            yield prefix + name, child
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _module_lists(child, f"{prefix}{name}.")


def _pipeline_plan(model: nn.Module) -> dict[str, bool]:
    """Map siblings of the blocks listed in the config's pipeline plan to True if they run after the blocks."""
    config: Any = getattr(model, "config", None)
    names = list(getattr(config, "base_model_pp_plan", None) or {})
    if "layers" not in names:
        return {}
    return {name: position > names.index("layers") for position, name in enumerate(names)}


class _WithoutDraws(TorchFunctionMode):
    """Mode that skips torch's initialisation of linear layers and embeddings on the meta device: they hold nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_) and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device within the context, without spending time on drawing their weights."""
    with torch.device("meta"), _WithoutDraws():
        yield


@torch.random.fork_rng(devices=[])
def count_tokens(config: Any, input_name: str, row_shape: tuple[int, ...]) -> int:
    """Count the tokens that an encoder outputs for one row of `row_shape`. Raises UserError if its forward fails."""
    try:
        with on_meta():
            model = AutoModel.from_config(config)
            row = torch.empty(1, *row_shape)
        with torch.no_grad():  # not `on_meta`: some count patches with tensors of the default device
            return model(**{input_name: row}).last_hidden_state.shape[1]
    except Exception as error:
        raise UserError(
            f"model_type {config.model_type!r} cannot be used as an image encoder: {one_line(error, 200)}"
        ) from None


def unused_parameters(model: PreTrainedModel, input_name: str, row_shape: tuple[int, ...]) -> frozenset[str]:
    """Return the names of parameters that an encoder's last hidden state does not depend on (pooling heads, mask
    tokens).

    The result is empty for a family whose forward does not run on the meta device.
    """
    settings = repr(PreTrainedConfig.to_dict(model.config))
    return _unused_parameters(_Skeleton(type(model), settings, model.config), input_name, row_shape)


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """Cache key for a model without weights: its class and settings are compared; it is built from the config."""

    kind: type[PreTrainedModel]
    settings: str
    config: Any = field(compare=False)


@lru_cache(maxsize=32)  # units of one model are built several times in a run
@torch.random.fork_rng(devices=[])
def _unused_parameters(of: _Skeleton, input_name: str, row_shape: tuple[int, ...]) -> frozenset[str]:
    try:
        with on_meta():
            skeleton: Any = of.kind(copy.deepcopy(of.config))
            skeleton.set_attn_implementation("eager")  # kernels may not support the meta device
            row = torch.empty(1, *row_shape)
        with torch.enable_grad():
            hidden = skeleton(**{input_name: row}).last_hidden_state
    except Exception:
        return frozenset()
    reached = leaves_of(hidden)
    return frozenset(
        name
        for name, parameter in skeleton.named_parameters()
        if parameter.requires_grad and id(parameter) not in reached
    )


def leaves_of(*outputs: Tensor) -> set[int]:
    """Return the ids of the leaf tensors from which tensors were computed."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [function for function, _ in node.next_functions]
    return leaves
