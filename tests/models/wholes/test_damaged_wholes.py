"""A whole model whose files or settings are damaged is one line, and never one that begins at random instead."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from cases.tiny_wholes import save_as_the_hub_does, whole_config
from dilatant.config import UserError
from dilatant.config.model import LoraConfig
from dilatant.data.media_units.image_unit import PixelProcessor
from dilatant.hf.stored_weights import Layout, open_tensors, tensor_files
from dilatant.models.adapters.lora import targets
from dilatant.models.core.materialize import materialize
from dilatant.models.core.weight_files import require_finite
from dilatant.models.families.pretrained import PretrainedModel, load_pretrained_weights
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import load_encoder, load_language_model, load_pretrained_config
from dilatant.plan.boxes import Box

TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_as_the_hub_does("llava", folder)
    return folder


def without_some(state: dict[str, Any]) -> dict[str, Any]:
    return {key: tensor for key, tensor in state.items() if ".mlp." not in key}


@pytest.mark.parametrize("change", [without_some, lambda state: {"other": torch.zeros(1)}])
def test_weights_that_are_not_there_do_not_begin_at_random(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    whole = PretrainedModel.of(load_pretrained_config(str(folder), "model"), "model")
    assert load_pretrained_weights(whole, str(folder))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(change(load_file(folder / WEIGHTS)), tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks '.*' and \d+ more of the weights of its model"):
        load_pretrained_weights(whole, str(tmp_path))


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("lm_head", r"lacks 'lm_head\.weight' of the weights of its model; write tie_word_embeddings: true"),
        ("layers.0.mlp", r"lacks 'model\.layers\.0\.mlp\.down_proj\.weight' and 2 more of the weights"),
    ],
)
def test_missing_language_model_weights_are_never_random(tmp_path: Path, left_out: str, says: str) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False)).save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    save_file({k: v for k, v in state.items() if left_out not in k}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=says):
        load_language_model(str(tmp_path))


def test_a_tied_head_loads_and_a_missing_pooler_only_warns(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / WEIGHTS)
    load_language_model(str(tmp_path / "tied"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4), add_pooling_layer=False).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"lacks 2 weights of its encoder \(pooler\.dense\.bias"):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    file, key = tmp_path / WEIGHTS, "model.layers.0.mlp.up_proj.weight"
    state = load_file(file)
    state[key][3, 5] = bad
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"^here: '{tmp_path}': '{key}' holds NaN or infinity.*; download it again"):
        load_language_model(str(tmp_path), "here")
    layout = Layout({key: file}, {"w": key})
    with pytest.raises(UserError, match=rf"^'{file}': '{key}' holds NaN or infinity"):
        layout.read({"w": Box.of("w", (8, 8))})
    others = layout.read({"w": Box("w", (8, 8), (((0, 3),), ((0, 8),)))})  # as another rank reads it
    assert torch.equal(others["w"], state[key][:3])


def test_a_single_number_may_be_an_infinite_bound() -> None:
    require_finite([("bound", torch.tensor(float("inf")))], "here")
    with pytest.raises(UserError, match="'bound' holds NaN"):
        require_finite([("bound", torch.tensor(float("nan")))], "here")


def test_a_whole_model_with_nan_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    state = load_file(folder / WEIGHTS)
    next(iter(state.values())).view(-1)[0] = float("nan")
    save_file(state, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"weight' holds NaN or infinity"):
        load_pretrained_weights(PretrainedModel.of(whole_config("llava"), "model"), str(tmp_path))


def test_a_head_unlike_the_embedding_that_ties_it(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    for change, opens in ((0, True), (1, False)):
        head = state["model.embed_tokens.weight"] + change
        save_file({**state, "lm_head.weight": head}, tmp_path / WEIGHTS, {"format": "pt"})
        if opens:
            load_language_model(str(tmp_path))
            continue
        with pytest.raises(UserError, match=r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight', but .* unlike"):
            load_language_model(str(tmp_path))


def test_a_file_cut_short_or_missing_is_named(folder: Path, tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    file, whole = tmp_path / WEIGHTS, PretrainedModel.of(whole_config("llava"), "model")
    os.truncate(file, file.stat().st_size - 100)
    says = rf"'{file}' is damaged or incomplete, download it again \(.*not fully covered"
    for read in (load_language_model, lambda source: load_pretrained_weights(whole, source)):
        with pytest.raises(UserError, match=says):
            read(str(tmp_path))
    with pytest.raises(UserError, match=says):
        open_tensors(file)
    file.unlink()
    (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {"model.norm.weight": "model-2.safetensors"}}')
    with pytest.raises(UserError, match=rf"'{tmp_path / 'model-2.safetensors'}': there is no such file; download it"):
        load_language_model(str(tmp_path))


def test_a_folder_without_weights_or_of_an_adapter_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    whole = PretrainedModel.of(load_pretrained_config(str(folder), "model"), "model")
    with pytest.raises(UserError, match=r"cannot be loaded: .*no file named model\.safetensors"):
        load_pretrained_weights(whole, str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"it is an adapter: write 'model\.lora\.adapter'"):
        load_pretrained_config(str(tmp_path / "a"), "model")


def test_a_pointer_of_git_lfs_is_told_from_damaged_weights(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="git lfs pull"):
        open_tensors(tmp_path / WEIGHTS)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[" * 100_000, "\udcff"]
)
def test_an_index_of_shards_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match="does not say which file has which weight"):
        tensor_files(tmp_path)


def test_weights_that_are_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="there is no such file"):
        open_tensors(tmp_path / WEIGHTS)


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        (None, "image_token_id", None, "image_token_id is None"),
        (None, "image_token_id", -5, "image_token_id is -5"),
        ("text_config", "hidden_size", 0, "hidden_size is 0; it must be at least 1"),
        ("text_config", "num_hidden_layers", 0, "num_hidden_layers is 0; it must be at least 1"),
        ("text_config", "num_hidden_layers", 9999, "num_hidden_layers is 9,999"),
        ("text_config", "num_attention_heads", 0, "num_attention_heads is 0; it must be at least 1"),
        ("text_config", "num_key_value_heads", 7, "num_key_value_heads is 7; it must divide num_attention_heads"),
        ("text_config", "rms_norm_eps", float("nan"), "rms_norm_eps is nan; it must be a number"),
        (None, "model_type", ["llava"], "is no object with a model_type"),
    ],
)
def test_a_config_that_cannot_be(
    folder: Path, tmp_path: Path, part: str | None, key: str, value: Any, says: str
) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (settings[part] if part else settings)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=says):
        PretrainedModel.of(load_pretrained_config(str(tmp_path), "model"), "model")


@pytest.mark.parametrize("key", ["text_config", "vision_config"])
def test_a_part_that_the_model_type_does_not_read(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY, key: {"hidden_size": 8}}))
    with pytest.raises(UserError, match=rf"has a {key}, which its model_type 'llama' does not read; write the model_t"):
        load_pretrained_config(str(tmp_path), "model")


def test_a_config_that_is_no_readable_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def refused(why: str) -> None:
        with pytest.raises(UserError, match=rf"^model: '{file}' cannot be read, download it again: {why}"):
            load_pretrained_config(str(tmp_path), "model")

    for target in ("config.json", "nowhere"):
        file.symlink_to(target)
        refused("it is a broken link")
        file.unlink()
    file.write_text("{")
    refused("Expecting property name")
    os.truncate(file, (16 << 20) + 1)
    refused("it is longer than 16 MiB")


def test_a_whole_model_as_language_model_points_to_its_setting(folder: Path) -> None:
    with pytest.raises(UserError, match=r"a whole model goes under model\.id"):
        load_language_model(str(folder))


def test_a_pattern_of_adapters_that_is_none() -> None:
    whole = PretrainedModel.of(whole_config("llava"), "model")
    with pytest.raises(UserError, match=r"'\(' is no regular expression"):
        targets(whole.composite(), LoraConfig(target_modules="("), whole.parts)


def test_images_beyond_any_memory() -> None:
    with pytest.raises(UserError, match="sides are 1 to 16,384 pixels long"):
        PixelProcessor(10**6, 10**6)


def test_layers_beyond_any_memory() -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    settings = {**config, "vocab_size": 32, "intermediate_size": 10**13}
    unit = MultimodalModel({}, settings, device="meta").language
    with pytest.raises(UserError, match=r"language\.layers\.0 needs another [\d,]+ GiB of this machine's memory"):
        materialize(unit, 0, len(unit.layers), 0)
