"""Sizes of the papers' data sets, read from the shared statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Tokens per sample: `vision` [samples] (merged patches) and `text` [samples]; `real`: measured, not modelled."""

    name: str
    vision: NDArray[np.int64]
    text: NDArray[np.int64]
    real: bool

    @property
    def language(self) -> NDArray[np.int64]:
        """What the language model processes: image tokens and text."""
        return self.vision + self.text

    @property
    def basis(self) -> str:
        return f"{self.name} ({'real' if self.real else 'modelled'})"


_FILES = {
    "SynthChartNet": ("modelled_synthchartnet", False),
    "LLaVA-150k": ("modelled_llava150k", False),
    "ChartQA": ("chartqa", True),
    "CocoQA": ("modelled_cocoqa", False),
}


def entrain_sizes(shared: Path) -> dict[str, Sizes]:
    """The four data sets of the thesis' chapter 4; empty when the statistics are absent."""
    folder = shared / "data/workload_stats"
    if not folder.exists():
        return {}
    return {name: _read(folder / f"{file}.parquet", name, real) for name, (file, real) in _FILES.items()}


def coco_image_sizes(shared: Path) -> NDArray[np.int64]:
    """Width and height of COCO val2017: `[images, 2]`, real."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(shared / "data/workload_stats/coco_val2017.parquet")
    return np.stack([table["width"].to_numpy(), table["height"].to_numpy()], axis=1).astype(np.int64)


def _read(path: Path, name: str, real: bool) -> Sizes:
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    vision = table["vision_tokens"].to_numpy().astype(np.int64)
    return Sizes(name, vision, table["text_tokens"].to_numpy().astype(np.int64), real)
