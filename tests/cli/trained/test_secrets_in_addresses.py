"""Secrets in the addresses of a config appear in no output and in no file but one, and a resumed run still has them."""

from __future__ import annotations

import base64
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cases.remote_data import http_server
from cases.tiny_project import Dilatant, tiny_config, write_images

pytest.importorskip("aiohttp")
TRACKER = """
import json, pathlib
def init(**about): pathlib.Path(__file__).with_name("tracked.json").write_text(json.dumps(about))
def log(scalars, step): pass
def finish(): pass
"""
SECRETS = ("us3r", "pa55word", "s1gnature", "t0ken")


@pytest.fixture
def secret_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `config.yaml`, whose data a server gives only to one user."""
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "trackio.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    write_images(tmp_path / "data", 4)
    password = base64.b64encode(b"us3r:pa55word").decode()
    with http_server(tmp_path / "data", password=password) as server:
        place = server.replace("://", "://us3r:pa55word@")
        tree = tiny_config(steps=2, save_steps=1, report_to=["trackio"])
        address = f"{place}/train.jsonl?X-Amz-Signature=s1gnature&token=t0ken"
        other = f"{place}/train.jsonl?sig=s1gnature"
        tree["data"] |= {"train": [{"path": address}, {"path": other}], "eval": [{"path": address, "limit": 2}]}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        yield tmp_path


def leaks(folder: Path) -> list[str]:
    """The files below that hold a secret, but for the one of secrets."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "credentials.json"]
    texts = {file: file.name.encode() + file.read_bytes() for file in files}
    return [str(file) for file, text in texts.items() if any(secret.encode() in text for secret in SECRETS)]


def test_secrets_of_addresses_stay_in_one_file(secret_data: Path, dilatant: Dilatant) -> None:
    config, run = secret_data / "config.yaml", secret_data / "run"
    told = []
    for command in (
        ("data", "stats", config, "--page", secret_data / "run.html", "--workers", 0),
        ("data", "stats", config, "--json", "--workers", 0),
        ("data", "lint", config, "--json", "--workers", 0),
        ("train", config),
        ("resume", run, "--set", "train.steps=3"),
    ):
        code, out, err = dilatant(*command)
        assert code == 0, err
        told.append(out + err)
    assert not any(secret in text for text in told for secret in SECRETS)
    config.unlink()
    assert "***@" in (secret_data / "tracked.json").read_text()
    assert leaks(secret_data) == []
    kept = run / "credentials.json"
    assert "pa55word" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "***@" in (run / "config.yaml").read_text()


def test_errors_about_an_address_do_not_tell_secrets(secret_data: Path, dilatant: Dilatant) -> None:
    config = secret_data / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    address = tree["data"]["train"][0]["path"]
    other = secret_data / "other.jsonl"
    for changed in (address.replace("train.jsonl", "gone.jsonl"), address.replace("us3r:", "us3r:x"), f"a::{address}"):
        for command in (("data", "lint", config, "--json", "--workers", 0), ("train", config)):
            code, out, err = dilatant(*command, "--set", f"data.train=[{{path: '{changed}'}}]")
            assert (code, "***@" in err) == (2, True), err
            assert not any(secret in out + err for secret in SECRETS)
    other.write_text('{"question": "a", "answer": "b", "image": "' + address.replace("127.0.0.1", "127.0.0.2") + '"}\n')
    code, out, err = dilatant("data", "lint", config, "--json", "--set", f"data.train.0.path={other}")
    assert code == 1, err
    assert "***@" in out
    assert not any(secret in out + err for secret in SECRETS)


def test_a_run_without_its_credentials_says_so(secret_data: Path, dilatant: Dilatant) -> None:
    config, run = secret_data / "config.yaml", secret_data / "run"
    assert dilatant("train", config)[0] == 0
    (run / "credentials.json").unlink()
    code, _, err = dilatant("resume", run, "--set", "train.steps=3")
    assert code == 2, err
    assert "lacks its credentials" in err
    assert "--set data.train.0.path=ADDRESS" in err
