"""Steps of `dilatant train` with compiled blocks against steps with eager ones, on one device.

Both loops train the model of `one_device.py` on the same samples in the same order. They take their steps in turn in
one process, so that noise of the machine falls on both. Steps of the warm-up, in which blocks are compiled, are not
timed. Losses must agree. The bar: compiled blocks are not slower.

    python benchmarks/compiled_blocks.py --data chartqa_mini --json benchmarks/results/compiled_blocks.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from machine import machine
from one_device import AGREEMENT, Step, cases, train_dilatant
from one_device_trainer import Turns

BAR = 1.0


def compare(name: str, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Run both loops in turn on one case; print and return the ratio of their times."""
    turns, eager = Turns(), list[Step]()

    def run_eager() -> None:
        turns.begin()
        try:
            options = argparse.Namespace(**{**vars(settings), "compile": "none"})
            eager.extend(train_dilatant(folder, options, turns.take))
        finally:
            turns.end()

    other = threading.Thread(target=run_eager)
    other.start()
    compiled = train_dilatant(folder, argparse.Namespace(**{**vars(settings), "compile": "blocks"}), turns.give)
    other.join()
    differences = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(compiled[:3], eager[:3], strict=True)]
    timed = list(zip(compiled, eager, strict=True))[settings.warm_up :]
    ratios = [b.seconds / a.seconds for a, b in timed]
    print(
        f"{name:15} eager {statistics.median(b.seconds for _, b in timed):.2f} s, compiled "
        f"{statistics.median(a.seconds for a, _ in timed):.2f} s: {statistics.median(ratios):.2f}x (median of "
        f"{len(ratios)} pairs of steps; {min(ratios):.2f} to {max(ratios):.2f}); bar {BAR}x; first step with "
        f"compilation {compiled[0].seconds:.0f} s; losses differ by {max(differences):.1e}",
        flush=True,
    )
    if max(differences) > AGREEMENT:
        raise SystemExit(f"{name}: the losses differ, so the ratio means nothing: {differences}")
    return {
        "ratio": {"median": statistics.median(ratios), "worst": min(ratios), "best": max(ratios), "bar": BAR},
        "seconds": {
            side: [step.seconds for step in steps] for side, steps in (("compiled", compiled), ("eager", eager))
        },
        "loss_difference": max(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of chartqa_mini")
    parser.add_argument("--case", default="as they are", help="of one_device.py")
    parser.add_argument("--steps", type=int, default=8, help="of each loop, that are timed after --warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples of an optimizer step")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--attention", help="attn_implementation, to compare with the default")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    if not any(settings.data.glob("*.parquet")):
        print(f"skipped: {settings.data} holds no Parquet files of chartqa_mini")
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in cases(settings.data, Path(scratch) / "charts"):
            if name == settings.case:
                results[name] = compare(name, folder, settings)
    if settings.json:
        options = {key: value for key, value in vars(settings).items() if key not in ("data", "json")}
        report = {"machine": machine(), "threads": torch.get_num_threads(), "settings": options, "cases": results}
        settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
