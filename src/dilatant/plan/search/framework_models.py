"""Models of other training frameworks: which families each can train, by transformers' names of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FrameworkModels:
    """Families that a release of a framework trains. families: transformers' `model_type` of those for which it has
    code. others: which further ones it runs, and `by` what, if that is to be said. joins: kinds of encoders that it
    joins to a language model of one's own choice."""

    release: str
    families: frozenset[str] = frozenset()
    others: Literal["none", "language", "all"] = "none"
    by: str = ""
    joins: frozenset[str] = frozenset()

    def note(self, family: str, encoders: Mapping[str, str], generators: int, is_whole: bool) -> str:
        """Say which model the framework lacks, or by what it runs one for which it has no code; "" for nothing.
        family: `model_type` of the whole model or of the language model; encoders: name → kind of those that are joined
        to it, as are the `generators`. is_whole: the family brings its own encoders."""
        kinds = [*dict.fromkeys(f"{kind} encoders" for kind in encoders.values()), *["generators"] * bool(generators)]
        lacks = f"{self.release} has no model like this{{}}: the flags are for one that you add to it"
        if generators or not self.joins.issuperset(encoders.values()):
            return lacks.format(f", {', '.join(kinds)} joined to a language model")
        family = family.removesuffix("_thinker")
        if family in self.families:
            return ""
        if self.others == "all" or (self.others == "language" and not is_whole):
            return f"{self.release} runs {family} by {self.by}" if self.by else ""
        return lacks.format(f", {family}")


def _families(names: str) -> frozenset[str]:
    return frozenset(names.split())


FRAMEWORK_MODELS: Mapping[str, FrameworkModels] = {
    "megatron": FrameworkModels(
        "megatron-core 0.16.1",
        others="language",
        by="its GPTModel, whose own flags describe the architecture",
        joins=frozenset({"image"}),
    ),
    "megatron-bridge": FrameworkModels(
        "megatron-bridge 0.3.1",
        _families(
            "deepseek_v2 deepseek_v3 gemma gemma2 gemma3 gemma3_text glm4_moe glm4v_moe gpt_oss llama mistral mistral3 "
            "nemotron nemotron_h olmoe qwen2 qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe"
        ),
    ),
    "ms-swift": FrameworkModels(
        "ms-swift 4.6.0",
        _families(
            "bailing_hybrid bailing_moe deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 dots1 "
            "ernie4_5 ernie4_5_moe gemma4 gemma4_unified glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next "
            "glm_moe_dsa gpt_oss hy_v3 internlm3 internvl internvl_chat kimi_k2 kimi_k25 kimi_vl llama llama4 "
            "llava_onevision1_5 mimo minicpmv4_6 minimax_m2 muse_glimmer nemotron_h olmoe ovis2_5 qwen2 qwen2_5_omni "
            "qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe "
            "qwen3_vl qwen3_vl_moe qwen4_exp"
        ),
    ),
    "torchtitan": FrameworkModels(
        "torchtitan 0.3.0",
        _families("deepseek_v3 gpt_oss kimi_k25 kimi_vl llama muse_glimmer qwen3 qwen3_5 qwen3_5_moe qwen3_moe"),
        others="language",
        by="its experiment transformers_modeling_backend",
    ),
    "automodel": FrameworkModels("nemo-automodel 0.7.0", others="all"),
    "veomni": FrameworkModels(
        "veomni 0.1.12",
        _families(
            "deepseek_v3 deepseek_v4 gemma3_text glm_moe_dsa gpt_oss llama qwen2 qwen2_5_omni qwen2_5_vl "
            "qwen2_5_vl_text qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_omni_moe "
            "qwen3_vl qwen3_vl_moe seed_oss"
        ),
    ),
}
"""By framework. Sources: the registries of models in the wheels (mcore-bridge 1.6.5 for ms-swift), and Megatron-Core's
LLaVA, which joins a vision encoder to a GPT; read on 2026-11-28."""
