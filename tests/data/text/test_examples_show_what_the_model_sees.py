"""Examples hold every token of their sample once, mark those that carry loss, and show media small."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from cases.data_builders import image_bytes, small_encoding, wav_bytes, write_lines
from dilatant.config import DataSource
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.order.blend import open_blend
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.encode import encode_sample
from dilatant.planning.problem.describe_data import PIXELS, show_examples, spans

ENCODING = small_encoding()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))


def test_examples_show_each_token_once_with_loss_and_media():
    pictures = [Media("image", image_bytes(640, 300, seed=n), f"picture {n}") for n in range(2)]
    sound = Media("audio", wav_bytes(0.25), "sound")
    turns = (
        Turn("user", ("é: ", *pictures, " and ", sound, "?")),
        Turn("assistant", ("yes",)),
        Turn("user", ("sure?",)),
        Turn("assistant", ("né",)),
    )
    sample = Sample("s:1", turns)
    shown = list(spans(sample, ENCODING))
    encoded = encode_sample(sample, ENCODING)
    assert sum(one.tokens for one in shown) == len(encoded.input_ids)
    learned = np.concatenate([np.full(one.tokens, one.carries_loss) for one in shown])
    assert (learned == (encoded.labels != -100)).all()
    assert [one.text.partition(",")[0] for one in shown if one.unit] == ["picture 0", "picture 1", "sound"]
    assert "".join(one.text for one in shown if not one.unit) == "<s>é:  and ?\nyes</s>sure?\nné</s>"
    assert [one.text for one in shown if one.carries_loss] == ["yes</s>", "né</s>"]
    first, _, heard = (one for one in shown if one.unit)
    assert max(Image.open(io.BytesIO(first.picture)).size) == PIXELS
    assert "640 × 300 pixels" in first.text
    assert max(heard.peaks) == 1.0
    assert min(heard.peaks) >= 0.0


def test_examples_are_median_longest_and_damaged_samples(tmp_path):
    cut = image_bytes(400, 400)
    (tmp_path / "cut.png").write_bytes(cut[: len(cut) // 2])
    lines = [{"question": "q" * n, "answer": "a"} for n in (1, 2, 50, 51, 52, 90, 400)]
    one = DataSource(path=str(write_lines(tmp_path / "one.jsonl", lines)))
    two = DataSource(
        path=str(write_lines(tmp_path / "two.jsonl", [{"question": "x", "answer": "y", "image": "cut.png"}]))
    )
    blend = open_blend([one, two])
    encoding = replace(ENCODING, max_length=100)
    typical, damaged, longest = show_examples(blend, blend_sizes(blend, encoding), encoding)
    assert typical.name.endswith("one.jsonl:3")  # of the six that fit, the median lies between 50 and 51
    assert damaged.spans == ()
    assert "is damaged" in damaged.problem
    assert longest.why == "the longest"
    assert longest.name.endswith("one.jsonl:6")
