"""What users name is printed as they named it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dilatant.report.say import say, warn


@pytest.mark.parametrize("text", ["[/red].png", "runs/x[/b]y", "runs/a[lr1]", "[bold]", "\\[x]", "a" * 300])
def test_brackets_and_length_of_a_name_change_nothing(text: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    say(console, text)
    warn(console, text)
    assert out.getvalue() == f"{text}\nwarning: {text}\n"
