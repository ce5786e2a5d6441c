"""LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) by peft.

Its layers are put into a model before it is cut, and its files are read and written. Only peft's own modules compute;
names of weights are those of the plain model, so checkpoints and freezing know nothing of it.
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
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.config.model import LoraConfig

ADAPTER = "default"
"""What peft calls the only adapter there is."""
PREFIX = "base_model.model."
"""Before every key of an adapter's file."""
MAGNITUDE = ".lora_magnitude_vector."
"""In the keys of what DoRA adds: the length of each row of the weight that an adapter lies beside."""


def plain_key(key: str) -> str:
    """A key of a model with adapters as it would be without; an adapter's own weight as its file has it."""
    return (
        key.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".") if ".base_layer." in key else _own(key)
    )


def is_adapter(key: str) -> bool:
    """Whether this is the key, or logical name, of an adapter's own weight."""
    return ".lora_A." in key or ".lora_B." in key or MAGNITUDE in key


def beside(key: str) -> str:
    """The plain weight that a weight belongs to: itself, or the one that an adapter lies beside."""
    return re.sub(r"\.lora_([AB]|magnitude_vector)\.", ".", plain_key(key))


def inject(model: PreTrainedModel, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> None:
    """Put adapters beside the linear layers that `config` means; from then on these alone train.

    parts: what `config.units` may name → paths in `model` that it stands for. Raises UserError where nothing is meant.
    """
    peft = _peft()
    names = targets(model, config, parts)
    if config.target_modules == "all-linear" and (experts := _fused_experts(model, config, parts)):
        warnings.warn(
            f"model.lora: the experts of {len(experts)} blocks ({experts[0]}, ...) are no linear layers, so they stay "
            "frozen without adapters; name them in model.lora.train to train them whole",
            stacklevel=3,
        )
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            target_modules=names,
        ),
        model,
        adapter_name=ADAPTER,
        # Memory comes with the layers' own.
        low_cpu_mem_usage=any(parameter.is_meta for parameter in model.parameters()),
    )


def inject_parts(
    language: PreTrainedModel, encoders: Mapping[str, PreTrainedModel], config: LoraConfig
) -> None:
    """As `inject`, into the models that a user put together. Raises UserError."""
    for place in dict.fromkeys(name.removesuffix(".encoder") for name in config.units):
        own = config.model_copy(update={"units": (place,)})
        inject(encoders.get(place, language), own, {place: ("",)})


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """Save a model as transformers does, what adapters add to its weights merged into them."""
    if not any(True for _ in layers_of(model)):
        model.save_pretrained(folder)
        return
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    known, tied = plain.state_dict(), tied_keys(plain)
    state = {
        key: tensor.contiguous()
        for key, tensor in merged_state(model).items()
        if key in known and key not in tied
    }
    dtype: Any = main_dtype(state.values())  # transformers types `to` wrongly
    plain.to(dtype)  # on the meta device; what the config is to say
    plain.save_pretrained(folder, state_dict=state)


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The floating dtype that most of the numbers have; fp32 where there are none."""
    counts = Counter({torch.float32: 0})
    for tensor in tensors:
        counts[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    return counts.most_common(1)[0][0]


def tied_keys(model: nn.Module) -> dict[str, str]:
    """Key of a weight that is held a second time → the key that it is stored under."""
    first: dict[int, str] = {}
    held = dict(model.named_parameters(remove_duplicate=False))
    return {
        key: first[id(weight)] for key, weight in held.items() if first.setdefault(id(weight), key) != key
    }


def targets(model: nn.Module, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> list[str]:
    """Paths of the linear layers that get an adapter. Raises UserError where there are none."""
    unknown = [unit for unit in config.units if unit not in parts]
    if unknown:
        raise UserError(
            f"model.lora.units: {unknown[0]!r} is no part of this model; there are {', '.join(parts)}"
        )
    roots = [path for unit in config.units for path in parts[unit]]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(_is_below(name, root) for root in roots)
    ]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [name for name in linear if model.get_submodule(name) is not head]
    wanted = config.target_modules
    if wanted == "all-linear":
        found = linear
    elif isinstance(wanted, str):
        try:
            found = [name for name in linear if re.fullmatch(wanted, name)]
        except re.error as error:
            raise UserError(
                f"model.lora.target_modules {wanted!r} is no regular expression: {error}"
            ) from None
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


def _fused_experts(model: nn.Module, config: LoraConfig, parts: Mapping[str, Iterable[str]]) -> list[str]:
    """Paths of the modules that hold the weights of all their experts as one tensor."""
    roots = [path for unit in config.units for path in parts[unit]]
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and any(weight.dim() == 3 for weight in module.parameters(recurse=False))
        and any(_is_below(name, root) for root in roots)
    ]


def layers_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, layer) of peft's layers in a module."""
    for name, inner in module.named_modules():
        if has_adapter(inner):
            yield name, inner


def has_adapter(module: nn.Module) -> bool:
    """Whether this is a layer of peft's, with an adapter beside a plain one."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def plain_linear(module: nn.Module, path: str) -> nn.Module:
    """The layer at `path` without what peft put around it."""
    found: Any = module.get_submodule(path)
    return found.base_layer if has_adapter(found) else found


def adapter_of(module: nn.Module, path: str) -> tuple[nn.Module, nn.Module] | None:
    """The two linear layers of the adapter at `path`, in the order in which they run; None where there is none."""
    found: Any = module.get_submodule(path)
    return (found.lora_A[ADAPTER], found.lora_B[ADAPTER]) if has_adapter(found) else None


@torch.no_grad()
def reset_adapters(module: nn.Module) -> None:
    """Let adapters begin as peft does: A by chance, B at 0, magnitudes as the weights have them, so that nothing is
    changed yet."""
    for _, layer in layers_of(module):
        layer.reset_lora_parameters(ADAPTER, True)
        if ADAPTER in layer.lora_magnitude_vector:
            layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude_of(layer.base_layer.weight))


def magnitude_of(weight: Tensor) -> Tensor:
    """The length of each row of a weight [out, in], with which DoRA begins: [out], in the weight's dtype."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).to(weight.dtype)


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module as if it had been trained without adapters: what they add is in the weights."""
    state = {plain_key(key): tensor for key, tensor in module.state_dict().items() if not is_adapter(key)}
    for name, layer in layers_of(module):
        key = f"{name}.weight" if name else "weight"
        plain = state[key]
        merged = plain.float() + layer.get_delta_weight(ADAPTER).float()
        if ADAPTER in layer.lora_magnitude_vector:
            factor = layer.lora_magnitude_vector[ADAPTER].weight.float() / magnitude_of(merged)
            merged = factor[:, None] * merged
        state[key] = merged.to(plain.dtype)
    return state


def adapter_config(config: LoraConfig, names: Iterable[str], saved: Iterable[str], base: str | None) -> Any:
    """What peft's `adapter_config.json` holds. names: paths with an adapter; saved: of modules that trained whole."""
    return _peft().LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=sorted(names),
        modules_to_save=sorted(saved) or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )


def merged_by_peft(model: PreTrainedModel, folder: Path) -> Any:
    """A plain model with an adapter of peft merged in. Raises what peft does, and UserError without it."""
    return _peft().PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def _own(key: str) -> str:
    return key.replace(f".{ADAPTER}.", ".") if is_adapter(key) else key


def _is_below(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(root + ".")


def _is_below_end(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _known(linear: list[str]) -> str:
    return f"there are {', '.join(sorted({name.rpartition('.')[2] for name in linear})[:12])}"


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("model.lora needs peft; install it with `pip install 'dilatant[lora]'`") from None
    return peft
