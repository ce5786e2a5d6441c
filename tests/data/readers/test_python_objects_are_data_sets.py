"""A data set that is a Python object gives the samples that files with the same records give."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cases.data_builders import small_encoding
from cases.tiny_project import write_images
from dilatant.config.data import DataSource
from dilatant.config.errors import UserError
from dilatant.config.own_parts import OwnPart
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.media_header import media_size
from dilatant.data.order.blend import Blend, StreamBlend, open_blend, open_own_data
from dilatant.data.sample import EncodedSample, MediaSize
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import QUESTION, TOKENS


class Numbered:
    """A map-style data set in the manner of torch's."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


class Endless:
    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


def records_of(file: Path) -> list[dict[str, Any]]:
    """Return a file's records with their images as PIL images."""
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for record in found:
        part = record["messages"][0]["content"][0]
        part["image"] = Image.open(file.parent / part["image"])
    return found


def as_blend(value: Any, name: str = "train_data") -> Blend:
    blend = open_own_data(OwnPart(name, value))
    assert isinstance(blend, Blend)
    return blend


def same(first: EncodedSample, second: EncodedSample) -> bool:
    def inputs(sample: EncodedSample) -> dict[str, list[Any]]:
        return {
            f"{unit}.{name}": np.asarray(getattr(value, "values", value)).tolist()
            for unit, own in sample.media.items()
            for name, value in own.items()
        }

    return (
        np.array_equal(first.input_ids, second.input_ids)
        and np.array_equal(first.labels, second.labels)
        and first.sizes == second.sizes
        and inputs(first) == inputs(second)
    )


@pytest.mark.parametrize("kind", ["list", "map-style", "datasets"])
def test_objects_give_the_samples_of_a_file(kind: str, tmp_path: Path) -> None:
    file, encoding = write_images(tmp_path, 5), small_encoding()
    of_file = open_blend([DataSource(path=str(file))], cache_dir=tmp_path)
    assert isinstance(of_file, Blend)
    records: Any = records_of(file)
    if kind == "datasets":
        import datasets

        flat = [
            {"image": record["messages"][0]["content"][0]["image"], "question": "Side?",
             "answer": record["messages"][1]["content"]} for record in records
        ]  # fmt: skip
        records = datasets.Dataset.from_list(flat)
    blend = as_blend(Numbered(records) if kind == "map-style" else records)
    assert len(blend) == len(of_file)
    for index in range(len(blend)):
        ours, theirs = (encode_sample(each[index], encoding) for each in (blend, of_file))
        if kind == "datasets":
            assert ours.sizes["vision"] == theirs.sizes["vision"]
            assert ours.target_tokens == theirs.target_tokens
        else:
            assert same(ours, theirs)
    received: Blend = pickle.loads(pickle.dumps(blend))
    assert same(encode_sample(received[3], encoding), encode_sample(blend[3], encoding))
    sizes = blend_sizes(blend, encoding, cache_dir=tmp_path, workers=0)
    expected = blend_sizes(of_file, encoding, cache_dir=tmp_path, workers=0)
    assert sizes.target_tokens.tolist() == expected.target_tokens.tolist()


def test_changed_objects_are_measured_again(tmp_path: Path) -> None:
    encoding = small_encoding()
    short, long = ([{"question": "a", "answer": text}] for text in ("b", "much longer"))
    before = blend_sizes(as_blend(short), encoding, cache_dir=tmp_path)
    after = blend_sizes(as_blend(long), encoding, cache_dir=tmp_path)
    assert before.target_tokens.tolist() != after.target_tokens.tolist()
    # All ranks of a run receive the launcher's key, so one of them measures.
    sent = OwnPart("train_data", short)
    assert pickle.loads(pickle.dumps(sent)).key == sent.key != OwnPart("train_data", short).key


