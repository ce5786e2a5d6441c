"""The token of ranks that an outer launcher started: given, or the user's own; never readable by others."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dilatant.comm.store.token import shared_token
from dilatant.config.errors import UserError

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DILATANT_TOKEN", raising=False)
    monkeypatch.delenv("DILATANT_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def test_concurrent_ranks_create_one_token_with_private_access(tmp_path: Path) -> None:
    tokens: list[bytes] = []
    threads = [threading.Thread(target=lambda: tokens.append(shared_token())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(tokens)) == 1
    assert len(tokens) == 16
    assert len(tokens[0]) == 64
    (path,) = (tmp_path / "home" / "dilatant").iterdir()  # no draft is left
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_variable_precedes_a_file_and_the_user_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-of-file\n")
    file.chmod(0o600)
    monkeypatch.setenv("DILATANT_TOKEN_FILE", str(file))
    assert shared_token() == f"{SECRET}-of-file".encode()
    monkeypatch.setenv("DILATANT_TOKEN", SECRET)
    assert shared_token() == SECRET.encode()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.mkdir(), "is no file"),
        (lambda path: os.mkfifo(path, 0o600), "is no file"),
        (lambda path: (path.write_text(SECRET), path.chmod(0o644)), "others may read.*chmod 600"),
        (lambda path: (path.write_text(SECRET), path.chmod(0o640)), "others may read.*chmod 600"),
        (lambda path: (path.write_text(SECRET), path.chmod(0o604)), "others may read.*chmod 600"),
        (lambda path: (path.write_text(SECRET), path.chmod(0o620)), "others may read.*chmod 600"),
        (lambda path: (path.write_text("short"), path.chmod(0o600)), "fewer than 16 characters; set DILATANT_TOKEN"),
        (lambda path: (path.write_bytes(b"\xff" * 40), path.chmod(0o600)), "cannot be read"),
    ],
)
def test_a_bad_token_file_is_one_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make, message: str
) -> None:
    make(tmp_path / "token")
    monkeypatch.setenv("DILATANT_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(UserError, match=message):
        shared_token()


def test_an_empty_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILATANT_TOKEN", "")
    with pytest.raises(UserError, match="the token in DILATANT_TOKEN has fewer"):
        shared_token()
