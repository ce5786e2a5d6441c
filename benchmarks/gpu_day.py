"""Benchmarks that need a GPU, in sections that run by themselves: correctness, rates, speed, prediction, recovery.

    python -m benchmarks.gpu_day --data chartqa_mini          # or: make gpu DATA=chartqa_mini
    python -m benchmarks.gpu_day --sections kernels families --json gpu.json

Every section is a command with its own limit in seconds. Its output goes to a log, and the JSON grows after each
section, so results survive if the machine is taken away. The last lines are a table. Nothing is downloaded. Without a
GPU, or without the data, each section prints one line with what it needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.machine import machine

TRAINER = ("-m", "benchmarks.models.one_device_trainer", "--case", "as they are", "--size", "1b", "--precision", "bf16")


@dataclass(frozen=True)
class Section:
    """A command, in which `{data}` is the folder of chartqa_mini and `{out}` that of the results.

    gigabytes: GPU memory. gpus: one for each rank, because NCCL takes one rank per GPU. package: an optional import.
    capability: the lowest compute capability.
    """

    title: str
    seconds: int
    command: tuple[str, ...]
    gigabytes: int = 8
    gpus: int = 1
    package: str | None = None
    capability: tuple[int, int] = (0, 0)

    def needs(self, data: Path | None) -> str | None:
        """Return what is missing here, or None."""
        if not torch.cuda.is_available():
            many = "an NVIDIA GPU" if self.gpus == 1 else f"{self.gpus} NVIDIA GPUs, one for each rank,"
            return f"needs {many} with {self.gigabytes} GB"
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        if memory < self.gigabytes:
            return f"needs {self.gigabytes} GB of GPU memory; there are {memory:.0f}"
        if (capability := torch.cuda.get_device_capability(0)) < self.capability:
            needed, found = (".".join(map(str, each)) for each in (self.capability, capability))
            return f"needs compute capability {needed}; this GPU has {found}"
        if (here := torch.cuda.device_count()) < self.gpus:
            return f"needs {self.gpus} GPUs, here {here}: NCCL takes one rank of a GPU"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}"
        if any("{data}" in part for part in self.command) and data is None:
            return "needs --data, the folder of chartqa_mini"
        return None


FP8 = (8, 9)
"""Compute capability with products in eight bits."""
STAGED = "tests/runtime/test_ranks_on_one_gpu.py"


def _tests(*files: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files)


SECTIONS = {
    "machine": Section("copies and matrix products", 60, ("-m", "benchmarks.gpu_day", "--machine"), 16),
    "kernels": Section("attention kernels and libraries against definitions", 400, _tests("tests/attention")),
    "libraries": Section(
        "cuDNN's Flex and MagiAttention, if installed: differences to float32, and rates", 500,
        ("-m", "benchmarks.attention.attention", "--sections", "rates", "backends", "--only", "cudnn_flex", "magi",
         "--tokens", "8192", "32768", "--repeats", "5", "--out", "{out}/attention-libraries-gpu.json"),
        40, capability=(9, 0),
    ),
    "runtime": Section(
        "a step against a CPU's; NCCL where there are two GPUs", 200, _tests("tests/runtime", f"--ignore={STAGED}")
    ),
    "staged": Section("several ranks on one GPU, through host memory: pp, tp, cp, zero, shard", 300, _tests(STAGED)),
    "families": Section("whole models against a CPU", 200, _tests("tests/models")),
    "attention": Section(
        "rates of attention by backend", 400,
        ("-m", "benchmarks.attention.attention", "--sections", "rates", "--tokens", "8192", "32768", "--repeats", "5",
         "--out", "{out}/attention-gpu.json"),
        40,
    ),
    "towers": Section(
        "a vision tower on packed images against the family's own calls", 200,
        ("-m", "benchmarks.attention.towers", "--out", "{out}/towers-gpu.json"),
        30,
    ),
    "training": Section(
        "a LLaVA of 0.8 B parameters against transformers' Trainer", 400,
        (*TRAINER, "--data", "{data}", "--workers", "4", "--json", "{out}/one_device_trainer-gpu.json"),
        80,
    ),
    "blocks": Section(
        "the same with compiled blocks", 500,
        (*TRAINER, "--compile", "blocks", "--way", "packed", "--warm-up", "3", "--data", "{data}", "--workers", "4",
         "--json", "{out}/one_device_compiled-gpu.json"),
        80,
    ),
    "fp8_products": Section(
        "linear layers in FP8 against bf16, and the rounding of their factors", 200,
        ("-m", "benchmarks.models.fp8_products", "--json", "{out}/fp8_products-gpu.json"),
        16, capability=FP8,
    ),
    "fp8": Section(
        "steps of that model with `precision: fp8` against the Trainer's in bf16", 300,
        (*TRAINER, "--precision", "fp8", "--way", "packed", "--data", "{data}", "--workers", "4",
         "--json", "{out}/one_device_fp8-gpu.json"),
        80, capability=FP8,
    ),
    "fp8_blocks": Section(
        "the same with compiled blocks", 500,
        (*TRAINER, "--precision", "fp8", "--compile", "blocks", "--way", "packed", "--warm-up", "3", "--data", "{data}",
         "--workers", "4", "--json", "{out}/one_device_fp8_compiled-gpu.json"),
        80, capability=FP8,
    ),
    "lora": Section(
        "LoRA of that model against transformers' Trainer with peft", 300,
        (*TRAINER, "--lora", "--data", "{data}", "--workers", "4", "--json", "{out}/one_device_lora-gpu.json"),
        40, package="peft",
    ),
    "muon": Section(
        "Muon for the language model's matrices against the Trainer's AdamW", 300,
        (*TRAINER, "--muon", "--way", "packed", "--data", "{data}", "--workers", "4",
         "--json", "{out}/one_device_muon-gpu.json"),
        80,
    ),
    "block_offload": Section(
        "inputs of recomputed blocks in host memory against the Trainer, which keeps all", 300,
        (*TRAINER, "--recompute", "block_offload", "--way", "packed", "--data", "{data}", "--workers", "4",
         "--json", "{out}/one_device_offload-gpu.json"),
        80,
    ),
    "backends": Section(
        "attention backends by mask class, timed as by `dilatant profile`", 300,
        ("-m", "benchmarks.attention.attention", "--sections", "backends", "--out", "{out}/backends-gpu.json"),
        16,
    ),
    "prediction": Section(
        "time and peak memory of a step of 0.8 B parameters, predicted and measured", 400,
        ("-m", "benchmarks.models.gpu_prediction", "--json", "{out}/gpu_prediction.json"),
        40,
    ),
    "recovery": Section(
        "one of four ranks is killed at a time", 300,
        ("-m", "benchmarks.recovery.recovery", "--device", "auto", "--kills", "5", "--restarts", "0",
         "--json", "{out}/recovery-gpu.json"),
        gpus=4,
    ),
}  # fmt: skip


def measure_machine() -> None:
    """Print the two ceilings: a large copy, counting bytes read and written, and a large bf16 matrix product."""
    size = 8192
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    row = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(row)
    copied = 2 * row.numel() / _seconds(lambda: other.copy_(row)) / 1e12
    multiplied = 2 * size**3 / _seconds(lambda: matrix @ matrix) / 1e12
    print(f"copy {copied:.2f} TB/s, bf16 product of {size} cubed {multiplied:.0f} TFLOP/s")


def _seconds(call: Any, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def run(section: Section, data: Path | None, out: Path, log: Path) -> dict[str, Any]:
    """Run a section; return its exit status, seconds and last line. A section that hangs is killed at its limit."""
    names = {"data": str(data), "out": str(out)}
    command = [part.format(**names) for part in section.command]
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                timeout=section.seconds,
            )  # fmt: skip
            status: int | str = done.returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {section.seconds} s"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    seconds = round(time.perf_counter() - begin, 1)
    return {"status": status, "seconds": seconds, "last": lines[-1][:160] if lines else "", "log": log.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--data", type=Path, help="the folder of chartqa_mini")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"), help="folder of logs and results")
    parser.add_argument("--machine", action="store_true", help="only the two ceilings, here")
    settings = parser.parse_args()
    if settings.machine:
        measure_machine()
        return
    data = settings.data.resolve() if settings.data else None
    out = settings.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "sections": {}}
    failed = False
    for name in settings.sections:
        section = SECTIONS[name]
        missing = section.needs(data)
        found = {"not run": missing} if missing else run(section, data, out, out / f"{name}.log")
        failed |= found.get("status", 0) != 0
        report["sections"][name] = found
        (out / "gpu_day.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        told = missing or f"{found['status']} in {found['seconds']} s: {found['last']}"
        print(f"{name:13} {section.title}: {told}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
