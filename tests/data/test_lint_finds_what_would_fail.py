"""A folder of deliberately broken samples: each is found, named, and has a remedy; the good ones pass."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cases.data_builders import image_bytes, small_encoding, wav_bytes, write_lines
from dilatant.config import DataSource
from dilatant.data.errors import SampleError
from dilatant.data.index.lint import lint
from dilatant.data.order.blend import open_blend
from dilatant.data.text.encode import encode_sample

GOOD = [
    {"question": "q", "answer": "a", "image": "good.png"},
    {"question": "<image>q<image>", "answer": "a", "images": ["good.png", "really_a.gif.png"]},
    {"question": "q", "answer": "a", "audio": "good.wav"},
    {"question": "q", "answer": "a"},
]
BROKEN = [
    ({"question": "q", "answer": "a", "image": "missing.png"}, "does not exist", False),
    ({"question": "q", "answer": "a", "image": "cut.png"}, "is damaged", True),
    ({"question": "q", "answer": "a", "image": "text.png"}, "no image in a known format", False),
    ({"question": "q", "answer": "a", "audio": "cut.wav"}, "is cut off", False),
    ({"question": "q", "answer": "a", "audio": "cut.flac"}, "cut off|cannot be read", True),
    ({"question": "q", "answer": "a", "audio": "empty.wav"}, "is empty", False),
    (
        {"question": "<image><image>", "answer": "a", "image": "good.png"},
        "2 image markers in the text for 1 images",
        False,
    ),
    ({"question": "<image>", "answer": "a", "images": ["good.png"] * 2}, "1 image markers in the text for 2", False),
    ({"question": "long " * 40, "answer": "a"}, "more than the 100 allowed", False),
    ({"messages": [{"role": "user", "content": "q"}]}, "no assistant answer", False),
    ({"question": "q", "answer": ""}, "only empty answers", False),
    ({"messages": []}, "conversation is empty", False),
    ({"something": "else"}, "no known form", False),
]


@pytest.fixture
def blend(tmp_path):
    (tmp_path / "good.png").write_bytes(image_bytes(40, 30))
    (tmp_path / "really_a.gif.png").write_bytes(image_bytes(40, 30, "GIF"))
    (tmp_path / "good.wav").write_bytes(wav_bytes())
    (tmp_path / "cut.png").write_bytes(image_bytes(40, 30)[:-1500])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.wav").write_bytes(wav_bytes()[:-500])
    (tmp_path / "cut.flac").write_bytes(wav_bytes(form="FLAC")[:-500])
    (tmp_path / "empty.wav").write_bytes(wav_bytes(0))
    path = write_lines(tmp_path / "x.jsonl", [*GOOD, *(record for record, _, _ in BROKEN), *GOOD])
    with path.open("a") as file:
        file.write('{"cut')
    return open_blend([DataSource(path=str(path))])


ENCODING = replace(small_encoding(), max_length=100)


@pytest.mark.parametrize("deep", [True, False])
def test_every_broken_sample_is_found_and_no_other(blend, deep):
    problems = lint(blend, ENCODING, deep=deep)
    expected = [number + len(GOOD) for number, (_, _, only_deep) in enumerate(BROKEN) if deep or not only_deep]
    assert [problem.index for problem in problems] == [*expected, len(blend) - 1]
    for problem in problems[:-1]:
        assert problem.sample == f"x.jsonl:{problem.index + 1}"
        assert problem.remedy
        assert re.search(BROKEN[problem.index - len(GOOD)][1], problem.problem)
    assert "not valid JSON" in problems[-1].problem


def test_lint_and_training_agree(blend):
    wrong = {problem.index for problem in lint(blend, ENCODING)}
    for index in range(len(blend)):
        try:
            encode_sample(blend[index], ENCODING)
            assert index not in wrong
        except SampleError:
            assert index in wrong


def test_all_that_is_wrong_with_one_sample_is_listed(tmp_path):
    (tmp_path / "cut.png").write_bytes(image_bytes(40, 30)[:-1500])
    record = {"question": "long " * 40, "answer": " ", "images": ["cut.png", "cut.png"]}
    blend = open_blend([DataSource(path=str(write_lines(tmp_path / "x.jsonl", [record])))])
    assert [problem.problem.split()[0] for problem in lint(blend, ENCODING)] == ["has", "has", "image", "image"]


def test_workers_find_the_same(tmp_path):
    records = [{"question": "q", "answer": "a" if number % 7 else ""} for number in range(300)]
    blend = open_blend([DataSource(path=str(write_lines(tmp_path / "x.jsonl", records)))])
    calls = []
    found = lint(blend, ENCODING, workers=2, progress=lambda done, total: calls.append((done, total)))
    assert found == lint(blend, ENCODING)
    assert len(found) == 43
    assert calls[-1] == (300, 300)
