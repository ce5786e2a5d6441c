"""A tiny run over a handful of drawn images, driven as a user drives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from cases.tiny_project import Dilatant, tiny_config, write_images
from dilatant.cli.app import run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with data and `config.yaml`, as a user would have it."""
    write_images(tmp_path, 12)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_config()), encoding="utf-8")
    return tmp_path


@pytest.fixture
def dilatant(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Dilatant]:
    """Run the command line in this process, in the folder of the config that it is given: returns exit code, standard
    output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        configs = (Path(str(each)) for each in arguments if str(each).endswith(".yaml"))
        if (config := next(configs, Path())).is_absolute() and config.is_file():
            monkeypatch.chdir(config.parent)
        monkeypatch.setattr("sys.argv", ["dilatant", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else int(code is not None)), out, err

    with patch.dict(os.environ):  # `train.device: cpu` hides GPUs, which later tests want to see
        yield call
