"""Checkpoints of one rank with two small weights, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dilatant.training.checkpoints.checkpoint import list_checkpoints
from dilatant.training.checkpoints.writer import CheckpointWriter


def tensors(fill: float) -> dict:
    return {
        "model": {"language.layers.0.weight": torch.full((64, 32), fill), "vision.norm.bias": torch.ones(7)},
        "optimizer": {"language.layers.0.weight": {"step": torch.tensor(fill), "exp_avg": torch.ones(64, 32)}},
    }


def write_steps(folder: Path, *steps: int, keep: int = 3, session: str = "first", **options: Any) -> None:
    """One rank's checkpoints. after: the checkpoint to go on from. frozen: as of `save`."""
    after, frozen = options.pop("after", None), options.pop("frozen", ())
    writer = CheckpointWriter(folder, keep, session)
    if after is not None:
        writer.continue_from(after)
    for step in steps:
        writer.save(step, tensors(step), {"step": step, "position": {"epoch": 0, "offset": step}}, frozen)
        writer.publish()
    writer.close()


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
