"""An export is what was trained, in its source's formats, and nothing of the source is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.cut_wholes import opened
from cases.engine_case import CASE
from cases.engine_case import build_model as build_case
from cases.tiny_wholes import save_as_the_hub_does
from dilatant.config import UserError
from dilatant.config.config import parse_config
from dilatant.config.model import LoraConfig
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.hf.export import load_exported
from dilatant.hf.stored_weights import check_sources, read_pretrained, tensor_files
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.build import build_model
from dilatant.models.core.materialize import allocate
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.planning.assemble import load_model_tokenizer, media_units
from dilatant.training.checkpoints.writer import CheckpointWriter
from dilatant.training.export_checkpoint import export_checkpoint

Weights = dict[str, torch.Tensor]


def export_of(
    base: Path, tree: dict[str, Any], train: Callable[[Weights], Weights] = lambda w: w, dcp: bool = False
) -> Path:
    """The export of a run that began with the config's sources, and changed the weights as `train` does."""
    data = {"train": [{"path": "x.jsonl"}], "max_length": 8}
    steps = {"steps": 1, "global_batch_size": 1}
    config = parse_config({"output_dir": "run", "model": tree, "data": data, "train": steps}, base=base)
    hollow = config.model.units
    tokenizer = load_model_tokenizer(config.model)
    build = lambda: build_model(config.model, seed=1, hollow=hollow, tokenizer=tokenizer)  # noqa: E731
    model = build()
    weights = allocate(model.units, 1)
    boxes = {name: Box.of(name, tuple(weight.shape)) for name, weight in weights.items()}
    read = read_pretrained(model, config.model, boxes, 1)
    weights = train({name: read.get(name, weight.detach()).float() for name, weight in weights.items()})
    writer = CheckpointWriter(base / "run", 1, "first")
    writer.save(1, {"model": weights}, {})
    writer.publish()
    writer.close()
    encoding = Encoding(chat_tokenizer(tokenizer), media_units(config.model, tokenizer))
    export = base / ("dcp" if dcp else "export")
    export_checkpoint(
        base / "run/step-00000001", build(), config, encoding, export, base / "run", "dcp" if dcp else "hf"
    )
    return export


def as_parts(base: Path, **case: Any) -> dict[str, Any]:
    """The model section of a source of parts, with tokenizer."""
    build_case(replace(CASE, **case)).save_pretrained(base / "m")
    (base / "m/multimodal.json").unlink()
    vision = {"kind": "image", "id": "m/vision", "projector": "linear", "processor": {}}
    return {"encoders": {"vision": vision}, "language_model": {"id": "m/language", "tokenizer": "m/words"}}


