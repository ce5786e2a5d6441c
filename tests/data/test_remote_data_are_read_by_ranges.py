"""Data at addresses of fsspec are read as local ones are, by ranges, and a change of them is noticed."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from cases.data_builders import image_bytes, small_encoding, write_lines, write_tar
from cases.mds_files import write_energon, write_mds
from cases.remote_data import CountedFileSystem, http_server, upload
from dilatant.config import DataSource, UserError
from dilatant.config.base import DataPath, path_rule
from dilatant.config.files.remote_files import FIRST_BYTES, RemotePath, data_path, open_data
from dilatant.data.errors import SampleError
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.index.lint import lint
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.media.open_media import open_media
from dilatant.data.order.blend import open_blend
from dilatant.data.order.sampler import SamplerState
from dilatant.data.readers.reader import open_source
from dilatant.data.workers.pool_wire import pack_undecoded, unpack_undecoded
from harness.loader import Loader

fsspec = pytest.importorskip("fsspec")
ENCODING = replace(small_encoding(), max_length=1000)


@pytest.fixture(autouse=True)
def counted(tmp_path, monkeypatch):
    """A protocol of our own: files in memory whose requests are counted."""
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.store.clear()
    CountedFileSystem.reads.clear()
    return CountedFileSystem.reads


def tar_members(numbers):
    return {
        f"{number:03}.{suffix}": data
        for number in numbers
        for suffix, data in (("json", json.dumps({"question": "q", "answer": f"a{number}"}).encode()),
                             ("png", image_bytes(seed=number)))
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The same eight samples with a picture in every form."""
    root = tmp_path / "data"
    (root / "tar").mkdir(parents=True)
    (root / "lines" / "images").mkdir(parents=True)
    (root / "table").mkdir()
    rows = [{"question": "q", "answer": f"a{number}", "image": f"images/{number}.png"} for number in range(8)]
    for number in range(8):
        (root / "lines" / "images" / f"{number}.png").write_bytes(image_bytes(seed=number))
    write_lines(root / "lines" / "a.jsonl", rows[:5])
    write_lines(root / "lines" / "b.jsonl", rows[5:])
    (root / "lines" / "c.csv").write_text(
        "".join(f"{','.join(row)}\n" for row in [[*rows[0]], *(r.values() for r in rows)])
    )
    table = pa.Table.from_pylist([row | {"image": image_bytes(seed=number)} for number, row in enumerate(rows)])
    pq.write_table(table, root / "table" / "x.parquet", row_group_size=3)
    write_tar(root / "tar" / "x-0.tar", tar_members(range(3)))
    write_tar(root / "tar" / "x-1.tar", tar_members(range(3, 8)))
    columns = {"answer": ("str", None), "image": ("png", None), "question": ("str", None)}
    mds = [[f"a{number}".encode(), image_bytes(seed=number), b"q"] for number in range(8)]
    write_mds(root / "mds", [(columns, mds[:4]), (columns, mds[4:])])
    write_mds(root / "packed", [(columns, mds[:4]), (columns, mds[4:])], "zstd")
    shards = {f"s/{at}.tar": tar_members(range(4 * at, 4 * at + 4)) for at in range(2)}
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_energon(root / "energon", shards, {"train": [*shards]}, crude)
    return root


FORMS = ["tar", "tar/x-*.tar", "tar/x-{0..1}.tar", "lines/*.jsonl", "lines/c.csv", "table", "table/x.parquet", "mds",
         "packed", "energon"]  # fmt: skip


def check(remote, local):
    """The samples of both are equal, and so are the bytes of their media."""
    assert len(remote) == len(local) == 8
    for index in (7, 0, 5, 2, 1, 3, 6, 4):
        ours, theirs = remote[index], local[index]
        assert (ours.id, ours.turns, ours.unused) == (theirs.id, theirs.turns, theirs.unused)
        for media, other in zip(ours.unplaced, theirs.unplaced, strict=True):
            with open_media(media) as stream, open_media(other) as same:
                assert stream.read() == same.read() == image_bytes(seed=index)


