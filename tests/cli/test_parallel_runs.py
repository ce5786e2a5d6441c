"""A run over several processes is the run of one process, whatever its layout and however it is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_project import Dilatant, tiny_config

from dilatant.report.plan_report import PlanReport
from dilatant.report.timeline import StepTimeline

COMMAND = [sys.executable, "-c", "from dilatant.cli.app import main; main()"]
THREE = {"units": {"vision": {"pp": 1}, "language": {"pp": 2}}, "microbatches": 2}
BLOCK_TABLES = ("--set", "model.language_model.attn_implementation=dilatant")
COLOCATED = {"units": {"vision": {}, "language": {"replicas": 2}}, "colocated": {"vision": "language"}}


@pytest.fixture
def project(project: Path) -> Path:
    """Without dropout, whose draws depend on who makes them."""
    tree = tiny_config(save_steps=3)
    for source in (tree["model"]["language_model"], tree["model"]["encoders"]["vision"]):
        source["config"]["attention_dropout"] = 0.0
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def actions(timeline: StepTimeline) -> dict[tuple[int, ...], list[tuple]]:
    return {
        lane.ranks: [row[1:5] for row in timeline.rows if row.lane == number]
        for number, lane in enumerate(timeline.lanes)
    }


def layout(parallel: dict) -> tuple[str, str]:
    return "--set", f"parallel={json.dumps(parallel)}"


def test_three_processes_have_the_losses_of_one_and_resume_under_any_layout(
    project: Path, dilatant: Dilatant
) -> None:
    config = project / "config.yaml"
    dilatant("train", config, "--set", "output_dir=one")
    code, _, _ = dilatant("train", config, *layout(THREE))
    assert code == 0
    run = project / "run"
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
    assert actions(report.measured) == actions(report.timeline)
    # From three processes into one, and from one process into two that share both units and attend on block tables.
    (run / "checkpoints" / "step-00000006").rename(project / "gone")
    code, _, _ = dilatant("resume", run, "--set", "parallel=null")
    assert code == 0
    assert losses(run) == pytest.approx(losses(project / "one"), rel=1e-4)
    one = project / "one"
    (one / "checkpoints" / "step-00000006").rename(project / "gone too")
    code, _, _ = dilatant("resume", one, *layout(COLOCATED), *BLOCK_TABLES)
    assert code == 0
    assert losses(one) == pytest.approx(losses(run), rel=1e-4)


def test_block_tables_give_the_losses_of_transformers_attention(project: Path, dilatant: Dilatant) -> None:
    config = project / "config.yaml"
    dilatant("train", config, "--set", "output_dir=plain")
    assert dilatant("train", config, *BLOCK_TABLES)[0] == 0
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(project / "run") == pytest.approx(losses(project / "plain"), rel=1e-4)


def test_images_may_see_themselves_whole(project: Path, dilatant: Dilatant) -> None:
    """The mask changes what is learned, travels with the export, and is used when the model answers."""
    config = project / "config.yaml"
    # Text sees what images saw a layer before.
    deeper = ("--set", "model.language_model.config.num_hidden_layers=2")
    dilatant("train", config, *deeper, "--set", "output_dir=plain")
    media = ("--set", "model.language_model.media_attention=bidirectional")
    assert dilatant("train", config, *deeper, *media)[0] == 0
    assert losses(project / "run") != pytest.approx(losses(project / "plain"), rel=1e-5)
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
    assert (code, "attention_dropout must be 0" in err) == (2, True)
    code, _, err = dilatant(
        "train", project / "config.yaml", "--set", f"{key}.attn_implementation=sdpa",
        "--set", f"{key}.media_attention=embedded",
    )  # fmt: skip
    assert (code, "needs attn_implementation: dilatant" in err) == (2, True)


def test_a_layout_that_cannot_work_lists_every_reason_before_a_process_starts(
    project: Path, dilatant: Dilatant
) -> None:
    wrong = {"units": {"vision": {"pp": 9}, "language": {"tp": 2, "cuts": [1]}, "speech": {}}}
    code, _, err = dilatant("train", project / "config.yaml", *layout(wrong))
    assert code == 2
    for reason in ("speech", "vision: pp is 9", "language: cuts"):
        assert reason in err
    assert not (project / "run" / "metrics.jsonl").exists()


def test_tensor_parallel_stages_are_refused_for_now(project: Path, dilatant: Dilatant) -> None:
    code, _, err = dilatant(
        "train", project / "config.yaml", *layout({"units": {"vision": {}, "language": {"tp": 2}}})
    )
    assert code == 2
    assert "tp" in err


def test_a_corrupt_sample_is_named_by_the_rank_that_reads_it(project: Path, dilatant: Dilatant) -> None:
    (project / "images" / "3.png").write_bytes(b"no image")
    code, _, err = dilatant("train", project / "config.yaml", *layout(THREE))
    assert code == 2
    assert "train.jsonl:4" in err


@pytest.mark.slow
def test_a_signal_stops_all_ranks_after_one_step(project: Path, dilatant: Dilatant) -> None:
    arguments = [
        *COMMAND,
        "train",
        str(project / "config.yaml"),
        *layout(THREE),
        "--set",
        "train.steps=100000",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    metrics = project / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "dilatant resume" in output
    done = len(losses(project / "run"))
    assert (project / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
