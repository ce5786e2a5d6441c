"""Benchmarks and examples import only what exists: most of them are not run by any test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {"dilatant", "benchmarks"}


def defined_in(module: str) -> set[str] | None:
    """Return the names that a module has, without importing it; None if there is no such module."""
    place = (ROOT / "src" if module.startswith("dilatant") else ROOT) / Path(*module.split("."))
    if place.is_dir():
        return {path.stem for path in place.iterdir()} | _names_of(place / "__init__.py")
    return _names_of(place.with_suffix(".py")) if place.with_suffix(".py").is_file() else None


def _names_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and path.name == "__init__.py":  # names that are imported on use
            found.add(str(node.value))
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_what_is_imported_from_packages_of_ours_exists(folder: str) -> None:
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ROOTS:
                continue
            known = defined_in(node.module or "")
            missing += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if known is None or alias.name not in known
            ]
    assert not missing
