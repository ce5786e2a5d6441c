"""Lines for the user that hold text of the user's: paths, names, ids, messages. Brackets in it are just brackets."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def say(console: Console, text: str, style: str = "") -> None:
    """Print `text` as it is, unwrapped."""
    console.print(Text(text, style=style), soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print `warning: text`."""
    console.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)
