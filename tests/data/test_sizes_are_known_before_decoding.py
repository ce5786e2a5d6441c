"""The sizes index has, for every sample, the sizes that encoding gives or the reason of a refusal; it is rebuilt when
anything that it depends on changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.data_builders import image_bytes, small_encoding, wav_bytes, write_lines, write_tar
from dilatant.config import DataSource, UserError
from dilatant.data.cache import open_cache
from dilatant.data.errors import SampleError
from dilatant.data.index import sizes
from dilatant.data.index.sizes import blend_sizes, known_sizes
from dilatant.data.order.blend import Blend, StreamBlend, open_blend
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import content_digest
from dilatant.data.text.encode import encode_sample

ENCODING = small_encoding()
VISION, AUDIO = ENCODING.units


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sizes"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "b.wav").write_bytes(wav_bytes(0.25))
    records = [
        {"question": "a" * number, "answer": "b", **[{}, {"image": "a.png"}, {"audio": "b.wav"}][number % 3]}
        for number in range(1, 20)
    ]
    records[6]["image"] = "none.png"
    return DataSource(path=str(write_lines(tmp_path / "x.jsonl", records)))


def lines(folder, records):
    write_lines(folder / "x.jsonl", records)


def array(folder, records):
    (folder / "x.json").write_text(json.dumps(records))


def parquet(folder, records):
    names = sorted({name for record in records for name in record})
    table = pa.table({name: [record.get(name) for record in records] for name in names})
    pq.write_table(table, folder / "x.parquet", row_group_size=3)


def shards(folder, records):
    for start in range(0, len(records), 5):
        members = {}
        for number, record in enumerate(records[start : start + 5]):
            members[f"{number}.json"] = json.dumps(record).encode()
        write_tar(folder / f"{start}.tar", members)


def with_template(folder):
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    return small_encoding(template=str(folder / "chat.jinja"))


@pytest.mark.parametrize(
    ("write", "make_encoding"),
    [
        (lines, lambda folder: ENCODING),
        (array, lambda folder: ENCODING),
        (parquet, lambda folder: replace(ENCODING, train_on="all")),
        (shards, lambda folder: small_encoding(units=(replace(VISION, merge="prepend"), AUDIO))),
        (lines, lambda folder: small_encoding(units=(replace(VISION, merge="prepend"), AUDIO))),
        (parquet, with_template),
        (shards, with_template),
    ],
    ids=["lines", "array", "parquet-all", "shards-prepend", "lines-prepend", "parquet-template", "shards-template"],
)
def test_the_index_holds_what_encoding_gives(tmp_path, write, make_encoding):
    encoding = make_encoding(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "data/b.wav").write_bytes(wav_bytes(0.25))
    media = [{}, {"image": "a.png"}, {"audio": "b.wav"}]
    records = [
        {"question": "aé" * number, "answer": "b" * (number % 4 + 1), **media[number % 3]} for number in range(12)
    ]
    write(tmp_path / "data", records)
    blend = open_blend([DataSource(path=str(tmp_path / "data"))])
    index = blend_sizes(blend, encoding)
    assert index.units == ("language", "vision", "audio")
    assert len(index) == len(blend) == 12
    assert not index.problems
    assert not index.refused(None)
    for number in range(12):
        encoded = encode_sample(blend[number], encoding)
        assert {unit: index.of(unit)[number] for unit in index.units} == dict(encoded.sizes)
        assert index.target_tokens[number] == (encoded.labels[1:] != -100).sum()
        assert index.content[number] == content_digest(encoded.input_ids, encoded.labels)
        assert blend.name(number) == blend[number].id
    assert len(set(index.content.tolist())) == 12


HOSTILE = [
    {"question": "q", "answer": "a"},
    {"question": "q" * 90, "answer": "a"},  # too long
    {"question": "q" * 90, "answer": " "},  # too long and empty: the length is what is said
    {"question": "q", "answer": ""},
    {"messages": [{"role": "user", "content": "q"}]},
    {"messages": [{"role": "user", "content": "q" * 90}]},
    {"messages": []},
    {"something": "else"},
    {"question": "q", "answer": "a", "image": "none.png"},
    {"question": "q" * 90, "answer": "a", "image": "text.png"},
    {"question": "q", "answer": "a", "image": "good.png"},
    {"question": "<image><image>", "answer": "a", "image": "good.png"},
    {"question": "q", "answer": "a\ue001"},
    {"question": "q\ud800", "answer": "a"},
    {"question": "q", "answer": "a", "video": "x"},
    {"question": "q", "answer": "a", "image": 3},
    {"question": "q", "answer": "a", "audio": "good.png"},
    "no object",
    {"answer": "a" * 49},
    {"answer": "a" * 50},
    {"answer": "a" * 51},
]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("max_length", [None, 1, 50, 60])
def test_refused_is_what_encoding_raises(tmp_path, train_on, max_length):
    (tmp_path / "good.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "text.png").write_text("no image")
    path = write_lines(tmp_path / "x.jsonl", HOSTILE)
    with path.open("a") as file:
        file.write('{"cut\n{"answer": 1}}\n')
    blend = open_blend([DataSource(path=str(path))])
    encoding = small_encoding(train_on=train_on, max_length=max_length)
    expected = {}
    for number in range(len(blend)):
        try:
            encode_sample(blend[number], encoding)
        except SampleError as error:
            expected[number] = str(error)
    index = blend_sizes(blend, encoding)
    assert index.refused(max_length) == expected
    assert list(index.refused(max_length)) == sorted(expected)
    assert 0 < len(expected) < len(blend) or max_length == 1


def same(one, other, part=slice(None)):
    return (
        one.units == other.units
        and (one.tokens[part] == other.tokens).all()
        and (one.target_tokens[part] == other.target_tokens).all()
        and (one.content[part] == other.content).all()
    )


class Progress:
    """Progress callback that records whether anything was measured."""

    def __init__(self):
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))


def index_of(source, encoding=ENCODING, cache_dir=None, workers=None):
    progress, blend, cache = Progress(), open_blend([source]), open_cache(cache_dir)
    found = sizes._source(blend.readers[0], encoding, cache, workers, progress)
    return sizes._index(blend, encoding, cache, [found]), progress.calls


def test_the_index_is_kept_in_the_cache_and_read_again(source, tmp_path, cache):
    before = sorted(tmp_path.iterdir())
    first, calls = index_of(source)
    assert calls == [(19, 19)]
    assert sorted({*tmp_path.iterdir()} - {cache.parent}) == before  # nothing is written among the data
    second, calls = index_of(source)
    assert calls == []
    assert same(first, second)
    assert dict(second.problems) == dict(first.problems)
    assert list(second.problems) == [6]
    assert "x.jsonl:7" in second.problems[6]
    assert "none.png" in second.problems[6]
    assert 5 not in second.problems
    assert 7 not in second.problems
    assert not second.tokens.flags.writeable


def test_the_index_is_made_anew_when_what_it_depends_on_changes(source):
    index_of(source)
    assert index_of(source, replace(ENCODING, train_on="all"))[1]
    assert index_of(source, replace(ENCODING, units=(replace(VISION, tokens_per_image=9), AUDIO)))[1]
    assert index_of(source.model_copy(update={"limit": 5}))[1]
    assert index_of(source.model_copy(update={"prompt": "what?"}))[1]
    assert index_of(source)[1] == []  # the first index is still there


def test_the_length_allowed_does_not_change_the_index(source):
    index_of(source)
    assert index_of(source, replace(ENCODING, max_length=7))[1] == []


def test_a_changed_file_replaces_its_index(source, tmp_path, cache):
    before, _ = index_of(source)
    files = sorted(path.name for path in cache.glob("*.arrays"))
    path = tmp_path / "x.jsonl"
    path.write_text(path.read_text().replace('"b"', '"a longer answer"'))  # as many records
    index, calls = index_of(source)
    assert calls
    assert (index.of("language") > before.of("language")).sum() == 18  # all but the one that cannot be read
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    index, calls = index_of(source)
    assert calls
    assert len(index) == 20
    assert sorted(path.name for path in cache.glob("*.arrays")) == files


def test_data_of_one_name_in_two_folders_have_two_indices(tmp_path, cache, monkeypatch):
    for folder, text in (("one", "short"), ("two", "somewhat longer")):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "y.jsonl", [{"text": text}])
    for _ in range(2):
        for folder, tokens in (("one", 7), ("two", 17)):
            monkeypatch.chdir(tmp_path / folder)
            assert index_of(DataSource(path="y.jsonl"))[0].of("language").tolist() == [tokens]
    assert len(list(cache.glob("sizes-*.arrays"))) == 2


def test_the_index_goes_to_the_users_cache(source, tmp_path, monkeypatch):
    monkeypatch.delenv("DILATANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    index_of(source)
    assert len(list((tmp_path / "home" / "dilatant" / "sizes").glob("*.arrays"))) == 2
    assert not index_of(source)[1]


def test_workers_measure_the_same(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "a" * (n % 50), "answer": "b"} for n in range(400)])
    alone, _ = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "one", workers=0)
    together, calls = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "two", workers=2)
    assert same(alone, together)
    assert calls[-1] == (400, 400)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_slow_indexing_moves_to_all_cores_midway(tmp_path, monkeypatch):
    from dilatant.data import parallel_map as pieces

    path = write_lines(tmp_path / "x.jsonl", [{"question": "a" * (n % 50), "answer": "b"} for n in range(900)])
    alone, _ = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "one", workers=0)
    monkeypatch.setattr(pieces, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(pieces, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(pieces.os, "sched_getaffinity", lambda process: {0, 1})
    started = []
    pool = pieces.WorkerPool
    monkeypatch.setattr(
        pieces, "WorkerPool", lambda job, workers, **more: started.append(workers) or pool(job, workers, **more)
    )  # fmt: skip
    shared, calls = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "two")
    assert started == [2]
    assert same(alone, shared)
    assert [done for done, _ in calls] == [*range(64, 900, 64), 900]


def test_groups_of_blocks_are_measured_by_one_worker_each(tmp_path, monkeypatch):
    from dilatant.data.index import measure
    from dilatant.data.readers import parquet_records

    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 1)  # as if the file were larger than memory
    texts = [{"text": "x" * (number % 9 + 1)} for number in range(20)]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "x.parquet", row_group_size=6)
    reader = open_source(DataSource(path=str(tmp_path / "x.parquet")))
    assert list(measure._pieces(20, reader.blocks)) == [(0, 6), (6, 12), (12, 18), (18, 20)]
    monkeypatch.setattr(measure, "BLOCK_PIECE", 4)
    pieces = list(measure._pieces(20, reader.blocks))
    assert pieces == [(0, 4), (4, 6), (6, 10), (10, 12), (12, 16), (16, 18), (18, 20)]
    tokens = blend_sizes(Blend((reader,), (1.0,)), ENCODING).of("language")
    assert tokens.tolist() == [len(encode_sample(reader[at], ENCODING).input_ids) for at in range(20)]
    assert list(measure._pieces(150, None)) == [(0, 64), (64, 128), (128, 150)]


def test_a_blend_is_its_sources_one_after_another(source, tmp_path):
    other = DataSource(path=str(write_lines(tmp_path / "y.jsonl", [{"text": "a"}, {"bad": 1}])))
    blend = open_blend([other, source])
    assert known_sizes(blend, ENCODING) is None
    progress = Progress()
    index = blend_sizes(blend, ENCODING, progress=progress)
    assert len(index) == len(blend) == 21
    alone, _ = index_of(source)
    assert same(index, alone, slice(2, None))
    assert list(index.problems) == [1, 8]
    assert index.problems[8] == alone.problems[6]
    assert progress.calls[-1] == (21, 21)
    for number in (0, 2, 20):
        assert index.of("language")[number] == len(encode_sample(blend[number], ENCODING).input_ids)
        assert blend.name(number) == blend[number].id
    assert index.refused(5)[20].startswith("x.jsonl:19: has 27 tokens, more than the 5 allowed")
    known = known_sizes(blend, ENCODING)
    assert known is not None
    assert same(index, known)
    with pytest.raises(UserError, match="do not stream"):
        blend_sizes(StreamBlend((), ()), ENCODING)


def test_columns_of_tokens_lie_together(source):
    index, _ = index_of(source)
    assert index.of("language").flags.c_contiguous
    assert index.tokens.shape == (19, 3)
    assert index.tokens[np.array([2, 0])].shape == (2, 3)


def test_a_medium_that_is_put_there_later_is_seen(tmp_path, monkeypatch):
    from dilatant.data.index import measure

    records = [{"question": "q", "answer": "a", "image": f"{number}.png"} for number in range(4)]
    source = DataSource(path=str(write_lines(tmp_path / "x.jsonl", [*records, {"bad": 1}])))
    (tmp_path / "0.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "1.png").write_text("no image")
    other = DataSource(path=str(write_lines(tmp_path / "y.jsonl", [{"text": "a"}])))
    assert list(blend_sizes(open_blend([other, source]), ENCODING).problems) == [2, 3, 4, 5]
    measured = []
    count = measure.measure_sample
    monkeypatch.setattr(
        measure, "measure_sample", lambda sample, *more: measured.append(sample.id) or count(sample, *more)
    )
    (tmp_path / "1.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "2.png").write_bytes(image_bytes(20, 30))
    blend = open_blend([other, source])
    assert known_sizes(blend, ENCODING) is None
    index = blend_sizes(blend, ENCODING)
    assert list(index.problems) == [4, 5]
    assert measured == ["x.jsonl:2", "x.jsonl:3", "x.jsonl:4"]  # and none of those that were right
    for number in range(4):
        encoded = encode_sample(blend[number], ENCODING)
        assert dict(encoded.sizes) == {unit: index.of(unit)[number] for unit in index.units}
        assert encoded.content_digest == index.content[number]
    measured.clear()
    assert list(blend_sizes(open_blend([other, source]), ENCODING).problems) == [4, 5]
    assert not measured
