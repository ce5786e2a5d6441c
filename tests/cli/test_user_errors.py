"""Bad input is one clear message on standard error and exit code 2, without a stack trace."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cases.tiny_project import Dilatant, write_images
from dilatant.comm import ray_cluster
from dilatant.runtime.step.cost_correction import CostCorrection
from harness.patience import HANG_SECONDS
from harness.refused import refused


def test_an_unknown_key(project: Path, dilatant: Dilatant) -> None:
    refused(dilatant("train", project / "config.yaml", "--set", "train.stepz=3"), "did you mean 'train.steps'?")


def test_recomputation_of_a_unit_that_is_not_there(project: Path, dilatant: Dilatant) -> None:
    result = dilatant("train", project / "config.yaml", "--set", "train.recompute={visoin: block}")
    refused(result, "train.recompute: no unit 'visoin'; there are vision, language")


def test_a_ray_cluster_that_cannot_be_used(project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ("train", project / "config.yaml", "--set", "data.preprocess=ray")
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    refused(dilatant(*ray), 'pip install "dilatant[ray]"')
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    refused(dilatant(*ray, "--set", "data.ray_address=127.0.0.1:6379"), "only with token authentication")
    assert not (project / "run" / "checkpoints").exists()


def test_a_run_that_cannot_begin_on_ray(project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ray = ("train", project / "config.yaml", "--on", "ray")
    refused(dilatant(*on_ray, "--set", "resilience.enabled=false"), "leave out 'resilience.enabled: false'")
    refused(dilatant(*on_ray, "--set", "resilience.listen=a:1"), "resilience.listen and launcher")
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    refused(dilatant(*on_ray), "launcher: 'ray' needs Ray", 'pip install "dilatant[ray]"')
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused(dilatant(*on_ray), "set RAY_ADDRESS or data.ray_address")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    refused(dilatant(*on_ray, "--set", "data.ray_address=127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    refused(dilatant(*on_ray), "torchrun started 2 processes")
    assert not (project / "run").exists()


def test_an_unknown_model_id_offline(project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = "model.language_model={id: nobody/no-such-model, tokenizer: bytes}"
    result = dilatant("train", project / "config.yaml", "--set", source)
    refused(result, "nobody/no-such-model", "HF_HUB_OFFLINE")


def test_an_unknown_model_type(project: Path, dilatant: Dilatant) -> None:
    setting = "model.language_model.config.model_type=lama"
    result = dilatant("train", project / "config.yaml", "--set", setting)
    refused(result, "model.language_model", "did you mean 'llama'?")


def test_an_unknown_tokenizer_folder(project: Path, dilatant: Dilatant) -> None:
    setting = "model.language_model.tokenizer=./none"
    refused(dilatant("train", project / "config.yaml", "--set", setting), "'./none' does not exist")


@pytest.mark.parametrize(
    "verb", [("plan", "--out"), ("profile", "--out"), ("profile", "--links"), ("data", "stats", "--page")]
)
def test_a_file_to_write_where_none_can_be(project: Path, dilatant: Dilatant, verb: tuple[str, ...]) -> None:
    *name, option = verb
    result = dilatant(*name, project / "config.yaml", option, project / "none" / "file")
    refused(result, option, "none' does not exist")
    result = dilatant(*name, project / "config.yaml", option, "/proc/file")  # nobody may write there
    refused(result, option, "'/proc/file' cannot be written")


@pytest.mark.parametrize(
    "verb",
    [
        ("plan", "--out"),
        ("plan", "--page"),
        ("profile", "--out"),
        ("profile", "--links"),
        ("data", "stats", "--page"),
        ("simulate", "--page"),
    ],
)
@pytest.mark.parametrize("precious", ["config.yaml", "train.jsonl", "images/0.png"])
def test_a_file_to_write_that_holds_something_else(
    project: Path, dilatant: Dilatant, verb: tuple[str, ...], precious: str
) -> None:
    *name, option = verb
    before = (project / precious).read_bytes()
    result = dilatant(*name, project / "config.yaml", option, project / precious)
    refused(result, option, precious, "name another file")
    assert (project / precious).read_bytes() == before


def test_a_page_is_written_again_over_itself(project: Path, dilatant: Dilatant) -> None:
    stats = ("data", "stats", project / "config.yaml", "--page", project / "data.html")
    assert [dilatant(*stats)[0], dilatant(*stats)[0]] == [0, 0]


@pytest.mark.parametrize(
    ("layout", "says"),
    [("single", "parallel: single asks for one"), ("{units: {vision: {}, language: {}}}", "has 2 ranks")],
)
def test_a_launcher_that_started_another_number_of_processes(
    project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch, layout: str, says: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    result = dilatant("train", project / "config.yaml", "--set", f"parallel={layout}")
    refused(result, says, "torchrun started 3 processes")


def test_a_missing_image(project: Path, dilatant: Dilatant) -> None:
    (project / "images" / "3.png").unlink()
    refused(dilatant("train", project / "config.yaml"), "train.jsonl:4", "images/3.png", "does not exist")


def test_a_held_out_sample_that_asks_nothing(project: Path, dilatant: Dilatant) -> None:
    (project / "held.jsonl").write_text('{"text": "alone"}\n')
    result = dilatant("train", project / "config.yaml", "--set", "data.eval=[{path: held.jsonl}]")
    refused(result, "data.eval: held.jsonl:1: ", "has no question")
    assert not (project / "run" / "metrics.jsonl").exists()


def test_an_empty_data_set(project: Path, dilatant: Dilatant) -> None:
    (project / "train.jsonl").write_text("")
    refused(dilatant("train", project / "config.yaml"), "train.jsonl", "is empty")


def test_missing_data(project: Path, dilatant: Dilatant) -> None:
    (project / "train.jsonl").unlink()
    refused(dilatant("train", project / "config.yaml"), "train.jsonl", "does not exist")


def test_a_sample_longer_than_the_context(project: Path, dilatant: Dilatant) -> None:
    result = dilatant("train", project / "config.yaml", "--set", "data.max_length=8")
    refused(result, "train.jsonl:", "tokens", "max_length")


def test_a_checkpoint_of_another_model(own_trained: Path, dilatant: Dilatant) -> None:
    result = dilatant("resume", own_trained / "run", "--set", "model.language_model.config.hidden_size=32")
    refused(result, "belongs to another model", "language.")


def test_a_checkpoint_with_nonsense_in_it(project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostCorrection, "to_json", lambda self: "[]")
    dilatant("train", project / "config.yaml", "--set", "train.steps=1")
    refused(dilatant("resume", project / "run"), "step-00000001", "'costs' is not the state of a run's costs")


def test_a_model_of_which_nothing_trains(project: Path, dilatant: Dilatant) -> None:
    result = dilatant("train", project / "config.yaml", "--set", "model.freeze=[vision, language]")
    refused(result, "model.freeze leaves nothing to train")


@pytest.mark.parametrize("temperature", ["1e-320", "1e-5", "inf"])
def test_a_temperature_that_leaves_no_numbers(project: Path, dilatant: Dilatant, temperature: str) -> None:
    result = dilatant("generate", project, "--prompt", "Side?", "--temperature", temperature)
    refused(result, "--temperature must be 0, or a number from 0.001 on")


def test_a_run_is_not_overwritten_by_accident(own_trained: Path, dilatant: Dilatant) -> None:
    result = dilatant("train", own_trained / "config.yaml")
    refused(result, "holds a run already", "dilatant resume", "--overwrite")
    code, _, _ = dilatant("train", own_trained / "config.yaml", "--overwrite", "--set", "train.steps=1")
    assert code == 0


def test_a_disk_that_fills_up_keeps_the_previous_checkpoint(own_trained: Path, dilatant: Dilatant) -> None:
    # A limit on file size makes writes fail in the middle of a file, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        result = dilatant("resume", own_trained / "run", "--set", "train.steps=7")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    refused(result, "disk is full", "step-00000006 is still valid")
    code, _, _ = dilatant("resume", own_trained / "run", "--set", "train.steps=7")
    assert code == 0


def test_resume_of_something_else(tmp_path: Path, dilatant: Dilatant) -> None:
    refused(dilatant("resume", tmp_path), "not a run folder")


def test_generate_from_something_else(tmp_path: Path, dilatant: Dilatant) -> None:
    refused(dilatant("generate", tmp_path, "--prompt", "hello"), "is not an export")


def test_a_frozen_name_that_is_none(project: Path, dilatant: Dilatant) -> None:
    result = dilatant("train", project / "config.yaml", "--set", "model.freeze=[vison]")
    refused(result, "did you mean 'vision'?")


def test_a_rate_for_a_name_that_is_none(project: Path, dilatant: Dilatant) -> None:
    setting = "train.optimizer.groups={langauge: {learning_rate: 1}}"
    refused(dilatant("train", project / "config.yaml", "--set", setting), "did you mean 'language'?")


def test_lint_reports_every_broken_sample_and_fails(project: Path, dilatant: Dilatant) -> None:
    broken = write_images(project, 8, "broken.jsonl")
    lines = [json.loads(line) for line in broken.read_text().splitlines()]
    (project / "images" / "cut.png").write_bytes((project / "images" / "2.png").read_bytes()[:60])
    lines[1]["messages"][0]["content"][0]["image"] = "images/none.png"
    lines[2]["messages"][0]["content"][0]["image"] = "images/cut.png"
    lines[4]["messages"][0]["content"][1]["text"] = "word " * 50
    lines[5]["messages"].pop()
    broken.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    path = "data.train.0.path=broken.jsonl"
    code, out, _ = dilatant("data", "lint", project / "config.yaml", "--set", path, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["samples"] == 8
    assert found["unused"] == {"broken.jsonl": ["id"]}
    problems = {problem["index"]: problem["problem"] for problem in found["problems"]}
    assert problems.keys() == {1, 2, 4, 5}
    assert "does not exist" in problems[1]
    assert "tokens" in problems[4]
    assert "answer" in problems[5]


def test_lint_finds_held_out_samples_that_ask_nothing(project: Path, dilatant: Dilatant) -> None:
    answer = {"role": "assistant", "content": "left"}
    lines = [{"messages": [{"role": "user", "content": "Side?"}, answer]}, {"messages": [answer]}]
    (project / "lone.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    for held_out, expected in ((False, []), (True, ["lone.jsonl:2"])):
        key = "data.eval=[{path: lone.jsonl}]" if held_out else "data.train.0.path=lone.jsonl"
        code, out, err = dilatant("data", "lint", project / "config.yaml", "--set", key, "--json")
        assert [problem["sample"] for problem in json.loads(out)["problems"]] == expected, err
        assert code == len(expected)


def test_lint_shows_names_with_brackets_as_they_are(project: Path, dilatant: Dilatant) -> None:
    broken = write_images(project, 2, "broken.jsonl")
    lines = [json.loads(line) for line in broken.read_text().splitlines()]
    lines[1]["messages"][0]["content"][0]["image"] = "images/[/red]\x1b[2J[bold].png"
    broken.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    path = "data.train.0.path=broken.jsonl"
    code, out, _ = dilatant("data", "lint", project / "config.yaml", "--set", path)
    assert code == 1
    assert "images/[/red]\\x1b[2J[bold].png" in out.replace("\\\\", "\\")
    assert "source broken.jsonl: columns not used: id\n" in out
    assert "2 samples, 1 problem" in out


def test_lint_refuses_what_no_row_of_training_holds(project: Path, dilatant: Dilatant) -> None:
    for tokens, expected in ((64, 0), (4, 1)):
        limit = f"train.row_tokens={tokens}"
        assert dilatant("data", "lint", project / "config.yaml", "--set", limit)[0] == expected


def test_a_plan_folder_of_somebody_else_is_not_replaced(project: Path, dilatant: Dilatant) -> None:
    (project / "run" / "plan").mkdir(parents=True)
    (project / "run" / "plan" / "config.yaml").write_text("mine")
    refused(dilatant("plan", project / "config.yaml"), "'config.yaml', which no plan wrote")
    code, _, err = dilatant("plan", project / "config.yaml", "--set", f"output_dir={project / 'train.jsonl'}")
    assert code == 2
    assert "cannot be written: Not a directory" in err
    assert "searching" not in err
    assert (project / "run" / "plan" / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("parallel.timeout_seconds=1e400", "parallel.timeout_seconds"),
        ("resilience.lease_seconds=1e300", "resilience.lease_seconds"),
        ("train.global_batch_size=10000000000", "train.global_batch_size"),
        ('output_dir="a\\0b"', "is no path"),
    ],
)
def test_values_that_no_machine_can_have(project: Path, dilatant: Dilatant, setting: str, says: str) -> None:
    refused(dilatant("train", project / "config.yaml", "--set", setting), says)


WAITS = (
    "import multiprocessing.util as util, time\nfrom dilatant.cli import app\n"
    "app.run = lambda: (print(util.get_temp_dir(), flush=True), time.sleep(6000))\napp.main()\n"
)


def test_sigterm_at_any_moment_leaves_no_temporary_folder() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    process.terminate()
    assert process.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    assert not folder.exists()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.freeze=[vision, language]", "leaves nothing to train"),
        ("model.language_model={id: empty, tokenizer: bytes}", "empty"),
        ("model.encoders.vision.config.num_attention_heads=3", "cannot be built"),
        ("parallel.units={language: {pp: 1}, visoin: {pp: 1}}", "did you mean 'vision'?"),
    ],
)
def test_lint_refuses_a_model_that_cannot_be_trained(
    setting: str, says: str, project: Path, dilatant: Dilatant
) -> None:
    (project / "empty").mkdir()
    language = yaml.safe_load((project / "config.yaml").read_text())["model"]["language_model"]["config"]
    (project / "empty" / "config.json").write_text(json.dumps({**language, "vocab_size": 300}))
    refused(dilatant("data", "lint", project / "config.yaml", "--set", setting), says)
