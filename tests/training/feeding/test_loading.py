"""A loop of one's own trains on the batches that `dilatant train` would take."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from cases.data_builders import image_bytes
from cases.tiny_project import tiny_config, write_images
from cases.tiny_wholes import save_as_the_hub_does
from dilatant import Generator, MultimodalModel, ParallelSpec, UserError, load_config, make_loader, parallelize
from dilatant.config import DataSource
from dilatant.data.media.pixels import as_array
from dilatant.data.order.blend import open_blend
from dilatant.planning.assemble import assemble_encoding, assemble_model, assemble_samples
from harness.loader import Loader


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    write_images(tmp_path, 12)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_config()), encoding="utf-8")
    return tmp_path / "config.yaml"


def test_batches_are_those_of_the_config_and_can_be_executed(config_path: Path) -> None:
    config = load_config(config_path)
    samples = assemble_samples(config)
    model = assemble_model(config, samples.tokenizer, samples.encoding)
    expected = Loader(samples.train, samples.encoding, samples.train.sampler(config.seed, 4), steps=3)
    own = ParallelSpec()
    parallel = parallelize(model, {"vision": own, "language": own}, colocated={"vision": "language"})
    optimizer = torch.optim.AdamW(parallel.trainable, lr=5e-3)
    sources, cache = [config_path.parent / "train.jsonl"], config_path.parent / "index"
    how = {"workers": 0, "max_length": 64, "cache_dir": cache, "parallel": parallel}
    with make_loader(model, sources, 4, steps=3, **how) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            for sample, other in zip(batch.samples, wanted.samples, strict=True):
                assert (sample.id, dict(sample.sizes)) == (other.id, dict(other.sizes))
                assert np.array_equal(sample.labels, other.labels)
                for name, array in sample.media["vision"].items():
                    assert np.array_equal(as_array(array), as_array(other.media["vision"][name]))
            assert np.isfinite(parallel.execute(batch.samples).loss)
            optimizer.step()
            optimizer.zero_grad()
    parallel.close()
    assert list(cache.glob("sizes-*"))


def test_samples_of_a_stream_are_measured_and_executed_in_order(config_path: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [
        {"image": {"bytes": image_bytes(seed=number), "path": None}, "question": "q", "answer": str(number)}
        for number in range(10)
    ]
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "train.parquet")
    source = DataSource(id=str(tmp_path / "hub"), streaming=True)
    sampler = open_blend([source]).sampler(0, 4)
    drawn = [[sample.id for sample in batch] for batch, _ in islice(sampler.batches(sampler.start()), 3)]
    config = load_config(config_path)
    samples = assemble_samples(config)
    model = assemble_model(config, samples.tokenizer, samples.encoding)
    own = ParallelSpec()
    parallel = parallelize(model, {"vision": own, "language": own}, colocated={"vision": "language"})
    with make_loader(model, [source], 4, steps=3, workers=0, max_length=64, parallel=parallel) as loader:
        for batch, names in zip(loader, drawn, strict=True):
            assert [sample.id for sample in batch.samples] == names
            assert all(len(sample.input_ids) == sample.sizes["language"] for sample in batch.samples)
            assert np.isfinite(parallel.execute(batch.samples).loss)
    parallel.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_a_whole_model_s_samples_are_those_of_the_config(family: str, config_path: Path, tmp_path: Path) -> None:
    save_as_the_hub_does(family, tmp_path / "whole")
    tree = {**tiny_config(), "model": {"id": str(tmp_path / "whole")}}
    config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(config_path)
    samples = assemble_samples(config)
    expected = Loader(samples.train, samples.encoding, samples.train.sampler(config.seed, 4), steps=1)
    model = MultimodalModel.from_pretrained(tmp_path / "whole")
    source = config_path.parent / "train.jsonl"
    with make_loader(model, [source], 4, steps=1, workers=0, max_length=64) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            for sample, other in zip(batch.samples, wanted.samples, strict=True):
                assert dict(sample.sizes) == dict(other.sizes)
                assert np.array_equal(sample.input_ids, other.input_ids)
                assert sample.media["vision"].keys() == other.media["vision"].keys()
                for name, array in sample.media["vision"].items():
                    assert np.array_equal(as_array(array), as_array(other.media["vision"][name]))
    for processors, says in (
        ({"eyes": {}}, "processors: no encoder 'eyes'; there are vision"),
        ({"vision": str(tmp_path / "nothing")}, "nothing"),
    ):
        with pytest.raises(UserError, match=says):
            make_loader(model, [source], 4, processors=processors)


def test_records_of_a_list_are_loaded_as_those_of_a_file(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_path.parent)  # relative paths of a list's media start from here
    config = load_config(config_path)
    model = assemble_model(config, *assemble_encoding(config), hollow=True)
    records = [json.loads(line) for line in Path("train.jsonl").read_text(encoding="utf-8").splitlines()]
    how = {"steps": 3, "workers": 0, "max_length": 64}
    with make_loader(model, ["train.jsonl"], 4, **how) as of_file, make_loader(model, records, 4, **how) as of_list:
        for batch, other in zip(of_file, of_list, strict=True):
            for sample, same in zip(batch.samples, other.samples, strict=True):
                assert np.array_equal(sample.input_ids, same.input_ids)
                assert sample.media["vision"].keys() == same.media["vision"].keys()


def test_a_loader_takes_the_keys_of_the_data_section(config_path: Path) -> None:
    config = load_config(config_path)
    model = assemble_model(config, *assemble_encoding(config), hollow=True)
    source, cache = config_path.parent / "train.jsonl", config_path.parent / "index"
    keys = {"workers": 0, "max_samples": 3, "cache_dir": cache}
    with make_loader(model, [source], 4, steps=2, max_length=64, **keys) as loader:
        samples = [sample for batch in loader for sample in batch.samples]
    longest = max(sample.sizes["language"] for sample in samples)
    assert len({sample.id for sample in samples}) == 3
    assert list(cache.glob("sizes-*"))
    with make_loader(model, [source], 4, steps=2, max_length=longest - 1, truncation="right", **keys) as loader:
        cut = [sample for batch in loader for sample in batch.samples]
    assert max(sample.sizes["language"] for sample in cut) == longest - 1
    for wrong, says in (
        ({"max_lenght": 64}, "unknown key 'data.max_lenght'; did you mean 'data.max_length'"),
        ({"workers": -1}, "data.workers: .*greater than or equal to 0"),
        ({"val_size": 2}, "val_size: a loader reads `sources` only"),
    ):
        with pytest.raises(UserError, match=says):
            make_loader(model, [source], 4, **wrong)


def test_a_model_without_a_tokenizer_is_asked_for_one(config_path: Path) -> None:
    config = load_config(config_path)
    model = assemble_model(config, *assemble_encoding(config), hollow=True)
    model.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        make_loader(model, [config_path.parent / "train.jsonl"], 4)


def test_a_model_that_draws_is_refused(config_path: Path) -> None:
    config = load_config(config_path)
    model = assemble_model(config, *assemble_encoding(config), hollow=True)
    model.generators = {"image": Generator(torch.nn.Linear(8, 1), token_id=3, width=8)}
    with pytest.raises(UserError, match="for encoders only; make `EncodedSample`s"):
        make_loader(model, [config_path.parent / "train.jsonl"], 4)
