"""Time linear layers in FP8 (`train.precision: fp8`) against bf16, and say how much of it is rounding the factors.

Per layer of a 7B model and number of rows: a forward with its input gradient, as both precisions multiply them, and the
rounding of rows, weight, output gradient and transposed weight alone. The bar: FP8 is quicker wherever there are 8,192
rows or more. Before it is timed, each product is compared with the same rounded numbers multiplied in bf16.

    python -m benchmarks.models.fp8_products --json fp8_products-gpu.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.attention.clock import median_seconds
from benchmarks.machine import machine
from dilatant.runtime.precision import has_fp8
from dilatant.runtime.state.fp8_products import fp8_linear, multiply_emulated, quantize

LAYERS = {"q, o": (3584, 3584), "gate, up": (18944, 3584), "down": (3584, 18944)}
"""Output and input widths of the linear layers of Qwen2.5-7B; its k and v are narrow."""
ROWS = (2048, 8192, 16384)
BAR_ROWS = 8192
AGREEMENT = 2**-8
"""Both add products of the same numbers in fp32, in other orders, and round the sum to bf16."""


def compare(name: str, sizes: tuple[int, int], rows: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the seconds of one layer in both precisions. sizes: of its output and its input."""
    outputs, inputs = sizes
    draw = torch.Generator(device).manual_seed(rows)
    row, weight, gradient = (
        torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    factors = {"forward": (row, weight), "input gradient": (gradient, weight.t())}
    for what, (left, right) in factors.items():
        exact = multiply_emulated(quantize(left), quantize(right), None, torch.bfloat16).float()
        difference = ((fp8_linear(left, right, None) - exact).norm() / exact.norm()).item()
        if not difference <= AGREEMENT:
            raise SystemExit(f"{name}, {rows} rows, {what}: the product differs from its emulation by {difference:.1e}")
    seconds = median_seconds(
        {
            "bf16": lambda: [functional.linear(*pair) for pair in factors.values()],
            "fp8": lambda: [fp8_linear(*pair, None) for pair in factors.values()],
            "rounding": lambda: [quantize(one) for pair in factors.values() for one in pair],
        },
        device,
        repeats,
    )
    operations = 4 * rows * outputs * inputs
    rates = {which: operations / seconds[which] / 1e12 for which in ("bf16", "fp8")}
    ratio = seconds["bf16"] / seconds["fp8"]
    return {"layer": name, "rows": rows, "seconds": seconds, "teraflops": rates, "ratio": ratio}


def show(row: Mapping[str, Any]) -> None:
    """Print one line of the table."""
    times, rates = {which: 1e3 * own for which, own in row["seconds"].items()}, row["teraflops"]
    bar = "; bar 1.0x" if row["rows"] >= BAR_ROWS else ""
    print(
        f"{row['layer']:9} {row['rows']:6} rows: bf16 {times['bf16']:7.2f} ms ({rates['bf16']:5.0f} TFLOP/s), "
        f"fp8 {times['fp8']:7.2f} ms ({rates['fp8']:5.0f}), of it {times['rounding']:6.2f} ms rounding: "
        f"{row['ratio']:.2f}x{bar}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    device = torch.device("cuda")
    if not torch.cuda.is_available() or not has_fp8(device):
        print("skipped: needs an NVIDIA GPU with FP8 (compute capability 8.9 or later)")
        return
    found = []
    for name, sizes in LAYERS.items():
        for rows in settings.rows:
            found.append(compare(name, sizes, rows, device, settings.repeats))
            show(found[-1])
    if settings.json:
        settings.json.write_text(json.dumps({"machine": machine(), "layers": found}, indent=1) + "\n", encoding="utf-8")
    worst = min((row["ratio"] for row in found if row["rows"] >= BAR_ROWS), default=None)
    print("no rows of the bar" if worst is None else f"worst of {BAR_ROWS} rows and more: {worst:.2f}x, bar 1.0x")


if __name__ == "__main__":
    main()
