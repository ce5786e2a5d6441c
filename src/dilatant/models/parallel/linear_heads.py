"""Tensor parallelism of linear attention (gated delta nets): ranks hold key heads, each with its value heads.

Channels of the convolution, decays and time steps belong to heads; one norm weight serves all heads. The recurrent
state, which passes from rank to rank along a row, is divided by heads as well. The output projection runs once per
sample of a packed row; its output is summed over ranks once per row, where it leaves the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from dilatant.attention.linear_rows import is_linear_attention
from dilatant.models.adapters.lora import plain_key, plain_linear
from dilatant.models.parallel.tensor_regions import Region, SplitPart

_OUT = "out_proj"
_PER_HEAD = ("A_log", "dt_bias")
_ALL_HEADS = ("norm",)


def linear_paths(block: nn.Module) -> list[str]:
    """Return the paths within a block of its linear-attention layers."""
    return [path for path, module in block.named_modules() if is_linear_attention(module)]


def linear_region(block: nn.Module, path: str) -> Region:
    """Return the tensor-parallel region of a linear-attention layer."""
    layer: Any = block.get_submodule(path)
    parts, row = _columns(layer), SplitPart(layer.num_v_heads, layer.head_v_dim)
    others = {"conv1d": _mixed(layer), **dict.fromkeys(_PER_HEAD, (SplitPart(layer.num_v_heads),))}
    return Region(
        path,
        {f"{path}.{name}": parts[name] for name in parts if hasattr(layer, name)},
        {f"{path}.{_OUT}": row},
        key_heads=layer.num_k_heads,
        others={f"{path}.{name}": cut for name, cut in others.items()},
        exits=True,
    )


def linear_refusals(block: nn.Module, path: str) -> Iterator[str]:
    """Yield the reasons why this version cannot divide a linear-attention layer."""
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
    """Set the local numbers of heads and channels of a layer that holds the weights of one of `size` ranks."""
    layer, convolution = cast(Any, module), cast(Any, module).conv1d
    for holder, names in (
        (layer, ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")),
        (convolution, ("in_channels", "out_channels", "groups")),
    ):
        for name in names:
            setattr(holder, name, getattr(holder, name) // size)


def _mixed(layer: Any) -> tuple[SplitPart, ...]:
    """Return the parts of fused queries, keys and values."""
    keys = SplitPart(layer.num_k_heads, layer.head_k_dim)
    return keys, keys, SplitPart(layer.num_v_heads, layer.head_v_dim)


def _columns(layer: Any) -> dict[str, tuple[SplitPart, ...]]:
    """Return the parts of the input projections under all families' names: separate projections, or fused ones that
    store each key head next to its value heads."""
    keys, values = layer.num_k_heads, layer.num_v_heads
    of_value = values // keys
    together = 2 * (layer.head_k_dim + of_value * layer.head_v_dim)
    return {
        "in_proj_qkv": _mixed(layer),
        "in_proj_z": (SplitPart(values, layer.head_v_dim),),
        "in_proj_b": (SplitPart(values),),
        "in_proj_a": (SplitPart(values),),
        "in_proj_qkvz": (SplitPart(keys, together),),
        "in_proj_ba": (SplitPart(keys, 2 * of_value),),
    }
