"""CSV, folders of media with texts beside them, COCO captions and VQA become the samples that they describe."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.data_builders import image_bytes, wav_bytes, write_lines, write_tar
from dilatant.config import DataSource, UserError
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import FileSlice


def open_all(path, **keys):
    reader = open_source(DataSource(path=str(path), **keys))
    return reader, [reader[number] for number in range(len(reader))]


def said(sample):
    """Texts of the turns, and the names of the media beside them."""
    media = []
    for each in sample.unplaced:
        source = each.source.path if isinstance(each.source, FileSlice) else each.source
        media.append((each.kind, source.name))
    return [part for turn in sample.turns for part in turn.content], media


CELLS = st.text(st.sampled_from('ab ,;\t|"\n'), max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=5),
    delimiter=st.sampled_from(",;\t|"),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
def test_rows_of_csv_are_those_of_the_standard_library(tmp_path_factory, rows, delimiter, end, mark):
    if delimiter == "\t":  # a row is a line there
        rows = [[cell.replace("\n", " ") for cell in row] for row in rows]
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(["first", "second"])
    writer.writerows(rows)
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" * mark + stream.getvalue().encode())
    reader = open_source(DataSource(path=str(path)))
    found = [reader.records.read(number).fields for number in range(len(reader))]
    assert [list(fields.values()) for fields in found] == rows
    assert all(list(fields) == ["first", "second"] for fields in found)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "image,caption\na.jpg,A dog\nb.jpg,\"Two, or\nthree\"\n", ["A dog", "Two, or\nthree"]),
        ("x.csv", 'image;caption\n;\na.jpg;A "dog"\nb.jpg;"A ""cat"""', ['A "dog"', 'A "cat"']),
        ("x.tsv", 'image\tcaption\na.jpg\t"We" say\nb.jpg\t"A" or "b"\n\n', ['"We" say', '"A" or "b"']),
        ("captions.txt", "a.jpg#0\tA dog\nb.jpg#1\tA cat\n", ["A dog", "A cat"]),
        ("captions.txt", "image,caption\na.jpg,A dog\nb.jpg,A cat\n", ["A dog", "A cat"]),
    ],
)  # fmt: skip
def test_captions_in_a_table_belong_to_their_images(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    for place in (tmp_path / name, tmp_path):  # the file, or its folder
        _, samples = open_all(place, prompt="What?")
        assert [said(sample) for sample in samples] == [
            (["What?", caption], [("image", image)]) for caption, image in zip(expected, ("a.jpg", "b.jpg"))
        ]


def test_cells_of_csv_hold_lists_and_conversations(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ["", "images", "messages", "label"],  # pandas writes its index first
                ["0", "['a.png', 'b.png']", json.dumps(turns), "True"],
                ["1", '["c.png"]', json.dumps(turns), ""],
            ]
        )
    reader, samples = open_all(tmp_path / "x.csv")
    assert said(samples[0]) == (["q", "a"], [("image", "a.png"), ("image", "b.png")])
    assert said(samples[1]) == (["q", "a"], [("image", "c.png")])
    assert samples[0].unused == ("column 1",)
    assert samples[0].id == reader.name_of(0) == "x.csv:1"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (b"question,answer\na,b\nc\n", "x.csv:2: has 1 values for the 2 columns"),
        (b"question,answer\na,b,c\n", "x.csv:1: has 3 values for the 2 columns"),
        (b'question,answer\na,b\n"c,d\n', "begins on line 3, a quotation mark opens a value"),
        (b'question,answer\na,"b" c\n', "begins on line 2, a quotation mark opens a value"),
        (b"answer,answer\na,b\n", "two columns 'answer'"),
        (b"question,answer\na,\xff\n", "x.csv:1: is not UTF-8"),
        (b"question,answer\n", "is empty"),
        (b"a\0b,c\n", "is unknown"),
        (b'question\tanswer\nq\t"a\nb"\n', "x.csv:2: has 1 values for the 2 columns"),
        (b"a.jpg,A dog, a cat\n", "begins with the file 'a.jpg', not .* as in image,caption"),
        (b"a.jpg#0\tA dog\ttrain\n", "x.csv:1: has 3 values for the 2 columns"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(tmp_path, text, pattern):
    (tmp_path / "x.csv").write_bytes(text)
    with pytest.raises(UserError, match=pattern):
        open_all(tmp_path / "x.csv")


def test_media_with_texts_beside_them_are_samples(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    (tmp_path / "train" / "a test.png").write_bytes(image_bytes(seed=1))
    (tmp_path / "train" / "a test.txt").write_text("one\n")
    (tmp_path / "train" / "b.v2.PNG").write_bytes(image_bytes(seed=2))
    (tmp_path / "train" / "b.v2.json").write_text(json.dumps({"image": "b.png", "caption": "two", "by": "me"}))
    (tmp_path / "c.wav").write_bytes(wav_bytes())
    (tmp_path / "c.caption").write_text("three")
    (tmp_path / "test" / "d.png").write_bytes(image_bytes(seed=3))
    (tmp_path / "test" / "d.txt").write_text("four")
    (tmp_path / "lonely.png").write_bytes(image_bytes(seed=4))
    (tmp_path / ".hidden.txt").write_text("no")
    reader, samples = open_all(tmp_path, prompt="What?")
    assert [said(sample) for sample in samples] == [
        (["What?", "three"], [("audio", "c.wav")]),
        (["What?", "one"], [("image", "a test.png")]),
        (["What?", "two"], [("image", "b.v2.PNG")]),
    ]
    assert [reader.name_of(number) for number in range(3)] == ["c", "train/a test", "train/b.v2"]
    assert samples[2].unused == ("image", "by")
    assert "lonely.png" in reader.passed_over[1]
    assert "test (1 of 4 files)" in reader.passed_over[0]
    assert [said(each)[0][1] for each in open_all(tmp_path, split="test", prompt="What?")[1]] == ["four"]
    assert pickle.loads(pickle.dumps(reader))[1] == samples[1]


def test_an_edited_text_beside_an_image_changes_the_fingerprint(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(seed=1))
    (tmp_path / "a.txt").write_text("one")
    first = open_source(DataSource(path=str(tmp_path))).fingerprint
    assert open_source(DataSource(path=str(tmp_path))).fingerprint == first
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert open_source(DataSource(path=str(tmp_path))).fingerprint != first


def test_two_texts_beside_an_image_that_differ_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(seed=1))
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.caption").write_text("two")
    with pytest.raises(UserError, match=r"^a: joins members"):
        open_all(tmp_path)


def test_a_data_file_in_the_folder_is_read_and_not_the_texts(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(seed=1))
    (tmp_path / "a.txt").write_text("one")
    write_lines(tmp_path / "x.jsonl", [{"image": "a.png", "question": "q", "answer": "two"}])
    _, samples = open_all(tmp_path)
    assert [said(sample) for sample in samples] == [(["q", "two"], [("image", "a.png")])]


def test_a_table_beside_shards_is_named_and_not_read(tmp_path):
    write_tar(tmp_path / "0.tar", {"a.jpg": image_bytes(), "a.txt": b"one"})
    (tmp_path / "ATTRIBUTION.tsv").write_text("image\tauthor\na.jpg\tme\n")
    reader, samples = open_all(tmp_path)
    assert [said(sample)[0] for sample in samples] == [["one"]]
    assert reader.passed_over == ("ATTRIBUTION.tsv: tables beside other data files",)


COCO = {
    "info": {"year": 2017},
    "images": [
        {"id": 7, "file_name": "7.jpg", "height": 5, "license": 3},
        {"id": 9, "file_name": "9.jpg", "height": 5, "license": 3},
    ],
    "licenses": [],
    "annotations": [
        {"image_id": 9, "id": 1, "caption": "nine"},
        {"image_id": 7, "id": 2, "caption": "seven, \u00e9"},
        {"image_id": 9, "id": 3, "caption": "nine again"},
    ],
}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_caption_of_coco_is_a_sample_with_its_image(tmp_path, indent):
    (tmp_path / "captions_train2017.json").write_text(json.dumps(COCO, indent=indent, ensure_ascii=False))
    reader, samples = open_all(tmp_path, prompt="What?")
    assert [said(sample) for sample in samples] == [
        (["What?", "nine"], [("image", "9.jpg")]),
        (["What?", "seven, \u00e9"], [("image", "7.jpg")]),
        (["What?", "nine again"], [("image", "9.jpg")]),
    ]
    assert samples[0].unused == ("info", "licenses", "images[].height", "images[].license")
    assert reader.name_of(1) == "captions_train2017.json:2"
    assert pickle.loads(pickle.dumps(reader))[2] == samples[2]


QUESTIONS = {
    "task_type": "Open-Ended",
    "data_subtype": "train2014",
    "questions": [
        {"image_id": 25, "question": "What?", "question_id": 25000},
        {"image_id": 42, "question": "Who?", "question_id": 42001},
    ],
}
ANSWERS = {
    "data_subtype": "train2014",
    "annotations": [
        {"question_id": 42001, "image_id": 42, "answers": [{"answer": "b"}, {"answer": "c"}, {"answer": "c"}]},
        {"question_id": 25000, "image_id": 25, "multiple_choice_answer": "net", "answer_type": "other"},
    ],
}


@pytest.mark.parametrize("files", [1, 2])
def test_a_question_of_vqa_is_a_sample_with_its_answer(tmp_path, files):
    if files == 1:
        (tmp_path / "x.json").write_text(json.dumps({**QUESTIONS, **ANSWERS}))
    else:
        (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
        (tmp_path / "annotations.json").write_text(json.dumps(ANSWERS))
    _, samples = open_all(tmp_path / "*.json")
    assert [said(sample) for sample in samples] == [
        (["What?", "net"], [("image", "COCO_train2014_000000000025.jpg")]),
        (["Who?", "c"], [("image", "COCO_train2014_000000000042.jpg")]),
    ]
    assert sorted(samples[0].unused) == ["annotations[].answer_type", "task_type"]
    assert samples[1].unused == samples[0].unused


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (ANSWERS, "holds answers without their questions"),
        ({**QUESTIONS, "annotations": ANSWERS["annotations"][:1]}, "x.json:1: is a question without an annotation"),
        ({**COCO, "images": COCO["images"][:1]}, "x.json:1: names an image that 'images' lacks"),
        ({**COCO, "annotations": [{"image_id": 7, "id": 1, "bbox": [1]}]}, "without captions .*annotations\\[\\].bbox"),
        ({**COCO, "annotations": [{"image_id": 7, "caption": "a"}, 3]}, "cannot be read as COCO"),
    ],
)  # fmt: skip
def test_wrong_annotations_are_refused_by_name(tmp_path, content, pattern):
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=pattern):
        open_all(tmp_path / "x.json", prompt="What?")


def test_records_with_such_keys_stay_records(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write_lines(tmp_path / "x.jsonl", [{"images": [], "annotations": [{"image_id": 1}], "messages": turns}])
    _, (sample,) = open_all(tmp_path)
    assert said(sample) == (["q", "a"], [])


def test_new_forms_are_held_out_limited_and_blended_like_others(tmp_path):
    (tmp_path / "x.csv").write_text("question,answer\n" + "".join(f"q{n},a{n}\n" for n in range(20)))
    (tmp_path / "coco.json").write_text(json.dumps(COCO))
    blend = open_blend(
        (DataSource(path=str(tmp_path / "x.csv"), limit=10), DataSource(path=str(tmp_path / "coco.json"), prompt="?"))
    )
    train, held_out = blend.split(0.2, seed=1)
    names = [part.name(number) for part in (train, held_out) for number in range(len(part))]
    assert sorted(names) == sorted([*(f"x.csv:{n}" for n in range(1, 11)), *(f"coco.json:{n}" for n in range(1, 4))])