def test_encoded_samples_are_reduced_to_parts(tmp_path: Path) -> None:
    encoding = small_encoding()
    ids = np.arange(1, 9)
    labels = np.array([5, -100, 7, 8, -100, 6, 9, -100])
    blend = as_blend([EncodedSample("mine", ids, labels)])
    whole = encode_sample(blend[0], encoding)
    assert whole.labels.tolist() == [-100, -100, 7, 8, -100, 6, 9, -100]
    assert whole.sizes == {"language": 8, "vision": 0, "audio": 0}
    assert encode_sample(blend[0], encoding, frozenset({QUESTION})).labels.tolist() == [*[-100] * 5, 6, 9, -100]
    assert len(encode_sample(blend[0], encoding, frozenset({"vision"})).input_ids) == 0
    sizes = blend_sizes(blend, encoding, cache_dir=tmp_path, workers=0)
    assert (sizes.target_tokens.tolist(), sizes.tokens.tolist()) == ([4], [[8, 0, 0]])
    assert encode_sample(blend[0], encoding, frozenset({TOKENS})).content_digest == sizes.content[0]


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("a text", r"train_data\[1\]: is a str; give a dict"),
        ({"answer": 1.5, "question": object()}, r"train_data\[1\]: 'question' is a object"),
        (EncodedSample("", np.array([1, 2]), np.array([1])), r"input_ids int64\[2\] and labels int64\[1\]"),
        (EncodedSample("", np.array([1, 2]), np.array([1, -100])), "no label that carries loss"),
        (EncodedSample("", np.array([1, -2]), np.array([1, 2])), "has the token -2"),
        (EncodedSample("", np.array([1, 2]), np.array([1, 2]), {"sight": {}}), "'sight', which is no encoder"),
        (EncodedSample("", np.array([1, 2]), np.array([1, 2]), {"vision": {}}), r"without sizes\['vision'\]"),
    ],
)
def test_an_item_that_cannot_be_trained_on_is_named(item: Any, problem: str, tmp_path: Path) -> None:
    blend = as_blend([{"question": "a", "answer": "b"}, item])
    sizes = blend_sizes(blend, small_encoding(), cache_dir=tmp_path, workers=0)
    assert [*sizes.problems] == [1]
    with pytest.raises(UserError, match=problem):
        encode_sample(blend[1], small_encoding())


def test_an_error_of_the_data_set_names_the_item(tmp_path: Path) -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> Any:
            return 1 / 0

    with pytest.raises(UserError, match=r"eval_data\[0\]: cannot be read: ZeroDivisionError"):
        as_blend(Broken([1]), "eval_data")[0]


@pytest.mark.parametrize(
    ("value", "name", "problem"),
    [
        ([], "train_data", "train_data is empty"),
        ({"train": []}, "train_data", "train_data is a dict; give a list of records"),
        ("file.jsonl", "train_data", "train_data is a str"),
        (3, "eval_data", "eval_data is a int"),
        (Endless([]), "eval_data", "eval_data is a Endless"),
        (iter([1]), "train_data", "can be read once"),
    ],
)
def test_other_objects_are_refused(value: Any, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_own_data(OwnPart(name, value))


def test_an_iterable_is_read_again_from_any_sample() -> None:
    records = [{"question": "a", "answer": str(number)} for number in range(6)]
    blend = open_own_data(OwnPart("train_data", Endless([*records, "bad"])), max_samples=7)
    assert isinstance(blend, StreamBlend)
    (stream,) = blend.streams
    whole = [*stream.read(0)]
    assert [getattr(sample, "id", "") for sample in whole] == [*(f"train_data[{n}]" for n in range(6)), ""]
    assert [*stream.read(4)][:2] == whole[4:6]
    assert isinstance(whole[6], UserError)


def test_what_no_other_process_can_have_is_refused_with_a_remedy() -> None:
    class Held(list):
        def __reduce__(self) -> Any:
            raise ValueError("a connection")

    with pytest.raises(UserError, match=r"train_data \(Held\) cannot be sent .*workers: 0"):
        pickle.dumps(OwnPart("train_data", Held()))
    shift = 3
    doubled: OwnPart = pickle.loads(pickle.dumps(OwnPart("loss", lambda x: 2 * x + shift)))
    assert doubled.value(4) == 11


def test_pictures_are_turned_upright_and_arrays_of_objects_are_lists() -> None:
    picture = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (16, 8)).save(picture, "JPEG", exif=turned)
    messages = np.empty(2, object)
    messages[:] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    sample = as_blend([{"images": [Image.open(picture)], "messages": messages}])[0]
    assert [turn.content for turn in sample.turns] == [("q",), ("a",)]
    assert media_size(sample.unplaced[0]) == MediaSize(width=8, height=16)


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "<u2"), ("I;16B", ">u2")])
def test_pictures_of_16_bits_keep_their_shades(mode: str, kind: str) -> None:
    picture = Image.fromarray((np.arange(64) * 1000).astype(kind).reshape(8, 8))
    assert picture.mode == mode
    (media,) = as_blend([{"image": picture, "text": "a"}])[0].unplaced
    assert np.array_equal(decode_image(media, 1)[:, :, 0], (np.arange(64) * 1000 >> 8).reshape(8, 8))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pictures_of_unknown_range_are_refused(kind: type) -> None:
    with pytest.raises(UserError, match="nobody knows what is white in an image of mode"):
        as_blend([{"image": Image.fromarray(np.zeros((8, 8), kind)), "text": "a"}])[0]
