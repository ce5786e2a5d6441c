"""`dilatant chat` and `generate --prompts` say what the model says to the same conversation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cases.tiny_project import Dilatant, tiny_config
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text import encode
from dilatant.data.text.encode import encode_prompt
from dilatant.hf.export import load_exported
from dilatant.training.evaluation.image_answers import generate_answers


@pytest.fixture
def exported(project: Path, dilatant: Dilatant) -> Path:
    tree = tiny_config(steps=2, device="cpu", optimizer={"learning_rate": 0.05})
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    code, out, err = dilatant("train", project / "config.yaml")
    assert code == 0, err
    assert out.count("source train.jsonl: columns not used: id\n") == 1
    return project / "run" / "export"


def answer(folder: Path, *turns: Turn, longest: int = 6) -> str:
    found = load_exported(folder)
    prompt = encode_prompt(Sample("s", turns), found.encoding)
    (text,) = generate_answers(found.model, found.tokenizer, [prompt], torch.device("cpu"), longest)
    return text


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    stream: Any = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()), "utf-8")
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_chat_keeps_its_history_and_answers_question_files(
    exported: Path, project: Path, dilatant: Dilatant, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = project / "images" / "0.png"
    image = Media("image", picture, str(picture))
    first = Turn("user", (image, "Side?"))
    one = answer(exported, first)
    two = answer(exported, first, Turn("assistant", (one,)), Turn("user", ("Really?",)))
    told = answer(exported, Turn("system", ("Be brief.",)), Turn("user", ("Side?",)))
    say(
        monkeypatch,
        "/image nowhere.png", "/audio x.wav", f"/video {project}", f"/image {picture}", "Side?", "Really?", "/dance",
        "/reset", "/system Be brief.", "Side?", "/exit", "not read",
    )  # fmt: skip
    asked: list[Sample] = []
    with monkeypatch.context() as patch:
        patch.setattr(encode, "encode_prompt", lambda sample, by: asked.append(sample) or encode_prompt(sample, by))
        code, out, err = dilatant("chat", exported, "--max-new-tokens", 6)
    assert code == 0, err
    assert out == f"{one}\n{two}\n{told}\n"
    # A picture is shown with its question alone, whether or not the model answers otherwise when it sees it again.
    assert [[len(turn.content) for turn in sample.turns] for sample in asked] == [[2], [2, 1, 1], [1, 1]]
    for said in (
        "image 'nowhere.png' does not exist",
        "no encoder for audio",
        "no encoder for video",
        "/dance is no command",
    ):
        assert said in err
    # A file of questions, with and without answers, and one that cannot be asked.
    lines = [
        {"question": "Side?", "image": "images/0.png"},
        {"messages": [{"role": "user", "content": "Side?"}, {"role": "assistant", "content": "left"}],
         "images": ["images/0.png"]},
        {"prompt": "Side?", "image": "images/none.png"},
        {"prompt": "Side?", "system": "Be brief."},
    ]  # fmt: skip
    (project / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    code, out, err = dilatant("generate", exported, "--prompts", project / "asked.jsonl", "--max-new-tokens", 6)
    assert code == 2
    answers = [json.loads(line) for line in out.splitlines()]
    assert [entry.get("answer") for entry in answers] == [one, one, None, told]
    assert "none.png" in answers[2]["error"]
    assert "1 of 4 could not be asked" in err
    # What is drawn is drawn by the seed, and a penalty has a say.
    draw = ("generate", exported, "--prompt", "Side?", "--temperature", 5, "--max-new-tokens", 12)
    drawn = [dilatant(*draw, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("chat", "--temperature", "-1"), "temperature"),
        (("chat", "--top-p", "0.5"), "give a --temperature"),
        (("chat", "--repetition-penalty", "0"), "must be above 0"),
        (("chat", "--image", "none.png"), "--image 'none.png' does not exist"),
        (("chat", "--video", "none.mp4"), "--video 'none.mp4' does not exist"),
        (("generate",), "give a --prompt, or a file of --prompts"),
        (("generate", "--prompt", "a", "--prompts", "b"), "give a --prompt, or a file of --prompts"),
        (("generate", "--prompts", "b", "--out", "x.png"), "--out is for one --prompt"),
        (("chat",), "is not an export"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(
    options: tuple[str, ...], said: str, tmp_path: Path, dilatant: Dilatant
) -> None:
    verb, *rest = options
    code, _, err = dilatant(verb, tmp_path, *rest)
    assert code == 2
    assert said in err
