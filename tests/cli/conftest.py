"""Fixtures of a tiny run on a few generated images, driven by the commands of a user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from cases.planning.planning_verbs import FEW, H100
from cases.tiny_project import Dilatant, write_project
from harness.command_line import make_once, run_command


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A new folder with data and `config.yaml`."""
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project after a run of six steps with a checkpoint after every third; tests must not change it."""
    project = write_project(tmp_path_factory.mktemp("trained"))
    make_once("train", project / "config.yaml", "--set", "train.save_steps=3")
    return project


@pytest.fixture(scope="session")
def planned_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a plan for two H100 in `run/plan`; tests must not change it."""
    project = write_project(tmp_path_factory.mktemp("planned"))
    make_once("plan", project / "config.yaml", *H100, *FEW, "--set", "cluster.gpus_per_node=2")
    return project


@pytest.fixture
def own_trained(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` that a test may change, with the paths in the run's config replaced."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(trained), str(tmp_path)), encoding="utf-8")
    return tmp_path


@pytest.fixture
def dilatant(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Dilatant]:
    """Function that runs a command in this process, in the folder of the config among its arguments, and returns exit
    code, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command(monkeypatch, *arguments)
        out, err = capfd.readouterr()
        return code, out, err

    with patch.dict(os.environ):  # `train.device: cpu` hides GPUs, which later tests want to see
        yield call
