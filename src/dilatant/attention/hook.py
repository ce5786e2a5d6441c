"""Dilatant attention in transformers models, through transformers' public registries, with no copied forward.

Pass the mask of a packed microbatch to the model's own forward as the keyword `attention_plan`:

    use_dilatant_attention(model)
    model(inputs_embeds=row, position_ids=positions, attention_plan=AttentionPlan(mask))

The plan covers all rows of the batch, concatenated; so a batch of equally large images is planned as one packed row.
Windows, soft caps and sinks come from the model, layer by layer. A `ContextParallelRow` in place of the plan runs each
layer under context parallelism.

No mask function is registered with the attention function, so transformers builds no mask and does not ask the device
whether positions restart.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dilatant.attention.context_parallel import ContextParallelRow, context_parallel_attention
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.packed_attention import attention
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.linear_rows import enable_packed_rows, linear_layers
from dilatant.attention.masks.packing import RowLayout, full
from dilatant.attention.recompute_cache import cached_attention

NAME = "dilatant"
FOR_TOWERS = "dilatant_flash"
"""The same attention for encoders: because of "flash" in the name, families that pack items pass all borders in one
call instead of calling attention item by item."""
PLAN_KEYWORD = "attention_plan"
WHY_NOT_COMPILED = "dilatant computes this from values on the host"
"""The reason that torch.compile states for graphs that end before attention or keyed dropout."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_UNSUPPORTED = {
    "position_bias": "adds a bias to its scores",
    "attention_bias": "adds a bias to its scores",
    "head_mask": "masks whole heads",
}


def register() -> None:
    """Register `attn_implementation="dilatant"` with transformers; repeated calls change nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(FOR_TOWERS, _attend_in_tower)


def why_not(model: PreTrainedModel, causal: bool = True) -> str | None:
    """Return the reason why `model` cannot use attention plans with unchanged results; None if it can.

    `causal` requires that all attention of `model` is causal; False is for families with other masks, which plans can
    express. Only the model's config and declarations are checked; problems that show up only in a forward raise
    AttentionError there.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    # Hybrid models and pretrained VLMs do not declare support, because of their other layers and their encoders.
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    supports = any(each._supports_attention_backend for each in models) or bool(linear_layers(model))
    if not model._can_set_attn_implementation() or not supports:
        return f"{type(model).__name__} computes attention in its own way, not as transformers' interface asks"
    known = {"full_attention", "sliding_attention", *(("linear_attention",) if linear_layers(model) else ())}
    if others := sorted(kinds - known):
        return f"{type(model).__name__} has layers of {' and '.join(others)}"
    if causal and any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return f"{type(model).__name__} has attention that is not causal"
    return dropout_of(model)


def leaks_between_samples(model: PreTrainedModel) -> str | None:
    """Return the reason why samples of a packed row would influence each other without attention plans, or None."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kind for kind in kinds if not kind.endswith("_attention") or kind == "linear_attention"):
        return f"layers of {' and '.join(others)} would carry what they know of one sample of a row into the next"
    return None


def dropout_of(model: PreTrainedModel) -> str | None:
    """Describe the attention dropout of `model`, which attention plans do not support; None if it has none."""
    config = model.config.get_text_config()
    for name in ATTENTION_DROPOUTS:
        if rate := getattr(config, name, None):
            return f"{name} is {rate}, and attention over plans never holds the weights that it would drop"
    return None


def use_dilatant_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switch every attention layer of `model` to Dilatant's kernels; return the model.

    Layers of some families (SigLIP) receive the plan keyword but do not pass it to the attention function. A forward
    pre-hook therefore passes the plan as the layer's `attention_mask`, which every family does pass. Raises
    AttentionError if transformers cannot replace the family's attention, or if a layer's mask cannot be expressed by a
    plan.
    """
    if "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise AttentionError(
            f"{type(model).__name__} has chunked attention layers, which attn_implementation={NAME!r} does not do; "
            "set another attn_implementation"
        )
    register()
    # In a pretrained VLM only the text config is switched: the model may lack the other parts.
    text = model.config.get_text_config()
    parts = [key for key in model.config.sub_configs if getattr(model.config, key) is text]
    model.set_attn_implementation({"": NAME, **dict.fromkeys(parts, NAME)} if parts else NAME)
    if model.config._attn_implementation != NAME:
        raise AttentionError(
            f"{type(model).__name__} computes attention in its own way, not through transformers' attention interface: "
            f"attn_implementation={NAME!r} cannot be used; leave it out"
        )
    getattr(model, "base_model", model).register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    enable_packed_rows(model, PLAN_KEYWORD)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.register_forward_pre_hook(_plan_as_mask, with_kwargs=True)
    return model


def attend_to_items(tower: nn.Module) -> None:
    """Switch every attention layer of an encoder that packs items to Dilatant's kernels.

    Its layers take the plan (`plan_of_items`) as `attention_plan` or as the mask, or take `borders_of_items` as
    `cu_seqlens`. Attention dropout above 0 raises AttentionError in training.
    """
    register()
    for module in tower.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = FOR_TOWERS


