"""What a rank leaves of a step counts for who goes on from that very state, once, and as it was written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dilatant.resilience.partial_step.handover import export_gradients, read_exported_gradients
from dilatant.runtime.step.partial_step import AccumulationReport, LayerShare


def _leave(folder: Path, generation: int, step: int, rank: int, ranks: tuple[int, ...] | None = None) -> None:
    share = LayerShare(("language", 0), ranks or (rank,), (1, 1, 1), (0,))
    report = AccumulationReport(rank, step, (0, 1), (share,), ())
    gradients = {"w": torch.full((2, 3), float(rank)), "half": torch.ones(5, dtype=torch.bfloat16)}
    unfinished: Any = SimpleNamespace(report=lambda: report, gradients=gradients)
    export_gradients(folder, generation, unfinished)


def _read(folder: Path, generation: int, step: int, size: int = 2) -> list[list[int]]:
    """By rank, whose gradients it reads."""
    return [
        [each.report.rank for each in read_exported_gradients(folder, generation, step, rank, size)]
        for rank in range(size)
    ]


def test_each_handover_file_of_the_step_is_read_by_one_rank(tmp_path: Path) -> None:
    for generation, step, rank in ((3, 7, 0), (3, 7, 1), (3, 7, 2), (2, 7, 4), (3, 6, 4), (13, 7, 4), (3, 77, 4)):
        _leave(tmp_path, generation, step, rank)
    _leave(tmp_path, 3, 7, 6, ranks=(6, 7))  # of no use without the other
    assert _read(tmp_path, 3, 7) == [[0, 2], [1]]
    (found,) = read_exported_gradients(tmp_path, 3, 7, 1, 2)
    assert found.report.step == 7
    assert torch.equal(found.gradients["w"], torch.full((2, 3), 1.0))
    assert found.gradients["half"].dtype == torch.bfloat16


def test_what_is_not_as_it_was_written_is_not_there(tmp_path: Path) -> None:
    for rank in range(4):
        _leave(tmp_path, 1, 0, rank)
    flipped, cut = tmp_path / "1-0-1.safetensors", tmp_path / "1-0-2.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert _read(tmp_path, 1, 0, size=1) == [[0, 3]]
