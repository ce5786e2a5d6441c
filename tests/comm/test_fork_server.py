"""The fork server starts wherever its caller is: in any folder, under any TMPDIR, from standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dilatant.comm.fork_server import NO_GUARD_EXIT

START = """
import multiprocessing, sys
from dilatant.comm import fork_server
fork_server.warm_up(["random", "dilatant.config.errors"])
process = multiprocessing.get_context("forkserver").Process(target=print, args=("works",))
process.start()
process.join(60)
with open("ended", "w") as file:
    file.write(str(process.exitcode))
"""


def python(*arguments: str, cwd: Path, text: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=cwd,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """As by the installed command, whose own folder is on the path and the working folder is not."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "script.py"
    script.write_text("if __name__ == '__main__':" + START.replace("\n", "\n    "))
    for name in ("random", "queue", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    done = python(str(script), cwd=tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["works"], "")
    assert (tmp_path / "ended").read_text() == "0"


def test_a_long_tmpdir_and_a_script_on_standard_input_do_no_harm(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    done = python("-", cwd=tmp_path, text=START, TMPDIR=str(long))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["works"], "")
    assert (tmp_path / "ended").read_text() == "0"
    assert not [*long.iterdir()]  # nor is anything left there


def test_a_script_without_a_main_guard_is_run_once_and_found_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START)
    done = python(str(script), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "ended").read_text() == str(NO_GUARD_EXIT)


def test_the_command_works_with_closed_streams_and_ascii_ones(tmp_path: Path) -> None:
    closed = ["bash", "-c", 'exec "$0" -m dilatant --version <&- >&- 2>&-', sys.executable]
    assert subprocess.run(closed, cwd=tmp_path, check=False).returncode == 0
    said = "from dilatant.report.say import print_anything as p; p(); print('1 \\u00b5s')"
    done = python("-c", said, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "1 \\xb5s\n")


def test_what_c_libraries_write_in_a_data_worker_is_not_shown(tmp_path: Path) -> None:
    code = "import os, sys; from dilatant.data.workers.ordered_map import begin_work; begin_work(); "
    code += "os.write(2, b'noise'); print('ours', file=sys.stderr)"
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "ours\n")
