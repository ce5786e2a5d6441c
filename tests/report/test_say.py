"""What users name is printed as they named it."""

from __future__ import annotations

import io
import warnings

import pytest
from rich.console import Console

from dilatant.report.say import say, warn, warnings_as_lines


@pytest.mark.parametrize("text", ["[/red].png", "runs/x[/b]y", "runs/a[lr1]", "[bold]", "\\[x]", "a" * 300])
def test_brackets_and_length_of_a_name_change_nothing(text: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    say(console, text)
    warn(console, text)
    assert out.getvalue() == f"{text}\nwarning: {text}\n"


def test_a_warning_is_one_line_said_once_and_those_for_programmers_none() -> None:
    out = io.StringIO()
    with warnings_as_lines(Console(file=out, width=20)):
        for _ in range(2):
            warnings.warn("the cache\ncannot be written", stacklevel=1)
        warnings.warn("use another function", DeprecationWarning, stacklevel=1)
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
    assert out.getvalue() == "warning: the cache cannot be written\n"
