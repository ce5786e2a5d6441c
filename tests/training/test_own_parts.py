"""A user's own data sets, loss, optimizer, schedule, callbacks and metrics, passed to `dilatant.train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cases.tiny_project import tiny_config, write_images
from dilatant import train
from dilatant.config import UserError, load_config


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def project(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Return a config that trains on images below `folder` into `folder/name`; changes: to its `train` section."""
    tree = tiny_config(**changes)
    return {**tree, "output_dir": str(folder / name)}


def with_file(tree: dict[str, Any], file: Path) -> dict[str, Any]:
    return {**tree, "data": {**tree["data"], "train": [{"path": str(file)}]}}


def records_of(file: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["messages"][0]["content"][0]["image"] = Image.open(
            file.parent / f"images/{record['id'][7:]}.png"
        )
    return records


def without_data(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "data": {key: value for key, value in tree["data"].items() if key != "train"}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    return write_images(tmp_path, 12)


def test_a_list_trains_and_resumes_as_its_file_does(file: Path, tmp_path: Path) -> None:
    constant = {"kind": "constant"}  # the parts of the run have other ends
    train(with_file(project(tmp_path, "file", schedule=constant), file))
    records = records_of(file)
    tree = without_data(project(tmp_path, "list", schedule=constant))
    train({**tree, "train": {**tree["train"], "steps": 3}}, train_data=records, eval_data=records[:4])
    resumed = {**tree, "train": {**tree["train"], "resume": "auto"}}
    result = train(resumed, train_data=records, eval_data=records[:4])
    assert result.evaluation is not None
    assert losses(tmp_path / "list") == losses(tmp_path / "file")
    written = load_config(tmp_path / "list" / "config.yaml")
    assert written.python == ("train_data", "eval_data")
    with pytest.raises(UserError, match=r"got its eval_data in Python .* eval_data=\.\.\.\)"):
        train(written, train_data=records)
    with pytest.raises(UserError, match="the training data changed since the checkpoint"):
        train(resumed, train_data=[*records[:-1], records[0]], eval_data=records[:4])


def test_what_python_replaces_is_named(file: Path, tmp_path: Path) -> None:
    tree = with_file(project(tmp_path), file)
    with pytest.warns(UserWarning, match="train_data takes the place of data.train"), pytest.raises(
        UserError, match="train_data is empty"
    ):  # fmt: skip
        train(tree, train_data=[])
    with pytest.raises(UserError, match="takes no 'lost'"):
        train(tree, lost=1)
    with pytest.raises(UserError, match="model is a int; give an id"):
        train(tree, model=3)
    with pytest.raises(UserError, match="is missing; name files or a data set"):
        train(without_data(tree))
