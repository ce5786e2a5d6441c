"""docs/design.md shows which room imports which; this holds it against the code. No file needs one that needs it."""

from __future__ import annotations

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


def test_the_documented_import_graph_is_the_real_one() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("| room | imports |")[2].partition("\n\n")[0]
    documented = {
        room: set(re.findall(r"\w+", targets))
        for room, targets in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
        if targets != "nobody"
    }
    assert documented == imports_between_rooms()


def test_no_file_needs_one_that_needs_it() -> None:
    graph = grimp.build_graph("dilatant")
    packages = {
        module for module in graph.modules if graph.find_children(module)
    }  # these pass on what is in them
    files = {
        module: graph.find_modules_directly_imported_by(module) - packages
        for module in graph.modules - packages
    }
    assert "dilatant.models.unit" in files["dilatant.models.multimodal"]
    list(TopologicalSorter(files).static_order())  # raises CycleError that lists the circle


ROOMS = ("config", "comm", "cost", "data", "attention", "models", "plan", "schedule", "report", "runtime",
         "profiling", "training", "resilience", "cli")  # fmt: skip

if __name__ == "__main__":  # the table as it should be
    found = imports_between_rooms()
    for room in ROOMS:
        print(f"| `{room}` | {', '.join(sorted(found.get(room, ()), key=ROOMS.index)) or 'nobody'} |")