@pytest.mark.parametrize("protocol", ["memory", "counted"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_as_from_a_disk(folder, form, protocol):
    upload(folder, f"{protocol}://set/{folder.parent.name}")
    remote = open_source(DataSource(path=f"{protocol}://set/{folder.parent.name}/{form}"))
    check(pickle.loads(pickle.dumps(remote)), open_source(DataSource(path=str(folder / form))))
    assert str(remote.home).startswith(f"{protocol}://set/")


def test_training_lint_and_sizes_take_remote_data(folder, tmp_path):
    upload(folder, "counted://set")
    blends = [open_blend([DataSource(path=path)]) for path in ("counted://set/tar", str(folder / "tar"))]
    index, local = (blend_sizes(blend, ENCODING, workers=0) for blend in blends)
    assert (index.content == local.content).all()
    assert (index.tokens == local.tokens).all()
    assert not lint(blends[0], ENCODING)
    batches = []
    for blend in blends:
        with Loader(blend, ENCODING, blend.sampler(0, 4), steps=3, workers=0) as loader:
            batches.append([[sample.id for sample in batch.samples] for batch in loader])
    assert batches[0] == batches[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_order_of_every_form_goes_on_with_the_next_sample(folder, form):
    upload(folder, "counted://set")

    def batches(steps, position=SamplerState()):  # noqa: B008 - a frozen value
        blend = open_blend([DataSource(path=f"counted://set/{form}")])
        with Loader(blend, ENCODING, blend.sampler(1, 3), position=position, steps=steps) as loader:
            return list(loader)

    whole = batches(5)  # of three samples each: the epoch of eight ends within a batch
    again = batches(3, whole[1].position)
    assert [batch.position for batch in again] == [batch.position for batch in whole[2:]]
    for ours, theirs in zip(again, whole[2:], strict=True):
        for sample, other in zip(ours.samples, theirs.samples, strict=True):
            assert sample.id == other.id
            assert (sample.input_ids == other.input_ids).all()
            for name, value in sample.media["vision"].items():
                assert (materialized(value) == materialized(other.media["vision"][name])).all()
    assert len({sample.id for batch in whole[:3] for sample in batch.samples}) == 8


def materialized(value):
    return np.asarray(getattr(value, "values", value))


def test_a_sample_is_read_by_requests_for_its_bytes(tmp_path, counted):
    """Of a tar of 3 MB, a sample's members come, and not the tar."""
    big = {f"{number:03}.{suffix}": data for number in range(6)
           for suffix, data in (("txt", b"t"), ("png", image_bytes(400, 400, seed=number)))}  # fmt: skip
    (tmp_path / "x").mkdir()
    write_tar(tmp_path / "x" / "x.tar", big)
    upload(tmp_path / "x", "counted://set")
    reader = open_source(DataSource(path="counted://set/x.tar", prompt="What?"))
    assert sum(length for *_, length in counted) < 12 * 2 * FIRST_BYTES
    counted.clear()
    (media,) = reader[4].unplaced
    assert [length for *_, length in counted] == [1]
    counted.clear()
    with open_media(media) as stream:
        stream.read(30)
    assert [length for *_, length in counted] == [FIRST_BYTES]
    counted.clear()
    with open_media(media) as stream:
        assert stream.read() == image_bytes(400, 400, seed=4)
    assert len(counted) <= 2
    assert sum(length for *_, length in counted) < 10 * FIRST_BYTES


def test_ranges_give_what_a_file_gives(tmp_path):
    data = os.urandom(300_000)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "f").write_bytes(data)
    upload(tmp_path / "x", "counted://set")
    with open_data(data_path("counted://set/f")) as remote, open(tmp_path / "x" / "f", "rb") as local:
        for offset, whence, length in ((0, 0, 10), (299_990, 0, 100), (-50, 2, 20), (5, 1, 3), (70_000, 0, 200_000),
                                       (1, 0, -1), (400_000, 0, 5), (0, 0, 0)):  # fmt: skip
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(length) == local.read(length)
        assert remote.tell() == local.tell()


def test_a_change_of_the_data_is_noticed(tmp_path):
    (tmp_path / "x").mkdir()
    encoding = small_encoding(units=())

    def identity(*answers):
        write_lines(tmp_path / "x" / "a.jsonl", [{"question": "q", "answer": answer} for answer in answers])
        upload(tmp_path / "x", "memory://changes")
        blend = open_blend([DataSource(path="memory://changes/a.jsonl")])
        return DataIdentity(blend, blend_sizes(blend, encoding, workers=0), encoding), blend.readers[0].fingerprint

    before, known = identity("a", "b")
    after, changed = identity("a", "c")  # as many bytes
    assert known != changed
    with pytest.raises(UserError, match="has 2 samples as before, but other ones"):
        after.require(before.by_source)


def test_addresses_stay_as_they_are_written(monkeypatch, tmp_path):
    monkeypatch.setenv("BUCKET", "mine")
    rule = path_rule(DataPath)
    assert rule is not None
    for text in ("s3://b/k/x-{0..3}.tar", "gs://b/*.parquet", "https://h/a.jsonl?x=1&y=%2F"):
        assert rule.absolute(text, tmp_path) == text
        assert rule.from_working_folder(text, tmp_path) == text
        path = data_path(text)
        assert str(path) == str(pickle.loads(pickle.dumps(path))) == text
        assert isinstance(path.parent / "y", RemotePath)
    assert rule.absolute("s3://$BUCKET/x", tmp_path) == "s3://mine/x"
    assert rule.absolute("s3/x", tmp_path) == str(tmp_path / "s3/x")
    assert type(data_path("/s3://x")) is type(Path("x"))
    with pytest.raises(ValidationError, match="data sets on the hub"):
        DataSource(path="s3://b/x", streaming=True)


def test_what_is_missing_is_one_clear_line(monkeypatch):
    fsspec.register_implementation("nolib", "no_such_package.NoSystem", clobber=True, errtxt="Install nolib")
    with pytest.raises(UserError, match=r"'nolib://b/x.tar' cannot be opened: Install nolib; pip install") as caught:
        open_source(DataSource(path="nolib://b/x.tar"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"Protocol not known: nowhere; pip install 'dilatant\[remote\]'"):
        open_source(DataSource(path="nowhere://b/x.tar"))
    with pytest.raises(UserError, match="chains file systems"):
        open_source(DataSource(path="zip://a.tar::s3://b/x.zip"))
    for path in ("memory://none/x.tar", "memory://none/*.tar"):
        with pytest.raises(UserError, match=r"does not exist|matches no file"):
            open_source(DataSource(path=path))


def test_arrow_is_read_from_disks_alone(tmp_path):
    (tmp_path / "x").mkdir()
    with pa.OSFile(str(tmp_path / "x" / "a.arrow"), "wb") as file, pa.ipc.new_file(file, pa.schema([("a", pa.int8())])):
        pass
    upload(tmp_path / "x", "memory://arrow")
    with pytest.raises(UserError, match=r"'memory://arrow/a.arrow' is Arrow, which is mapped into memory: copy it"):
        open_source(DataSource(path="memory://arrow/a.arrow"))


def test_an_unreachable_server_is_tried_again_and_named(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    write_lines(tmp_path / "x" / "a.jsonl", [{"question": "q", "answer": "a"}])
    upload(tmp_path / "x", "counted://set")
    reader = open_source(DataSource(path="counted://set/a.jsonl"))

    def gone(*_, **__):
        raise RuntimeError("connection pool is gone")

    monkeypatch.setattr(CountedFileSystem, "cat_file", gone)
    with pytest.raises(OSError, match=r"counted://set/a.jsonl: RuntimeError: connection pool is gone") as caught:
        reader[0]
    from dilatant.data.errors import may_pass

    assert may_pass(caught.value)


def test_media_may_be_at_addresses_of_the_same_bucket(folder):
    rows = [{"question": "q", "answer": "a0", "image": "memory://media/0.png"}]
    write_lines(folder / "lines" / "d.jsonl", rows)
    upload(folder / "lines" / "images", "memory://media")
    upload(folder / "lines", "memory://elsewhere")
    for path in (str(folder / "lines" / "d.jsonl"), "memory://elsewhere/d.jsonl"):
        source = DataSource(path=path)
        with pytest.raises(SampleError, match=r"'memory://media/0.png' is a remote address, and not of the data's own"):
            open_source(source)[0]
        (media,) = open_source(source.model_copy(update={"media_dir": "memory://media"}))[0].unplaced
        with open_media(media) as stream:
            assert stream.read() == image_bytes(seed=0)
    sample = open_source(DataSource(path="memory://elsewhere/a.jsonl"))[0]
    assert unpack_undecoded(pack_undecoded(sample)) == sample


def test_paths_of_this_machine_stay_local_in_remote_data(folder):
    local = folder / "lines" / "images" / "0.png"
    write_lines(folder / "lines" / "d.jsonl", [{"question": "q", "answer": "a", "image": str(local)}])
    upload(folder / "lines", "memory://local")
    (media,) = open_source(DataSource(path="memory://local/d.jsonl"))[0].unplaced
    assert media.source == local


NO_HTTP = pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="no aiohttp: HTTP is not checked")


@NO_HTTP
@pytest.mark.parametrize(
    "form", ["tar/x-{0..1}.tar", "table/x.parquet", "lines/c.csv", "mds", "mds/index.json", "energon"]
)
def test_files_of_a_server_of_http_are_read(folder, form):
    with http_server(folder) as address:
        check(open_source(DataSource(path=f"{address}/{form}")), open_source(DataSource(path=str(folder / form))))
        with pytest.raises(UserError, match="matches no file"):
            open_source(DataSource(path=f"{address}/tar/*.tar"))


@NO_HTTP
def test_a_server_without_ranges_is_refused(tmp_path):
    write_tar(
        tmp_path / "x.tar", {f"{at}.{suffix}": os.urandom(90_000) for at in range(9) for suffix in ("bin", "png")}
    )
    with http_server(tmp_path, ranged=False) as address, pytest.raises(UserError, match="range requests"):
        open_source(DataSource(path=f"{address}/x.tar"))


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs")),
    reason="no moto, s3fs: S3 is not checked",
)
def test_buckets_of_s3_are_read(folder, monkeypatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1",
                            "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        upload(folder, "s3://bucket/set")
        for form in FORMS:
            reader = open_source(DataSource(path=f"s3://bucket/set/{form}"))
            check(pickle.loads(pickle.dumps(reader)), open_source(DataSource(path=str(folder / form))))
        source = DataSource(path="s3://bucket/set/tar")
        before = open_source(source).fingerprint
        upload(folder / "tar", "s3://bucket/set/tar")
        assert open_source(source).fingerprint == before  # the same bytes, written again
        write_tar(folder / "tar" / "x-0.tar", tar_members((0, 1, 9)))
        upload(folder / "tar", "s3://bucket/set/tar")
        assert open_source(source).fingerprint != before
        with pytest.raises(FileNotFoundError):
            open_data(data_path("s3://bucket/set/tar/gone"))
        with pytest.raises(UserError, match="does not exist"):
            open_source(DataSource(path="s3://no-such-bucket/x.tar"))
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="no gcsfs: Google Cloud Storage is not checked")
def test_buckets_of_google_are_read(folder, monkeypatch):
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # else it asks by gRPC what kind a bucket is
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    with http_server(folder, bucket=True) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        for form in FORMS:
            reader = open_source(DataSource(path=f"gs://bucket/{form}"))
            check(pickle.loads(pickle.dumps(reader)), open_source(DataSource(path=str(folder / form))))
        source = DataSource(path="gs://bucket/tar")
        before = open_source(source).fingerprint
        write_tar(folder / "tar" / "x-0.tar", tar_members((0, 1, 9)))
        fsspec.filesystem("gs").invalidate_cache()
        assert open_source(source).fingerprint != before
        with pytest.raises(FileNotFoundError):
            open_data(data_path("gs://bucket/tar/gone"))
        with pytest.raises(UserError, match="does not exist"):
            open_source(DataSource(path="gs://no-such-bucket/x.tar"))
