"""A run in bf16 trains as one in fp32 does, and loses nothing of its weights: masters are what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant, tiny_config, write_images

SETTINGS = (
    "--set", "train.schedule.kind=constant",
    "--set", "model.freeze=[vision.encoder]",
)  # fmt: skip


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    parts = sorted((run / "checkpoints" / f"step-{step:08}").glob("part-*/model.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


def test_precision_may_change_where_a_run_goes_on(project: Path, dilatant: Dilatant) -> None:
    config, run = project / "config.yaml", project / "run"
    dilatant("train", config, *SETTINGS, "--set", f"output_dir={project / 'whole'}")
    for steps, precision in ((2, "fp32"), (4, "bf16"), (6, "fp32")):
        code, _, err = dilatant(
            "train", config, *SETTINGS, "--set", f"train.steps={steps}", "--set", "train.resume=auto",
            "--set", f"train.precision={precision}",
        )  # fmt: skip
        assert code == 0, err
        weights = saved(run, steps)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        rounded = all(torch.equal(t, t.bfloat16().float()) for t in weights.values())
        assert not rounded, "what was saved are rounded weights, not their masters"
    whole = losses(project / "whole")
    assert losses(run)[:2] == pytest.approx(whole[:2], rel=1e-6)
    # Losses in bf16 are off by its rounding, 2^-9, and weights by what gradients were off in two steps.
    assert losses(run) == pytest.approx(whole, rel=1e-2)
    assert losses(run)[2:4] != pytest.approx(whole[2:4], rel=1e-6)
    for name, weight in saved(project / "whole", 6).items():
        assert (weight - saved(run, 6)[name]).norm() <= 0.05 * weight.norm(), name


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_bf16_run_exports_its_masters_in_the_source_dtype(ranks: int, project: Path, dilatant: Dilatant) -> None:
    settings = tiny_config(precision="bf16", steps=2)
    settings["model"]["encoders"]["vision"]["config"]["dtype"] = "bfloat16"
    if ranks == 2:
        settings["parallel"] = {"units": {"vision": {"pp": 1}, "language": {"pp": 1}}}
    (project / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    write_images(project, 4, "heldout.jsonl")
    code, _, err = dilatant("train", project / "config.yaml", "--set", "data.eval=[{path: heldout.jsonl}]")
    assert code == 0, err
    run = project / "run"
    masters = saved(run, 2)
    language = load_file(run / "export" / "language" / "model.safetensors")
    vision = load_file(run / "export" / "vision" / "model.safetensors")
    assert {tensor.dtype for tensor in language.values()} == {torch.float32}
    assert {tensor.dtype for tensor in vision.values()} == {torch.bfloat16}
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(language[norm], masters["language.layers.0.input_layernorm.weight"])
    assert not torch.equal(language[norm], language[norm].bfloat16().float())
    code, _, err = dilatant("generate", run / "export", "--prompt", "Side?")
    assert code == 0, err
