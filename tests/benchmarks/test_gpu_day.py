"""The sections of the GPU day name their requirements, and those that need no GPU run without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_day
import gpu_prediction
from one_device_trainer import SIZES, save_model


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
    sections = gpu_day.SECTIONS
    assert sections["training"].needs(tmp_path) == "needs 80 GB of GPU memory; there are 70"
    assert (sections["recovery"].needs(None) or "").startswith("needs 4 GPUs, here 1: NCCL takes one rank")
    assert sections["lora"].needs(None) == "needs --data, the folder of chartqa_mini"
    monkeypatch.setattr(gpu_day.importlib.util, "find_spec", lambda name: None)
    assert sections["lora"].needs(tmp_path) == "needs the package peft"
    assert sections["prediction"].needs(None) is None


@pytest.mark.slow
def test_prediction_is_compared_with_a_step(tmp_path: Path) -> None:
    command = "--size tiny --precision fp32 --steps 1 --warm-up 1 --batch 4 --workers 0"
    settings = gpu_prediction.parser().parse_args(command.split())
    save_model(tmp_path / "model", SIZES[settings.size])
    gpu_prediction.write_charts(tmp_path / "charts", 8)
    row = gpu_prediction.predict("modelled", tmp_path / "model", tmp_path / "charts", tmp_path, settings)
    assert json.loads(json.dumps(row)) == row
    assert row["compute_seconds"] > 0 < row["predicted_seconds"]
    assert row["predicted_peak_bytes"] > 16 * row["parameters"]
    assert row["step_seconds"] >= row["compute_seconds"]
    assert (row["peak_bytes"], row["mfu"]) == (None, None)
