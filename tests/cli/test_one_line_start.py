"""A model and data by their names: the YAML that it stands for is shown, can be kept, and is what trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cases.tiny_project import Dilatant
from cases.tiny_wholes import save_as_the_hub_does
from dilatant.config import load_config


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_as_the_hub_does("llava", project / "whole")
    monkeypatch.chdir(project)
    return project


@pytest.mark.slow
def test_train_without_a_config_shows_and_trains_its_config(inside: Path, dilatant: Dilatant) -> None:
    line = ("train", "--model", "whole", "--data", "train.jsonl", "--lora", "--set", "train.steps=1")
    options = ("--set", "data.workers=0", "--set", "train.device=cpu")
    code, out, err = dilatant(*line, *options, "--save-config", "mine.yaml")
    assert code == 0, err
    tree = yaml.safe_load((inside / "mine.yaml").read_text())
    assert tree["model"] == {"id": "whole", "lora": {"train": ["vision.projector"]}}
    assert tree["data"]["train"] == [{"path": "train.jsonl"}]
    assert tree["train"]["optimizer"]["learning_rate"] == 1e-4
    assert not (inside / "runs").exists()

    code, out, err = dilatant(*line, *options)
    assert code == 0, err
    assert yaml.safe_load((inside / "mine.yaml").read_text(encoding="utf-8")) == tree
    assert "id: whole" in out
    assert (inside / "runs" / "whole-lora" / "export" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_kept_config_elsewhere_names_the_same_files(inside: Path, dilatant: Dilatant) -> None:
    (inside / "kept").mkdir()
    given = ("--model", "whole", "--data", "train.jsonl", "--eval", "./train.jsonl", "--output", "runs/mine")
    code, _, err = dilatant("train", *given, "--set", "data.cache_dir=cache", "--save-config", "kept/mine.yaml")
    assert code == 0, err
    config = load_config(inside / "kept" / "mine.yaml")
    assert config.model.id == str(inside / "whole")
    assert [each.path for each in (*config.data.train, *config.data.eval)] == [str(inside / "train.jsonl")] * 2
    assert (config.output_dir, config.data.cache_dir) == (str(inside / "runs" / "mine"), str(inside / "cache"))


def test_what_a_start_lacks_is_said(inside: Path, dilatant: Dilatant) -> None:
    (inside / "there.yaml").write_text("mine")
    whole = ("train", "--model", "whole", "--data", "train.jsonl")
    for line, text in (
        (("train",), "give a YAML file, or a model and data"),
        (("train", "--model", "whole"), "give a YAML file, or a model and data"),
        (("train", "config.yaml", "--lora"), "--lora is for a start without a config file"),
        (("train", "--model", "nowhere/there", "--data", "train.jsonl"), "nowhere/there"),
        (("train", "--model", "whole", "--data", ""), "give a YAML file, or a model and data"),
        (("train", "--model", "whole", "--data", "nowhere.jsonl"), "nowhere.jsonl' does not exist"),
        ((*whole, "--save-config", "there.yaml"), "is there already"),
        ((*whole, "--save-config", "none/mine.yaml"), "cannot be written: No such file or directory"),
        ((*whole, "--set", "model.lora_rank=4"), "write 'model.lora.r'"),
        ((*whole, "--set", "train.freeze_vision_tower=true"), "write 'model.freeze: [vision.encoder]'"),
        ((*whole, "--set", "model.max_pixels=4"), "model.processor: {min_pixels"),
    ):
        code, _, err = dilatant(*line)
        assert code == 2, line
        assert text in err.replace("\n", " "), line
    assert (inside / "there.yaml").read_text() == "mine"