def passes_borders(encoder: nn.Module) -> bool:
    """Return whether the layers of an encoder pass the borders of packed items to flash attention, as transformers'
    families do, so that `attend_to_items` needs nothing else."""
    kinds = {type(module) for module in encoder.modules()}
    families = [kind for kind in kinds if kind.__module__.startswith("transformers")]
    return any("cu_seq_lens_q=" in inspect.getsource(kind) for kind in families)


def plan_of_items(lengths: ArrayLike) -> AttentionPlan:
    """Return the plan of a row of items (images, windows of images, sounds), each of which attends to itself."""
    return AttentionPlan(full(RowLayout.of_lengths(lengths)))


def borders_of_items(lengths: ArrayLike) -> torch.Tensor:
    """Return the cumulative lengths of a row's items, int32 `[items + 1]`, on the host, with their plan attached. A
    forward that passes this tensor to attention makes no host wait for a device."""
    borders = torch.from_numpy(np.cumsum([0, *np.asarray(lengths)], dtype=np.int32))
    borders.__dict__[PLAN_KEYWORD] = plan_of_items(lengths)
    return borders


@torch.compiler.disable(reason=WHY_NOT_COMPILED)
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | AttentionPlan | ContextParallelRow | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_plan: AttentionPlan | ContextParallelRow | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers calls in each layer. `query` is `[batch, heads, tokens, dim]`, keys and
    values have KV heads only; returns `[batch, tokens, heads, dim]` and no weights. Encoders that pack items pass their
    borders as `cu_seq_lens_q`, instead of a plan.

    Raises AttentionError if the plan is missing, or listing the layer's options that packed rows do not support.
    """
    where = type(module).__name__
    plan = attention_mask if isinstance(attention_mask, (AttentionPlan, ContextParallelRow)) else attention_plan
    if plan is None and (borders := kwargs.get("cu_seq_lens_q")) is not None:
        if PLAN_KEYWORD not in borders.__dict__:  # not of `borders_of_items`, but of a family's own forward
            borders.__dict__[PLAN_KEYWORD] = plan_of_items(borders.diff().cpu().numpy())
        plan = borders.__dict__[PLAN_KEYWORD]
    if plan is None:
        raise AttentionError(
            f"{where} got no {PLAN_KEYWORD}: pass {PLAN_KEYWORD}=AttentionPlan(mask) to the model's forward, prepare "
            "the model with dilatant.attention.hook.use_dilatant_attention, or set another attn_implementation"
        )
    problems = [f"{name} ({what})" for name, what in _UNSUPPORTED.items() if kwargs.get(name) is not None]
    if isinstance(attention_mask, torch.Tensor):
        problems.append("an attention_mask beside the plan, which says everything")
    if dropout := kwargs.get("dropout"):
        problems.append(f"dropout of {dropout} in attention (set attention_dropout to 0)")
    if kwargs.get("output_attentions"):
        problems.append("output_attentions (the weights are never held)")
    if key.shape[2] != query.shape[2]:
        problems.append(f"{key.shape[2]} keys for {query.shape[2]} queries (a cache or cross-attention)")
    if problems:
        raise AttentionError(f"{where} asks for what attention over packed rows does not do: {'; '.join(problems)}")

    mask = (plan.plan if isinstance(plan, ContextParallelRow) else plan).mask
    window = mask.window if sliding_window is None else sliding_window
    batch, _, tokens, _ = query.shape
    query, key, value = (x.to(value.dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if isinstance(plan, ContextParallelRow):
            return context_parallel_attention(query, key, value, plan.windowed(window), sinks=sinks, **options)
        return attention(query, key, value, plan.windowed(window), sinks=sinks, **options)

    output = cached_attention(run, query, key, value, s_aux)
    return output.unflatten(0, (batch, tokens)), None


def _attend_in_tower(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Run `attend` in an encoder, in which each entry of a batch without borders, plan or mask attends to itself."""
    given = (attention_mask, kwargs.get(PLAN_KEYWORD), kwargs.get("cu_seq_lens_q"))
    if all(each is None for each in given) and getattr(module, "is_causal", True) is False:
        kwargs[PLAN_KEYWORD] = plan_of_items([query.shape[2]] * len(query))
    return attend(module, query, key, value, attention_mask, **kwargs)


def _refuse_padding(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a mask with padding: transformers builds no mask for this attention, so the caller's would be ignored."""
    mask = kwargs.get("attention_mask")
    if module.config._attn_implementation != NAME or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    if not bool(mask.all()):
        raise AttentionError(
            f"an attention_mask with padding was given to a model with attn_implementation={NAME!r}: "
            f"leave it out, and mark padding in the mask of {PLAN_KEYWORD}"
        )


def _plan_as_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if kwargs.get(PLAN_KEYWORD) is None or "attention_mask" not in kwargs or kwargs["attention_mask"] is not None:
        return None
    return args, {**kwargs, "attention_mask": kwargs[PLAN_KEYWORD]}
