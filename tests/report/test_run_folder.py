"""metrics.jsonl keeps one record a step across crashes, and the folder refuses what it cannot write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilatant.config import UserError
from dilatant.report.run_folder import RunFolder


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log_steps(folder: Path, completed: int, *numbers: int) -> None:
    run = RunFolder(folder)
    run.begin_metrics(completed)
    for number in numbers:
        run.log({"step": number})
    run.close()


def test_a_resumed_run_continues_its_records(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1, 2, 3, 4, 5)
    log_steps(tmp_path, 3, 4, 5, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    log_steps(tmp_path, 2, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_full_disk_is_the_users_to_mend(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run._metrics = (tmp_path / "metrics.jsonl").open("a")
    with pytest.raises(UserError, match=r"cannot be written: No space left on device"):
        run.log({"step": 1})
    run.close()


def test_a_new_run_starts_an_empty_record(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1, 2)
    log_steps(tmp_path, 0, 1)
    assert steps(tmp_path) == [1]


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="output_dir"):
        RunFolder(tmp_path / "run")
