"""A run that begins with what another exported has its weights, projectors included."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.engine_case import CASE
from cases.engine_case import build_model as build_case
from dilatant.config import UserError
from dilatant.config.config import parse_config
from dilatant.config.model import ModelConfig
from dilatant.hf.stored_weights import read_pretrained
from dilatant.models.build import build_model
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box


def digests(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors.values()}


def section(base: Path, tree: dict[str, Any]) -> ModelConfig:
    config = {"output_dir": "run", "model": tree, "data": {"train": [{"path": "x.jsonl"}], "max_length": 8}}
    return parse_config({**config, "train": {"steps": 1, "global_batch_size": 1}}, base=base).model


def begins_with(config: ModelConfig) -> tuple[MultimodalModel, dict[str, torch.Tensor]]:
    model = build_model(config, seed=5, hollow=set(config.units))
    held = {name: p for unit in model.units.values() for name, p in unit.named_logical_parameters()}
    return model, read_pretrained(model, config, {n: Box.of(n, p.shape) for n, p in held.items()}, seed=5)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    build_case(CASE).save_pretrained(tmp_path / "s1" / "export")
    return tmp_path / "s1" / "export"


def parts(**vision: Any) -> dict[str, Any]:
    encoder = {"kind": "image", "id": "s1/export/vision", **vision}
    language = {"tokenizer": "bytes", "id": "s1/export/language"}
    return {"encoders": {"vision": encoder}, "language_model": language}


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({"id": "s1/export", "tokenizer": "bytes"}, marks=pytest.mark.slow),
        {"id": "s1/export", "tokenizer": "bytes", "freeze": ["vision.encoder"]},
        {"id": "s1/export", "tokenizer": "bytes", "lora": {"r": 2}},
        pytest.param(parts(), marks=pytest.mark.slow),
        parts(projector="linear"),
        pytest.param(parts(projector="s1/export"), marks=pytest.mark.slow),
        parts(projector="s1/export/projectors/vision.safetensors"),
    ],
)
def test_every_weight_of_the_second_stage_is_the_export_s(export: Path, tree: dict[str, Any]) -> None:
    config = section(export.parent.parent, tree)
    with pytest.warns(UserWarning, match="goes on from .*projectors/vision.safetensors"):
        model, weights = begins_with(config)
    stored = {str(file): load_file(file) for file in export.rglob("*.safetensors")}
    assert len(stored) == 3
    assert digests(weights) == {one for tensors in stored.values() for one in digests(tensors)}
    trained = {name for unit in model.units.values() for name in unit.trained_names}
    assert any(name.startswith("vision.projector") for name in trained)
    assert any(name.startswith("vision.layers") for name in trained) == ("freeze" not in tree and "lora" not in tree)
    in_python = build_model(config, seed=5)
    projector = load_file(export / "projectors/vision.safetensors")
    assert all(torch.equal(in_python["vision"].projector.state_dict()[k], projector[k]) for k in projector)


def test_a_projector_that_does_not_fit_is_said_or_refused(export: Path) -> None:
    base = export.parent.parent
    with pytest.warns(UserWarning, match="a new one begins; .* is not taken, for it is of kind linear"):
        _, weights = begins_with(section(base, parts(projector="mlp")))
    assert not any("projector" in name for name in weights)
    with pytest.raises(UserError, match=r"projector: there is no file .*nowhere.safetensors"):
        begins_with(section(base, parts(projector="nowhere.safetensors")))
    with pytest.raises(UserError, match="holds no linear, mlp or identity projector"):
        begins_with(section(base, parts(projector="s1/export/vision/model.safetensors")))
    wide = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1}
    wide |= {"num_attention_heads": 2, "intermediate_size": 8}
    tree = {**parts(projector="s1/export"), "language_model": {"tokenizer": "bytes", "config": wide}}
    with pytest.raises(UserError, match=r"does not fit: its weight is \[16, 12\] and \[32, 12\] is needed"):
        begins_with(section(base, tree))
    with pytest.raises(UserError, match="must be 'linear', 'mlp' or 'identity', or a path"):
        section(base, parts(projector="mpl"))


def test_a_projector_with_nan_is_refused(export: Path) -> None:
    file = export / "projectors/vision.safetensors"
    save_file({key: tensor * float("nan") for key, tensor in load_file(file).items()}, file)
    config = section(export.parent.parent, parts(projector="s1/export"))
    for begin in (begins_with, build_model):
        with (
            pytest.warns(UserWarning, match="goes on from"),
            pytest.raises(UserError, match=rf"'{file}': '\w+' holds NaN"),
        ):
            begin(config)


def test_what_no_export_of_parts_can_say_is_refused(export: Path) -> None:
    base = export.parent.parent
    with pytest.raises(UserError, match="is an export of parts; name them, with `processor`"):
        section(base, {"id": "s1/export", "processor": {"max_pixels": 64}})
    with pytest.raises(UserError, match=r"export of parts: 'lora.merge: false' is for whole models"):
        section(base, {"id": "s1/export", "lora": {"merge": False}})
    manifest = json.loads((export / "multimodal.json").read_text())
    manifest["encoders"]["vision"]["code"] = ["after_encoder"]
    (export / "multimodal.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"with code of your own \(vision.after_encoder\)"):
        section(base, {"id": "s1/export"})
    (export / "multimodal.json").write_text("{}")
    with pytest.raises(UserError, match=r"multimodal\.json or conversation\.json is damaged"):
        section(base, {"id": "s1/export"})
    (export / "multimodal.json").write_text("[]")
    with pytest.raises(UserError, match="is no object of JSON"):
        section(base, {"id": "s1/export"})


def test_an_encoder_that_is_in_no_export_says_nothing(export: Path) -> None:
    (export / "multimodal.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, weights = begins_with(section(export.parent.parent, parts(projector="linear")))
    assert not any("projector" in name for name in weights)
