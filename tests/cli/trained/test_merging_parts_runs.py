"""The tower of a Qwen-VL as the encoder of another language model, from the files of the whole to an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant, tiny_config, write_images
from cases.tiny_wholes import save_as_the_hub_does


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_frozen_tower_trains_with_another_language_model(
    family: str, tmp_path: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, 12)
    save_as_the_hub_does(family, tmp_path / "whole")
    tree = tiny_config()
    tree["model"]["encoders"]["vision"] = {"kind": "image", "id": "whole"}
    tree["model"]["freeze"] = ["vision.encoder"]
    Path("config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    losses = []
    for name, parallel in (
        ("run", "single"),
        ("apart", "{units: {vision: {pp: 2}, language: {pp: 1}}, microbatches: 2}"),
    ):
        code, _, error = dilatant(
            "train", "config.yaml", "--set", f"output_dir={name}", "--set", f"parallel={parallel}"
        )
        assert code == 0, error
        steps = map(json.loads, Path(name, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        losses.append([step["loss"] for step in steps if "loss" in step])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # fp32 sums in another order, over some updates
    kept, source = (load_file(folder / "model.safetensors") for folder in (Path("run/export/vision"), Path("whole")))
    whole = {name.partition("visual.")[2]: weight for name, weight in source.items()}
    assert kept
    assert all(torch.equal(weight, whole[name]) for name, weight in kept.items())
    code, _, error = dilatant("generate", "apart/export", "--prompt", "Side?", "--image", "images/1.png")
    assert code == 0, error
