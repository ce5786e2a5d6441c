"""`export` and `generate`: nothing of the user's is lost, and nothing of a stranger's is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant
from dilatant.data.sample import Sample
from dilatant.data.text.encode import EncodedPrompt, encode_prompt
from dilatant.data.text.encoding import Encoding
from dilatant.training.checkpoints import checkpoint


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(trained: Path) -> Path:
    """The run folder of `trained`; tests must not change it."""
    return trained / "run"


@pytest.fixture
def own_run(own_trained: Path) -> Path:
    return own_trained / "run"


def test_export_spares_foreign_files_and_replaces_an_export(
    run: Path, dilatant: Dilatant, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path_factory.mktemp("mine")
    (mine / "precious.txt").write_text("precious")
    monkeypatch.chdir(mine)
    for target in (mine, run, run.parent, ".", run / "checkpoints", mine / "precious.txt"):
        before = tree(run.parent), tree(mine)
        code, _, err = dilatant("export", run, "--to", target)
        assert code == 2
        assert "the export cannot go to" in err
        assert (tree(run.parent), tree(mine)) == before
    for _ in range(2):
        code, out, _ = dilatant("export", run, "--to", mine / "[b]new", "--json")
        assert code == 0
        assert json.loads(out) == {"export": str(mine / "[b]new"), "step": 6}
    assert tree(mine / "[b]new") == tree(run / "export")


def test_an_export_for_torch_has_a_card_and_is_pushed_only_with_a_token(
    run: Path, dilatant: Dilatant, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path_factory.mktemp("for_torch") / "export"
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    for options, says in (
        (("--push-to-hub", "me/mine"), "needs a token"),
        (("--push-to-hub", "not/a/name"), "--push-to-hub: "),
    ):
        code, _, err = dilatant("export", run, "--to", target, *options)
        assert code == 2
        assert says in err
        assert not target.exists()
    code, _, err = dilatant("export", run, "--to", target, "--format", "dcp", "--license", "apache-2.0")
    assert code == 0, err
    assert (target / "language/.metadata").is_file()
    assert not [*target.rglob("model*.safetensors")]
    card = huggingface_hub.ModelCard((target / "README.md").read_text())
    assert card.data.license == "apache-2.0"
    assert "| steps | 6 of " in card.text
    code, _, err = dilatant("generate", target, "--prompt", "a")
    assert code == 2
    assert "without --format dcp" in err


@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_may_go_while_it_is_exported(
    times: int, own_run: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and deletes the checkpoint for the next one."""
    load, newest, gone = checkpoint.load, checkpoint.newest_valid, list[Path]()

    def reads_too_late(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if len(gone) < times:
            gone.append((path / "manifest.json").rename(path / "gone"))
        return load(path, *arguments, **keywords)

    def finds_the_next(folder: Path) -> Any:
        for path in gone[-1:]:
            path.rename(path.with_name("manifest.json"))
        return newest(folder)

    monkeypatch.setattr("dilatant.training.export_checkpoint.load", reads_too_late)
    monkeypatch.setattr(checkpoint, "newest_valid", finds_the_next)
    code, out, err = dilatant("export", own_run, "--to", own_run.parent / "out")
    assert code == (0 if times == 1 else 2)
    if times == 1:
        assert "step 6 exported to" in out
    else:
        assert "deletes its checkpoints while they are exported; raise train.keep_checkpoints" in " ".join(err.split())
        assert not (own_run.parent / "out").exists()


def test_a_run_whose_data_are_gone_is_exported_with_a_word(own_run: Path, dilatant: Dilatant) -> None:
    for file in own_run.parent.glob("*.jsonl"):
        file.unlink()
    code, _, err = dilatant("export", own_run, "--to", own_run.parent / "again")
    assert code == 0, err
    assert tree(own_run.parent / "again") == tree(own_run / "export")
    assert "data.train.0.path: " in err
    assert "does not exist; nothing is checked against these data" in err


def test_what_is_wrong_with_a_prompt_is_said_about_the_prompt(run: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "torn.png").write_bytes(b"no image")
    arguments = ("generate", run / "export", "--prompt", "a \udcff", "--top-p", 0.5)
    code, _, err = dilatant(*arguments, "--image", "[/red].png", "--image", tmp_path / "fifo.png")
    assert code == 2
    for problem in ("'[/red].png' does not exist", "fifo.png' is not a file", "--prompt is not", "--temperature"):
        assert problem in err
    assert "data file" not in err
    code, _, err = dilatant("generate", run / "export", "--prompt", "a", "--image", tmp_path / "torn.png")
    assert code == 2
    assert "torn.png" in err
    assert "data." not in err


def test_answers_are_drawn_from_the_seed(run: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*arguments: object) -> str:
        code, out, err = dilatant(
            "generate", run / "export", "--prompt", "Side?", "--max-new-tokens", 12, "--json", *arguments
        )
        assert code == 0, err
        return json.loads(out)["answer"]

    drawn = [answer("--temperature", 5, "--seed", seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    likeliest = answer()
    assert answer("--temperature", 5, "--top-k", 1) == likeliest
    assert answer("--temperature", 5, "--top-p", 0.000001) == likeliest
    told: list[Sample] = []

    def encode(sample: Sample, encoding: Encoding) -> EncodedPrompt:
        told.append(sample)
        return encode_prompt(sample, encoding)

    monkeypatch.setattr("dilatant.data.text.encode.encode_prompt", encode)
    answer("--system", "Only colours.")
    assert [(turn.role, turn.content) for turn in told[0].turns] == [
        ("system", ("Only colours.",)),
        ("user", ("Side?",)),
    ]


def test_an_export_that_says_nonsense_is_no_traceback(own_run: Path, dilatant: Dilatant) -> None:
    for text in ("[]", "null", '{"encoders": [1]}', '{"encoders": {"vision": {}}}', "{}", "[" * 100_000):
        (own_run / "export" / "conversation.json").write_text(text)
        code, _, err = dilatant("generate", own_run / "export", "--prompt", "a")
        assert code == 2
        assert "is not an export" in err


def test_code_of_an_export_is_neither_run_nor_asked_for(
    own_run: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = own_run / "export" / "language" / "tokenizer_config.json"
    changed = {
        **json.loads(settings.read_text()),
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]},
    }
    settings.write_text(json.dumps(changed))
    (settings.parent / "mine.py").write_text(f"open({str(own_run / 'ran')!r}, 'w')\nclass Mine: pass\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    code, _, err = dilatant("generate", own_run / "export", "--prompt", "Side?")
    assert not (own_run / "ran").exists()
    assert asked == []
    assert code == 2
    assert "cannot be read" in err


def test_a_second_run_goes_on_from_an_export_by_one_line(own_run: Path, dilatant: Dilatant) -> None:
    folder = own_run.parent
    first = load_file(own_run / "export/projectors/vision.safetensors")
    second = yaml.safe_load((folder / "config.yaml").read_text())
    second |= {"output_dir": "run2", "model": {"id": "run/export", "lora": {"r": 2}}}
    second["train"] |= {"steps": 1, "optimizer": {"learning_rate": 1e-12}}
    (folder / "second.yaml").write_text(yaml.safe_dump(second))
    code, out, err = dilatant("train", folder / "second.yaml")
    assert code == 0, err
    assert "it goes on from" in out + err
    again = load_file(folder / "run2/export/projectors/vision.safetensors")
    for key, tensor in first.items():  # but for one update of 1e-12
        torch.testing.assert_close(again[key], tensor, rtol=0, atol=1e-9)
