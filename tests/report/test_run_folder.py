"""metrics.jsonl keeps one record a step across crashes, and the folder refuses what it cannot write."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dilatant.config import UserError
from dilatant.report.run_folder import RunFolder, last_step


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


def test_a_line_cut_off_by_a_crash_is_dropped_without_a_word(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    assert RunFolder(tmp_path).begin_metrics(2) is None
    assert not (tmp_path / "metrics.damaged").exists()
    log_steps(tmp_path, 2, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_record_that_lacks_only_its_end_of_line_is_kept(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 1)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2}')
    log_steps(tmp_path, 2, 3)
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    "line", ['{"step": "x"}', "null", "[1]", '{"step": true}', '{"loss": 1}', "[" * 100_000, "{", "\x00", '"step"']
)
def test_malformed_record_is_set_aside_and_stops_nothing(tmp_path: Path, line: str) -> None:
    log_steps(tmp_path, 0, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(f'{line}\n{{"step": 3}}\n')
    run = RunFolder(tmp_path)
    warning = run.begin_metrics(2)
    run.close()
    assert warning is not None
    assert "1 lines" in warning
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "metrics.damaged").read_text() == f"{line}\n"
    assert RunFolder(tmp_path).begin_metrics(2) is None


def test_bytes_that_are_no_text_are_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    assert RunFolder(tmp_path).begin_metrics(1) is not None
    assert (tmp_path / "metrics.damaged").read_bytes() == b"\xff\xfe\n"


HOLD = (
    "import sys\nfrom dilatant.report.run_folder import RunFolder, last_step\n"
    "folder = RunFolder(sys.argv[1])\nfolder.lock()\nprint('held', flush=True)\nsys.stdin.read()\n"
)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_command_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    process = holder(tmp_path)
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match=rf"is in use by process {process.pid} on {socket.gethostname()};"):
        folder.lock()
    process.communicate("")
    folder.lock()
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        RunFolder(tmp_path).lock()
    folder.close()
    RunFolder(tmp_path).lock()


def test_the_lock_of_a_killed_command_is_free(tmp_path: Path) -> None:
    process = holder(tmp_path)
    (tmp_path / ".config.yaml.0123456789ab.writing").write_text("half")
    process.kill()
    process.communicate()
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.close()
    assert not list(tmp_path.glob("*.writing"))


def test_several_processes_may_write_the_same_file(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path) for _ in range(4)]
    texts = [str(number) * 10_000 for number in range(4)]

    def write(number: int) -> None:
        for _ in range(25):
            folders[number].write_text("config.yaml", texts[number])
            assert (tmp_path / "config.yaml").read_text() in texts

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def test_a_full_disk_is_the_users_to_mend(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run._metrics = (tmp_path / "metrics.jsonl").open("ab")
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


WRITTEN = ("config.yaml", "metrics.jsonl", "plan.json", "eval.json", "checkpoints/best.pt", "resilience/notes.md")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_no_run_wrote_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    for _ in range(2):  # nor at a second try
        with pytest.raises(UserError, match="which no run wrote"):
            RunFolder(tmp_path).lock()
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} == {name.partition("/")[0]}


def test_a_folder_with_other_things_in_it_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        folder = RunFolder(tmp_path)
        folder.lock()
        folder.write_text("config.yaml", "x")
        folder.close()


def test_a_copied_run_without_its_lock_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("x")
    RunFolder(tmp_path).lock()


def test_rebuilt_run_keeps_records_of_committed_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = json.dumps({"step": 1, "loss": "x" * 200_000})  # longer than what is read at once
    for written, completed, kept in (
        ("", 0, []),
        (f"{first}\n", 1, [1]),
        (f'{first}\n{{"step": 2}}\n', 5, [1, 2]),
        (f'{first}\n{{"step": 2}}\n{{"step": 3}}\n', 2, [1, 2]),
        (f'{first}\n{{"step": 2}}\n{{"st', 2, [1, 2]),
        (f"{first}\nno record\n", 1, [1]),
    ):
        path.write_text(written)
        run = RunFolder(tmp_path)
        run.begin_metrics(completed, goes_on=True)
        run.log({"step": completed + 1})
        run.close()
        found = [json.loads(line)["step"] for line in path.read_text().splitlines() if line != "no record"]
        assert found == [*kept, completed + 1]
        assert last_step(path) == completed + 1


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "metrics.jsonl",
        "metrics.damaged",
        "checkpoints",
        "plan",
        "checkpoints/step-00000001",
        "export/x/y",
        "data.html",
    ],
)
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_links_in_run_folder_are_refused_before_any_write(name: str, target: str, tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("mine")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / target)
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError, match=rf"{name}' is a link.*remove it"):
        RunFolder(run).lock()
    assert sorted(run.rglob("*")) == before
    assert sorted(path.name for path in outside.rglob("*")) == ["file", "folder"]
    assert (outside / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
@pytest.mark.parametrize("linked", ["symlink_to", "hardlink_to"])
def test_a_link_that_appears_later_is_not_written_through(name: str, linked: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text('{"step": 1}\n')
    run = RunFolder(tmp_path / "run")
    getattr(run.path / name, linked)(mine)
    write = run.lock if name == ".lock" else partial(run.begin_metrics, 1, goes_on=True)
    with pytest.raises(UserError, match=r"is a link|several names \(hard links\)"):
        write()
    assert mine.read_text() == '{"step": 1}\n'


def test_lines_that_are_no_records_do_not_go_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = RunFolder(tmp_path / "run")
    (run.path / "metrics.jsonl").write_text("echo harm\n")
    (run.path / "metrics.damaged").symlink_to(mine)
    with pytest.raises(UserError, match=r"metrics.damaged is a link"):
        run.begin_metrics(0)
    assert mine.read_text() == "mine"


def test_pipes_in_a_run_folder_are_not_waited_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert last_step(tmp_path / "metrics.jsonl") == 0
    with pytest.raises(UserError, match=r"metrics.jsonl' is no regular file"):
        run.lock()


def test_run_folder_may_be_a_link_and_hold_foreign_links(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "scratch" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "scratch" / "data").symlink_to("/")  # of the user's own
    (tmp_path / "runs").symlink_to("scratch")
    folder = RunFolder(tmp_path / "runs")
    folder.lock()
    folder.begin_metrics(0)
    folder.log({"step": 1})
    folder.close()
    assert steps(tmp_path / "scratch") == [1]
