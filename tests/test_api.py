"""`dilatant` itself is the Python API, and costs nothing until it is used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.resources import files

import pytest

import dilatant


def test_importing_dilatant_loads_nothing_heavy() -> None:
    program = (
        "import sys; before = set(sys.modules); import dilatant;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(*sorted(new & {'torch', 'transformers', 'numpy', 'numba', 'pydantic'}))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


@pytest.mark.parametrize("name", dilatant.__all__)
def test_every_name_is_there_under_its_own_name(name: str) -> None:
    assert getattr(dilatant, name).__name__ == name
    assert name in dir(dilatant)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'"):
        dilatant.paralelize  # noqa: B018


def test_editors_see_types_and_every_name() -> None:
    """A type checker follows the imports that never run; they must name what `__getattr__` finds."""
    assert files("dilatant").joinpath("py.typed").is_file()
    spec = importlib.util.find_spec("dilatant")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as source:
        shown = source.read().split("if TYPE_CHECKING:")[1].split("__version__")[0]
    assert all(name in shown.replace(",", " ").split() for name in dilatant.__all__)
