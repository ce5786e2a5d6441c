"""Environment variables are read and set in one file."""

from __future__ import annotations

import re
from pathlib import Path

import dilatant


def test_no_other_file_reads_the_environment() -> None:
    source = Path(dilatant.__file__).parent
    readers = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\benviron\b|\bgetenv\b|\bputenv\b", path.read_text())
    ]
    assert readers == ["config/environment.py"]
