"""docs/design.md shows which room imports which; this holds it against the code. No file needs one that needs it."""

from __future__ import annotations

import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


def imports_between_rooms() -> dict[str, set[str]]:
    graph = grimp.build_graph("dilatant")
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        room = module.split(".")[1] if "." in module else ""
        for imported in graph.find_modules_directly_imported_by(module):
            target = imported.split(".")[1] if "." in imported else ""
            if room and target and room != target and not room.startswith("__"):
                found.setdefault(room, set()).add(target)
    return found


def imports_between_sub_rooms(room: str) -> dict[str, set[str]]:
    """Sub-room → the sub-rooms of the same room that it imports. Files at the root of a room are in none."""
    graph = grimp.build_graph("dilatant")
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        parts = module.split(".")
        if len(parts) < 4 or parts[1] != room:
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            target = imported.split(".")
            if len(target) > 3 and target[1] == room and target[2] != parts[2]:
                found.setdefault(parts[2], set()).add(target[2])
    return found


def test_the_documented_import_graph_is_the_real_one() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("| room | imports |")[2].partition("\n\n")[0]
    documented = {
        room: set(re.findall(r"\w+", targets))
        for room, targets in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
        if targets != "nobody"
    }
    assert documented == imports_between_rooms()


def test_sub_rooms_import_only_what_is_written_before_them() -> None:
    for room, order in SUB_ROOMS.items():
        folders = {path.parent.name for path in (ROOT / "src/dilatant" / room).glob("*/__init__.py")}
        assert folders == set(order), room
        for importer, targets in imports_between_sub_rooms(room).items():
            later = set(order[order.index(importer) :])
            assert not targets & later, f"{room}.{importer} imports {sorted(targets & later)}"


def test_folders_are_small_and_large_rooms_have_a_readme() -> None:
    source = ROOT / "src" / "dilatant"
    for folder in {path.parent for path in source.rglob("*.py")}:
        assert len([*folder.glob("*.py")]) <= 20, folder
    for room in SUB_ROOMS:
        assert (source / room / "README.md").is_file(), room


def test_packages_export_no_name_of_a_submodule() -> None:
    for path in (ROOT / "src" / "dilatant").glob("*/__init__.py"):
        below = {each.stem for each in path.parent.glob("*.py")} | {
            each.parent.name for each in path.parent.glob("*/*.py")
        }
        exported = set(getattr(importlib.import_module(f"dilatant.{path.parent.name}"), "__all__", ()))
        assert not exported & below, path


def test_no_file_needs_one_that_needs_it() -> None:
    graph = grimp.build_graph("dilatant")
    packages = {module for module in graph.modules if graph.find_children(module)}  # these pass on what is in them
    files = {module: graph.find_modules_directly_imported_by(module) - packages for module in graph.modules - packages}
    assert "dilatant.models.core.unit" in files["dilatant.models.multimodal"]
    list(TopologicalSorter(files).static_order())  # raises CycleError that lists the circle


ROOMS = ("config", "comm", "cost", "data", "attention", "models", "plan", "schedule", "report", "runtime",
         "planning", "hf", "training", "resilience", "cli")  # fmt: skip

SUB_ROOMS = {
    "config": ("files",),
    "comm": ("wire", "store"),
    "data": ("media", "media_units", "readers", "text", "order", "index", "workers"),
    "attention": ("masks", "kernels"),
    "models": ("experts", "adapters", "core", "dropout", "parallel", "language", "encoders", "generators", "families"),
    "plan": ("costs", "layouts", "templates", "search", "replay"),
    "schedule": ("families", "simulator", "assignment"),
    "report": ("text", "pages"),
    "runtime": ("state", "step"),
    "planning": ("problem", "measuring"),
    "training": ("optimizers", "checkpoints", "feeding", "evaluation", "engines"),
    "resilience": ("protocol", "processes", "partial_step", "worker"),
}
"""Room → its sub-rooms in the order in which they may import each other: a sub-room imports those before it."""

if __name__ == "__main__":  # the table as it should be
    found = imports_between_rooms()
    for room in ROOMS:
        print(f"| `{room}` | {', '.join(sorted(found.get(room, ()), key=ROOMS.index)) or 'nobody'} |")
