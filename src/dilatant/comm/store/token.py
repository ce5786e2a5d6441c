"""Token: the secret shared by the ranks of one run, with which they authenticate to their store."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dilatant.config.environment import config_home, token_variables
from dilatant.config.errors import UserError

MIN_CHARACTERS = 16
REMEDY = (
    "set DILATANT_TOKEN to one secret on all machines (openssl rand -hex 32 makes one), or DILATANT_TOKEN_FILE to a "
    "file of mode 600 that holds it"
)


def fresh_token() -> bytes:
    """Create a token for ranks that one process starts, which passes it to them."""
    return secrets.token_bytes(32)


def shared_token() -> bytes:
    """Return the token for ranks under an outer launcher: DILATANT_TOKEN, else DILATANT_TOKEN_FILE, else the user's.

    The user's token file is created at first use, readable by the user only: one machine needs no setup, nor do
    several with one home directory, as on clusters. Raises UserError.
    """
    token, file = token_variables()
    if token is not None:
        return _checked(token, "DILATANT_TOKEN")
    if file is not None:
        return _checked(_read(Path(file)), f"DILATANT_TOKEN_FILE ({file})")
    path = config_home() / "dilatant" / "token"
    try:
        _make(path)
    except OSError as error:
        raise UserError(f"no token can be kept at {path} ({error}); {REMEDY}") from None
    return _checked(_read(path), str(path))


def _make(path: Path) -> None:
    """Create a token file unless there is one. It appears atomically, even if many ranks create it at once."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".token-{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"the token file {path} is no file")
        if path.stat().st_mode & 0o077:
            raise UserError(f"others may read the token file {path}; chmod 600 it")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {path} cannot be read ({error}); {REMEDY}") from None


def _checked(text: str, place: str) -> bytes:
    token = text.strip()
    if len(token) < MIN_CHARACTERS:
        raise UserError(f"the token in {place} has fewer than {MIN_CHARACTERS} characters; {REMEDY}")
    return token.encode()
