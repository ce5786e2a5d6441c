"""An image in an assistant's turn is what a generator learns to draw: placed, sized, decoded and refused as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.data_builders import IMAGE_ID, image_bytes, small_encoding, write_lines
from dilatant.config.data import DataSource
from dilatant.data.errors import SampleError
from dilatant.data.index.lint import lint
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.index.stats import describe
from dilatant.data.media_units.image_target import image_target
from dilatant.data.media_units.image_unit import ImageUnit, PixelProcessor
from dilatant.data.order.blend import Blend, open_blend
from dilatant.data.sample import Media, MediaSize, Sample, Turn
from dilatant.data.text.encode import encode_prompt, encode_sample, find_problems, measure_sample
from dilatant.data.text.encoding import Encoding

DRAWN_ID = 400
TARGET = image_target(
    "image", placeholder_id=DRAWN_ID, tokens_per_item=3, start="<draw>", marker="<image>", pixels=(1, 4, 4)
)
READER = ImageUnit("vision", IMAGE_ID, 4, PixelProcessor(8, 8))


def _encoding(reads: bool = True, **settings: Any) -> Encoding:
    return small_encoding(units=(READER,) if reads else (), targets=(TARGET,), **settings)


def _image(seed: int = 0) -> Media:
    return Media("image", image_bytes(seed=seed), f"image {seed}")


def _read(ids: np.ndarray) -> str:
    names = {IMAGE_ID: "#", DRAWN_ID: "@", 257: "^", 258: "$"}
    return "".join(names.get(token) or chr(token) for token in ids.tolist())


def test_an_image_target_follows_its_marker_which_carries_loss() -> None:
    sample = Sample("s", (Turn("user", ("draw",)), Turn("assistant", (_image(), "so"))))
    encoded = encode_sample(sample, _encoding(reads=False))
    assert _read(encoded.input_ids) == "^draw\n<draw>@@@so$"
    assert _read(encoded.input_ids[encoded.labels != -100]) == "<draw>so$"
    assert encoded.sizes == {"language": len(encoded.input_ids), "image": 3}
    pixels = encoded.media["image"]["pixel_values"].normalized()  # type: ignore[union-attr]
    assert pixels.shape == (1, 1, 4, 4)
    assert pixels.min() >= -1
    assert pixels.max() <= 1


def test_a_picture_is_read_where_the_conversation_goes_on() -> None:
    turns = (
        Turn("user", ("draw",)),
        Turn("assistant", (_image(1),)),
        Turn("user", (_image(2), "same?")),
        Turn("assistant", (_image(3),)),
    )
    encoded = encode_sample(Sample("s", turns), _encoding())
    assert _read(encoded.input_ids) == "^draw\n<draw>@@@####$####same?\n<draw>@@@$"
    assert encoded.sizes == {"language": len(encoded.input_ids), "vision": 8, "image": 6}
    assert len(encoded.media["image"]["pixel_values"]) == 2
    read = encoded.media["vision"]["pixel_values"].normalized()  # type: ignore[union-attr]
    first = READER.process(_image(1), MediaSize())["pixel_values"].normalized()  # type: ignore[union-attr]
    assert np.array_equal(read[:1], first)


def test_a_model_that_only_reads_takes_it_for_input_as_before() -> None:
    sample = Sample("s", (Turn("user", ("look",)), Turn("assistant", (_image(), "so"))))
    assert _read(encode_sample(sample, small_encoding(units=(READER,))).input_ids) == "^look\n####so$"


def test_answer_markers_take_images_listed_beside_the_chat() -> None:
    turns = (Turn("user", ("<image> again",)), Turn("assistant", ("here: <image>",)))
    sample = Sample("s", turns, (_image(1), _image(2)))
    encoded = encode_sample(sample, _encoding())
    assert _read(encoded.input_ids) == "^#### again\nhere: <draw>@@@$"
    drawn = TARGET.process(_image(2), MediaSize())["pixel_values"].normalized()  # type: ignore[union-attr]
    assert np.array_equal(encoded.media["image"]["pixel_values"].normalized(), drawn)  # type: ignore[union-attr]
    prompt = encode_prompt(sample, _encoding()).sample
    assert _read(prompt.input_ids) == "^#### again\n"
    assert np.array_equal(encoded.input_ids[: len(prompt.input_ids)], prompt.input_ids)


@pytest.mark.parametrize("parts", [frozenset({"image"}), frozenset({"tokens"}), frozenset({"vision"})])
def test_a_rank_decodes_targets_only_where_it_says_so(parts: frozenset[str]) -> None:
    sample = Sample("s", (Turn("user", (_image(1),)), Turn("assistant", (_image(2),))))
    assert encode_sample(sample, _encoding(), parts).media.keys() == parts - {"tokens"}


def test_a_picture_in_a_question_needs_an_encoder() -> None:
    sample = Sample("s", (Turn("user", (_image(), "what?")), Turn("assistant", (_image(1),))))
    with pytest.raises(SampleError, match=r"no image encoder; add one .*, or a generator that draws"):
        encode_sample(sample, _encoding(reads=False))


def test_a_text_that_holds_the_asking_token_itself_is_refused() -> None:
    target = image_target(
        "image", placeholder_id=ord("~"), tokens_per_item=2, start="<draw>", marker="<image>", pixels=(1, 4, 4)
    )
    encoding = small_encoding(units=(), targets=(target,))
    fine = Sample("s", (Turn("user", ("draw",)), Turn("assistant", (_image(),))))
    assert _read(encode_sample(fine, encoding).input_ids) == "^draw\n<draw>~~$"
    bad = Sample("s", (Turn("user", ("a ~ b",)), Turn("assistant", (_image(),))))
    with pytest.raises(SampleError, match="holds the token by which the model asks 'image' for an image"):
        encode_sample(bad, encoding)


def test_index_lint_and_statistics_know_targets(tmp_path: Path) -> None:
    good, cut = image_bytes(), image_bytes()[:60]
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "cut.png").write_bytes(cut)
    records = [
        {"messages": [{"role": "user", "content": "draw"},
                      {"role": "assistant", "content": [{"type": "image", "image": name}]}]}
        for name in ("good.png", "cut.png", "good.png")
    ]  # fmt: skip
    records.append({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]})
    path = write_lines(tmp_path / "data.jsonl", records)
    blend = open_blend([DataSource(path=str(path))], cache_dir=tmp_path / "cache")
    assert isinstance(blend, Blend)
    encoding = _encoding(reads=False)
    index = blend_sizes(blend, encoding, cache_dir=tmp_path / "cache", workers=0)
    assert index.of("image").tolist() == [3, 3, 3, 0]
    for number in range(4):
        assert measure_sample(blend[number], encoding).tokens["language"] == index.of("language")[number]
    problems = lint(blend, encoding, cache_dir=tmp_path / "cache", workers=0)
    assert [problem.index for problem in problems] == [1]
    assert "cut.png" in problems[0].problem
    assert not find_problems(blend[0], encoding, deep=True)
    stats = describe(index)
    assert stats.mixes == {"image + text": 3, "text": 1}
    json.dumps(stats.to_json())


def test_the_index_is_made_anew_for_another_number_of_places() -> None:
    other = image_target(
        "image", placeholder_id=DRAWN_ID, tokens_per_item=5, start="<draw>", marker="<image>", pixels=(1, 4, 4)
    )
    assert _encoding().fingerprint != small_encoding(units=(READER,), targets=(other,)).fingerprint
