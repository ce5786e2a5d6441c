"""An export has the weights that vLLM and SGLang look for: their rules for names, applied to its keys, leave none over,
and what they hand to the text model has the names and shapes of the plain text model. Where vLLM looks for an encoder's
weights elsewhere, the export says so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.generic_steps import GENERIC, pretrained
from cases.often import often
from cases.tiny_wholes import whole_config
from dilatant.hf.pretrained_export import write_pretrained
from dilatant.hf.stored_weights import tensor_files
from dilatant.models.core.structure import on_meta
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from harness.vllm_python import ask_vllm

_TEXT = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_LLAVA = {
    **_TEXT,
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}
_QWEN = {**_TEXT, "model.visual.": "visual.", "model.": "language_model.model."}
SERVED: Mapping[str, tuple[Mapping[str, str], str]] = {
    "llava": (_LLAVA, "llama"),
    "llava_onevision": (_LLAVA, "qwen2"),
    "gemma3": (_LLAVA, "gemma3_text"),
    "paligemma": (_LLAVA, "gemma2"),
    "mistral3": (_LLAVA, "mistral"),
    "qwen2_vl": (_QWEN, "qwen2"),
    "qwen2_5_vl": (_QWEN, "qwen2"),
    "qwen3_vl": (_QWEN, "qwen3"),
    "qwen3_vl_moe": (_QWEN, "qwen3_moe"),
}
"""Family → the prefixes that vLLM (September 2026) replaces one after the other; and the plain text model that takes
what is under language_model."""
SGLANG: Mapping[str, tuple[Mapping[str, str], str]] = {
    "gemma3": ({}, "language_model."),
    "qwen2_5_vl": ({}, ""),
    "qwen3_vl": ({"model.language_model.": "model.", "model.visual.": "visual."}, ""),
}
"""Family → the prefixes that `load_weights` of SGLang's class replaces (as of 2025; for Qwen2.5-VL, later also those of
vLLM), and the prefix of its text model."""
TOWERS = {
    "clip_vision_model": {"vision_tower.vision_model"},
    "siglip_vision_model": {"vision_tower.vision_model"},
    "pixtral": {"vision_tower.patch_conv", "vision_tower.ln_pre", "vision_tower.transformer"},
}
"""Encoder → the modules that vLLM 0.32 has in it."""
ENCODERS = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")


def plain_text_model(config: Any, kind: str) -> Any:
    settings = {**config.get_text_config().to_dict(), "model_type": kind}
    settings["tie_word_embeddings"] = config.tie_word_embeddings
    with on_meta():
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(settings))


def name_by(rules: Mapping[str, str], key: str) -> str:
    for prefix, replacement in rules.items():
        key = replacement + key.removeprefix(prefix) if key.startswith(prefix) else key
    return key


def exported(family: str, folder: Path) -> tuple[PretrainedModel, dict[str, Tensor], list[str]]:
    """Export a random model of the family; return it, the stored weights, and the warnings."""
    whole = pretrained(family) if family in GENERIC else PretrainedModel.of(whole_config(family), "model")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_pretrained(MultimodalModel({}, whole, seed=0), folder, None)
    stored = {key: each for file in {*tensor_files(folder).values()} for key, each in load_file(file).items()}
    return whole, stored, [str(each.message) for each in caught]


@pytest.mark.slow
def test_what_is_said_of_vllm_is_what_its_package_does(tmp_path: Path) -> None:
    ask = ask_vllm("names of weights against its mappings")
    keys, named = {}, {}
    for family, (rules, _) in SERVED.items():
        _, stored, _ = exported(family, tmp_path / family)
        (architecture,) = json.loads((tmp_path / family / "config.json").read_text())["architectures"]
        keys[architecture] = [*stored]
        named[architecture] = [name_by(rules, key) for key in stored]
    assert len(named) == len(SERVED)
    assert ask({"names": keys}) == named


@pytest.mark.parametrize("family", often(SERVED, "llava", "qwen2_5_vl"))
def test_servers_find_every_weight_of_an_export(family: str, tmp_path: Path) -> None:
    rules, kind = SERVED[family]
    whole, stored, said = exported(family, tmp_path)
    names = [name_by(rules, key) for key in stored]
    tower = {".".join(name.split(".")[:2]) for name in names if name.startswith("vision_tower.")}
    is_elsewhere = not tower <= TOWERS.get(whole.config.vision_config.model_type, set())
    assert is_elsewhere == any("vLLM's own classes" in each for each in said)
    plain = plain_text_model(whole.config, kind)
    wanted = {name: tuple(each.shape) for name, each in plain.named_parameters()}
    is_tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    servers = [(rules, "language_model."), *([SGLANG[family]] if family in SGLANG else [])]
    for replaced, inner in servers:
        of_text = {key: name for key in stored if not (name := name_by(replaced, key)).startswith(ENCODERS)}
        assert all(name.startswith(inner) for name in of_text.values())
        found = {name.removeprefix(inner): tuple(stored[key].shape) for key, name in of_text.items()}
        if is_tied:
            found.pop("lm_head.weight", None)
        assert found == wanted
