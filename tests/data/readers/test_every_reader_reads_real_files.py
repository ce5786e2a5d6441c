"""The shared real data sets, read by index, agree with a plain reading of the same files."""

from __future__ import annotations

import json
import tarfile
from itertools import islice

import numpy as np
import pytest

from cases.data_builders import shared, small_encoding
from dilatant.config import DataSource
from dilatant.data.media.pixels import as_array
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import FileSlice
from dilatant.data.text.encode import encode_sample, measure_sample


def test_parquet_chart_rows_become_conversations_with_an_image():
    folder = shared("data/chartqa_mini", "FineVision-like Parquet")
    import pyarrow.parquet as pq

    rows = [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    reader = open_source(DataSource(path=str(folder)))
    assert len(reader) == len(rows) == 126
    for index in (0, 31, 32, 63, 64, 125):
        sample, row = reader[index], rows[index]
        said = [(turn.role, turn.content) for turn in sample.turns]
        assert said == [
            item for pair in row["texts"] for item in (("user", (pair["user"],)), ("assistant", (pair["assistant"],)))
        ]
        assert [media.source for media in sample.unplaced] == [image["bytes"] for image in row["images"]]
    assert len({reader[index].id for index in range(len(reader))}) == len(reader)


@pytest.mark.parametrize(
    ("folder", "kind", "field", "count"),
    [("coco_cc_mini", "image", "captions", 106), ("fsdd_mini", "audio", "text", 1500)],
)
def test_tar_shard_members_become_samples_with_source_prompt(folder, kind, field, count):
    folder = shared(f"data/{folder}", "WebDataset tar")
    # All shards: of the folder alone, a source reads the training split.
    reader = open_source(DataSource(path=str(folder / "*.tar"), prompt="What is it?"))
    expected = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            by_key: dict[str, dict[str, bytes]] = {}
            for member in archive:
                key, _, suffix = member.name.partition(".")
                by_key.setdefault(key, {})[suffix] = archive.extractfile(member).read()
        expected += by_key.items()
    assert len(reader) == len(expected) == count
    for index in np.random.default_rng(0).integers(0, count, 20):
        sample = reader[int(index)]
        key, members = expected[index][0], dict(expected[index][1])
        answer = json.loads(members.pop("json"))[field]
        assert sample.id.endswith(":" + key)
        assert sample.turns[0].content == ("What is it?",)
        assert sample.turns[1].content == (answer if isinstance(answer, str) else answer[0],)
        (media,) = sample.unplaced
        assert media.kind == kind
        assert isinstance(media.source, FileSlice)
        with open(media.source.path, "rb") as stream:
            stream.seek(media.source.offset)
            assert stream.read(media.source.length) == next(iter(members.values()))


@pytest.mark.parametrize("folder", ["chartqa_mini", "coco_cc_mini", "fsdd_mini"])
def test_sizes_from_headers_are_those_of_the_decoded_samples(folder):
    reader = open_source(DataSource(path=str(shared(f"data/{folder}", "sizes of real media")), prompt="What?"))
    encoding = small_encoding()
    for index in range(0, len(reader), max(1, len(reader) // 30)):
        sample = reader[index]
        sizes = measure_sample(sample, encoding)
        encoded = encode_sample(sample, encoding)
        assert dict(encoded.sizes) == dict(sizes.tokens)
        assert (encoded.labels != -100).sum() == sizes.target_tokens
        rows = encoded.media["vision" if folder != "fsdd_mini" else "audio"]
        (array,) = rows.values()
        assert as_array(array).dtype == np.float32
        assert len(array) * (4 if folder != "fsdd_mini" else 5) == max(sizes.tokens["vision"], sizes.tokens["audio"])


def test_large_parquet_is_read_in_blocks_and_row_groups_once(monkeypatch):
    from dilatant.data.readers import parquet_records

    folder = shared("data/chartqa_mini", "block-wise reading of Parquet")
    # As if memory held two of the row groups (32 rows of about 1.3 MB).
    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 3 << 20)
    blend = open_blend([DataSource(path=str(folder))])
    (reader,) = blend.readers
    assert reader.blocks is not None
    assert reader.blocks.window == 2
    assert sum(reader.blocks.lengths) == 126
    loads = []
    read = parquet_records.ParquetRecords._table

    def counted(records, block):
        before = block in records._cache
        table = read(records, block)
        loads.extend([] if before else [block])
        return table

    monkeypatch.setattr(parquet_records.ParquetRecords, "_table", counted)
    sampler = blend.sampler(0, 18)
    for indices, _ in islice(sampler.batches(sampler.start()), 7):
        for index in indices:
            assert blend[index].turns
    assert sorted(loads) == list(range(len(reader.blocks.lengths)))
    # A row group that is larger than all that may be kept is kept as long as its rows are read.
    monkeypatch.setattr(parquet_records, "CACHE_BYTES", 1)
    loads.clear()
    blend = open_blend([DataSource(path=str(folder))])
    assert all(blend[index].turns for index in (40, 41, 33))
    assert loads == [1]
