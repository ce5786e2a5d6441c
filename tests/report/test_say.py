"""What users name is printed as they named it."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numba
import pytest
from rich.console import Console
from rich.table import Table

from dilatant.report import say as say_module
from dilatant.report.say import open_console, say, show_progress, warn, warnings_as_lines


@pytest.mark.parametrize("text", ["[/red].png", "runs/x[/b]y", "runs/a[lr1]", "[bold]", "\\[x]", "a" * 300])
def test_brackets_and_length_of_a_name_change_nothing(text: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    say(console, text)
    warn(console, text)
    assert out.getvalue() == f"{text}\nwarning: {text}\n"


def test_a_notebook_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", kernel, raising=False)
    assert Console().is_jupyter
    assert not open_console().is_jupyter


def test_no_console_of_ours_reads_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tables either, where `doctor` says what to install."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    console = open_console()
    table = Table(show_header=False, box=None)
    table.add_row("pip install 'dilatant[gpu]'")
    console.print(table)
    console.print("runs/[x]")
    assert [line.strip() for line in out.getvalue().splitlines()] == ["pip install 'dilatant[gpu]'", "runs/[x]"]
    makers = {path.name for path in Path(say_module.__file__).parents[1].rglob("*.py")
              if re.search(r"\b(Console|Terminal)\((?!Protocol)", path.read_text())}  # fmt: skip
    assert makers == {"say.py"}


def test_user_warnings_print_once_on_one_line() -> None:
    out = io.StringIO()
    with warnings_as_lines(Console(file=out, width=20)):
        for _ in range(2):
            warnings.warn("the cache\ncannot be written", stacklevel=1)
        warnings.warn("use another function", DeprecationWarning, stacklevel=1)
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
    assert out.getvalue() == "warning: the cache cannot be written\n"


def test_a_task_says_once_that_it_compiles_kernels() -> None:
    out = io.StringIO()
    with show_progress(Console(file=out, width=80), "planning"):
        for add in (1, 2):
            assert numba.njit(lambda number, add=add: number + add)(1) == 1 + add
    assert out.getvalue().splitlines() == ["planning", "compiling the planner's kernels, once for this installation"]
