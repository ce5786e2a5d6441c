"""Make text fit to be shown: control characters are escaped, and secrets in addresses are masked."""

from __future__ import annotations

import re

MASK = "***"
"""What is shown in the place of a secret."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls except tab and newline, marks that change text direction, and lone surrogates."""
_ACCOUNT = re.compile(r"(:/{1,2})(?:[^\s/?#]{0,999}|[^\s/?#\[:@]{0,99}:(?!\d{0,9}(?:[/?#\s]|$))\S{0,999})@")
"""User and password of an address. A password with / ? or # ends no address; one after a port is a part of the path. No
pattern is without a limit of length: hostile texts would take minutes."""
_PEER = re.compile(r"(?<![\w/@.])[^\s/@:'\"(]{1,99}:[^\s/@]{0,999}@(?=[\w.\-\[\]:]*:\d)")
"""User and password before HOST:PORT."""
_SIGNED = re.compile(
    r"([?&;][^\s=&;?]{0,99}(?:sig|token|secret|key|pass|pwd|credential|auth|sas)[^\s=&;?]{0,99}=)"
    r"(?:[^\s&#'\"<>;,:)]|['\";,:)](?=\w))+",
    re.IGNORECASE,
)
"""A parameter of an address whose name says that its value is a signature, a token or a key."""


def masked(text: str) -> str:
    """Return `text` with `***` in place of users with passwords, signatures and tokens in addresses."""
    if "@" in text:
        text = _PEER.sub(f"{MASK}@", _ACCOUNT.sub(rf"\1{MASK}@", text))
    return _SIGNED.sub(rf"\1{MASK}", text) if "=" in text else text


def escaped(text: str) -> str:
    r"""Return `text` with control characters escaped as in Python, such as `\x1b`; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Return a message for a terminal: `masked`, then `escaped`."""
    return escaped(masked(text))
