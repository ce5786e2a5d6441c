"""A Qwen2.5-VL vision tower on packed images: our attention of a row against the family's own calls item by item.

    python -m benchmarks.attention.towers                    # on this machine: bf16 and 8 blocks of full width on a GPU
    python -m benchmarks.attention.towers --device cpu       # a narrower tower in float32, one thread (two minutes)

Both towers have the same weights, run forward and backward on the same patches in turn, and their outputs and
gradients are compared. The family's forward (`attn_implementation="sdpa"`) gets its sizes on the device, as its users
give them, and calls attention for each image and each window. Ours makes all tables on the host once per row.

Mixes of sizes: `photos` of usual shapes, `thumbnails` of 2 to 8 patches a side, `frames` of one clip, and one `page`.
Attention calls are counted in the forward, for the whole tower. On a CPU, processor time is measured. Writes
benchmarks/results/towers-<device>.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from benchmarks import RESULTS
from benchmarks.attention.clock import median_seconds
from benchmarks.machine import machine
from dilatant.attention.recompute_cache import cached_attention
from dilatant.data.media_units.native_image_unit import GRID
from dilatant.models.encoders.native_encoder import NativeEncoderUnit, multiply_patches

PHOTOS = ((24, 24), (34, 46), (16, 16), (36, 28), (24, 32), (46, 34), (38, 58), (54, 72), (52, 92), (72, 54))
"""Rows and columns of patches of 14 pixels: 336x336, 640x480, 224x224, 1024x768, 1280x720 and the like."""


def grids_of(mix: str, patches: int, seed: int = 0) -> list[list[int]]:
    """Frames, rows and columns of the items of a mix, about `patches` of them together."""
    side = max(4, int(np.sqrt(patches)) // 4 * 4 - 2)  # windows of 8 patches do not divide it
    if mix == "page":
        return [[1, side, side]]
    if mix == "frames":
        return [[max(1, patches // (20 * 26)), 20, 26]]
    draws = np.random.default_rng(seed)
    grids, left = [], patches
    while left > 0:
        rows, columns = PHOTOS[len(grids) % len(PHOTOS)] if mix == "photos" else 2 * draws.integers(1, 5, 2)
        grids.append([1, int(rows), int(columns)])
        left -= rows * columns
    return grids


class Counting(TorchFunctionMode):
    """Context that counts calls of attention: each of SDPA, and one for a row that runs in our kernels."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function is scaled_dot_product_attention
        if function is not cached_attention:
            return function(*args, **(kwargs or {}))
        attend, *inputs = args
        before = self.calls
        with self:
            output = attend(*inputs)
        self.calls += self.calls == before
        return output


def measure(settings: argparse.Namespace, mix: str) -> dict[str, Any]:
    device, dtype = torch.device(settings.device), settings.dtype
    heads, blocks = settings.heads, settings.blocks
    config = Qwen2_5_VLConfig().vision_config
    config.update(
        {"hidden_size": 80 * heads, "num_heads": heads, "depth": blocks, "out_hidden_size": 128 * heads}
        | {"intermediate_size": int(2.672 * 80 * heads), "fullatt_block_indexes": [*range(3, blocks, 4)]}
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    family: Any = Qwen2_5_VisionTransformerPretrainedModel(config).to(device, dtype)
    multiply_patches(family)  # in both, so that attention alone differs
    ours = NativeEncoderUnit("vision", copy.deepcopy(family))
    stage = ours.stage(0, len(ours.layers))
    grids = grids_of(mix, settings.patches)
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, device=device, dtype=dtype)

    def of_family() -> Tensor:
        return family(pixels, grid_thw=grid.to(device)).pooler_output

    def of_ours() -> Tensor:
        return stage({"pixel_values": pixels, GRID: grid})

    calls, outputs, gradients, seconds = {}, {}, {}, {}
    forwards = {"family": (of_family, family), "ours": (of_ours, stage)}
    for name, (forward, module) in forwards.items():
        with Counting() as counter:
            outputs[name] = forward()
        calls[name] = counter.calls
        outputs[name].float().square().mean().backward()
        gradients[name] = [weight.grad for weight in module.parameters() if weight.grad is not None]

    def step(name: str) -> None:
        forward, module = forwards[name]
        module.zero_grad()
        forward().float().square().mean().backward()

    for what, run in (("forward", lambda name: forwards[name][0]()), ("step", step)):
        with torch.set_grad_enabled(what == "step"):
            of_each = {name: partial(run, name) for name in forwards}
            clock = processor_seconds if device.type == "cpu" else median_seconds
            taken = clock(of_each, device, settings.repeats)
        seconds[what] = {**taken, "ratio": taken["family"] / taken["ours"]}
    return {
        "mix": mix, "items": len(grids), "patches": len(pixels), "attention_calls": calls, "seconds": seconds,
        "output_difference": _difference(outputs["family"], outputs["ours"]),
        "largest_gradient_difference": max(map(_difference, gradients["family"], gradients["ours"])),
    }  # fmt: skip


def processor_seconds(calls: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median processor time of each call, in turn: other work on the machine does not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            taken[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def _difference(expected: Tensor, found: Tensor) -> float:
    """The norm of the difference relative to the expected."""
    expected, found = expected.detach().double(), found.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mixes", nargs="+", default=["photos", "thumbnails", "frames", "page"])
    parser.add_argument("--patches", type=int, help="patches of a row")
    parser.add_argument("--heads", type=int, help="attention heads of 80 channels; the real tower has 16")
    parser.add_argument("--blocks", type=int, help="every fourth attends to whole images, others in windows")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    settings = parser.parse_args(arguments)
    on_gpu = torch.device(settings.device).type == "cuda"
    settings.dtype = torch.bfloat16 if on_gpu else torch.float32
    if not on_gpu:
        torch.set_num_threads(1)
    settings.patches = settings.patches or (16_000 if on_gpu else 4_000)
    settings.heads, settings.blocks = (settings.heads or (16 if on_gpu else 2), settings.blocks or (8 if on_gpu else 4))
    settings.repeats = settings.repeats or (10 if on_gpu else 3)
    settings.out = settings.out or RESULTS / f"towers-{'gpu' if on_gpu else 'cpu'}.json"
    named = {key: str(value) for key, value in vars(settings).items() if key != "out"}
    report: dict[str, Any] = {"machine": {**machine(), "threads": torch.get_num_threads()}, "settings": named}
    report["mixes"] = []
    print(f"{settings.blocks} blocks, {settings.heads} heads of 80, {settings.dtype}, {settings.device}; seconds")
    print(f"{'mix':12}{'items':>7}{'patches':>9}{'calls':>14}{'forward':>20}{'x':>7}{'step':>20}{'x':>7}  differences")
    for mix in settings.mixes:
        row = measure(settings, mix)
        report["mixes"].append(row)
        times = "".join(
            f"{each['family']:10.4f}{each['ours']:10.4f}{each['ratio']:7.2f}" for each in row["seconds"].values()
        )
        calls = f"{row['attention_calls']['family']} : {row['attention_calls']['ours']}"
        print(
            f"{mix:12}{row['items']:7}{row['patches']:9}{calls:>14}{times}  "
            f"{row['output_difference']:.1e} {row['largest_gradient_difference']:.1e}",
            flush=True,
        )
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.write_text(json.dumps(report, indent=1) + "\n")  # kept as it grows
    print(f"written to {settings.out}")
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
