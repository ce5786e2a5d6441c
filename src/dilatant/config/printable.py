"""Text of others on a terminal: control characters are written out instead of obeyed."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls but for tab and newline, marks that reverse the order of letters, and lone surrogates."""


def printable(text: str) -> str:
    r"""Return `text` with control characters as they are written in Python, such as `\x1b`; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
