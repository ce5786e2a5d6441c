"""What a killed process leaves in the folder for temporary files goes with the next command, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilatant.comm.temporary import OWNER, TemporaryFolder, remove_left_folders

FOLDERS = """
import sys, time
from dilatant.comm.fork_server import warm_up
from dilatant.comm.temporary import TemporaryFolder
own = TemporaryFolder()
warm_up(())
print(own.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="test-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_only_folders_of_killed_processes_are_removed(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FOLDERS],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        own = Path(process.stdout.readline().decode().strip())
        made = sorted(temporary.iterdir())
        assert own in made
        assert [path.name.partition("-")[0] for path in made] == ["dilatant", "pymp"]
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in made)
        remove_left_folders()
        assert sorted(temporary.iterdir()) == made
        process.send_signal(signal.SIGKILL)
        process.wait()
    remove_left_folders()
    assert not list(temporary.iterdir())


def test_folders_that_end_in_order_leave_nothing(temporary: Path) -> None:
    folder = TemporaryFolder()
    (Path(folder.path) / "0.sock").touch()
    open_before = len(os.listdir("/proc/self/fd"))
    folder.close()
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == open_before - 1
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("owner", [None, "", "not a number", "999999999", "-1 gone", "link", "pipe"])
def test_folders_that_are_not_surely_left_stay(owner: str | None, temporary: Path) -> None:
    folder, mine = temporary / "dilatant-x", temporary / "mine"
    folder.mkdir()
    mine.write_text("999999999 1 b")
    if owner == "link":
        (folder / OWNER).symlink_to(mine)
    elif owner == "pipe":
        os.mkfifo(folder / OWNER)
    elif owner is not None:
        (folder / OWNER).write_text(owner)
    stays = owner != "999999999"  # no process has this number
    remove_left_folders()
    assert folder.exists() == stays
    assert mine.exists()


def test_a_link_to_a_left_folder_is_not_followed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text("999999999 1 b")
    (temporary / "dilatant-x").symlink_to(elsewhere)
    remove_left_folders()
    assert (elsewhere / OWNER).exists()


def test_a_process_with_the_same_number_is_another_one(temporary: Path) -> None:
    (temporary / "dilatant-x").mkdir()
    owner = temporary / "dilatant-x" / OWNER
    owner.write_text(f"{os.getpid()} 1 another boot")
    remove_left_folders()
    assert not owner.exists()
