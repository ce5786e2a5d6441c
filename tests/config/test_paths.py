"""Paths of a config that are not relative to its YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dilatant.cli.options import read_config
from dilatant.config.errors import UserError
from dilatant.config.files.paths import follow_run

CONFIG = """
output_dir: run
model:
  language_model: {config: {model_type: llama}, tokenizer: bytes}
data: {train: [{path: a.jsonl}, {path: b.jsonl}]}
"""


def test_paths_of_overrides_are_those_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    for file in (there / "config.yaml", there / "beside.jsonl", here / "mine.jsonl", here / "model"):
        file.write_text(CONFIG)
    monkeypatch.chdir(here)
    config = read_config(
        there / "config.yaml",
        [
            "data.train.0.path=mine.jsonl",
            "data.eval=[{path: new/*.jsonl}, {path: beside.jsonl}]",
            "output_dir=runs/1",
            "model.language_model.id=model",
            "model.language_model.config=null",
            "model.language_model.tokenizer=some/id",
            "train.resume=auto",
        ],
    )
    assert [source.path for source in config.data.train] == [f"{here}/mine.jsonl", f"{there}/b.jsonl"]
    assert [source.path for source in config.data.eval] == [f"{here}/new/*.jsonl", f"{there}/beside.jsonl"]
    assert config.output_dir == f"{here}/runs/1"
    language = config.model.language_model
    assert language is not None
    assert (language.id, language.tokenizer) == (f"{here}/model", "some/id")
    assert config.train.resume == "auto"


def moved(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The tree of a run whose project was at /nowhere/old, and the run's folder now."""
    run = tmp_path / "new" / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "new" / "a.jsonl").write_text("{}")
    tree = {
        "output_dir": "/nowhere/old/runs/mine",
        "data": {"train": [{"path": "/nowhere/old/a.jsonl"}, {"path": str(run)}], "eval": []},
        "model": {"id": "/nowhere/old/model"},
    }
    return tree, run


def test_what_moved_along_with_a_run_is_found_and_said(tmp_path: Path) -> None:
    tree, run = moved(tmp_path)
    (line,) = follow_run(tree, run)
    assert line.startswith("data.train.0.path: /nowhere/old/a.jsonl is gone; ")
    assert tree["data"]["train"] == [{"path": str(tmp_path / "new" / "a.jsonl")}, {"path": str(run)}]
    assert tree["model"]["id"] == "/nowhere/old/model"  # named by whoever opens it


def test_data_that_are_nowhere_are_named_by_their_key(tmp_path: Path) -> None:
    tree, run = moved(tmp_path)
    (tmp_path / "new" / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"--set data\.train\.0\.path=PATH"):
        follow_run(tree, run)


@pytest.mark.parametrize("below", [".", "plan"])
def test_configs_inside_a_moved_run_find_their_moved_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], below: str
) -> None:
    tree, run = moved(tmp_path)
    folder = run / below
    folder.mkdir(exist_ok=True)
    for mark in ("report.json", "plan.json"):
        (folder / mark).write_text("{}")
    tree["model"] = {"language_model": {"tokenizer": "bytes", "config": {"model_type": "llama"}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    found = read_config(folder / "config.yaml", (), trust=False)
    assert [source.path for source in found.data.train] == [str(tmp_path / "new" / "a.jsonl"), str(run)]
    assert found.output_dir == str(run)
    assert capsys.readouterr().err.count("which moved along with the run, is used") == 1
