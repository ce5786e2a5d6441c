"""The list of wrong changes fits the tree, and the script says which of them tests notice."""

from __future__ import annotations

import py_compile
from dataclasses import replace
from pathlib import Path

import pytest

from mutants import run
from mutants.run import Place, check, read_places, try_change

PLACE = Place("off by one", "fresh", "one.py", "n + 1", "n + 2", "one is more", ("tests/test_one.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one function, with a test of it."""
    for name, text in {
        "src/dilatant/__init__.py": "",
        "src/dilatant/one.py": "def after(n):\n    return n + 1  # noqa\n",
        "tests/test_one.py": "from dilatant.one import after\n\n\ndef test_one():\n    assert after(1) == 2\n",
        "tests/test_all.py": "from dilatant.one import after\n\n\ndef test_all():\n    assert after(2) == 3\n",
        "tests/test_type.py": "from dilatant.one import after\n\n\ndef test_type():\n    assert after(1) > 0\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_text_is_there_once_and_every_change_is_python() -> None:
    places = read_places()
    assert check(places) == []
    assert [path for place in places for path in place.tests if not (run.ROOT / path).exists()] == []
    assert all(place.old != place.new and place.breaks for place in places)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"old": "n + 3"}, "occurs 0 times in src/dilatant/one.py"),
        ({"old": "n"}, "occurs 4 times"),
        ({"new": "n +"}, "invalid syntax"),
        ({"file": "gone.py"}, "No such file"),
    ],
)
def test_a_place_that_does_not_fit_is_named(tree: Path, changes: dict[str, str], problem: str) -> None:
    (found,) = check([replace(PLACE, **changes)], tree / "src" / "dilatant")
    assert found.startswith("off by one: ")
    assert problem in found


def test_a_changed_file_is_compiled_again(tree: Path) -> None:
    """Python would use the old bytecode where a change of equal length is written within the same second."""
    file = tree / "src" / "dilatant" / "one.py"
    compiled = Path(py_compile.compile(str(file), doraise=True) or "")
    assert compiled.is_file()
    run.write_source(file, PLACE.changed(file.read_text()))
    assert "n + 2" in file.read_text()
    assert not compiled.exists()


@pytest.mark.slow
def test_a_change_is_noticed_by_a_test_that_passes_without_it(tree: Path) -> None:
    noticed = try_change(PLACE, tree, ("tests/test_type.py", "tests/test_one.py"), 60.0)
    assert (noticed.verdict, noticed.by) == (run.NOTICED, "tests/test_one.py::test_one")
    nearest_first = try_change(PLACE, tree, ("tests/test_one.py", "tests"), 60.0)
    assert nearest_first.by == noticed.by
    assert try_change(PLACE, tree, ("tests/test_type.py", "tests"), 60.0).by == "tests/test_all.py::test_all"
    assert try_change(PLACE, tree, ("tests/test_type.py",), 60.0).verdict == run.SURVIVED
    assert "n + 1" in (tree / "src" / "dilatant" / "one.py").read_text()
    (tree / "tests" / "test_one.py").write_text("def test_one():\n    raise AssertionError\n")
    with pytest.raises(RuntimeError, match=r"off by one: .* does not pass without the change"):
        try_change(PLACE, tree, PLACE.tests, 60.0)
