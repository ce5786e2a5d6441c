"""All notations of a sample give the same conversation; the content of a file decides its format."""

from __future__ import annotations

import base64
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.data_builders import image_bytes, wav_bytes, write_lines, write_tar
from dilatant.config import DataSource, UserError
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import Media

QUESTION, ANSWER = "Which digit?", "seven"
PLAIN = (("user", (QUESTION,)), ("assistant", (ANSWER,)))


def read_all(path, **settings):
    reader = open_source(DataSource(path=str(path), **settings))
    return [reader[index] for index in range(len(reader))]


def turns(sample):
    return tuple(
        (turn.role, tuple(part.kind if isinstance(part, Media) else part for part in turn.content))
        for turn in sample.turns
    )


def messages(*content):
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": ANSWER}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(image_bytes(seed=1))
    (tmp_path / "media" / "b.png").write_bytes(image_bytes(seed=2))
    (tmp_path / "media" / "c.wav").write_bytes(wav_bytes())
    return tmp_path


TEXT = {"type": "text", "text": QUESTION}
ENCODED = base64.b64encode(image_bytes(seed=1)).decode()
SOUND = base64.b64encode(wav_bytes()).decode()


@pytest.mark.parametrize(
    ("record", "media"),
    [
        ({"messages": messages({"type": "image", "image": "media/a.png"}, TEXT)}, ["image"]),
        ({"messages": messages({"type": "image", "path": "media/a.png"}, TEXT)}, ["image"]),
        ({"messages": messages({"type": "image", "url": "media/a.png", "path": None}, TEXT)}, ["image"]),
        ({"messages": messages({"type": "image_url", "image_url": {"url": "media/a.png"}}, TEXT)}, ["image"]),
        ({"messages": messages({"type": "image_url", "image_url": "media/a.png"}, TEXT)}, ["image"]),
        (
            {
                "messages": messages(
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}}, TEXT
                )
            },
            ["image"],
        ),
        (
            {"messages": messages({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}, TEXT)},
            ["audio"],
        ),
        ({"messages": messages({"type": "audio", "audio": "media/c.wav"}, TEXT)}, ["audio"]),
        ({"messages": messages({"type": "audio_url", "audio_url": {"url": "media/c.wav"}}, TEXT)}, ["audio"]),
        ({"messages": messages({"type": "image"}, TEXT), "images": ["media/a.png"]}, ["image"]),
        (
            {
                "messages": messages({"type": "image"}, {"type": "image"}, TEXT),
                "images": ["media/a.png", "media/b.png"],
            },
            ["image", "image"],
        ),
        (
            {
                "messages": messages({"type": "image"}, {"type": "audio"}, TEXT),
                "image": "media/a.png",
                "audio": "media/c.wav",
            },
            ["image", "audio"],
        ),
    ],
)
def test_typed_content_keeps_media_in_reading_order(folder, record, media):
    (sample,) = read_all(write_lines(folder / "x.jsonl", [record]))
    assert turns(sample) == (("user", (*media, QUESTION)), ("assistant", (ANSWER,)))
    assert sample.unplaced == ()
    images = [image_bytes(seed=1), image_bytes(seed=2)]
    for part in sample.turns[0].content:
        if isinstance(part, Media):
            data = part.source if isinstance(part.source, bytes) else part.source.read_bytes()
            assert data == (images.pop(0) if part.kind == "image" else wav_bytes())


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]},
        {"messages": json.dumps([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {"conversations": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]},
        {"texts": [{"user": QUESTION, "assistant": ANSWER}]},
        {"prompt": QUESTION, "completion": ANSWER},
        {"prompt": [{"role": "user", "content": QUESTION}], "completion": [{"role": "assistant", "content": ANSWER}]},
        {"question": QUESTION, "answer": ANSWER},
        {"query": QUESTION, "response": ANSWER, "unrelated": {"deep": [1]}},
        {"instruction": QUESTION, "output": ANSWER},
    ],
)
@pytest.mark.parametrize("listed", [{"images": ["media/a.png"]}, {"image": "media/a.png"}, {}])
def test_every_record_form_gives_the_same_conversation(folder, record, listed):
    (sample,) = read_all(write_lines(folder / "x.jsonl", [{**record, **listed}]))
    assert turns(sample) == PLAIN
    assert [media.name for media in sample.unplaced] == (["media/a.png"] if listed else [])


