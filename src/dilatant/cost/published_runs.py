"""Published runs that were compared with their modelled step: which of them are like a plan, and how far it was off."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A training run that others published. `source`: where, with the number of its row. `model`: its name and in what
    it differs from dense ones in 16 bits ("Qwen3_30B_a3B, experts, FP8"). `billions`: its weights. `sharded`:
    "weights", "optimizer state" or "nothing" among replicas. `ratio`: modelled over measured seconds of a step."""

    source: str
    model: str
    hardware: str
    devices: int
    billions: float
    tp: int
    pp: int
    sharded: str
    ratio: float

    @property
    def kind(self) -> str:
        """Return in what the model differs from a dense one in 16 bits; empty if in nothing."""
        return self.model.partition(", ")[2]

    def unlike(self, other: PublishedRun) -> float:
        """Return how far its size, devices and degrees are from those of another run, in doublings: another sharding
        counts as one, another precision or experts as two."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("billions", "devices", "tp", "pp"))
        far = sum(abs(math.log2(own / theirs)) for own, theirs in pairs)
        return far + (self.sharded != other.sharded) + 2 * (self.kind != other.kind)

    def __str__(self) -> str:
        layout = f"tp {self.tp}, pp {self.pp}, sharded {self.sharded}"
        return f"{self.model} on {self.devices:,} devices ({self.source}: {layout}) {self.ratio:.2f}"


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Read the built-in table, which `python -m benchmarks.planning.published --rows FILE --table FILE` writes."""
    rows = csv.DictReader(
        files("dilatant.cost").joinpath("published_runs.csv").read_text(encoding="utf-8").splitlines()
    )
    kinds: dict[str, Callable[[str], Any]] = {"devices": int, "tp": int, "pp": int, "billions": float, "ratio": float}
    return tuple(PublishedRun(**{name: kinds.get(name, str)(own) for name, own in row.items()}) for row in rows)


def nearest_runs(plan: PublishedRun, most: int = 3) -> tuple[PublishedRun, ...]:
    """Return up to `most` published runs on the hardware of a plan, described as a run, the most similar first."""
    return tuple(sorted((run for run in published_runs() if run.hardware == plan.hardware), key=plan.unlike)[:most])


def mean_errors(hardware: str) -> dict[str, float]:
    """Return by source and kind of model how far the modelled steps of its runs in the table, on this hardware, are
    from the measured ones in the mean, as a share of these."""
    errors: dict[str, list[float]] = {}
    for run in published_runs():
        if run.hardware == hardware:
            source = run.source.rpartition("-")[0]
            errors.setdefault(", ".join(filter(None, (source, run.kind))), []).append(abs(run.ratio - 1.0))
    return {source: sum(own) / len(own) for source, own in errors.items()}
