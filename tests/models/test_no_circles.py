"""The files of the model room can be read in one order: none needs a later one, not even for a type."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import dilatant.models

ROOM = Path(dilatant.models.__file__).parent


def _imported(path: Path) -> set[str]:
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    return {
        (node.module or "").removeprefix("dilatant.models.")
        for node in nodes
        if (node.module or "").startswith("dilatant.models.")
    }


def test_no_file_needs_one_that_needs_it() -> None:
    graph = {path.stem: _imported(path) for path in ROOM.glob("*.py") if path.stem != "__init__"}
    assert graph["multimodal"] >= {"graph", "saving", "unit"}
    list(TopologicalSorter(graph).static_order())  # raises CycleError that lists the circle


def test_the_model_room_imports_no_room_above_it() -> None:
    above = ("plan", "schedule", "runtime", "training", "profiling", "report", "cli")
    for path in ROOM.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(f"dilatant.{room}" in text for room in above), path.name