def test_a_system_text_beside_the_conversation_comes_first(folder):
    record = {"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    (sample,) = read_all(write_lines(folder / "x.jsonl", [record]))
    assert turns(sample)[0] == ("system", ("Be brief.",))


def test_source_prompt_fills_in_for_a_missing_question(folder):
    path = write_lines(folder / "x.jsonl", [{"image": "media/a.png", "caption": ANSWER}])
    assert turns(read_all(path, prompt=QUESTION)[0]) == PLAIN
    assert turns(read_all(path)[0]) == (("user", ()), ("assistant", (ANSWER,)))


def test_columns_of_other_names_can_be_named(folder):
    record = {"q": QUESTION, "digit": 7, "pic": "media/a.png", "text": "no", "image": "media/b.png"}
    path = write_lines(folder / "x.jsonl", [record])
    (sample,) = read_all(path, columns={"question": "q", "answer": "digit", "images": "pic"})
    assert turns(sample) == (("user", (QUESTION,)), ("assistant", ("7",)))
    assert [media.name for media in sample.unplaced] == ["media/a.png"]


def test_empty_media_columns_are_no_media(folder):
    records = [{"question": "q", "answer": "a", "image": empty, "videos": []} for empty in (None, "", [])]
    for sample in read_all(write_lines(folder / "x.jsonl", records)):
        assert sample.unplaced == ()


def test_text_alone_is_what_the_assistant_writes(folder):
    (sample,) = read_all(write_lines(folder / "x.jsonl", [{"text": "Once upon a time."}]))
    assert turns(sample) == (("assistant", ("Once upon a time.",)),)


def test_parquet_takes_the_same_records(folder):
    records = [
        {"messages": messages({"type": "image", "text": None}, {"type": "text", "text": QUESTION}), "images": None}
        for _ in range(3)
    ]
    for record in records:
        record["messages"] = [
            {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        ]
        record["images"] = [{"bytes": image_bytes(seed=1), "path": None}]
    pq.write_table(pa.Table.from_pylist(records), folder / "x.parquet", row_group_size=2)
    samples = read_all(folder / "x.parquet")
    assert [sample.id for sample in samples] == ["x.parquet:1", "x.parquet:2", "x.parquet:3"]
    assert {turns(sample) for sample in samples} == {(("user", ("image", QUESTION)), ("assistant", (ANSWER,)))}


def test_parquet_paths_are_relative_to_the_file(folder):
    table = pa.Table.from_pylist(
        [{"images": [{"bytes": None, "path": "media/a.png"}], "texts": [{"user": "q", "assistant": "a"}]}]
    )
    pq.write_table(table, folder / "x.parquet")
    (sample,) = read_all(folder / "x.parquet")
    assert sample.unplaced[0].source == folder / "media" / "a.png"


def test_a_tar_record_may_hold_a_whole_conversation(folder):
    conversation = {
        "conversations": [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    }
    path = write_tar(
        folder / "x.tar",
        {
            "one/0001.json": json.dumps({**conversation, "image": "0001.png"}).encode(),
            "one/0001.png": image_bytes(),
            "one/0002.left.png": image_bytes(seed=1),
            "one/0002.right.png": image_bytes(seed=2),
            "one/0002.txt": b" two pictures \n",
            "one/0003.wav": wav_bytes(),
            "one/0003.cls": b"7",
            "one/.hidden.json": b"{}",
        },
    )
    first, second, third = read_all(path)
    assert turns(first) == (("user", (f"<image>\n{QUESTION}",)), ("assistant", (ANSWER,)))
    assert [len(sample.unplaced) for sample in (first, second, third)] == [1, 2, 1]
    assert turns(second)[1] == ("assistant", ("two pictures",))
    assert turns(third)[1] == ("assistant", ("7",))
    assert [sample.id for sample in (first, second, third)] == [f"x.tar:one/000{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("name", ["x.data", "x.json", "x.jsonl", "x.parquet", "x.tar", "x"])
def test_the_form_is_told_by_content_whatever_the_file_is_called(tmp_path, name):
    path = tmp_path / name
    record = {"question": "a", "answer": "b"}
    write_lines(path, [record, record])
    assert len(read_all(path)) == 2
    path.write_text(json.dumps([record] * 3, indent=2))
    assert len(read_all(path)) == 3
    pq.write_table(pa.Table.from_pylist([record] * 4), path)
    assert len(read_all(path)) == 4
    write_tar(path, {f"{n}.json": json.dumps(record).encode() for n in range(5)})
    assert len(read_all(path)) == 5


CHARACTERS = st.characters(exclude_categories=["Cs"])  # a codec takes seconds to look up
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(CHARACTERS, max_size=6)
    | st.sampled_from(['"', '\\"', "\\\\", "}{", "]["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    extras=st.lists(JSON_VALUES, min_size=1, max_size=6),
    gaps=st.lists(st.sampled_from([",", ", ", " ,", ",\n", ",\r\n  ", ",  "]), min_size=1, max_size=6),
    ascii_only=st.booleans(),
    mark=st.booleans(),
)
def test_json_array_elements_are_found_for_any_string_content(tmp_path_factory, extras, gaps, ascii_only, mark):
    records = [{"x": extra, "question": "q", "answer": str(number)} for number, extra in enumerate(extras)]
    text = "".join(
        gaps[number % len(gaps)] * (number > 0) + json.dumps(record, ensure_ascii=ascii_only)
        for number, record in enumerate(records)
    )
    path = tmp_path_factory.mktemp("json") / "x.json"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + f" [{text} ]\n".encode())
    reader = open_source(DataSource(path=str(path)))
    assert [reader.records.read(index).fields for index in range(len(reader))] == records


@pytest.mark.parametrize("indent", [None, 0, 1, 4])
def test_a_large_array_is_read_as_the_standard_library_reads_it(tmp_path, indent):
    records = [{"text": "é" * (number % 7), "deep": {"x": [[], {}]}} for number in range(500)]
    (tmp_path / "x.json").write_text(json.dumps(records, indent=indent))
    reader = open_source(DataSource(path=str(tmp_path / "x.json")))
    assert [reader.records.read(index).fields for index in range(len(reader))] == records


@settings(max_examples=50, deadline=None, print_blob=True)
@given(
    lines=st.lists(st.sampled_from(["", "  ", "\t", '{"question": "q", "answer": "é\\n"}']), max_size=12),
    end=st.sampled_from(["", "\n", "\r\n"]),
    scan=st.integers(1, 60),
    mark=st.booleans(),
)
def test_lines_are_found_among_blank_ones(tmp_path_factory, lines, end, scan, mark):
    lines = [*lines, '{"question": "q", "answer": "last"}']
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    text = "\r\n".join(lines) + end
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    from dilatant.data.readers import json_records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_records, "SCAN_BYTES", scan)
        reader = open_source(DataSource(path=str(path)))
    assert [reader.records.read(index).fields for index in range(len(reader))] == [
        json.loads(line) for line in lines if line.strip()
    ]


def test_folders_patterns_and_braces_name_several_files(tmp_path):
    for number in range(3):
        write_lines(tmp_path / f"part-{number:03}.jsonl", [{"question": "q", "answer": str(number)}])
    (tmp_path / ".dilatant").mkdir()
    write_lines(tmp_path / ".dilatant" / "x.jsonl", [{"question": "q", "answer": "hidden"}])
    for pattern, expected in (
        ("", ["0", "1", "2"]),
        ("part-*.jsonl", ["0", "1", "2"]),
        ("part-{001..002}.jsonl", ["1", "2"]),
        ("part-{000,002}.jsonl", ["0", "2"]),
    ):
        samples = read_all(tmp_path / pattern if pattern else tmp_path)
        assert [sample.turns[1].content[0] for sample in samples] == expected
        assert len({sample.id for sample in samples}) == len(expected)


def test_a_limit_uses_the_first_samples(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q", "answer": str(n)} for n in range(9)])
    assert [sample.turns[1].content[0] for sample in read_all(path, limit=4)] == ["0", "1", "2", "3"]
    with pytest.raises(IndexError):
        open_source(DataSource(path=str(path), limit=4))[4]


def test_a_limit_leaves_out_the_blocks_behind_it(tmp_path, monkeypatch):
    from dilatant.data.readers import parquet_records

    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 1)  # as if the file were larger than memory
    table = pa.table({"text": [str(number) for number in range(20)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4)
    for limit, lengths in ((None, (4,) * 5), (20, (4,) * 5), (9, (4, 4, 1)), (8, (4, 4)), (1, (1,))):
        reader = open_source(DataSource(path=str(tmp_path / "x.parquet"), limit=limit))
        assert reader.blocks.lengths == lengths
        assert len(reader.blocks.groups) == len(lengths)
        assert sum(lengths) == len(reader)


def test_a_row_group_is_read_once_in_blocks_that_memory_holds(tmp_path, monkeypatch):
    from dilatant.data.readers import parquet_records

    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 400_000)
    monkeypatch.setattr(parquet_records, "BLOCK_BYTES", 100_000)
    noise = np.random.default_rng(0)
    texts = [noise.bytes(5_000).hex() for _ in range(300)]  # 10 kB each, 3 MB in all
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=200, compression=None)
    opened = []
    read = parquet_records._row_group
    monkeypatch.setattr(
        parquet_records, "_row_group", lambda path, group, rows: opened.append(group) or read(path, group, rows)
    )
    blend = open_blend([DataSource(path=str(tmp_path / "x.parquet"))])
    records = blend.readers[0].records
    assert records.blocks.window == 4
    assert set(records.blocks.groups) == {0, 1}
    assert max(records.blocks.lengths) <= 10

    def check(index):
        assert blend[index].turns[0].content == (texts[index],)
        assert blend[index].id == f"x.parquet:{index + 1}"
        assert sum(table.nbytes for table in records._cache.values()) <= 400_000

    sampler = blend.sampler(0, 300)
    for index in sampler.take(sampler.start(), 300)[0].tolist():
        check(index)
    assert sorted(opened) == [0, 1]
    opened.clear()
    for index in range(300):
        check(index)
    assert opened == [0, 1]
    for index in noise.integers(0, 300, 30).tolist():
        check(index)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_batches_of_any_length_become_blocks_of_one(lengths, rows):
    from dilatant.data.readers.parquet_records import in_blocks

    ends = np.cumsum(lengths, dtype=int)
    batches = [
        pa.record_batch({"x": pa.array(range(end - length, end), pa.int64())})
        for length, end in zip(lengths, ends.tolist())
    ]
    total = sum(lengths)
    found = [table["x"].to_pylist() for table in in_blocks(batches, rows)]
    assert found == [list(range(start, min(start + rows, total))) for start in range(0, total, rows)]


def test_of_several_answers_the_first_is_used(folder):
    path = write_lines(folder / "x.jsonl", [{"question": QUESTION, "captions": [ANSWER, "eight"]}])
    assert turns(read_all(path)[0]) == PLAIN


def test_a_reader_travels_to_another_process(folder):
    path = write_lines(folder / "x.jsonl", [{"question": "q", "answer": "a", "image": "media/a.png"}])
    reader = open_source(DataSource(path=str(path)))
    assert pickle.loads(pickle.dumps(reader))[0] == reader[0]


def test_fingerprint_changes_with_files_and_reader_settings(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    seen = {open_source(DataSource(path=str(path))).fingerprint}
    assert open_source(DataSource(path=str(path))).fingerprint in seen
    seen.add(open_source(DataSource(path=str(path), prompt="q")).fingerprint)
    seen.add(open_source(DataSource(path=str(path), columns={"answer": "text"})).fingerprint)
    write_lines(path, [{"text": "ab"}])
    seen.add(open_source(DataSource(path=str(path))).fingerprint)
    assert len(seen) == 4


def fails(path, pattern, **settings):
    with pytest.raises(UserError, match=pattern) as caught:
        read_all(path, **settings)
    assert len(str(caught.value)) < 400


def test_what_is_no_data_set_is_named(tmp_path):
    fails(tmp_path / "none.jsonl", "does not exist")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "none.jsonl")
    fails(tmp_path / "link.jsonl", "does not exist")
    (tmp_path / "link.jsonl").unlink()
    fails(tmp_path / "*.tar", "matches no file")
    fails(tmp_path, "holds no data file")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    fails(tmp_path / "empty.jsonl", "is empty")
    (tmp_path / "list.json").write_text("[]")
    fails(tmp_path / "list.json", "is empty")
    for data, name in (
        (b"\x1f\x8b123", "gzip"),
        (b"PK\x03\x04123", "zip file"),
        (b"\x28\xb5\x2f\xfd12", "zstd"),
        (b"a,b\n1,2\n", r"unknown \(starts b'a,b"),
    ):
        (tmp_path / "odd").write_bytes(data)
        fails(tmp_path / "odd", name)
    write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    fails(tmp_path / "x.jsonl", "is JSON, but 'format' says 'webdataset'", format="webdataset")


def test_a_folder_of_several_forms_asks_for_a_pattern(tmp_path):
    write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    write_tar(tmp_path / "x.tar", {"a.txt": b"a"})
    fails(tmp_path, r"holds JSON and WebDataset tar files; name the data by a pattern")


def test_damaged_files_are_named(tmp_path):
    whole = write_tar(tmp_path / "x.tar", {"a.txt": b"a" * 3000, "b.txt": b"b" * 3000}).read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[:5000])
    fails(tmp_path / "x.tar", "cut off|cannot be read")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-3])
    fails(tmp_path / "x.parquet", "cannot be read as Parquet")
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": ')
    fails(tmp_path / "x.json", "cut off")


