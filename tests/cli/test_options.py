"""What holds for all verbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from cases.tiny_project import Dilatant
from dilatant.__main__ import main
from dilatant.cli.options import output_file, read_config
from dilatant.config.errors import UserError


def test_the_version_is_told_without_a_verb(dilatant: Dilatant) -> None:
    assert dilatant("--version") == (0, f"dilatant {version('dilatant')}\n", "")


@pytest.mark.parametrize(
    ("content", "replaced"),
    [(None, True), (b"", True), (b" \n", True), (b"mine: 1\n", False), (b"\xff\xfe\x00weights", False)],
)
def test_an_output_of_another_kind_is_not_replaced(tmp_path: Path, content: bytes | None, replaced: bool) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    option: Any = SimpleNamespace(opts=["--out"])
    if replaced:
        assert output_file("dilatant.plan.plan:Plan.from_json")(option, path) == path
    else:
        with pytest.raises(UserError, match="was not written by this option"):
            output_file("dilatant.plan.plan:Plan.from_json")(option, path)
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_run_on_the_cpu_hides_gpus_from_all_its_processes(project: Path) -> None:
    with patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        read_config(project / "config.yaml")
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        read_config(project / "config.yaml", ["train.device=cpu"])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_warning_is_a_line_without_its_place_in_the_code(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILATANT_CACHE", str(project / "config.yaml"))
    code, _, err = dilatant("data", "stats", project / "config.yaml")
    assert code == 0, err
    (line,) = [each for each in err.splitlines() if not each.startswith("loading ")]
    assert line.startswith("warning: the index of the data cannot be written to ")


def test_ctrl_c_while_the_command_is_imported_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dilatant.cli.app", Interrupted("dilatant.cli.app"))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_raises_nothing_inside_a_module_import(tmp_path: Path) -> None:
    (tmp_path / "extension.py").write_text(
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: print('raised', flush=True)"
    )
    (tmp_path / "app.py").write_text("import extension\ndef main(): print('went on')")
    call = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # jobs ignore it
        "import dilatant.cli as cli; cli.__path__ = ['.']; from dilatant.__main__ import main; "
        "import sys; sys.path.insert(0, '.'); main()"
    )
    done = subprocess.run([sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


FIRST_LINES = """
import contextlib, io, json, sys
from dilatant.cli.app import run

class Loads(BaseException):
    pass

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise Loads

sys.meta_path.insert(0, Refuse())
said = {}
for command in json.loads(sys.argv[1]):
    sys.argv, err = ["dilatant", *command], io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(Loads):
        run()
    said[" ".join(command)] = err.getvalue()
print(json.dumps(said))
"""


def test_every_command_prints_a_line_before_slow_imports(project: Path) -> None:
    run = project / "run"
    run.mkdir()
    (run / "config.yaml").write_text((project / "config.yaml").read_text())
    (run / "plan.json").write_text('{"units": []}')
    commands = [
        *([verb, "config.yaml"] for verb in ("plan", "simulate", "profile", "train")),
        *(["data", verb, "config.yaml"] for verb in ("stats", "lint")),
        *([verb, "run"] for verb in ("simulate", "resume", "export", "chat")),
        ["train", "--model", "some/model", "--data", "some/data"],
        ["generate", "run", "--prompt", "Side?"],
        ["evaluate", "run", "--data", "train.jsonl", "--judge", "judge.py:judge"],
        ["doctor"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINES, json.dumps(commands)], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {" ".join(command): "loading torch and transformers\n" for command in commands}
