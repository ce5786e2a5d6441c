"""Parts of the user's own are found by the names that a YAML file has: loss, optimizer, callback and others."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import tiny_config, write_images
from dilatant import train
from dilatant.config import UserError, load_config
from harness.faults.chaos import Fault, run_with_faults

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

@dilatant.optimizer
def momentum(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)

@dilatant.rate_schedule
def halved(step):
    return 0.5**step

@dilatant.optimizer
def of_three(weights, names, rates):
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


def with_own(tree: dict[str, Any], name: str, **train_keys: Any) -> dict[str, Any]:
    """Return the config of a run in folder `name`, with these keys in `train` and none of the parts of `tree`."""
    keys = {key: value for key, value in tree["train"].items() if key not in ("loss", "callbacks", "optimizer")}
    data = {key: value for key, value in tree["data"].items() if key != "eval"}
    return {**tree, "train": {**keys, **train_keys}, "data": data, "evaluation": {}, "output_dir": name}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{file.parent.name}.{key}": each for file in folder.rglob("export/**/*.safetensors")
            for key, each in load_file(file).items()}  # fmt: skip


def test_an_optimizer_by_name_is_the_passed_one(tree: dict[str, Any], tmp_path: Path) -> None:
    named: dict[str, Any] = {"optimizer": "parts_by_name.momentum", "schedule": "parts_by_name:halved"}
    train(with_own(tree, "named", steps=2, **named))
    again = load_config(tmp_path / "named" / "config.yaml", ["train.resume=auto", "train.steps=4"])
    assert (again.train.optimizer.own, again.train.schedule.own) == (named["optimizer"], named["schedule"])
    train(again)
    parts = importlib.import_module("parts_by_name")
    train(with_own(tree, "passed", steps=4), optimizer=parts.momentum, schedule=parts.halved)
    logs = [
        [(record["loss"], record["learning_rates"]) for record in records(tmp_path / name) if "loss" in record]
        for name in ("named", "passed")
    ]
    assert logs[0] == logs[1]
    assert [rates for _, rates in logs[0]] == [{"group 0": 0.05 * 0.5**step} for step in range(4)]
    found, expected = (weights(tmp_path / name) for name in ("named", "passed"))
    assert len(found) > 10
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    card = (tmp_path / "named" / "export" / "README.md").read_text(encoding="utf-8")
    assert "as set by its optimizer (parts_by_name.momentum), parts_by_name:halved" in card


@pytest.mark.slow
@pytest.mark.parametrize("resilience", [{}, {"enabled": True}], ids=["ranks", "agents"])
def test_ranks_divide_the_state_of_an_optimizer_by_name(
    tree: dict[str, Any], tmp_path: Path, resilience: dict[str, Any]
) -> None:
    named: dict[str, Any] = {"optimizer": "parts_by_name.momentum", "schedule": "parts_by_name:halved", "steps": 3}
    layout = {"units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}}
    train(with_own(tree, "alone", **named))
    train({**with_own(tree, "two", zero="node", **named), "parallel": layout, "resilience": resilience})
    alone, two = (
        [(record["loss"], record["learning_rates"]) for record in records(tmp_path / name) if "loss" in record]
        for name in ("alone", "two")
    )
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in alone], rel=1e-5)  # sums in another order
    assert [rates for _, rates in two] == [rates for _, rates in alone]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"optimizer": "parts_by_name.halved"}, "train.optimizer: 'parts_by_name.halved' is not declared as an opt"),
        ({"schedule": "parts_by_name.momentum"}, "is not declared as a schedule; put @dilatant.rate_schedule above"),
        ({"optimizer": "torch.optim.SGD"}, "train.optimizer: 'torch.optim.SGD' is not declared as an optimizer"),
        ({"optimizer": "parts_by_name.gone"}, "train.optimizer: 'parts_by_name.gone' cannot be imported"),
        ({"optimizer": "parts_by_name.of_three"}, r"of_three' is called as \(weights\), but takes"),
        ({"optimizer": "lion"}, "'name' is 'lion'; give one of adamw, adamw_8bit, or your own as package"),
        ({"schedule": {"kind": "a.b", "warmup_steps": 1}}, "'warmup_steps' is not used with your own 'a.b'"),
        ({"optimizer": {"name": "a.b", "eps": 1e-3, "ema": 0.9}}, "'eps' is not used with your own 'a.b'"),
    ],
)
def test_an_own_optimizer_that_cannot_be_used_is_named(
    tree: dict[str, Any], keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        train(with_own(tree, "run", **keys))
    assert len(str(refused.value).splitlines()) == 1 or str(refused.value).startswith(
        "config has a mistake:\n  - train"
    )
    assert not (tmp_path / "run").exists()


def test_a_strangers_optimizer_needs_permission(tree: dict[str, Any], tmp_path: Path) -> None:
    own = with_own(tree, "runs", optimizer={"name": "parts_by_name.momentum", "ema": 0.9})
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    with pytest.raises(UserError, match=r"names code to run in 'train.optimizer' \(parts_by_name.momentum\)"):
        load_config(folder / "config.yaml")
    load_config(folder / "config.yaml", ["train.optimizer=parts_by_name.momentum"])


@pytest.mark.slow
def test_a_named_optimizer_survives_the_loss_of_a_rank(tree: dict[str, Any], tmp_path: Path) -> None:
    named: dict[str, Any] = {"optimizer": "parts_by_name.momentum", "schedule": "parts_by_name:halved", "steps": 10}
    train(with_own(tree, "alone", **named))
    layout = {"units": {"language": {"replicas": 2}}, "colocated": {"vision": "language"}, "microbatches": 2}
    limits = {"enabled": True, "lease_seconds": 10.0, "fence_seconds": 60.0}
    resilient = {**with_own(tree, "run", **named), "parallel": layout, "resilience": limits}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resilient), encoding="utf-8")
    ended = run_with_faults(tmp_path, Fault(3, "worker:1"))
    assert (ended.exit_code, ended.injected) == (0, 1), ended.output
    alone, run = (
        [record["loss"] for record in records(tmp_path / name) if "loss" in record] for name in ("alone", "run")
    )
    assert run == pytest.approx(alone, rel=1e-5)  # sums in another order
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "alone")
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-5, msg=key)


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
