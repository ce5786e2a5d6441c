"""LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) by peft.

peft's layers are injected into a model before it is cut; adapter files have peft's format. Only peft's modules compute.
Weights have the names of the plain model, so checkpoints and freezing are independent of adapters.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.config.model import LoraConfig
from dilatant.models.experts.expert_lora import inject_experts, merged_experts, reset_expert_adapters

ADAPTER = "default"
"""peft's name of the only adapter."""
PREFIX = "base_model.model."
"""Prefix of every key of an adapter's file."""
MAGNITUDE = ".lora_magnitude_vector."
"""Part of the keys of DoRA's magnitudes: the norm of each row of the adapted weight."""


def plain_key(key: str) -> str:
    """Return the key that a weight has in the plain model; for an adapter's own weight, the key in its file."""
    if ".base_layer." in key:
        return key.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
    return key.replace(f".{ADAPTER}.", ".") if is_adapter(key) else key


def is_adapter(key: str) -> bool:
    """Return True for the key, or logical name, of an adapter's own weight."""
    return ".lora_A." in key or ".lora_B." in key or MAGNITUDE in key


def adapted_key(key: str) -> str:
    """Return the plain key of a weight; for an adapter's weight, the key of the weight that it adapts."""
    return re.sub(r"\.lora_([AB]|magnitude_vector)\.", ".", plain_key(key))


def inject(model: PreTrainedModel, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> None:
    """Add adapters to the linear layers that `config` selects; afterwards only adapters train.

    parts: names that `config.units` may use → paths in `model`. Raises UserError if nothing is selected.
    """
    names = targets(model, config, parts)
    taken = sorted({name.rpartition(".")[2] for name in read_as_experts(model)})
    _peft().inject_adapter_in_model(
        _peft_config(config, target_modules=names),
        model,
        adapter_name=ADAPTER,
        # Allocated together with the layers' own weights.
        low_cpu_mem_usage=any(parameter.is_meta for parameter in model.parameters()),
    )
    inject_experts(model, config, [path for unit in config.units for path in parts[unit]])
    if config.target_modules == "all-linear" and (experts := _fused_experts(model, config, parts)):
        warnings.warn(
            f"model.lora: the experts of {len(experts)} blocks ({experts[0]}, ...) are no linear layers, so they stay "
            "frozen without adapters"
            + (f", and so do {', '.join(taken)}, whose names peft reads as the experts'" * bool(taken))
            + "; name their weights in model.lora.target_parameters, or in model.lora.train to train them whole",
            stacklevel=3,
        )
    for _, layer in layers_of(model):
        layer.lora_variant.setdefault(ADAPTER, _OneAddition())  # DoRA has a variant of peft


class _OneAddition:
    """Variant, as peft calls an adapter's own computation: scale and add the adapter's output in one operation."""

    @staticmethod
    def forward(layer: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        parts = (layer.lora_dropout, layer.lora_A, layer.lora_B)
        for part in parts:
            x = part[active_adapter](x)
        return torch.add(result, x, alpha=layer.scaling[active_adapter])


def inject_parts(language: PreTrainedModel, encoders: Mapping[str, PreTrainedModel], config: LoraConfig) -> None:
    """Call `inject` on the models of a user-composed multimodal model. Raises UserError."""
    for place in dict.fromkeys(name.removesuffix(".encoder") for name in config.units):
        own = config.model_copy(update={"units": (place,)})
        inject(encoders.get(place, language), own, {place: ("",)})


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """Save a model by transformers' `save_pretrained`, with adapters merged into the weights."""
    if not any(True for _ in layers_of(model)):
        model.save_pretrained(folder)
        return
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    known, tied = plain.state_dict(), tied_keys(plain)
    state = {
        key: tensor.contiguous() for key, tensor in merged_state(model).items() if key in known and key not in tied
    }
    dtype: Any = main_dtype(state.values())  # transformers types `to` wrongly
    plain.to(dtype)  # on the meta device, for the dtype in the config
    plain.save_pretrained(folder, state_dict=state)


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the floating dtype of most elements; fp32 if there are none."""
    counts = Counter({torch.float32: 0})
    for tensor in tensors:
        counts[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    return counts.most_common(1)[0][0]


def tied_keys(model: nn.Module) -> dict[str, str]:
    """Map each further key of a tied weight to the key under which the weight is stored."""
    first: dict[int, str] = {}
    held = dict(model.named_parameters(remove_duplicate=False))
    return {key: first[id(weight)] for key, weight in held.items() if first.setdefault(id(weight), key) != key}


def targets(model: nn.Module, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the paths of the linear layers that get an adapter. Raises UserError if there are none."""
    unknown = [unit for unit in config.units if unit not in parts]
    if unknown:
        raise UserError(f"model.lora.units: {unknown[0]!r} is no part of this model; there are {', '.join(parts)}")
    roots = [path for unit in config.units for path in parts[unit]]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, NonDynamicallyQuantizableLinear)  # attention of torch reads its weight
        and any(_is_below(name, root) for root in roots)
    ]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    of_experts = read_as_experts(model)
    linear = [name for name in linear if model.get_submodule(name) is not head and name not in of_experts]
    wanted = config.target_modules
    if wanted == "all-linear":
        found = linear
    elif isinstance(wanted, str):
        try:
            found = [name for name in linear if re.fullmatch(wanted, name)]
        except re.error as error:
            raise UserError(f"model.lora.target_modules {wanted!r} is no regular expression: {error}") from None
    else:
        found = [name for name in linear if any(_is_below_end(name, end) for end in wanted)]
        idle = [end for end in wanted if not any(_is_below_end(name, end) for name in linear)]
        if idle and found:
            raise UserError(f"model.lora.target_modules: {idle[0]!r} names no linear layer; {_known(linear)}")
    if not found:
        raise UserError(
            f"model.lora.target_modules {wanted!r} names no linear layer of {', '.join(config.units)}; {_known(linear)}"
        )
    return found


