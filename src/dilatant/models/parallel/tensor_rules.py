"""Tensor-parallel rules of a block's linear layers: from the family's own plan in transformers (`base_model_tp_plan` of
its config), or from tables here for families that have none."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.models.core.unit import Unit

_ATTENTION = ("q_proj", "k_proj", "v_proj")
PARTIAL = "replicated_with_grad_allreduce"
_MLP = {"fc1": "colwise", "fc2": "rowwise"}
GATED = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
ENCODER_RULES = {
    **{f"self_attn.{name}": "colwise" for name in _ATTENTION},
    **{f"attention.{name}": "colwise" for name in _ATTENTION},
    **{f"attention.attention.{name}": "colwise" for name in ("query", "key", "value")},
    **{f"attn.{name}": "colwise" for name in ("qkv", "q", "k", "v")},
    **dict.fromkeys(("self_attn.out_proj", "attention.o_proj", "attention.output.dense"), "rowwise"),
    **dict.fromkeys(("attn.proj", "attention.projection_layer"), "rowwise"),
    **_MLP,
    **{f"mlp.{name}": rule for name, rule in _MLP.items()},
    **{f"{mlp}.{name}": rule for mlp in ("mlp", "feed_forward") for name, rule in GATED.items()},
    "mlp.linear_fc1": "colwise",
    "mlp.linear_fc2": "rowwise",
    "mlp.weights_in": "colwise",
    "mlp.weights_out": "rowwise",
}
"""Linear layers of an encoder block, by their names in all versions of transformers."""
_ENCODERS = frozenset(
    {
        *("siglip_vision_model", "siglip2_vision_model", "clip_vision_model", "dinov2", "whisper"),
        *("idefics3_vision", "smolvlm_vision", "internvl_vision"),
        *(f"{family}_vision" for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")),
        *("qwen3_5_vision", "qwen3_5_moe_vision", "qwen2_5_omni_vision_encoder"),
        *("qwen2_5_omni_audio_encoder", "qwen2_audio_encoder"),
    }
)
_TEXT_RULES = {
    **{
        f"{attention}.{name}": rule
        for attention in ("self_attn", "cross_attn")
        for name, rule in (*((name, "colwise") for name in _ATTENTION), ("o_proj", "rowwise"))
    },
    **dict.fromkeys((f"{at}.{norm}" for at in ("self_attn", "cross_attn") for norm in ("q_norm", "k_norm")), PARTIAL),
    **{f"mlp.{name}": rule for name, rule in GATED.items()},
}
_TEXTS = frozenset({"qwen3_vl_text", "mllama_text_model"})
"""Text models whose config has no plan."""


def rules_of_family(unit: Unit) -> Mapping[str, str]:
    """Map the paths of linear layers within a block to their rules in the plan."""
    if unit.family in _ENCODERS:
        return ENCODER_RULES
    if unit.family in _TEXTS:
        return _TEXT_RULES
    declared = getattr(unit.config, "base_model_tp_plan", None) or {}
    found = {}
    for path, rule in declared.items():
        _, star, rest = path.partition(".*.")
        if star:
            found[rest] = rule
    return found or unit.tensor_rules
