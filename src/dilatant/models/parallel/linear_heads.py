"""How tensor-parallel ranks share a layer of linear attention (a gated delta net): by key heads, each with the value
heads that read it.

Channels of the convolution, decays and time steps belong to heads, and the norm behind them is one for all heads. So is
the state: what passes along a row, from sample to sample or from rank to rank, each does for its own heads. The output
projection runs once for every sample of a packed row; what it makes is summed over ranks once for the row, where it
leaves the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from dilatant.attention.linear_rows import is_linear_attention
from dilatant.models.adapters.lora import plain_key, plain_linear
from dilatant.models.parallel.tensor_regions import Part, Region

_OUT = "out_proj"
_PER_HEAD = ("A_log", "dt_bias")
_ALL_HEADS = ("norm",)


def linear_paths(block: nn.Module) -> list[str]:
    """Paths within a block of its layers of linear attention."""
    return [path for path, module in block.named_modules() if is_linear_attention(module)]


def linear_region(block: nn.Module, path: str) -> Region:
    """The region that such a layer is."""
    layer: Any = block.get_submodule(path)
    parts, row = _columns(layer), Part(layer.num_v_heads, layer.head_v_dim)
    others = {"conv1d": _mixed(layer), **dict.fromkeys(_PER_HEAD, (Part(layer.num_v_heads),))}
    return Region(
        path,
        {f"{path}.{name}": parts[name] for name in parts if hasattr(layer, name)},
        {f"{path}.{_OUT}": row},
        key_heads=layer.num_k_heads,
        others={f"{path}.{name}": cut for name, cut in others.items()},
        exits=True,
    )


def linear_refusals(block: nn.Module, path: str) -> Iterator[str]:
    """Why this version cannot divide such a layer."""
    layer: Any = block.get_submodule(path)
    linear = {*_columns(layer), _OUT}
    known = {*linear, *_PER_HEAD, *_ALL_HEADS, "conv1d"}
    for name in dict.fromkeys(plain_key(name).partition(".")[0] for name, _ in layer.named_parameters()):
        if name not in known:
            yield f"how ranks share '{path}.{name}' is not known"
        elif name in linear and not isinstance(plain_linear(layer, name), nn.Linear):
            yield f"'{path}.{name}' is no linear layer"
    out = plain_linear(layer, _OUT)
    if getattr(out, "bias", None) is not None:
        yield f"'{path}.{_OUT}' has a bias, which every rank would add"


def count_linear_heads(module: nn.Module, size: int) -> None:
    """Let a layer with the weights of one of `size` ranks know its own heads and channels."""
    layer, convolution = cast(Any, module), cast(Any, module).conv1d
    for holder, names in (
        (layer, ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")),
        (convolution, ("in_channels", "out_channels", "groups")),
    ):
        for name in names:
            setattr(holder, name, getattr(holder, name) // size)


def _mixed(layer: Any) -> tuple[Part, ...]:
    """Queries, keys and values one behind the other."""
    keys = Part(layer.num_k_heads, layer.head_k_dim)
    return keys, keys, Part(layer.num_v_heads, layer.head_v_dim)


def _columns(layer: Any) -> dict[str, tuple[Part, ...]]:
    """Projections of the inputs, by the names that families give them: each by itself, or the parts of a key head and
    of the value heads that read it together."""
    keys, values = layer.num_k_heads, layer.num_v_heads
    of_value = values // keys
    together = 2 * (layer.head_k_dim + of_value * layer.head_v_dim)
    return {
        "in_proj_qkv": _mixed(layer),
        "in_proj_z": (Part(values, layer.head_v_dim),),
        "in_proj_b": (Part(values),),
        "in_proj_a": (Part(values),),
        "in_proj_qkvz": (Part(keys, together),),
        "in_proj_ba": (Part(keys, 2 * of_value),),
    }
