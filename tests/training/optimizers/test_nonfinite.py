"""A loss or gradient that is not finite is never applied and never saved, and the guilty samples are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import tiny_config, write_images
from dilatant.config import UserError, load_config
from dilatant.models.core.stage import StageOutput
from dilatant.models.language.language_stage import LanguageStage
from dilatant.report.metrics import StepMetrics
from dilatant.training.run import train


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_images(tmp_path, 12)
    tree = tiny_config(save_steps=2, steps=6, row_tokens=512)  # a step is one microbatch
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path / "config.yaml"


def spoil(monkeypatch: pytest.MonkeyPatch, call: int, how: Callable[[StageOutput], StageOutput]) -> list[Any]:
    """Change the output of the language model's `call`-th forward in training (a proof of the model comes before);
    returns the samples of every call."""
    run, calls = LanguageStage.run, []

    def spoiled(self: Any, data: Any, samples: Any, inbound: Any) -> StageOutput:
        output = run(self, data, samples, inbound)
        names = [data.samples[sample].id for sample in samples]
        trains = not data.predicts and all(name.startswith("train.jsonl") for name in names)
        if trains:
            calls.append(names)
        return how(output) if trains and len(calls) == call else output

    monkeypatch.setattr(LanguageStage, "run", spoiled)
    return calls


def bad_loss(output: StageOutput) -> StageOutput:
    return StageOutput(output.rows, {unit: loss * float("nan") for unit, loss in output.losses.items()})


def bad_loss_of_good_gradient(output: StageOutput) -> StageOutput:
    return StageOutput(output.rows, {unit: loss + float("nan") for unit, loss in output.losses.items()})


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def bad_gradient(output: StageOutput) -> StageOutput:
    return StageOutput(output.rows, {unit: _BadGradient.apply(loss) for unit, loss in output.losses.items()})


def newest_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max(run.glob("checkpoints/step-*"))
    return {n: t for file in newest.rglob("model.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param(bad_loss, "became nan", marks=pytest.mark.slow),
        (bad_loss_of_good_gradient, "became nan"),
        (bad_gradient, "norm is"),
    ],
)
def test_nonfinite_stop_names_samples_and_keeps_last_good_step(
    project: Path, monkeypatch: pytest.MonkeyPatch, how: Any, says: str
) -> None:
    calls = spoil(monkeypatch, 4, how)
    with pytest.raises(UserError, match=says) as refused:
        train(load_config(project))
    assert all(repr(name) in str(refused.value) for name in calls[3])
    assert max((project.parent / "run" / "checkpoints").glob("step-*")).name == "step-00000003"
    assert all(tensor.isfinite().all() for tensor in newest_weights(project.parent / "run").values())


@pytest.mark.parametrize("how", [bad_loss, bad_gradient])
def test_an_update_is_skipped_and_counted(project: Path, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    spoil(monkeypatch, 4, how)
    result = train(load_config(project, ["train.on_nonfinite=skip"]))
    assert (result.step, result.finished) == (6, True)
    records = [json.loads(line) for line in (project.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["skipped_updates"] for record in records] == [0, 0, 0, 1, 1, 1]
    assert all(tensor.isfinite().all() for tensor in newest_weights(project.parent / "run").values())


def test_weights_that_are_not_finite_are_not_saved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = torch.optim.AdamW.step, []

    def overflow(self: Any, *arguments: Any) -> Any:
        result = step(self, *arguments)
        calls.append(1)
        if len(calls) == 4:
            self.param_groups[0]["params"][0].data.fill_(float("inf"))
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(UserError, match="is not finite after step 4, so nothing is saved"):
        train(load_config(project))
    assert [path.name for path in (project.parent / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_a_record_of_metrics_stays_json() -> None:
    metrics = StepMetrics(1, 1, float("nan"), float("inf"), {}, 1.0, 0.0, 1, 0, 1, 1, {}, 0.0, 0.0)
    record = json.loads(json.dumps(metrics.to_record(), allow_nan=False))
    assert record["loss"] is None
    assert record["grad_norm"] is None
