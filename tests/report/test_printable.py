"""Nothing that others wrote is obeyed by a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table

from dilatant.cli import app
from dilatant.config import UserError
from dilatant.config.printable import printable
from dilatant.report.say import Terminal, print_line, say, warn

HARM = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\x7f\udc80\r"
CONTROLS = "\x1b\x07\x9b\u202e\x7f\udc80\r"


def test_controls_are_written_out_and_text_stays() -> None:
    assert printable("a\x1b[31mb\r\n\tc\u202e\x9b\udc80") == "a\\x1b[31mb\\r\n\tc\\u202e\\x9b\\udc80"
    text = "Grüße, 你好, 👩‍👩‍👧, שלום,\n\ttab, a\\b"
    assert printable(text) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_obeys_nothing_but_its_own_styles(terminal: bool) -> None:
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=terminal, color_system=None, width=200)
    table = Table(HARM)
    table.add_row(HARM)
    say(console, HARM)
    warn(console, HARM)
    print_line(console, (HARM, "bold"))
    console.print(HARM, table, HARM)
    with Live(table, console=console, auto_refresh=False) as live:
        live.update(table, refresh=True)
    shown = file.getvalue()
    assert "\\x1b]0;title" in shown
    assert not set(CONTROLS) & set(shown if not terminal else _without_cursor_moves(shown))


def _without_cursor_moves(shown: str) -> str:
    """Without what rich itself writes to draw a live table over the last one."""
    for own in ("\x1b[?25l", "\x1b[?25h", "\x1b[1A", "\x1b[2K", "\r", "\x1b[1m", "\x1b[0m", "\x1b[33m"):
        shown = shown.replace(own, "")
    return shown


def test_an_error_with_a_name_of_others_obeys_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise UserError(f"sample {HARM} is wrong:\n  - [bold]{HARM}")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit):
        app.run()
    err = capsys.readouterr().err
    assert not set(CONTROLS) & set(err)
    assert err.count("\\x1b]0;title") == 2


def test_status_obeys_nothing_of_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "resilience"
    folder.mkdir()
    event = {"time": 1.0, "generation": 1, "task": "rebuild", "step": 0, "members": ["a"], "reason": HARM}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for _ in range(2)))
    (folder / "coordinator.json").write_text(json.dumps({"stopped": HARM.replace("\udc80", "")}))
    node = {"node": HARM, "host": HARM, "pid": 1, "workers": {HARM: 2}}
    (folder / "node-1.json").write_text(json.dumps(node))
    monkeypatch.setattr("sys.argv", ["dilatant", "status", str(tmp_path)])
    with pytest.raises(SystemExit):
        app.run()
    out, err = capsys.readouterr()
    assert "\\x1b]0;title" in out, err
    assert not set(CONTROLS) & set(out)
