"""Rerun the papers' tables: `python -m benchmarks.papers [--only oobleck cornstarch entrain disttrain] [--json FILE]`.

Every table says what its figures are: measured here, replayed from the paper's own measurements, predicted from public
shapes by the shipped cost model, or predicted after a constant was fitted to another figure of the paper. Sizes of
samples are those in ../shared/data/workload_stats, of which some are modelled themselves (each table says so). The
folder is found through DILATANT_SHARED, or beside the repository; tables that need it are left out without it.

With --json, papers of that file that are not run again stay as they are; --untimed leaves the measured tables alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import ROOT
from benchmarks.machine import machine

CHAPTERS = ("oobleck", "cornstarch", "entrain", "disttrain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHAPTERS, default=CHAPTERS, help="the papers to rerun")
    parser.add_argument("--json", type=Path, help="also write the tables to this file")
    parser.add_argument("--untimed", action="store_true", help="leave out tables of times: the machine is busy")
    arguments = parser.parse_args()
    shared = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared"))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    if not shared.exists():
        console.print(f"[yellow]{shared} is absent: tables that need real sizes or traces are left out[/]")
    started = time.perf_counter()
    found: list[dict[str, Any]] = []
    for chapter in arguments.only:
        for table in importlib.import_module(f"benchmarks.papers.{chapter}.chapter").tables(
            shared, not arguments.untimed
        ):
            table.show(console)
            found.append({"chapter": chapter, "ran": machine(), **table.to_plain()})
        if arguments.json:
            own = [table for table in found if table["chapter"] == chapter]
            _write(arguments.json, chapter, own, not arguments.untimed)
    console.print(f"\n{len(found)} tables in {time.perf_counter() - started:.0f} s")


def _write(path: Path, chapter: str, found: list[dict[str, Any]], timed: bool) -> None:
    """Put the tables into the file, in the papers' order, in place of those that the chapter had."""
    before = json.loads(path.read_text(encoding="utf-8"))["tables"] if path.exists() else []
    named = {table["name"] for table in found}
    kept = [
        table
        for table in before
        if table["chapter"] != chapter or (table["timed"] and not timed and table["name"] not in named)
    ]
    ordered = sorted([*found, *kept], key=lambda table: CHAPTERS.index(table["chapter"]))
    path.write_text(json.dumps({"tables": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
