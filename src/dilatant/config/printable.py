"""Escape control characters in untrusted text before it is printed on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls except tab and newline, marks that change text direction, and lone surrogates."""


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped as in Python, such as `\x1b`; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
