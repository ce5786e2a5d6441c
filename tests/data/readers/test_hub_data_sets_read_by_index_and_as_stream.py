"""The hub reader, on local folders in the layout of the hub; a hub out of reach is a clear error."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from cases.data_builders import image_bytes, shared, small_encoding, wav_bytes
from dilatant.config import DataSource, UserError
from dilatant.config.own_parts import OwnPart
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.order.blend import Blend, StreamBlend, open_blend, open_own_data
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import Media

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    """Ten labelled images and sounds as the hub's viewers know them: typed features, encoded inside Parquet."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog", "bird"]),
            "clips": datasets.List(datasets.Audio()),
        }
    )
    rows = [
        {
            "image": {"bytes": image_bytes(seed=n), "path": None},
            "label": n % 3,
            "clips": [{"bytes": wav_bytes(), "path": "x.wav"}],
        }
        for n in range(10)
    ]
    (tmp_path / "hub").mkdir()
    # Written by hand: the library itself wants torchcodec to write sounds.
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), tmp_path / "hub" / "train.parquet")
    return str(tmp_path / "hub")


def check_pictures(samples):
    assert [sample.turns[1].content[0] for sample in samples] == [["cat", "dog", "bird"][n % 3] for n in range(10)]
    assert all(sample.turns[0].content == ("What is it?",) for sample in samples)
    for number, sample in enumerate(samples):
        image, sound = sample.unplaced
        assert isinstance(image, Media)
        assert image.source == image_bytes(seed=number)
        assert (sound.kind, sound.source) == ("audio", wav_bytes())


SETTINGS = {"prompt": "What is it?", "columns": {"audios": "clips"}}


def test_typed_features_come_undecoded_and_labels_by_name(folder):
    reader = open_source(DataSource(id=folder, **SETTINGS))
    check_pictures([reader[index] for index in range(len(reader))])
    assert pickle.loads(pickle.dumps(reader))[3] == reader[3]
    assert reader[3].id == f"{folder}:4"
    assert open_source(DataSource(id=folder, **SETTINGS)).fingerprint == reader.fingerprint
    assert len(open_source(DataSource(id=folder, limit=4, **SETTINGS))) == 4


def test_a_stream_gives_the_same_samples(folder):
    blend = open_blend([DataSource(id=folder, streaming=True, **SETTINGS)])
    assert isinstance(blend, StreamBlend)
    (stream,) = blend.streams
    check_pictures(list(stream.read(0)))
    assert list(stream.read(7)) == list(stream.read(0))[7:]
    (limited,) = open_blend([DataSource(id=folder, streaming=True, limit=4, **SETTINGS)]).streams
    assert len(list(limited.read(0))) == 4
    assert len(list(limited.read(3))) == 1
    sampler = blend.sampler(0, 4)
    batches = list(islice(sampler.batches(sampler.start()), 5))
    assert sorted(sample.id for batch, _ in batches for sample in batch) == sorted(
        [f"{folder}:{n + 1}" for n in range(10)] * 2
    )
    with pytest.raises(UserError, match=r"set 'train.steps'"):
        len(blend)


@pytest.mark.parametrize("kind", ["hub", "object"])
def test_a_resumed_stream_goes_on_with_the_next_sample(folder, kind):
    """From every batch on, in any pass and inside of blocks, the samples are those of a run without a stop."""
    blend = open_blend([DataSource(id=folder, streaming=True, **SETTINGS)])
    if kind == "object":
        rows = datasets.Dataset.from_list([{"question": "q", "answer": f"a{number}"} for number in range(10)])
        own = rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)
        blend = open_own_data(OwnPart("train_data", own))
    sampler = replace(blend.sampler(0, 3), shuffle_block=4)
    whole = list(islice(sampler.batches(sampler.start()), 8))
    for at, (_, state) in enumerate(whole[:-1]):
        rest = list(islice(sampler.batches(sampler.resume(state)), 7 - at))
        assert [[(sample.id, sample.turns) for sample in batch] for batch, _ in rest] == [
            [(sample.id, sample.turns) for sample in batch] for batch, _ in whole[at + 1 :]
        ]


def test_a_stream_of_other_files_is_not_gone_on_with(folder):
    source = DataSource(id=folder, streaming=True, **SETTINGS)

    def identity():
        return DataIdentity(open_blend([source]), None, small_encoding())

    before = json.loads(json.dumps(identity().by_source))
    identity().require(before)
    identity().require([])
    identity().require([{**before[0], "content": ""}])  # unknown: by an earlier version, or the hub did not answer
    file = Path(folder, "train.parquet")
    pq.write_table(pq.read_table(file).slice(1), file)
    with pytest.raises(UserError, match="hub' is a stream of other files"):
        identity().require(before)
    with pytest.raises(UserError, match="there were 1 sources, and now there are 2"):
        DataIdentity(open_blend([source, source]), None, small_encoding()).require(before)


def test_a_record_of_no_known_form_is_named_in_a_stream(tmp_path):
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_list([{"height": 1}]).to_parquet(tmp_path / "hub" / "train.parquet")
    (stream,) = open_blend([DataSource(id=str(tmp_path / "hub"), streaming=True)]).streams
    (error,) = stream.read(0)
    assert "hub:1: is of no known form; found the fields height" in str(error)


def test_the_real_charts_read_alike_from_the_hub_and_from_files():
    folder = str(shared("data/chartqa_mini", "the hub reader on real rows"))
    local, hub = open_source(DataSource(path=folder)), open_source(DataSource(id=folder))
    assert len(local) == len(hub)
    for index in (0, 50, 125):
        assert local[index].turns == hub[index].turns
        assert [media.source for media in local[index].unplaced] == [media.source for media in hub[index].unplaced]


def read_first(source):
    blend = open_blend([source])
    return next(blend.streams[0].read(0)) if source.streaming else blend[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_out_of_reach_is_one_clear_line(monkeypatch, streaming):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="'nobody/nothing' is on the hub, which this machine cannot reach") as caught:
        read_first(DataSource(id="nobody/nothing", streaming=streaming))
    assert "\n" not in str(caught.value)


def test_streams_are_for_the_hub_and_not_mixed_with_files(folder):
    with pytest.raises(ValidationError, match="'streaming' is for data sets on the hub"):
        DataSource(path="x", streaming=True)
    with pytest.raises(UserError, match="cannot be blended with others"):
        open_blend([DataSource(id=folder, streaming=True), DataSource(id=folder)])
    assert isinstance(open_blend([DataSource(id=folder)]), Blend)
