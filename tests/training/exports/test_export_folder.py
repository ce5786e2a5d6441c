"""An export replaces an earlier export and nothing else; a crash loses neither the old one nor the new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilatant.config import UserError
from dilatant.hf.export import check_target, replacing


def write(folder: Path, text: str) -> None:
    with replacing(folder) as writing:
        (writing / "language").mkdir()
        (writing / "language" / "model.safetensors").write_text(text)
        (writing / "multimodal.json").write_text(text)


def content(folder: Path) -> dict[str, str]:
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    files.pop("files.json", None)
    return files


def export_of(text: str) -> dict[str, str]:
    return {"language/model.safetensors": text, "multimodal.json": text}


@pytest.mark.parametrize("name", ["new", "new/er/est", "odd [name]*", ".hidden"])
def test_an_export_is_replaced_by_the_next_one(tmp_path: Path, name: str) -> None:
    for text in ("one", "two"):
        check_target(tmp_path / name)
        write(tmp_path / name, text)
        assert content(tmp_path / name) == export_of(text)
    assert len(list((tmp_path / name).parent.iterdir())) == 1  # nothing is left beside it


def test_an_empty_folder_may_become_an_export(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    write(tmp_path / "empty", "one")
    assert content(tmp_path / "empty") == export_of("one")


@pytest.mark.parametrize("foreign", ["precious.txt", "language/thesis.txt", "deep/er/notes", "link", "empty/"])
def test_what_no_export_wrote_is_never_replaced(tmp_path: Path, foreign: str) -> None:
    for with_export in (False, True):
        folder = tmp_path / str(with_export)
        if with_export:
            write(folder, "one")
        if foreign == "link":
            folder.mkdir(exist_ok=True)
            (folder / "link").symlink_to(tmp_path)
        elif foreign.endswith("/"):
            (folder / foreign).mkdir(parents=True)
        else:
            (folder / foreign).parent.mkdir(parents=True, exist_ok=True)
            (folder / foreign).write_text("precious")
        with pytest.raises(UserError, match="no export wrote"):
            check_target(folder)


def test_a_listed_file_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "export", "one")
    (tmp_path / "export" / "multimodal.json").unlink()
    (tmp_path / "export" / "multimodal.json").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="no export wrote"):
        check_target(tmp_path / "export")


@pytest.mark.parametrize("listed", ["", "[]", "null", '{"files": 3}', "[" * 100_000])
def test_a_list_that_says_nothing_allows_nothing(tmp_path: Path, listed: str) -> None:
    write(tmp_path / "export", "one")
    (tmp_path / "export" / "files.json").write_text(listed)
    with pytest.raises(UserError, match="no export wrote"):
        check_target(tmp_path / "export")


def test_the_run_and_what_holds_it_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "project" / "run"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "file").write_text("")
    for target, says in {
        run: "holds the run itself",
        run.parent: "holds the run itself",
        Path("../project"): "holds the run itself",
        run / "export" / "..": "holds the run itself",
        run / "checkpoints": "among the run's checkpoints",
        run / "checkpoints" / "step-00000001": "among the run's checkpoints",
        Path("."): "the command runs in it",
        Path(".."): "the command runs in it",
        Path("/"): "the command runs in it",
        tmp_path / "link": "it is a link",
        tmp_path / "file": "it is a file",
    }.items():
        with pytest.raises(UserError, match=says):
            check_target(target, run)
    check_target(run / "export", run)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write(tmp_path / "export", "one")
    rename, calls = Path.rename, []

    def fail(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "export", "two")
    assert content(tmp_path / "export") == export_of("one")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("after", ["half written", "first rename", "second rename"])
def test_a_crash_loses_neither(tmp_path: Path, after: str) -> None:
    write(tmp_path / "export", "one")
    if after == "half written":
        (tmp_path / ".export.writing-0123abcd" / "language").mkdir(parents=True)
    else:
        os.rename(tmp_path / "export", tmp_path / ".export.old-0123abcd")
    if after == "second rename":
        (tmp_path / "export").mkdir()
    seen = content(tmp_path / (".export.old-0123abcd" if after == "first rename" else "export"))
    assert seen == ({} if after == "second rename" else export_of("one"))
    with pytest.raises(RuntimeError), replacing(tmp_path / "export"):
        raise RuntimeError("the disk is full")
    assert content(tmp_path / "export") == ({} if after == "second rename" else export_of("one"))
    write(tmp_path / "export", "two")
    assert content(tmp_path / "export") == export_of("two")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