def mixed(folder: Path, is_fine: Callable[[str], bool]) -> Weights:
    """Let a folder hold bf16, but for fp32 weights that bf16 cannot say."""
    file = folder / "model.safetensors"
    stored = {k: w + 1e-4 if is_fine(k) else w.bfloat16() for k, w in load_file(file).items()}
    save_file(stored, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for each in (config, *(config[key] for key in ("text_config", "vision_config") if key in config)):
        each["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return stored


@pytest.mark.parametrize("rounded", [False, True], ids=["run in fp32", "run in bf16"])
def test_export_keeps_frozen_weights_and_dtypes_bit_for_bit(tmp_path: Path, rounded: bool) -> None:
    save_as_the_hub_does("llava", tmp_path / "m")
    stored = mixed(tmp_path / "m", lambda key: "norm" in key and key.endswith("weight"))
    round_all = lambda w: {k: v.bfloat16().float() if rounded else v for k, v in w.items()}  # noqa: E731
    export = export_of(tmp_path, {"id": "m", "freeze": ["vision", "language"]}, round_all)
    found = load_file(export / "model.safetensors")
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in stored.items()}
    assert [key for key in stored if not torch.equal(found[key], stored[key])] == []
    assert json.loads((export / "config.json").read_text())["dtype"] == "bfloat16"


def test_adapters_are_saved_and_merged_in_fp32(tmp_path: Path) -> None:
    save_as_the_hub_does("llava", tmp_path / "m")
    base = mixed(tmp_path / "m", lambda key: False)
    torch.manual_seed(1)
    drawn = lambda w: {k: 0.1 * torch.randn_like(v) if is_adapter(k) else v for k, v in w.items()}  # noqa: E731
    export = export_of(tmp_path, {"id": "m", "lora": {"r": 2, "lora_alpha": 32}}, drawn)
    adapter = load_file(export / "adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    key = next(key for key in base if key.endswith("layers.0.mlp.down_proj.weight") and "language" in key)
    a, b = (next(v for k, v in adapter.items() if f"layers.0.mlp.down_proj.lora_{x}." in k) for x in "AB")
    nearest = (base[key].float() + 16 * b @ a).bfloat16()
    # Products may be summed in another order, which turns a rounding here and there.
    assert (load_file(export / "model.safetensors")[key] == nearest).float().mean() > 0.99


def test_trained_tied_embedding_is_the_head_in_both_exports(tmp_path: Path) -> None:
    tree = as_parts(tmp_path, tied=True)
    load_tokenizer("bytes").save_pretrained(str(tmp_path / "m/words"))
    tree["language_model"] |= {"id": str(resized(tmp_path / "m/language"))}
    tree["lora"] = {"r": 2, "train": ["language.embedding"]}
    torch.manual_seed(1)
    trains = lambda k: is_adapter(k) or k.startswith("language.embedding")  # noqa: E731
    drawn = lambda w: {k: torch.randn_like(v) if trains(k) else v for k, v in w.items()}  # noqa: E731
    export = export_of(tmp_path, tree, drawn)
    ids = torch.arange(20)[None]
    merged = AutoModelForCausalLM.from_pretrained(export / "language")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "m/language")
    adapted = PeftModel.from_pretrained(base, str(export / "adapter/language"))
    with torch.no_grad():
        ours, theirs = merged(ids).logits, adapted(ids).logits
    # Of adapters beside and within weights, in fp32.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def resized(folder: Path) -> Path:
    """A language model that embeds the tokenizer of bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(260)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("same", "whole"),
    [
        pytest.param(False, True, id="another-whole"),
        pytest.param(True, False, id="the same-parts"),
        pytest.param(False, False, id="another-parts", marks=pytest.mark.slow),
        pytest.param(True, True, id="the same-whole", marks=pytest.mark.slow),
    ],
)
def test_a_head_beside_a_config_that_ties_it_is_refused(tmp_path: Path, whole: bool, same: bool) -> None:
    load_tokenizer("bytes").save_pretrained(str(tmp_path / "m/words"))
    if whole:
        save_as_the_hub_does("llava", tmp_path / "m")
        folder, tree = tmp_path / "m", {"id": "m"}
    else:
        tree = as_parts(tmp_path, tied=True)
        folder = resized(tmp_path / "m/language")
    config = json.loads((folder / "config.json").read_text())
    for each in (config, config.get("text_config", config)):
        each["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    (embedding,) = [tensor for key, tensor in stored.items() if key.endswith("embed_tokens.weight")]
    head = next((key for key in stored if "lm_head" in key), "lm_head.weight")
    save_file({**stored, head: embedding + (not same)}, folder / "model.safetensors", {"format": "pt"})
    if same:
        export_of(tmp_path, tree)
        return
    with pytest.raises(UserError, match=r"ties .*lm_head.weight' to .*embed_tokens.weight', but the files hold unlike"):
        export_of(tmp_path, tree)


def test_export_keeps_generation_settings_and_unread_weights(tmp_path: Path) -> None:
    tree = as_parts(tmp_path, language="qwen3_5_text")
    load_tokenizer("bytes").save_pretrained(str(tmp_path / "m/words"))
    folder = resized(tmp_path / "m/language")
    settings = {"eos_token_id": [2, 5], "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    rotary = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps({**config, **rotary}))
    more = {"mtp.fc.weight": torch.ones(2, 2).bfloat16(), "model.visual.norm.weight": torch.ones(2)}
    save_file({**stored, **more}, folder / "model.safetensors", {"format": "pt"})
    export = export_of(tmp_path, tree) / "language"
    assert json.loads((export / "generation_config.json").read_text()) == settings
    assert json.loads((export / "config.json").read_text()).items() >= rotary.items()
    new, old = (AutoConfig.from_pretrained(each).rope_parameters for each in (export, folder))
    assert new == old
    assert new["rope_theta"] == 5e5
    files = tensor_files(export)
    assert files.keys() == {*stored, "mtp.fc.weight"}
    assert torch.equal(load_file(files["mtp.fc.weight"])["mtp.fc.weight"], more["mtp.fc.weight"])
    again = AutoModelForCausalLM.from_pretrained(export).state_dict()
    assert all(torch.equal(again[key], stored[key]) for key in stored)
    save_as_the_hub_does("qwen3_5", tmp_path / "w")
    file = tmp_path / "w/model.safetensors"
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    assert "mtp.fc.weight" in tensor_files(export_of(tmp_path, {"id": "w"}))


def test_limits_and_template_are_in_every_file_that_has_them(tmp_path: Path) -> None:
    save_as_the_hub_does("qwen2_5_vl", tmp_path / "m")
    old = tmp_path / "m/preprocessor_config.json"
    parts = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": json.loads(old.read_text())}
    (tmp_path / "m/processor_config.json").write_text(json.dumps(parts))
    old.unlink()
    (tmp_path / "m/additional_chat_templates").mkdir()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / "m" / name).write_text(template)
    export = export_of(tmp_path, {"id": "m", "processor": {"min_pixels": 64, "max_pixels": 256}})
    assert (export / "chat_template.jinja").read_text() == template
    assert not (export / "additional_chat_templates").exists()
    found = json.loads((export / "processor_config.json").read_text())
    limits = {"shortest_edge": 64, "longest_edge": 256}
    assert found["image_processor"]["size"] == limits
    assert found["image_processor"]["image_processor_type"] == "Qwen2VLImageProcessor"
    assert found["processor_class"] == "Qwen2_5_VLProcessor"
    assert json.loads((export / "preprocessor_config.json").read_text())["size"] == limits


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    save_as_the_hub_does("qwen2_5_vl", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="there is no tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_one_call_opens_whole_models_and_language_models(tmp_path: Path) -> None:
    plain = save_as_the_hub_does("llava", tmp_path / "m").eval()
    ids = torch.arange(10)[None]
    whole = MultimodalModel.from_pretrained(tmp_path / "m").eval()
    assert list(whole.units) == ["vision", "language"]
    state = plain.state_dict()
    for unit, weight in whole.weights_of_whole():
        own = getattr(unit, weight.part).state_dict()[weight.key]
        assert torch.equal(own, state[whole.whole.key_of(unit, weight)]), weight.name
    text = AutoModelForCausalLM.from_config(parse_text())
    text.save_pretrained(tmp_path / "t")
    alone = MultimodalModel.from_pretrained(tmp_path / "t").eval()
    with torch.no_grad():
        for ours, theirs in ((whole, plain), (alone, text.eval())):
            # The same products, summed in another order.
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def parse_text() -> Any:
    return CONFIG_MAPPING["llama"](
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )


def test_experts_without_adapters_are_named() -> None:
    with pytest.warns(UserWarning, match=r"experts of 5 blocks \(.*mlp.experts, ...\) are no linear layers"):
        opened("qwen3_vl_moe", lora=LoraConfig())


def read_by_torch(folder: Path, state: Weights) -> Weights:
    """Fill a state dict from a checkpoint of torch, which refuses one that lacks any of its keys."""
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("family", ["llava", "qwen3_vl_moe"])
def test_torch_loads_an_export_into_a_model_by_its_own_keys(tmp_path: Path, family: str) -> None:
    save_as_the_hub_does(family, tmp_path / "m")
    mixed(tmp_path / "m", lambda key: "norm" in key and key.endswith("weight"))
    torch.manual_seed(1)
    tree = {"id": "m", "lora": {"r": 2}}
    drawn = lambda w: {k: 0.1 * torch.randn_like(v) if is_adapter(k) else v for k, v in w.items()}  # noqa: E731
    plain = export_of(tmp_path, tree, drawn)
    torch.manual_seed(1)
    folder = export_of(tmp_path, tree, drawn, dcp=True)
    names = {str(path.relative_to(plain)) for path in plain.rglob("*")}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {
        *(names - {"model.safetensors"}), ".metadata", "__0_0.distcp"
    }  # fmt: skip
    expected = AutoModelForImageTextToText.from_pretrained(plain, dtype="auto").state_dict()
    empty = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    read = read_by_torch(folder, {key: torch.zeros_like(tensor) for key, tensor in empty.items()})
    assert [key for key in expected if not torch.equal(read[key].to(expected[key].dtype), expected[key])] == []
    dtypes = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    in_fp32 = {key for key, entry in dtypes.items() if entry.properties.dtype == torch.float32}
    assert in_fp32 == {key for key in dtypes if "norm" in key and key.endswith("weight")}
    with pytest.raises(UserError, match="without --format dcp to ask the model"):
        load_exported(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:model.encoders.vision.projector")
def test_parts_go_on_from_an_export_as_checkpoints_of_torch(tmp_path: Path) -> None:
    tree = as_parts(tmp_path, tied=True)
    load_tokenizer("bytes").save_pretrained(str(tmp_path / "m/words"))
    tree["language_model"] |= {"id": str(resized(tmp_path / "m/language"))}
    folders = [export_of(tmp_path, tree, dcp=dcp) for dcp in (False, True)]
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders[1] / "language"))
    read = read_by_torch(folders[1] / "language", empty.state_dict())
    assert torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])  # a checkpoint has both
    again = []
    for folder in folders:
        tree = {"output_dir": "run", "model": {"id": folder.name}}
        data, steps = {"train": [{"path": "x.jsonl"}]}, {"steps": 1, "global_batch_size": 1}
        config = parse_config({**tree, "data": data, "train": steps}, base=tmp_path).model
        model = build_model(config, hollow=config.units, tokenizer=load_model_tokenizer(config))
        check_sources(model, config)
        weights = {name: w for unit in model.units.values() for name, w in unit.named_logical_parameters()}
        boxes = {name: Box.of(name, tuple(weight.shape)) for name, weight in weights.items()}
        again.append(read_pretrained(model, config, boxes, 1))
        assert again[-1].keys() == boxes.keys()
    assert [name for name in again[0] if not torch.equal(again[0][name], again[1][name])] == []
    expected = AutoModelForCausalLM.from_pretrained(folders[0] / "language").state_dict()
    assert [key for key in expected if not torch.equal(expected[key], read[key])] == []
