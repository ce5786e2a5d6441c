"""Run commands as function calls in the process of the tests."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from dilatant.cli.app import run


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run a command in the folder of the config among its arguments, if there is one; return its exit code."""
    configs = (Path(str(each)) for each in arguments if str(each).endswith(".yaml"))
    if (config := next(configs, Path())).is_absolute() and config.is_file():
        monkeypatch.chdir(config.parent)
    monkeypatch.setattr("sys.argv", ["dilatant", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run()
    code = ended.value.code
    return code if isinstance(code, int) else int(code is not None)


def make_once(*arguments: object) -> None:
    """Run a command that must succeed and whose files several tests read."""
    with patch.dict(os.environ), pytest.MonkeyPatch.context() as monkeypatch:
        assert run_command(monkeypatch, *arguments) == 0, arguments
