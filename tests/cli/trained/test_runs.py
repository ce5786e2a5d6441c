"""A run writes the files that it promises, and can always be continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cases.tiny_project import SIDES, Dilatant, tiny_config, write_images
from dilatant.data.media.image_file import decode_image
from dilatant.data.media_units import unit_base
from harness.patience import HANG_SECONDS, wait_until

COMMAND = [sys.executable, "-c", "from dilatant.cli.app import main; main()"]
DROPOUT = {"model_type": "phi", "num_key_value_heads": 2, "tie_word_embeddings": False, "resid_pdrop": 0.1}
"""A language model with dropout, so that random state matters."""


def records(run: Path) -> list[dict]:
    """The records of steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if "evaluation" not in record]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def configure(project: Path, **train: object) -> None:
    (project / "config.yaml").write_text(yaml.safe_dump(tiny_config(**train)), encoding="utf-8")


def start(project: Path) -> subprocess.Popen[str]:
    """Start a run that handles SIGINT even if the tests run in the background, where SIGINT is ignored."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*COMMAND, "train", str(project / "config.yaml")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_folder_holds_what_was_promised(project: Path, dilatant: Dilatant) -> None:
    write_images(project, 4, "heldout.jsonl")
    code, out, _ = dilatant(
        "train", project / "config.yaml", "--set", "data.eval=[{path: heldout.jsonl}]",
        "--set", "train.report_to=[tensorboard]", "--json",
    )  # fmt: skip
    assert code == 0
    summary = json.loads(out)
    run = project / "run"
    assert summary["steps"] == 6
    judged = json.loads((run / "eval.json").read_text())
    assert summary["exact_match"] == judged["exact_match"]
    assert summary["evaluation"]["samples"] == judged["samples"] == 4
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["evaluation"]["loss"] == judged["loss"]
    assert last["step"] == 6
    assert records(run)[0]["time"] <= last["time"] <= datetime.now(UTC).isoformat()
    assert summary["loss"] == pytest.approx(records(run)[-1]["loss"])
    assert 0.0 < summary["startup_seconds"] <= summary["whole_seconds"] - summary["seconds"] + 0.02  # rounded
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "learning_rates", "step_seconds", "tokens", "tokens_per_second", "data_wait_seconds"}
    assert wanted <= records(run)[0].keys()
    assert records(run)[0]["tokens"].keys() == {"language", "vision"}
    assert list((run / "tensorboard").iterdir())
    assert (run / "checkpoints" / "step-00000006").is_dir()
    assert (run / "export" / "multimodal.json").is_file()


def test_the_saved_config_repeats_the_run(trained: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    dilatant("train", trained / "run" / "config.yaml", "--set", f"output_dir={tmp_path / 'again'}")
    # The same operations in the same order: equal, but for how threads split sums.
    assert losses(tmp_path / "again") == pytest.approx(losses(trained / "run"), rel=1e-6)


def test_a_resumed_run_has_the_losses_of_the_undisturbed_one(project: Path, dilatant: Dilatant) -> None:
    # Twelve samples in batches of 4 make the cut fall inside an epoch's order.
    tree = tiny_config()
    tree["model"]["language_model"]["config"] |= DROPOUT
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    dilatant("train", project / "config.yaml", "--set", "train.save_steps=4")
    run = project / "run"
    undisturbed = losses(run)
    # As if the process had died after step 5: the checkpoint of step 4 is the newest.
    (run / "checkpoints" / "step-00000006").rename(project / "gone")
    code, _, _ = dilatant("resume", run)
    assert code == 0
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
    # The same operations in the same order: equal, but for how threads split sums.
    assert losses(run) == pytest.approx(undisturbed, rel=1e-6)


def test_a_damaged_checkpoint_is_passed_over(own_trained: Path, dilatant: Dilatant) -> None:
    run = own_trained / "run"
    before = losses(run)
    newest = run / "checkpoints" / "step-00000006"
    next(newest.glob("part-*/model.safetensors")).write_bytes(b"rubbish")
    code, out, _ = dilatant("resume", run)
    assert code == 0
    assert "step-00000006 is damaged and was skipped" in " ".join(out.split())
    assert losses(run) == pytest.approx(before, rel=1e-6)


def test_going_back_in_a_run_goes_on_from_there_only(project: Path, dilatant: Dilatant) -> None:
    config, run = project / "config.yaml", project / "run"
    dilatant("train", config, "--set", "train.save_steps=2", "--set", "train.keep_checkpoints=3")
    lower_rate = ("--set", "train.optimizer.learning_rate=0.001", "--set", "train.keep_checkpoints=1")
    back = ("--set", f"train.resume={run / 'checkpoints' / 'step-00000002'}")
    code, _, err = dilatant("train", config, *back, *lower_rate, "--set", "train.steps=4")
    assert code == 0, err
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert not list((run / "checkpoints").glob("abandoned-*"))  # enough are new
    before = (run / "export" / "language" / "model.safetensors").read_bytes()
    dilatant("export", run, "--to", project / "again")
    assert (project / "again" / "language" / "model.safetensors").read_bytes() == before
    code, out, _ = dilatant("resume", run, "--set", "train.steps=6")
    assert "going on after step 4" in " ".join(out.split())
    assert max(record["learning_rates"]["vision"] for record in records(run)[2:]) <= 0.001


def signalled_here(project: Path, dilatant: Dilatant, number: signal.Signals) -> tuple[int, str]:
    """Train in this process and signal it after the first step; return exit code and output."""
    metrics = project / "run" / "metrics.jsonl"

    def ask() -> None:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        if signal.getsignal(number) != signal.SIG_DFL:  # after a failure nothing would catch it
            os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    code, output, _ = dilatant("train", project / "config.yaml")
    asking.join()
    return code, output


def signalled_apart(project: Path, dilatant: Dilatant, number: signal.Signals) -> tuple[int, str]:
    """Train in a separate process and signal it as a terminal or a cluster does; return exit code and output."""
    process = start(project)
    metrics = project / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, output


@pytest.mark.parametrize(
    ("number", "signalled"),
    [
        (signal.SIGTERM, signalled_here),
        *(pytest.param(number, signalled_apart, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_a_signal_saves_and_stops_and_the_run_goes_on(
    project: Path,
    dilatant: Dilatant,
    number: signal.Signals,
    signalled: Callable[[Path, Dilatant, signal.Signals], tuple[int, str]],
) -> None:
    configure(project, steps=100_000)
    code, output = signalled(project, dilatant, number)
    assert code == 128 + number
    assert "dilatant resume" in output
    done = len(records(project / "run"))
    assert (project / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
    code, _, _ = dilatant("resume", project / "run", "--set", f"train.steps={done + 2}")
    assert code == 0
    assert [record["step"] for record in records(project / "run")] == list(range(1, done + 3))


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(project: Path, dilatant: Dilatant) -> None:
    configure(project, steps=40, save_steps=5)
    dilatant("train", project / "config.yaml", "--set", "output_dir=whole")
    process = start(project)
    wait_until(lambda: any((project / "run" / "checkpoints").glob("step-*")))
    process.kill()
    process.communicate()
    dilatant("resume", project / "run")
    # Another process may split sums over threads in another way, and forty optimizer steps amplify the last bit.
    assert losses(project / "run") == pytest.approx(losses(project / "whole"), rel=1e-3)


def test_what_an_optimizer_left_half_done_is_not_saved(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = torch.optim.AdamW.step, []

    def out_of_memory(self: torch.optim.AdamW, *arguments: Any) -> Any:
        step(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room for the next weight")

    monkeypatch.setattr(torch.optim.AdamW, "step", out_of_memory)
    code, _, err = dilatant("train", project / "config.yaml")
    assert (code, "MemoryError: no room for the next weight" in err) == (1, True)
    assert not [*(project / "run").glob("checkpoints/step-*")]


def test_losses_do_not_depend_on_how_samples_are_packed(project: Path, trained: Path, dilatant: Dilatant) -> None:
    short = ("--set", "train.row_tokens=20", "--set", "data.max_length=20")
    dilatant("train", project / "config.yaml", *short)
    # fp32 sums in another order: 1e-7 a step, which six optimizer steps amplify.
    assert losses(project / "run") == pytest.approx(losses(trained / "run"), rel=1e-4)


@pytest.mark.slow
def test_the_export_is_reloaded_by_transformers_alone(project: Path, dilatant: Dilatant) -> None:
    dilatant("train", project / "config.yaml")
    export = project / "run" / "export"
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoModel, AutoTokenizer\n"
        "folder = sys.argv[1]\n"
        "llm = AutoModelForCausalLM.from_pretrained(folder + '/language')\n"
        "vision = AutoModel.from_pretrained(folder + '/vision')\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder + '/language')\n"
        "ids = tokenizer('left', return_tensors='pt').input_ids\n"
        "torch.save([llm(ids).logits, vision(torch.ones(1, 1, 8, 8)).last_hidden_state], sys.argv[2])\n"
        "assert not [name for name in sys.modules if name.startswith('dilatant')]\n"
    )
    subprocess.run([sys.executable, "-c", code, str(export), str(project / "out.pt")], check=True)
    logits, hidden = torch.load(project / "out.pt")
    from dilatant import MultimodalModel

    model = MultimodalModel.from_pretrained(export).eval()
    ids = model.tokenizer("left", return_tensors="pt").input_ids
    # The same weights through the same code: only the split of sums over threads may differ.
    torch.testing.assert_close(model["language"].model(ids).logits, logits, rtol=1e-5, atol=1e-6)
    own = model["vision"].model(torch.ones(1, 1, 8, 8)).last_hidden_state
    torch.testing.assert_close(own, hidden, rtol=1e-5, atol=1e-6)


def test_generate_answers_from_the_export_as_evaluation_did(project: Path, dilatant: Dilatant) -> None:
    write_images(project, 2, "heldout.jsonl")
    dilatant(
        "train", project / "config.yaml", "--set", "data.eval=[{path: heldout.jsonl}]",
        "--set", "train.steps=30", "--set", "evaluation.max_new_tokens=6",
    )  # fmt: skip
    judged = json.loads((project / "run" / "eval.json").read_text())
    wrong = {entry["sample"]: entry["written"] for entry in judged["wrong_examples"]}
    for number in range(2):
        code, out, _ = dilatant(
            "generate", project / "run" / "export", "--prompt", "Side?", "--max-new-tokens", 6,
            "--image", project / "images" / f"{number}.png", "--json",
        )  # fmt: skip
        assert code == 0
        answer = json.loads(out)["answer"].strip()
        # Of a wrong answer evaluation tells what was written up to the first wrong token.
        judged_as = wrong.get(f"heldout.jsonl:{number + 1}")
        if judged_as is None:
            assert answer == SIDES[number]
        else:
            assert answer.startswith(judged_as.removesuffix("...").strip())


def test_export_writes_the_newest_checkpoint_again(trained: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    first = (trained / "run" / "export" / "language" / "model.safetensors").read_bytes()
    code, out, _ = dilatant("export", trained / "run", "--to", tmp_path / "elsewhere", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 6
    assert (tmp_path / "elsewhere" / "language" / "model.safetensors").read_bytes() == first


def test_data_stats_counts_tokens_by_unit(project: Path, dilatant: Dilatant) -> None:
    page = project / "page.html"
    code, out, _ = dilatant("data", "stats", project / "config.yaml", "--json", "--page", page)
    assert code == 0
    stats = json.loads(out)
    assert stats["samples"] == 12
    assert {unit["unit"]: unit["total"] for unit in stats["units"]}["vision"] == 12 * 4
    assert [one["policy"] for one in stats["balance"]] == ["random", "balanced"]
    text = page.read_text()
    assert "What balancing is worth" in text
    assert "data:image/jpeg;base64," in text  # a sample is shown


def test_frozen_weights_stay_as_they_were(project: Path, dilatant: Dilatant) -> None:
    frozen = ("train", project / "config.yaml", "--set", "model.freeze=[vision.encoder]")
    dilatant(*frozen, "--set", "train.steps=1", "--set", "output_dir=short")
    dilatant(*frozen, "--set", "output_dir=long")
    weights = {
        (run, unit): (project / run / "export" / unit / "model.safetensors").read_bytes()
        for run in ("short", "long")
        for unit in ("vision", "language")
    }
    assert weights["short", "vision"] == weights["long", "vision"]
    assert weights["short", "language"] != weights["long", "language"]


def test_held_out_accuracy_is_shown_on_the_way(project: Path, dilatant: Dilatant) -> None:
    write_images(project, 4, "heldout.jsonl")
    code, out, _ = dilatant(
        "train", project / "config.yaml", "--set", "data.eval=[{path: heldout.jsonl}]",
        "--set", "evaluation.steps=2",
    )  # fmt: skip
    assert code == 0
    assert [f"step {step}: " in out for step in (2, 4, 6)] == [True, True, True]


def test_doctor_tells_what_would_be_used(dilatant: Dilatant) -> None:
    code, out, _ = dilatant("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["A run here uses"]["device"] in ("cpu", "cuda")
    attention = found["Attention over packed rows"]
    for row in ("packed text", "sliding window", "text and images"):
        chosen = attention[row].split()[0]
        for other in {"triton", "blockwise", "sdpa"} - {chosen}:
            assert f"not {other}: " in attention[row]


def test_a_warm_up_that_outlasts_the_run_is_said(project: Path, dilatant: Dilatant) -> None:
    settings = ("--set", "train.steps=1", "--set", "train.schedule.warmup_steps=1")
    code, out, _ = dilatant("train", project / "config.yaml", *settings)
    assert code == 0
    assert "train.schedule: a warm-up of 1 is no less than the run's 1 step: the learning rate does not" in out


def test_the_wait_for_data_is_that_of_the_step_that_waited(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*asked: Any) -> Any:
        time.sleep(0.1)
        return decode_image(*asked)

    monkeypatch.setattr(unit_base, "decode_image", slowly)
    skipping = ("--set", "data.on_error=skip", "--set", "train.steps=2")
    code, _, err = dilatant("train", project / "config.yaml", *skipping)
    assert code == 0, err
    for step in records(project / "run"):
        assert step["data_wait_seconds"] <= step["step_seconds"]