def read_as_experts(model: nn.Module) -> frozenset[str]:
    """Return the paths of linear layers whose last names peft would read as experts of older versions of the family. It
    would adapt all experts instead of the shared expert (DeepSeek, GLM)."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    settings = _peft().LoraConfig(target_modules=names)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        convert_peft_config_for_transformers(settings, model=model, conversions=None)
    except (ImportError, ValueError):  # this version or family takes names as they are
        return frozenset()
    return frozenset(names).difference(settings.target_modules)


def _fused_experts(model: nn.Module, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the paths of modules without adapters that hold the weights of all their experts as one tensor."""
    roots = [path for unit in config.units for path in parts[unit]]
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ParameterDict)
        and "lora_A" not in module._modules
        and any(weight.dim() == 3 for weight in module.parameters(recurse=False))
        and any(_is_below(name, root) for root in roots)
    ]


def layers_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of peft's layers in a module."""
    for name, inner in module.named_modules():
        if has_adapter(inner):
            yield name, inner


def has_adapter(module: nn.Module) -> bool:
    """Return True for a peft layer that wraps a plain layer and its adapter, but not for a `Placeholder` of one."""
    return {"lora_A", "base_layer"} <= module._modules.keys()


def plain_linear(module: nn.Module, path: str) -> nn.Module:
    """Return the layer at `path` without peft's wrapper."""
    found: Any = module.get_submodule(path)
    return found.base_layer if has_adapter(found) else found


def adapter_of(module: nn.Module, path: str) -> tuple[nn.Module, nn.Module] | None:
    """Return the adapter's linear layers at `path`, (lora_A, lora_B); None without an adapter."""
    found: Any = module.get_submodule(path)
    return (found.lora_A[ADAPTER], found.lora_B[ADAPTER]) if has_adapter(found) else None


@torch.no_grad()
def reset_adapters(module: nn.Module) -> None:
    """Initialise adapters as peft does: A at random, B at 0, magnitudes from the weights; outputs are unchanged."""
    for _, layer in layers_of(module):
        layer.reset_lora_parameters(ADAPTER, True)
        if ADAPTER in layer.lora_magnitude_vector:
            layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude_of(layer.base_layer.weight))
    reset_expert_adapters(module)


def magnitude_of(weight: Tensor) -> Tensor:
    """Return the norm of each row of a weight [out, in], DoRA's initial magnitude: [out], in the weight's dtype."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).to(weight.dtype)


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module with its adapters merged into the weights."""
    state = {plain_key(key): tensor for key, tensor in module.state_dict().items() if not is_adapter(key)}
    for name, layer in layers_of(module):
        key = f"{name}.weight" if name else "weight"
        plain = state[key]
        merged = plain.float() + layer.get_delta_weight(ADAPTER).float()
        if ADAPTER in layer.lora_magnitude_vector:
            factor = layer.lora_magnitude_vector[ADAPTER].weight.float() / magnitude_of(merged)
            merged = factor[:, None] * merged
        state[key] = merged.to(plain.dtype)
    return state | merged_experts(module)


def adapter_config(
    config: LoraConfig, names: Iterable[str], saved: Iterable[str], base: str | None, of_experts: Iterable[str] = ()
) -> Any:
    """Return the content of peft's `adapter_config.json`. names: paths with adapters; saved: fully trained modules;
    of_experts: paths of weights of experts with adapters."""
    return _peft_config(
        config,
        target_modules=sorted(names),
        modules_to_save=sorted(saved) or None,
        target_parameters=sorted(of_experts) or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )


def merged_by_peft(model: PreTrainedModel, folder: Path) -> Any:
    """Merge an adapter of peft into a plain model. Raises peft's exceptions, and UserError without peft."""
    return _peft().PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def _is_below(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(root + ".")


def _is_below_end(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _known(linear: list[str]) -> str:
    return f"there are {', '.join(sorted({name.rpartition('.')[2] for name in linear})[:12])}"


def _peft_config(config: LoraConfig, **settings: Any) -> Any:
    own = config.model_dump(include={"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"})
    return _peft().LoraConfig(**own, **settings)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("model.lora needs peft; install it with `pip install 'dilatant[lora]'`") from None
    return peft
