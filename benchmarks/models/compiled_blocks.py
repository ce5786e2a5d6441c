"""Steps of `dilatant train` with compiled blocks against steps with eager ones, on one device.

Both loops train the model of `one_device.py` on the same samples in the same order. They take their steps in turn in
one process, so that noise of the machine falls on both. Steps of the warm-up, in which blocks are compiled, are not
timed. Losses must agree. The bar: compiled blocks are not slower.

    python -m benchmarks.models.compiled_blocks --data chartqa_mini --json benchmarks/results/compiled_blocks.json
"""

from __future__ import annotations

import argparse
import statistics
import threading
import warnings
from pathlib import Path
from typing import Any

from benchmarks.models.one_device import Step, compared, options, run, train_dilatant
from benchmarks.models.one_device_trainer import Turns

BAR = 1.0


def compare(name: str, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Run both loops in turn on one case; print and return the ratio of their times."""
    turns, eager = Turns(), list[Step]()

    def run_eager() -> None:
        turns.begin()
        try:
            eager.extend(train_dilatant(folder, argparse.Namespace(**vars(settings), compile="none"), turns.take))
        finally:
            turns.end()

    other = threading.Thread(target=run_eager)
    other.start()
    compiled = train_dilatant(folder, argparse.Namespace(**vars(settings), compile="blocks"), turns.give)
    turns.leave()
    other.join()
    seconds = {side: [one.seconds for one in steps] for side, steps in (("compiled", compiled), ("eager", eager))}
    medians = {side: statistics.median(own[settings.warm_up :]) for side, own in seconds.items()}
    print(
        f"{name:15} eager {medians['eager']:.2f} s, compiled {medians['compiled']:.2f} s; first step with compilation "
        f"{seconds['compiled'][0]:.0f} s"
    )
    return {"seconds": seconds, **compared(name, compiled, eager, settings.warm_up, BAR)}


if __name__ == "__main__":
    warnings.filterwarnings("error", message="train.compile: blocks of .* run eager")
    run(options(str(__doc__)).parse_args(), compare)
