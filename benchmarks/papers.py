"""Rerun the papers' tables: `python benchmarks/papers.py [--only oobleck cornstarch entrain disttrain] [--json FILE]`.

Planning times are measured here. Times of models are counted from their public shapes (modelled); sizes of samples
are those in ../shared/data/workload_stats, of which some are modelled themselves (each table says so). The folder is
found through DILATANT_SHARED, or beside the repository; tables that need it are left out without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path

from machine import machine
from rich.console import Console

CHAPTERS = ("oobleck", "cornstarch", "entrain", "disttrain")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CHAPTERS, default=CHAPTERS, help="the papers to rerun")
    parser.add_argument("--json", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    shared = Path(os.environ.get("DILATANT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    if not shared.exists():
        console.print(f"[yellow]{shared} is absent: tables that need real sizes or traces are left out[/]")
    started = time.perf_counter()
    tables = []
    for chapter in arguments.only:
        for table in importlib.import_module(f"papers.{chapter}").tables(shared):
            table.show(console)
            tables.append(table.to_plain())
    console.print(f"\n{len(tables)} tables in {time.perf_counter() - started:.0f} s")
    if arguments.json:
        document = {**machine(), "tables": tables}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
