"""`dilatant evaluate` scores what a run has exported as the run itself did, by the metrics of its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cases.tiny_project import Dilatant, tiny_config, write_images
from dilatant.data.sample import Sample
from dilatant.data.text.encode import EncodedPrompt, encode_prompt
from dilatant.data.text.encoding import Encoding
from dilatant.training.evaluation import scored_answers

METRICS = ("exact_match", "anls", "wer")


@pytest.fixture
def judged(tmp_path: Path, dilatant: Dilatant) -> Path:
    """A folder with a run that was evaluated on the first samples of two data sets."""
    write_images(tmp_path, 12)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(lines[3:10]).replace('"right"', '"rights"') + "\n")
    tree = tiny_config(steps=35, optimizer={"learning_rate": 0.02})
    tree["data"] |= {"eval": [{"path": "train.jsonl"}, {"path": "other.jsonl"}], "system": "Say what you see."}
    tree["evaluation"] = {"metrics": [*METRICS], "max_new_tokens": 6, "limit": 6}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    code, _, err = dilatant("train", tmp_path / "config.yaml")
    assert code == 0, err
    return tmp_path


def test_an_export_is_scored_as_its_run_was(judged: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = set[str | None]()

    def noted(sample: Sample, encoding: Encoding) -> EncodedPrompt:
        systems.add(encoding.system)
        return encode_prompt(sample, encoding)

    monkeypatch.setattr(scored_answers, "encode_prompt", noted)
    told = json.loads((judged / "run" / "eval.json").read_text())
    code, out, err = dilatant("evaluate", judged / "run", "--json", "--out", judged / "answers.json")
    assert code == 0, err
    found = json.loads(out)
    assert systems == {"Say what you see."}
    assert found["samples"] == told["samples"] == 12
    for own, of_run in ((found, told), *zip(found["by_data_set"].values(), told["by_data_set"].values())):
        # The same greedy answers in fp32, so the same counts of edits.
        assert {name: own[name] for name in METRICS} == pytest.approx({name: of_run[name] for name in METRICS})
    assert 0 < found["anls"] < 1, found
    assert [*found["by_data_set"]] == [*told["by_data_set"]]
    answers = json.loads((judged / "answers.json").read_text())["answers"]
    right = [one["expected"].strip() == one["written"].strip() for one in answers]
    assert sum(right) / len(right) == found["exact_match"]

    code, out, err = dilatant("evaluate", judged / "run" / "export", "--metric", "wer", "--limit", "1")
    assert code == 0, err
    assert out.endswith(" of 2 answers\n")
    assert out.startswith("wer ")
    asked = ("evaluate", judged / "run", "--data", judged / "other.jsonl", "--metric", "anls", "--json")
    code, out, err = dilatant(*asked)
    assert code == 0, err
    assert json.loads(out) == {"anls": found["by_data_set"]["other.jsonl"]["anls"], "samples": 6}
    (judged / "run" / "export").rename(judged / "moved")
    for arguments, says in (
        ((judged / "run",), "has no export yet"),
        ((judged / "gone",), "is no folder"),
        ((judged / "moved",), "give --data"),
        ((judged / "moved", "--metric", "wer", "--judge", "own.py"), "give one of them"),
        ((judged / "moved", "--metric", "bleu"), "'bleu'"),
    ):
        code, _, err = dilatant("evaluate", *arguments)
        assert (code, says in err) == (2, True), err


def test_bad_answers_of_a_run_on_marks_are_not_asked(tmp_path: Path, dilatant: Dilatant) -> None:
    write_images(tmp_path, 4)
    marked = [
        {"image": f"images/{number}.png", "prompt": "Side?", "completion": "left", "label": number != 1}
        for number in range(4)
    ]
    (tmp_path / "marks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in marked))
    tree = tiny_config(steps=1, global_batch_size=4, preferences={"method": "kto"})
    tree["data"] |= {"train": [{"path": "marks.jsonl"}], "eval": [{"path": "marks.jsonl"}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    code, _, err = dilatant("train", tmp_path / "config.yaml")
    assert code == 0, err
    code, out, err = dilatant("evaluate", tmp_path / "run", "--json", "--max-new-tokens", "2")
    assert code == 0, err
    assert json.loads(out)["samples"] == 3
    assert "marked as bad are left out" in err
