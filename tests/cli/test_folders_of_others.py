"""A run folder of somebody else is looked at without running its code and without writing outside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cases.tiny_project import Dilatant
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec

VERBS = {
    "resume": ("resume", "run"),
    "export": ("export", "run"),
    "simulate": ("simulate", "run"),
    "simulate a plan": ("simulate", "run/plan.json"),
    "train": ("train", "run/config.yaml"),
    "plan": ("plan", "run/config.yaml"),
    "profile": ("profile", "run/config.yaml"),
    "stats": ("data", "stats", "run/config.yaml"),
    "lint": ("data", "lint", "run/config.yaml"),
}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run leaves it, whose model's code leaves a file behind when it runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    model, run = tmp_path / "run" / "model", tmp_path / "run"
    model.mkdir(parents=True)
    for kind in ("configuration", "modeling"):
        (model / f"{kind}_evil.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\nclass Evil: ...\n")
    mapped = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    tree = {
        "output_dir": str(run),
        "model": {"language_model": {"id": str(model), "tokenizer": "bytes", "trust_remote_code": True}},
        "data": {"train": [{"path": str(tmp_path / "train.jsonl")}], "max_length": 16},
        "train": {"steps": 1, "report_to": [], "device": "cpu"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    (run / "plan.json").write_text(plan_from_specs({"language": 3}, {"language": ParallelSpec()}, {}).to_json())
    (run / ".lock").write_text("")
    return run


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_code_that_a_found_config_names(verb: str, theirs: Path, dilatant: Dilatant) -> None:
    code, _, err = dilatant(*VERBS[verb])
    assert code == 2, err
    assert "--trust-remote-code" in err
    assert not (theirs.parent / "harm").exists()
    assert not (theirs.parent / "state").exists()


@pytest.mark.parametrize("verb", ["resume", "export", "train", "plan", "stats"])
def test_no_verb_follows_a_link_of_a_run_folder(verb: str, theirs: Path, dilatant: Dilatant) -> None:
    mine = theirs.parent / "mine"
    mine.write_text("mine")
    (theirs / "metrics.damaged").symlink_to(mine)
    (theirs / "metrics.jsonl").write_text("echo harm\n")
    code, _, err = dilatant(*VERBS[verb])
    assert (code, mine.read_text()) == (2, "mine")
    assert "metrics.damaged' is a link" in err


def test_the_users_word_lets_the_code_run(theirs: Path, dilatant: Dilatant) -> None:
    dilatant(*VERBS["stats"], "--trust-remote-code")
    assert (theirs.parent / "harm").exists()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ([1], "'step' is not a mapping"),
        ({"num_microbatches": 10**12}, "step.num_microbatches"),
        ({"num_microbatches": "x"}, "step.num_microbatches"),
        ({"schedule": "x\x1b[31m"}, "step.schedule"),
        ({"row_tokens": -5}, "step.row_tokens"),
        ({"zero": ["node"]}, "step.zero"),
    ],
)
def test_a_foreign_plan_file_is_checked_before_simulation(
    step: object, says: str, theirs: Path, dilatant: Dilatant
) -> None:
    plan = theirs / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "step": step}))
    code, _, err = dilatant("simulate", "run")
    assert code == 2, err
    assert says in err


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_model_folder_of_somebody_runs_none_of_its_code(verb: str, theirs: Path, dilatant: Dilatant) -> None:
    asked = ("--prompt", "x") if verb == "generate" else ()
    code, _, err = dilatant(verb, "run/model", *asked)
    assert code == 2, err
    assert not (theirs.parent / "harm").exists()
