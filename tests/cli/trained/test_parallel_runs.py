"""A run over several processes is the run of one process, whatever its layout and however it is cut."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.tiny_project import Dilatant, tiny_config
from dilatant.comm.launch import Worker
from dilatant.config import Config
from dilatant.report.gantt import GanttChart
from dilatant.report.plan_report import PlanReport
from dilatant.training import run as training_run
from harness.patience import HANG_SECONDS

COMMAND = [sys.executable, "-c", "from dilatant.cli.app import main; main()"]
PHI = {
    "model_type": "phi",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
}
"""Dropout in every place that has a key: of embeddings and of hidden states."""
THREE = {"units": {"vision": {"pp": 1}, "language": {"pp": 2}}, "microbatches": 2}
BLOCK_TABLES = ("--set", "model.language_model.attn_implementation=dilatant")
COLOCATED = {"units": {"vision": {}, "language": {"replicas": 2}}, "colocated": {"vision": "language"}}


@pytest.fixture
def project(project: Path) -> Path:
    tree = tiny_config(save_steps=3)
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def actions(timeline: GanttChart) -> dict[tuple[int, ...], list[tuple]]:
    return {
        lane.ranks: [row[1:5] for row in timeline.rows if row.lane == number]
        for number, lane in enumerate(timeline.lanes)
    }


def layout(parallel: dict) -> tuple[str, str]:
    return "--set", f"parallel={json.dumps(parallel)}"


def test_three_processes_train_and_resume_as_one(project: Path, dilatant: Dilatant) -> None:
    config = project / "config.yaml"
    tree = tiny_config(save_steps=3)
    tree["model"]["language_model"]["config"] |= PHI
    tree["plan"] = {"measure_seconds": 0}
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    dilatant("train", config, "--set", "output_dir=one")
    code, _, _ = dilatant("train", config, *layout(THREE))
    assert code == 0
    run = project / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(step["predicted_seconds"] > 0 for step in steps)
    assert all(step["drift"].keys() == {"vision", "language"} for step in steps)
    assert json.loads((run / "plan.json").read_text())["step"]["costs"]["origin"].startswith("modelled for CPU")
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(run) == pytest.approx(losses(project / "one"), rel=1e-4)
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert (run / "export" / "language" / "model.safetensors").is_file()
    code, out, err = dilatant("simulate", run)
    assert code == 0, err
    assert "A measured step took" in out
    assert "The step as measured" in (run / "plan.html").read_text()
    _, out, _ = dilatant("simulate", run, "--json")
    report = PlanReport.from_json(json.dumps(json.loads(out)["report"]))
    assert report.measured is not None
    # The same actions, in the order in which each rank runs them.
    assert actions(report.measured) == actions(report.remodelled)
    (run / "checkpoints" / "step-00000006").rename(project / "gone")
    code, _, _ = dilatant("resume", run, "--set", "parallel=single")
    assert code == 0
    assert losses(run) == pytest.approx(losses(project / "one"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("encoders", "languages"), [(2, 3), (3, 2)])
def test_replicas_that_do_not_divide_each_other_train_as_one(
    project: Path, dilatant: Dilatant, encoders: int, languages: int
) -> None:
    config = project / "config.yaml"
    dilatant("train", config, "--set", "output_dir=one")
    units = {"vision": {"replicas": encoders}, "language": {"replicas": languages}}
    code, _, err = dilatant("train", config, *layout({"units": units, "microbatches": 2}))
    assert code == 0, err
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(project / "run") == pytest.approx(losses(project / "one"), rel=1e-4)


@pytest.mark.slow
def test_one_process_resumes_as_two_that_share_both_units(project: Path, dilatant: Dilatant) -> None:
    config = project / "config.yaml"
    tree = tiny_config(save_steps=3)
    tree["model"]["language_model"]["config"] |= PHI
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    dilatant("train", config)
    run = project / "run"
    undisturbed = losses(run)
    (run / "checkpoints" / "step-00000006").rename(project / "gone")
    code, _, _ = dilatant("resume", run, *layout(COLOCATED))
    assert code == 0
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)  # fp32 sums in another order


def test_block_tables_give_the_losses_of_transformers_attention(project: Path, dilatant: Dilatant) -> None:
    config = project / "config.yaml"
    plain = ("--set", "output_dir=plain", "--set", "model.language_model.attn_implementation=sdpa")
    dilatant("train", config, *plain)
    assert dilatant("train", config, *BLOCK_TABLES)[0] == 0
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(project / "run") == pytest.approx(losses(project / "plain"), rel=1e-4)


@pytest.mark.slow
def test_images_may_see_themselves_whole(project: Path, dilatant: Dilatant) -> None:
    """The mask changes training, is part of the export, and is used for generation."""
    config = project / "config.yaml"
    # Text sees what images saw a layer before; with large weights attention is far from a mean over all.
    deeper = (
        *("--set", "model.language_model.config.num_hidden_layers=2"),
        *("--set", "model.language_model.config.initializer_range=0.3"),
    )
    dilatant("train", config, *deeper, "--set", "output_dir=plain")
    media = ("--set", "model.language_model.media_attention={vision: bidirectional}")
    assert dilatant("train", config, *deeper, *media)[0] == 0
    assert losses(project / "run") != pytest.approx(losses(project / "plain"), rel=1e-3)
    code, out, _ = dilatant("generate", project / "run" / "export", "--image", project / "images" / "0.png",
                            "--prompt", "Side?", "--max-new-tokens", "3", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["answer"]


def test_what_block_tables_cannot_do_is_refused_before_training(project: Path, dilatant: Dilatant) -> None:
    key = "model.language_model"
    code, _, err = dilatant(
        "train", project / "config.yaml", "--set", f"{key}.attn_implementation=dilatant",
        "--set", f"{key}.config.attention_dropout=0.1",
    )  # fmt: skip
    assert (code, "attention_dropout is 0.1" in err) == (2, True)
    code, _, err = dilatant(
        "train", project / "config.yaml", "--set", f"{key}.attn_implementation=sdpa",
        "--set", f"{key}.media_attention=embedded",
    )  # fmt: skip
    assert (code, "needs attn_implementation: dilatant" in err) == (2, True)


def test_an_invalid_layout_lists_every_reason_before_the_start(project: Path, dilatant: Dilatant) -> None:
    wrong = {"units": {"vision": {"pp": 9}, "language": {"tp": 2, "cuts": [1]}}}
    code, _, err = dilatant("train", project / "config.yaml", *layout(wrong))
    assert code == 2
    for reason in ("vision: pp is 9", "language: cuts"):
        assert reason in err
    assert not (project / "run" / "metrics.jsonl").exists()


def test_a_degree_that_divides_no_heads_names_valid_degrees(project: Path, dilatant: Dilatant) -> None:
    code, _, err = dilatant("train", project / "config.yaml", *layout({"units": {"vision": {}, "language": {"tp": 3}}}))
    assert code == 2
    assert "attention heads cannot be shared by 3 ranks; it takes tp 1, 2" in err


def test_a_corrupt_sample_is_named_by_the_rank_that_reads_it(project: Path, dilatant: Dilatant) -> None:
    (project / "images" / "3.png").write_bytes(b"no image")
    code, _, err = dilatant("train", project / "config.yaml", *layout(THREE))
    assert code == 2
    assert "train.jsonl:4" in err


@pytest.mark.slow
def test_stages_judge_held_out_answers_like_the_whole_model(project: Path, dilatant: Dilatant) -> None:
    tree = tiny_config(steps=40, global_batch_size=6, optimizer={"learning_rate": 0.01})
    tree["data"]["eval"] = [{"path": "train.jsonl"}]
    tree["evaluation"] = {"steps": 20, "batch_size": 5, "max_new_tokens": 5}
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = project / "config.yaml"
    code, _, _ = dilatant("train", config, "--set", "output_dir=one", "--set", "train.save_steps=40")
    assert code == 0
    by_whole_model = json.loads((project / "one" / "eval.json").read_text())
    assert 0 < by_whole_model["exact_match"] < 1  # or this shows little
    # The same weights, judged by three ranks: nothing is left to train.
    code, _, err = dilatant("resume", project / "one", *layout(THREE))
    assert code == 0, err
    by_stages = json.loads((project / "one" / "eval.json").read_text())
    assert by_stages["exact_match"] == by_whole_model["exact_match"]
    for mine, theirs in zip(by_stages["wrong_examples"], by_whole_model["wrong_examples"], strict=True):
        assert (mine["sample"], mine["expected"]) == (theirs["sample"], theirs["expected"])
        assert theirs["written"].startswith(mine["written"].removesuffix("..."))
    # And on the way.
    code, _, err = dilatant(
        "train", config, *layout(THREE), "--check-transport", "--set", "train.report_to=[tensorboard]"
    )
    assert code == 0, err
    assert b"eval/exact_match" in b"".join(file.read_bytes() for file in (project / "run" / "tensorboard").iterdir())
    assert json.loads((project / "run" / "eval.json").read_text())["step"] == 40


def rank_that_breaks(worker: Worker, *arguments: Any) -> Any:
    """Run a rank; the third forward of rank 1 fails, as with a bug in a model."""
    from dilatant.models.language.language_stage import LanguageStage

    run, calls = LanguageStage.run, []

    def break_down(self: Any, *given: Any) -> Any:
        calls.append(1)
        if worker.rank == 1 and len(calls) == 3:
            raise ValueError("out of paper")
        return run(self, *given)

    LanguageStage.run = break_down  # type: ignore[method-assign]
    return training_run.train_rank(worker, *arguments)


def test_a_failing_stage_is_named_with_its_samples_only(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "train_rank", rank_that_breaks)
    code, _, err = dilatant("train", project / "config.yaml", *layout(THREE))
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert re.search(
        r"^error: rank 1, language replica 0 stage 0 \(layers 0 to \d\), F of microbatch 0 with samples "
        r"'train.jsonl:\d+', .*: ValueError: out of paper$",
        last,
    ), last
    assert err.count("Traceback") == 1
    assert "CommAborted" not in err
    # All ranks live to save their parts of the finished step.
    assert [saved.name for saved in (project / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def rank_that_never_begins(worker: Worker, config: Config, *_: Any) -> None:
    (Path(config.output_dir) / f"rank{worker.rank}").touch()
    time.sleep(1000)


@pytest.mark.slow
def test_a_signal_before_training_begins_just_ends_the_command(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "train_rank", rank_that_never_begins)

    def ask() -> None:
        while len([*(project / "run").glob("rank*")]) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    code, _, err = dilatant("train", project / "config.yaml", *layout(THREE))
    assert code == 128 + signal.SIGTERM
    assert err == "stopped before the run began; nothing is lost\n"


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    return [below for child in children(pid) for below in (child, *descendants(child))]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_leaves_no_process(project: Path) -> None:
    config = project / "config.yaml"
    arguments = [*COMMAND, "train", str(config), *layout(THREE), "--set", "train.steps=100000"]
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics = project / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANG_SECONDS
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    family = descendants(process.pid)
    # The server that workers come from is the command's child, the workers are that server's.
    ranks = [pid for server in children(process.pid) for pid in children(server)]
    assert len(ranks) == 3
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert re.search(r"^error: rank \d was killed by SIGKILL", err.strip().splitlines()[-1]), err
    deadline = time.monotonic() + HANG_SECONDS
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_ranks_after_one_step(project: Path, number: signal.Signals) -> None:
    arguments = [
        *COMMAND,
        "train",
        str(project / "config.yaml"),
        *layout(THREE),
        "--set",
        "train.steps=100000",
        "--set",
        "data.workers=1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    metrics = project / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANG_SECONDS
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal, `timeout`, Slurm and systemd do
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + number
    assert "dilatant resume" in output
    done = len(losses(project / "run"))
    assert (project / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
