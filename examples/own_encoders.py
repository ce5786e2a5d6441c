"""Encoders that are modules of your own: other media, several inputs, items of unlike sizes, several stages.

Each function wraps a module in an `Encoder` for `MultimodalModel(encoders={...})`; docs/models.md explains the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dilatant import EncodedSample, Encoder, MultimodalModel


def lidar(voxels: nn.Module) -> Encoder:
    """Wrap `voxels(points=[rows, 4, 32, 32, 8]) -> [rows, 64, 256]`."""
    return Encoder(voxels, kind="lidar", input_name="points", row_shape=(4, 32, 32, 8), width=256, tokens_per_row=64)


def protein(module: nn.Module) -> Encoder:
    """Wrap a module of two inputs, `module(residues=[rows, 128], coordinates=[rows, 128, 3]) -> [rows, 128, 512]`."""
    example = {"residues": torch.zeros(1, 128, dtype=torch.int64), "coordinates": torch.zeros(1, 128, 3)}
    return Encoder(module, kind="protein", width=512, tokens_per_row=128, example=example)


def protein_sample(
    mllm: MultimodalModel,
    name: str,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    residues: NDArray[np.int64],
    coordinates: NDArray[np.float32],
) -> EncodedSample:
    """Return a sample for `parallel.execute`, with rows of media that the file readers do not know."""
    media: dict[str, dict[str, Any]] = {"protein": {"residues": residues, "coordinates": coordinates}}
    return EncodedSample(name, input_ids, labels, media, mllm.sizes_of(input_ids.tolist(), media))


def _steps(inputs: Mapping[str, Any]) -> int:
    return int(inputs["lengths"].sum())


def series(module: nn.Module) -> Encoder:
    """Wrap a module over items of unlike sizes: `module(values=[steps, 4], lengths=[items]) -> [steps, 256]`."""
    example = {"values": torch.zeros(90, 4), "lengths": torch.tensor([90])}  # one item
    return Encoder(module, kind="series", width=256, tokens_of=_steps, example=example)


def tower_in_stages(tower: nn.Module) -> Encoder:
    """Wrap a tower with an `nn.ModuleList` of blocks, between which a plan may cut it."""
    return Encoder(tower, kind="image", row_shape=(3, 224, 224), width=768, tokens_per_row=196)
