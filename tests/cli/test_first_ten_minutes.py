"""docs/first_ten_minutes.md is true: its own commands are run, one block after another, and its model reads digits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dilatant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_first_ten_minutes_works(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, module in (("dilatant", "-m dilatant"), ("python", "")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n', encoding="utf-8")
        (bin_ / name).chmod(0o755)
    here = tmp_path / "here"
    here.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(dilatant.__file__).parents[1]),
    }
    text = (ROOT / "docs" / "first_ten_minutes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    said = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block],
            cwd=here, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    found = json.loads((here / "run" / "eval.json").read_text())
    assert [entry["step"] for entry in found["history"]] == [100, 200, 300, 400]
    assert found["exact_match"] >= 0.8  # of ten digits
    assert (here / "data.html").is_file()
    assert (here / "run" / "timeline.html").is_file()
    one, talked = said[4].splitlines()
    assert (one, talked) == ("0", "7")
    answers = [json.loads(line)["answer"] for line in said[5].splitlines()]
    assert answers == ["0", "1", "2", "3", "4"]
