"""What holds for all verbs."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from tiny_project import Dilatant

from dilatant.cli.options import read_config


def test_the_version_is_told_without_a_verb(dilatant: Dilatant) -> None:
    assert dilatant("--version") == (0, f"dilatant {version('dilatant')}\n", "")


def test_a_run_on_the_cpu_hides_gpus_from_all_its_processes(project: Path) -> None:
    with patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        read_config(project / "config.yaml")
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        read_config(project / "config.yaml", ["train.device=cpu"])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
