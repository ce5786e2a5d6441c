"""Files that the profiler writes for steps that fail, are repeated or run out of GPU memory."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilatant.comm.launch import Worker
from dilatant.config.train import ProfileConfig
from dilatant.runtime.step.recorder import Recorder
from dilatant.schedule.schedule import Action, ActionKind
from dilatant.training.step_profiler import StepProfiler


def profiler(folder: Path, config: ProfileConfig | None, device: str = "cpu", ranges: Any = nullcontext) -> Any:
    whole: Any = SimpleNamespace(train=SimpleNamespace(profile=config), output_dir=str(folder))
    return StepProfiler(whole, Worker(1, 2, 1, torch.device(device), None), ranges)


def break_in_an_action(recorder: Recorder) -> None:
    recorder.start("language", Action(ActionKind.F, 0, 0), (0,))
    raise ValueError("broken")


def test_a_failed_step_has_no_trace_and_its_repetition_has_one(tmp_path: Path) -> None:
    recorder = Recorder(1, torch.device("cpu"))
    profiled = profiler(tmp_path, ProfileConfig(steps=(2, 2)), ranges=recorder.named_ranges)
    recorder.begin()
    with profiled.step(1):
        recorder.start("language", Action(ActionKind.F, 0, 0), (0,))
    with pytest.raises(ValueError, match="broken"), profiled.step(2):
        break_in_an_action(recorder)
    assert not list(tmp_path.rglob("*"))
    for _ in range(2):
        recorder.begin()
        with profiled.step(2):
            recorder.start("language", Action(ActionKind.B, 3, 1), (0,))
            recorder.computing()
            recorder.done()
    (path,) = (tmp_path / "traces" / "step-00000002").iterdir()
    assert path.name == "rank-1-of-2.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = sorted((one["ts"], one["name"]) for one in events if one.get("cat") == "user_annotation")
    what = "language stage 3 B microbatch 1"
    assert [name for _, name in named] == ["step 2", f"rows for {what}", what]


def test_memory_snapshot_where_a_gpu_runs_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    record = "_record_memory_history"
    monkeypatch.setattr(torch.cuda.memory, record, lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"held"))
    profiled = profiler(tmp_path, ProfileConfig(), "cuda")
    with pytest.raises(RuntimeError, match="action"), profiled.step(7):
        raise RuntimeError("action failed") from torch.OutOfMemoryError("out of memory")
    with pytest.raises(ValueError, match="another"), profiled.step(8):
        raise ValueError("another")
    profiled.close()
    assert calls == ["all", None]
    (path,) = (one for one in tmp_path.rglob("*") if one.is_file())
    assert path == tmp_path / "traces" / "out-of-memory-in-step-7.rank-1-of-2.pickle"
    assert path.read_bytes() == b"held"
    assert str(path) in capsys.readouterr().err


def test_a_full_disk_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").write_text("a file where a folder must be")
    with profiler(tmp_path, ProfileConfig(steps=(1, 1))).step(1):
        pass
    assert "warning: " in capsys.readouterr().err