@pytest.mark.parametrize(
    ("record", "pattern"),
    [
        ("{broken", r"x.jsonl:2: is not valid JSON"),
        ("{}", "found the fields \\(none\\)"),
        ('{"weight": 1, "height": 2}', "found the fields height, weight"),
        ('{"messages": []}', "conversation is empty"),
        ('{"messages": {"role": "user"}}', "conversation is an object"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "message 1 has the role 'wizard'"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no 'content'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "smell"}]}]}',
            "part 1 of message 1 is of the type 'smell'",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "name more images than the record holds"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": "http://a/b.png"}]}]}',
            "remote address",
        ),
        ('{"texts": [{"user": "a"}]}', "entry 1 of 'texts' lacks"),
        ('{"answer": "a", "image": "data:image/png;base64,@@"}', "not valid base64"),
        ('{"answer": {"a": 1}}', "'answer' is an object"),
        ('{"answer": "a", "videos": [3]}', "video 1 is a number"),
        ('{"answer": "a", "images": [3]}', "image 1 is a number"),
    ],
)
def test_a_wrong_record_is_named_by_its_number(tmp_path, record, pattern):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + record + "\n")
    fails(tmp_path / "x.jsonl", pattern)
    fails(tmp_path / "x.jsonl", "^x.jsonl:2: ")
