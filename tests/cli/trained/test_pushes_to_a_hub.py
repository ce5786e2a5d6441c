"""`dilatant export --push-to-hub` against a hub on loopback, which refuses, vanishes, or takes the export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases.hub_server import TOKEN, Hub, hub_server
from cases.tiny_project import Dilatant


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for its own, as with HF_ENDPOINT, which it reads when it is imported."""
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # storage of another kind, with servers of its own
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def files_of(export: Path) -> dict[str, bytes]:
    files = [file for file in export.rglob("*") if file.is_file() and file.name != "files.json"]
    return {file.relative_to(export).as_posix(): file.read_bytes() for file in files}


def test_a_hub_gets_the_export_and_loses_old_shards(own_trained: Path, hub: Hub, dilatant: Dilatant) -> None:
    hub.files = {"language/model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    run = own_trained / "run"
    code, out, err = dilatant("export", run, "--push-to-hub", "us/tiny", "--json")
    assert code == 0, err
    assert json.loads(out) == {"export": str(run / "export"), "step": 6, "hub": f"{hub.address}/us/tiny"}
    assert hub.files == {**files_of(run / "export"), "notes.txt": b"mine"}
    assert any(name.endswith(".safetensors") for name in hub.files)
    assert (hub.made["name"], hub.made["organization"], hub.made["visibility"]) == ("tiny", "us", "private")
    assert hub.messages == ["Step 6, exported by Dilatant"]


@pytest.mark.parametrize(
    ("lost_at", "code", "says"),
    [
        (None, 401, "hf auth login"),
        (None, 403, "hf auth login"),
        ("/repos/create", None, "same command"),
        ("/preupload/", None, "same command"),
        ("/large/", None, "same command"),
        ("/commit/", None, "same command"),
    ],
)
def test_a_push_that_fails_says_why_and_keeps_the_export(
    lost_at: str | None,
    code: int | None,
    says: str,
    own_trained: Path,
    hub: Hub,
    dilatant: Dilatant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between repeated requests
    hub.lost_at, hub.code = lost_at, code
    run = own_trained / "run"
    status, _, err = dilatant("export", run, "--push-to-hub", "us/tiny")
    assert status == 2, err
    problem = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(problem) == 1, err
    assert f"{str(run / 'export')!r} is exported, but could not be pushed to 'us/tiny'" in problem[0]
    assert says in problem[0]
    assert err.endswith(problem[0] + "\n")
    assert TOKEN not in err
    assert "model.safetensors" in " ".join(files_of(run / "export"))
    assert "Step 6" not in hub.messages
    hub.lost_at = hub.code = None
    assert dilatant("export", run, "--push-to-hub", "us/tiny")[0] == 0
    assert hub.files == files_of(run / "export")


@pytest.mark.slow
def test_the_hub_is_that_of_the_environment(own_trained: Path, hub: Hub) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "dilatant", "export", own_trained / "run", "--push-to-hub", "tiny"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert f"pushed to {hub.address}/me/tiny" in ended.stdout
    assert hub.files == files_of(own_trained / "run" / "export")
