"""What others put into a folder is neither written through nor believed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from dilatant.config import UserError
from dilatant.config.files.own_files import is_trusted_cache_file, open_in_place, read_text, require_plain
from dilatant.data.cache import Arrays, open_cache


def test_a_folder_of_files_and_folders_is_plain(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    (tmp_path / "link").symlink_to("a")
    require_plain(tmp_path / "a")
    require_plain(tmp_path / "link")
    require_plain(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling", "loop", "pipe", "socket"])
def test_whatever_could_lead_out_or_wait_is_refused_at_any_depth(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "x").mkdir(parents=True)
    place = run / "checkpoints" / "x" / "y"
    targets = {"file": "/etc/hostname", "folder": "/", "dangling": "nowhere", "loop": "y"}
    if kind in targets:
        place.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        monkeypatch.chdir(place.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("y")
    with pytest.raises(UserError, match="/checkpoints/x/y"):
        require_plain(run)


def test_a_hard_linked_file_is_never_appended_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log").hardlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="several names"):
        open_in_place(tmp_path / "log")
    with open_in_place(tmp_path / "new") as file:
        file.write(b"a")
    with open_in_place(tmp_path / "new") as file:
        file.write(b"b")
    assert (tmp_path / "new").read_text() == "ab"


@pytest.mark.parametrize("path", ["/dev/null", "pipe"])
def test_devices_and_pipes_are_not_appended_to(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        open_in_place(tmp_path / path)


def test_a_long_text_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="longer than 2 MiB"):
        read_text(tmp_path / "sparse", 2 << 20)
    with pytest.raises(OSError, match="longer than 1 MiB"):
        read_text(Path("/dev/zero"), 1 << 20)


@pytest.mark.parametrize(
    ("mode", "user", "link", "safe"),
    [
        (0o755, 0, False, True),
        (0o755, 1, False, True),  # a folder that a group shares, filled by another of its users
        (0o1777, 0, False, True),
        (0o1777, 1, False, False),
        (0o755, 0, True, False),
    ],
)
def test_what_everybody_may_put_into_a_cache_is_made_again(
    mode: int, user: int, link: bool, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    cache, key = open_cache(folder), "key"

    def make(value: int) -> Arrays:
        return cache.kept("sizes", key, lambda: Arrays({"x": np.full(3, value)}, {}, ""))

    make(1)
    folder.chmod(mode)
    if link:
        (folder / "sizes.arrays").rename(tmp_path / "elsewhere")
        (folder / "sizes.arrays").symlink_to(tmp_path / "elsewhere")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + user)
    assert is_trusted_cache_file(folder / "sizes.arrays") == safe
    assert (cache.known("sizes", key) is not None) == safe
    monkeypatch.undo()
    assert make(2).arrays["x"][0] == (2 if link else 1)
