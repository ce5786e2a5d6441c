"""The sections of the GPU day name their requirements, and those that need no GPU run without one."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_day
from benchmarks.models import fp8_products, gpu_prediction
from benchmarks.models.one_device_trainer import SIZES, save_model, tree


def test_every_section_says_in_one_line_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_day.main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu_day.SECTIONS)
    assert all(": needs " in line and "NVIDIA GPU" in line for line in lines)
    report = json.loads((tmp_path / "gpu_day.json").read_text())
    assert all(found["not run"].startswith("needs ") for found in report["sections"].values())


def test_what_a_small_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = SimpleNamespace(total_memory=70e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    sections = gpu_day.SECTIONS
    assert sections["training"].needs(tmp_path) == "needs 80 GB of GPU memory; there are 70"
    assert (sections["recovery"].needs(None) or "").startswith("needs 4 GPUs, here 1: NCCL takes one rank")
    assert sections["lora"].needs(None) == "needs --data, the folder of chartqa_mini"
    monkeypatch.setattr(gpu_day.importlib.util, "find_spec", lambda name: None)
    assert sections["lora"].needs(tmp_path) == "needs the package peft"
    assert sections["fp8_products"].needs(None) == "needs compute capability 8.9; this GPU has 8.6"
    assert sections["prediction"].needs(None) is None


def test_products_in_fp8_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> dict[str, Any]:
        return fp8_products.compare("small", (32, 48), 64, torch.device("cpu"), 1)

    row = measure()
    assert json.loads(json.dumps(row)) == row
    assert all(each > 0 for each in (row["ratio"], *row["seconds"].values(), *row["teraflops"].values()))
    fp8_products.show(row)
    monkeypatch.setattr(fp8_products, "fp8_linear", torch.nn.functional.linear)
    with pytest.raises(SystemExit, match="small, 64 rows, forward: the product differs from its emulation"):
        measure()


def test_kernels_belong_to_the_action_that_launched_them(tmp_path: Path) -> None:
    """Kernels of a backward are launched by a thread of autograd, while the action's range is open elsewhere."""

    def event(category: str, name: str, begin: float, seconds: float, **arguments: int) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": begin, "dur": seconds, "args": arguments}

    events = [
        event("user_annotation", "rows for language stage 1 F microbatch 0", 0, 10),
        event("user_annotation", "language stage 1 F microbatch 0", 10, 100),
        event("user_annotation", "language stage 1 B microbatch 0", 110, 50),
        event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 120, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 170, 1, correlation=3),
        event("kernel", "product", 300, 1_000_000, correlation=1),
        event("kernel", "product", 1_000_300, 2_000_000, correlation=2),
        event("kernel", "update", 3_000_300, 500_000, correlation=3),
        {"cat": "process", "name": "no duration", "ts": 0},
    ]
    (tmp_path / "step-00000001").mkdir()
    with gzip.open(tmp_path / "step-00000001" / "rank-0-of-1.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    actions, kernels = gpu_prediction.read_trace(tmp_path)
    assert actions == {
        "language F": {"kernels": 1.0, "issuing": pytest.approx(1e-4)},
        "language B": {"kernels": 2.0, "issuing": pytest.approx(5e-5)},
    }
    assert kernels == {"product": 3.0, "update": 0.5}


def test_a_run_whose_step_is_predicted_has_a_config(tmp_path: Path) -> None:
    settings = gpu_prediction.parser().parse_args(["--compile", "blocks", "--steps", "2", "--warm-up", "1"])
    train = tree(tmp_path / "model", tmp_path / "charts", tmp_path / "run", settings)["train"]
    assert (train["steps"], train["compile"], train["recompute"]) == (3, "blocks", "none")


@pytest.mark.slow
def test_prediction_is_compared_with_a_step(tmp_path: Path) -> None:
    command = "--trace --size tiny --precision fp32 --steps 1 --warm-up 1 --batch 4 --workers 0"
    settings = gpu_prediction.parser().parse_args(command.split())
    save_model(tmp_path / "model", SIZES[settings.size])
    gpu_prediction.write_charts(tmp_path / "charts", 8)
    row = gpu_prediction.predict("modelled", tmp_path / "model", tmp_path / "charts", tmp_path, settings)
    assert json.loads(json.dumps(row)) == row
    assert row["compute_seconds"] > 0 < row["predicted_seconds"]
    assert row["predicted_peak_bytes"] > 16 * row["parameters"]
    assert row["step_seconds"] >= row["compute_seconds"]
    assert (row["peak_bytes"], row["mfu"]) == (None, None)
    assert {*row["actions"]} == {"vision F", "vision B", "language F", "language B"}
    predicted = sum(own["predicted"] for own in row["actions"].values())
    assert predicted == pytest.approx(row["predicted_seconds"])  # of one rank, which never waits
    assert all(own["measured"] > 0 < own["issuing"] for own in row["actions"].values())
    gpu_prediction.show(row)
