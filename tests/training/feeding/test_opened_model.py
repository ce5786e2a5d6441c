"""A model that transformers has opened, passed to `dilatant.train`: its own weights are where training starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

from cases.tiny_project import tiny_config, write_images
from cases.tiny_wholes import save_as_the_hub_does
from dilatant import UserError, train
from dilatant.data.text.tokenizer import load_tokenizer

PIPELINE = {"units": {"vision": {}, "language": {"cuts": [0, 2], "pp": 2}}, "colocated": {}}


def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Steps in proportion to gradients: their rounding stays rounding in the weights, which Adam would enlarge."""
    return torch.optim.SGD(parameters, lr=0.05)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def changed(folder: Path) -> Any:
    """Return the model of a folder, with weights that the folder does not have."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    file = write_images(tmp_path, 12)
    save_as_the_hub_does("llava", tmp_path / "hub")
    tree = tiny_config(steps=3, schedule={"kind": "constant"}, optimizer={})
    return {**tree, "model": {}, "data": {**tree["data"], "train": [{"path": str(file)}]}}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_opened_model_trains_from_its_own_weights(ranks: int, project: dict[str, Any], tmp_path: Path) -> None:
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    model = changed(hub)
    shutil.copytree(hub, saved)
    model.save_pretrained(saved)
    layout = {"parallel": PIPELINE} if ranks > 1 else {}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train({**project, **layout, "output_dir": str(tmp_path / "run")}, model=model, optimizer=plain)
    for folder in (saved, hub):
        train({**project, "output_dir": str(tmp_path / f"of-{folder.name}")}, model=folder, optimizer=plain)
    expected, others = losses(tmp_path / "of-saved"), losses(tmp_path / "of-hub")
    # Ranks add the same fp32 numbers in another order.
    assert losses(tmp_path / "run") == (expected if ranks == 1 else pytest.approx(expected, rel=1e-5))
    assert abs(others[0] - expected[0]) > 0.01
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "export").state_dict()
    of_saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "of-saved" / "export").state_dict()
    assert all(torch.allclose(exported[key], value, atol=1e-5) for key, value in of_saved.items())


def test_opened_model_resumes_only_with_its_weights(project: dict[str, Any], tmp_path: Path) -> None:
    model = changed(tmp_path / "hub")
    tree = {**project, "output_dir": str(tmp_path / "run")}
    train({**tree, "output_dir": str(tmp_path / "whole")}, model=model)
    train({**tree, "train": {**tree["train"], "steps": 2}}, model=model)
    with pytest.raises(UserError, match="holds a run already"):
        train(tree, model=model)
    tree["train"]["resume"] = "auto"
    with torch.no_grad():
        weight = next(model.parameters())
        weight.add_(1)
        with pytest.raises(UserError, match="the run began with other weights than those of model="):
            train(tree, model=model)
        weight.copy_(AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model").get_parameter(
            next(name for name, _ in model.named_parameters())
        ))  # fmt: skip
    train(tree, model=model)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_opened_language_model_takes_its_place(project: dict[str, Any], tmp_path: Path) -> None:
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=300, **size))
    parts = {**tiny_config()["model"], "language_model": {"media_attention": "embedded"}}
    tree = {**project, "model": parts, "output_dir": str(tmp_path / "run")}
    train(tree, model=model, processor=load_tokenizer("bytes"))
    assert len(losses(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


def quantized(model: Any) -> None:
    model.hf_quantizer = SimpleNamespace()


def adapted(model: Any) -> None:
    model._hf_peft_config_loaded = True


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (quantized, "with quantized weights"),
        (adapted, "with adapters of peft"),
        (lambda model: model.to("meta"), "without values for"),
    ],
)
def test_models_that_cannot_be_written_are_refused(
    change: Any, problem: str, project: dict[str, Any], tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hub")
    change(model)
    with pytest.raises(UserError, match=problem):
        train({**project, "output_dir": str(tmp_path / "run")}, model=model)
    assert not (tmp_path / "run" / "model").exists()


def test_launched_ranks_and_frozen_weights_are_named(
    project: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hub")
    tree = {**project, "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match="processor goes with a model that transformers opened"):
        train({**tree, "model": {"id": str(tmp_path / "hub")}}, processor=load_tokenizer("bytes"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    next(model.parameters()).requires_grad_(False)
    with (
        pytest.warns(UserWarning, match="name what is frozen: model.freeze"),
        pytest.raises(UserError, match="started 2 processes, each with a model of its own; save one"),
    ):
        train(tree, model=model)
