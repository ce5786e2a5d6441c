"""A loss, a callback and a metric of the user's own are found by the names that a YAML file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant import train
from dilatant.config import UserError, load_config

MODULE = """
import dilatant
import torch

@dilatant.loss
def doubled(logits, targets):
    return 2 * torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

@dilatant.metric
def longest(expected, written):
    return max(map(len, written))

@dilatant.callback
class Stop:
    def on_step(self, run, metrics):
        run.log({"called": run.step})
        if run.step == 2:
            run.stop()

@dilatant.callback
class Strict:
    def __init__(self, when):
        self.when = when

class Undeclared:
    def on_end(self, run, result):
        pass
"""


class Last:
    """Passed in Python beside the callbacks that the file names."""

    def on_end(self, run: Any, result: Any) -> None:
        run.log({"ended": result.step})


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def figures(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in records(folder):
        found.setdefault(record["step"], {}).update(record.get("figures", {}))
    return found


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A config in the working folder, beside the module that it names."""
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts_by_name.py").write_text(MODULE, encoding="utf-8")
    tree = tiny_config(loss="parts_by_name.doubled", callbacks=["parts_by_name:Stop"])
    data = [{"path": str(write_images(tmp_path, 12))}]
    metrics = {"metrics": ["exact_match", "parts_by_name:longest"]}
    return {**tree, "data": {**tree["data"], "train": data, "eval": data}, "evaluation": metrics, "output_dir": "run"}


def test_parts_by_name_train_and_resume(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    result = train("mine.yaml")
    assert (result.step, result.ended_early) == (2, 2)
    assert records(tmp_path / "run")[0]["loss"] > 8  # twice the cross entropy of 260 bytes
    assert result.evaluation is not None
    assert result.evaluation.figures.keys() == {"loss", "exact_match", "parts_by_name:longest"}
    again = load_config(tmp_path / "run" / "config.yaml", ["train.resume=auto", "train.steps=3"])
    assert train(again, callbacks=[Last()]).step == 3
    assert figures(tmp_path / "run") == {1: {"called": 1}, 2: {"called": 2}, 3: {"called": 3, "ended": 3}}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("parts_by_name.Strict", "train.callbacks: 'parts_by_name.Strict' cannot be made: TypeError"),
        ("parts_by_name.Undeclared", "is not declared as a callback; put @dilatant.callback above it"),
        ("parts_by_name.Gone", "train.callbacks: 'parts_by_name.Gone' cannot be imported"),
        ("Stop", "train.callbacks: 'Stop' cannot be imported"),
    ],
)
def test_a_callback_that_cannot_be_used_is_named(tree: dict[str, Any], name: str, problem: str) -> None:
    tree["train"]["callbacks"] = [name]
    with pytest.raises(UserError, match=problem):
        train(tree)
