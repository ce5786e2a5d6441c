"""Code that a config names runs on the user's own word, which is not in the folder that the config lies in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilatant.config import Config, UserError, load_config
from dilatant.report.run_folder import RunFolder

MODEL = "model: {language_model: {id: some/model, trust_remote_code: true}}"
METRIC = "model: {language_model: {id: some/model}}\nevaluation: {metrics: ['mine:score', exact_match]}"
DATA = "\ndata: {train: [{path: train.jsonl}]}\n"
CALLBACK = "model: {language_model: {id: some/model}}\ntrain: {callbacks: ['mine:Stop']}"
KEYS = {MODEL: "model.language_model.trust_remote_code", METRIC: "evaluation.metrics", CALLBACK: "train.callbacks"}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "dilatant" / "trusted"


def found(folder: Path, text: str, mark: str = ".lock") -> Path:
    """The config of a run folder that somebody handed over."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text + DATA)
    (folder / mark).parent.mkdir(exist_ok=True, parents=True)
    (folder / mark).write_text("")
    return folder / "config.yaml"


def start(config: Config) -> Path:
    """What a run writes when it starts."""
    folder = RunFolder(config.output_dir)
    folder.lock()
    folder.write_config(config)
    folder.close()
    return folder.config


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("mark", [".lock", "metrics.jsonl", "step.json", "checkpoints/step-00000001/manifest.json"])
def test_a_found_config_names_the_key_of_its_code_and_the_remedy(text: str, mark: str, tmp_path: Path) -> None:
    config = found(tmp_path / "theirs", text, mark)
    with pytest.raises(UserError, match=rf"{KEYS[text]}.*--trust-remote-code") as caught:
        load_config(config)
    assert "\n" not in str(caught.value)
    assert load_config(config, trust_remote_code=True).output_dir == str(tmp_path / "theirs")


@pytest.mark.parametrize("text", KEYS)
def test_a_config_that_the_user_names_needs_no_second_word(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text + DATA)
    (tmp_path / "plan.json").write_text("{}")  # of `dilatant plan --out`
    load_config(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="--trust-remote-code"):  # the user named the folder
        load_config(tmp_path / "config.yaml", trust_remote_code=False)


def test_a_config_beside_a_plan_needs_trust_and_finds_its_run(tmp_path: Path) -> None:
    config = found(tmp_path / "theirs" / "plan", MODEL, "report.json")
    (config.parent / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(config)
    assert load_config(config, trust_remote_code=True).output_dir == str(tmp_path / "theirs")


@pytest.mark.parametrize("text", KEYS)
def test_a_run_that_the_user_started_goes_on_unasked(text: str, tmp_path: Path, state: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text + DATA)
    saved = start(load_config(tmp_path / "mine.yaml", [f"output_dir={tmp_path}/run"]))
    config = load_config(saved, trust_remote_code=False)
    assert start(config) == saved
    assert not any(path.is_relative_to(tmp_path / "run") for path in state.iterdir())
    # The note is for this folder, this key and this code.
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(tmp_path / "moved" / "config.yaml")
    (tmp_path / "moved").rename(tmp_path / "run")
    saved.write_text(saved.read_text().replace("some/model", "their/model").replace("mine:", "theirs:"))
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(saved)


def test_code_on_the_command_line_is_the_users_word(tmp_path: Path) -> None:
    config = found(tmp_path / "theirs", "model: {language_model: {id: some/model}}")
    load_config(config, ["model.language_model.trust_remote_code=true", "evaluation={metrics: ['mine:score']}"])
    config.write_text(MODEL + DATA)
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(config, ["evaluation.metrics=['mine:score']"])


@pytest.mark.parametrize("mode", [0o666, 0o622])
def test_a_note_that_others_may_write_is_no_word(mode: int, tmp_path: Path, state: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MODEL + DATA)
    saved = start(load_config(tmp_path / "mine.yaml", [f"output_dir={tmp_path}/run"]))
    (note,) = state.iterdir()
    assert note.stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    note.chmod(mode)
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(saved)
    note.unlink()
    note.symlink_to(tmp_path / "mine.yaml")
    with pytest.raises(UserError, match="--trust-remote-code"):
        load_config(saved)


def test_a_run_without_code_of_its_own_notes_nothing(tmp_path: Path, state: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {language_model: {id: some/model}}" + DATA)
    saved = start(load_config(tmp_path / "mine.yaml", [f"output_dir={tmp_path}/run"]))
    load_config(saved, trust_remote_code=False)
    assert not os.path.lexists(state)


def test_a_found_config_may_not_lead_elsewhere(tmp_path: Path) -> None:
    config = found(tmp_path / "theirs", f"output_dir: {tmp_path}/mine\nmodel: {{language_model: {{id: a/b}}}}")
    assert load_config(config).output_dir == str(tmp_path / "theirs")
    assert load_config(config, ["output_dir=../other"]).output_dir == str(tmp_path / "other")
    (tmp_path / "theirs" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link"):
        load_config(config)
