"""MosaicML's shards are read by our own reader as its package reads them; what is damaged or hostile is refused."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import struct
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from cases.data_builders import image_bytes, small_encoding
from cases.mds_files import PACK, TEXTS, mds_entry, mds_shard, texts, write_mds
from dilatant.config import DataSource, UserError
from dilatant.data.errors import SampleError
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.index.lint import lint
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.order.blend import open_blend
from dilatant.data.readers import mds_records
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import Media

PNGS = [image_bytes(seed=seed) for seed in range(2)]


def of_list(*items, head=b""):
    return head + struct.pack(f"<{len(items) + 1}I", len(items), *map(len, items)) + b"".join(items)


RAW = struct.pack("<3I", 2, 1, 3) + b"RGB" + bytes(range(6))
VALUES = {
    "bytes": (b"\x00\xff", None, b"\x00\xff"),
    "str": ("ü".encode(), None, "ü"),
    "int": (struct.pack("<q", -5), 8, -5),
    "uint8": (b"\xff", 1, 255),
    "int16": (struct.pack("<h", -300), 2, -300),
    "uint32": (struct.pack("<I", 1 << 31), 4, 1 << 31),
    "uint64": (struct.pack("<Q", 1 << 63), 8, 1 << 63),
    "float16": (struct.pack("<e", 1.5), 2, 1.5),
    "float32": (struct.pack("<f", 0.1), 4, 0.1),
    "float64": (struct.pack("<d", 0.1), 8, 0.1),
    "str_int": (b"123456789012345678901234567890", None, 123456789012345678901234567890),
    "str_float": (b"0.25", None, 0.25),
    "str_decimal": (b"1.10", None, Decimal("1.10")),
    "jpeg": (b"\xff\xd8\xff?", None, b"\xff\xd8\xff?"),
    "png": (PNGS[0], None, PNGS[0]),
    "json": (b'{"a": [1, null]}', None, {"a": [1, None]}),
    "list[png]": (of_list(*PNGS, head=bytes(4)), None, PNGS),
    "list[jpeg]": (of_list(head=bytes(4)), None, []),
    "jpeg_array": (of_list(b"ab", b"c"), None, [b"ab", b"c"]),
    "jpegarray": (of_list(b"ab"), None, [b"ab"]),
    "ndarray": (bytes([33, (2 << 2) | 0, 1, 2]) + struct.pack("<2i", 7, -7), None, [[7, -7]]),
    "ndarray:float32": (bytes([(1 << 2) | 1]) + struct.pack("<H2f", 2, 0.5, 2.0), None, [0.5, 2.0]),
    "ndarray:uint16:2,1": (struct.pack("<2H", 3, 4), 4, [[3], [4]]),
}


def test_every_encoding_becomes_the_value_it_holds(tmp_path):
    columns = {f"c{number}": (encoding, size) for number, (encoding, (_, size, _)) in enumerate(VALUES.items())}
    write_mds(tmp_path / "x", [(columns, [[data for data, _, _ in VALUES.values()]])])
    fields = open_source(DataSource(path=str(tmp_path / "x"))).records.read(0).fields
    assert {name: fields[f"c{number}"] for number, name in enumerate(VALUES)} == {
        name: value for name, (_, _, value) in VALUES.items()
    }


def test_raw_pictures_become_encoded_ones(tmp_path):
    columns = {"answer": ("str", None), "image": ("pil", None), "images": ("list[pil]", None)}
    write_mds(tmp_path / "x", [(columns, [[b"a", RAW, of_list(RAW, RAW, head=bytes(4))]])])
    fields = open_source(DataSource(path=str(tmp_path / "x"))).records.read(0).fields
    for data in (fields["image"], *fields["images"]):
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.mode, image.size, image.tobytes()) == ("PNG", "RGB", (2, 1), bytes(range(6)))


@pytest.mark.parametrize("suffix", PACK)
def test_shards_are_read_in_any_order_packed_or_not(tmp_path, suffix):
    columns = {"answer": ("str", None), "image": ("png", None)}
    rows = [[f"a{seed}".encode(), image_bytes(seed=seed)] for seed in range(7)]
    write_mds(tmp_path / "x", [(columns, rows[:3]), (columns, rows[3:4]), (columns, rows[4:])], suffix)
    reader = pickle.loads(pickle.dumps(open_source(DataSource(path=str(tmp_path / "x"), prompt="What?"))))
    assert len(reader) == 7
    for index in (6, 0, 3, 5, 1, 2, 4):
        sample = reader[index]
        assert sample.turns[1].content == (f"a{index}",)
        (media,) = sample.unplaced
        assert isinstance(media, Media)
        assert media.source == image_bytes(seed=index)
    name = "shard.00001.mds" + (f".{suffix}" if suffix else "")
    assert reader.name_of(3) == f"{name}:1"
    assert reader.blocks is None


def test_a_shard_that_was_unpacked_in_its_folder_is_read(tmp_path):
    """As mosaicml-streaming leaves a data set that it has downloaded: the index names both, and one is there."""
    folder = write_mds(tmp_path / "x", [(TEXTS, texts(0, 1)), (TEXTS, texts(2))], "zstd")
    (folder / "shard.00000.mds").write_bytes(mds_shard(TEXTS, texts(0, 1)))
    (folder / "shard.00000.mds.zstd").unlink()
    reader = open_source(DataSource(path=str(folder)))
    assert [reader[at].turns[1].content[0] for at in range(3)] == ["a0", "a1", "a2"]


def test_large_packed_shards_are_read_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(mds_records, "CACHE_BYTES", 1000)
    write_mds(tmp_path / "x", [(TEXTS, texts(*range(at, at + 4))) for at in range(0, 20, 4)], "zstd")
    reader = open_source(DataSource(path=str(tmp_path / "x")))
    blocks = reader.blocks
    assert blocks is not None
    assert blocks.lengths == (4,) * 5
    sampler = open_blend([DataSource(path=str(tmp_path / "x"))]).sampler(0, 20)
    batch, _ = next(sampler.batches(sampler.start()))
    unpacked, unpack = [], mds_records.MdsRecords._unpack
    monkeypatch.setattr(mds_records.MdsRecords, "_unpack", lambda *a: unpacked.append(a[1].name) or unpack(*a))
    assert sorted(reader[int(index)].turns[1].content[0] for index in np.array(batch).reshape(-1)) == sorted(
        f"a{number}" for number in range(20)
    )
    assert len(unpacked) <= 5 + 1 + 5 // blocks.window  # windows are shuffled: a shard may come twice in one


def test_a_folder_for_each_split_and_merged_indexes(tmp_path):
    for number, split in enumerate(("train", "val")):
        write_mds(tmp_path / "x" / split, [(TEXTS, texts(number))])
    source = DataSource(path=str(tmp_path / "x"))
    reader = open_source(source)
    assert reader[0].turns[1].content == ("a0",)
    assert "validation (1 of 2 files)" in reader.passed_over[0]
    assert open_source(source.model_copy(update={"split": "val"}))[0].turns[1].content == ("a1",)
    with pytest.raises(UserError, match="holds the splits train, validation"):
        open_source(source, held_out=True)
    entries = []
    for number in range(2):
        write_mds(tmp_path / "merged" / str(number), [(TEXTS, texts(number))])
        (entry,) = json.loads((tmp_path / "merged" / str(number) / "index.json").read_text())["shards"]
        entry["raw_data"]["basename"] = f"{number}/{entry['raw_data']['basename']}"
        entries.append(entry)
    (tmp_path / "merged" / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    for path in ("merged", "merged/index.json"):
        reader = open_source(DataSource(path=str(tmp_path / path)))
        assert [reader[at].turns[1].content for at in range(2)] == [("a0",), ("a1",)]


def test_lint_sizes_and_resume_know_shards(tmp_path):
    write_mds(tmp_path / "x", [(TEXTS | {"score": ("int", 8)}, [[*texts(0)[0], bytes(8)], [*texts(1)[0], bytes(8)]])])
    encoding = small_encoding(units=())

    def identity():
        blend = open_blend([DataSource(path=str(tmp_path / "x"))], cache_dir=tmp_path / "cache")
        sizes = blend_sizes(blend, encoding, cache_dir=tmp_path / "cache", workers=0)
        assert not lint(blend, encoding)
        assert sizes.unused == (("score",),)
        return DataIdentity(blend, sizes, encoding)

    before = identity().by_source
    identity().require(before)
    write_mds(tmp_path / "x", [(TEXTS | {"score": ("int", 8)}, [[*texts(0)[0], bytes(8)], [*texts(2)[0], bytes(8)]])])
    with pytest.raises(UserError, match="has 2 samples as before, but other ones"):
        identity().require(before)


def changed(index, change):
    tree = json.loads(index.read_text())
    change(tree, tree["shards"][0])
    index.write_text(json.dumps(tree))


def put(place, key, value):
    return lambda tree, shard: {"shard": shard, "raw": shard["raw_data"], "tree": tree}[place].update({key: value})


def twice(tree, shard):
    tree["shards"].append(shard)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("raw", "basename", "../secret.mds"), r"names '../secret.mds', which is no file below its own folder"),
        (put("raw", "basename", "/etc/passwd"), r"names '/etc/passwd', which is no file below"),
        (put("raw", "basename", "a/../../x.mds"), r"which is no file below"),
        (put("raw", "basename", "gone.mds"), r"gone.mds' cannot be read: No such file"),
        (put("raw", "bytes", 7), r"shard.00000.mds has \d+ bytes, not 7"),
        (put("raw", "bytes", -1), r"Expected `int` >= 0"),
        (put("shard", "samples", 3), r"shard.00000.mds has 2 samples, not 3"),
        (put("shard", "samples", 1 << 60), r"Expected `int` <"),
        (put("shard", "samples", "2"), r"Expected `int`"),
        (put("shard", "format", "json"), r"shard 0 cannot be used: it is of the format 'json'"),
        (put("shard", "version", 1), r"it is of version 1"),
        (put("shard", "compression", "snappy"), r"its compression 'snappy' is none of zstd, gz, bz2, br"),
        (put("tree", "shards", {}), r"its 'shards' is no list"),
        (put("tree", "shards", [1]), r"it is of the format None"),
        (twice, r"names shard.00000.mds twice"),
    ],
)
def test_a_wrong_or_hostile_index_is_refused(tmp_path, change, said):
    write_mds(tmp_path / "x", [(TEXTS, texts(0, 1))])
    write_mds(tmp_path, [(TEXTS, texts(9))])
    (tmp_path / "index.json").unlink()
    changed(tmp_path / "x" / "index.json", change)
    with pytest.raises(UserError, match=said):
        open_source(DataSource(path=str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"shards": [{"a": 1', "cannot be read as the index of MDS shards"),
        ('{"shards": [], "shards": [], "version": 2}', "an object has the key 'shards' twice"),
        ('{"shards": ' + "[" * 100_000, "cannot be read as the index"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, said):
    write_mds(tmp_path / "x", [(TEXTS, texts(0))])
    (tmp_path / "x" / "index.json").write_text(text)
    with pytest.raises(UserError, match=said):
        open_source(DataSource(path=str(tmp_path / "x")))


WHOLE = mds_shard(TEXTS, texts(0, 1, 2))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *((WHOLE[:length], "cut off|damaged|more than it can hold") for length in (2, 4, 15, 30, 200, len(WHOLE) - 1)),
        (WHOLE + b"x", "its samples end at"),
        (b"\xff\xff\xff\xff" + WHOLE[4:], "promises 4,294,967,295 samples, more than it can hold"),
        (WHOLE[:8] + bytes(4) + WHOLE[12:], "its offsets are damaged"),
        (WHOLE[:4] + bytes(4) + WHOLE[8:], "its offsets are damaged"),
        (mds_shard({"x": ("pkl", None)}, [[b"\x80\x04N."]]), r"column 'x': its encoding 'pkl' may run any code"),
        (mds_shard({"x": ("msgpack", None)}, [[b""]]), r"its encoding 'msgpack' is not known"),
        (mds_shard({"x": ("ndarray:object", None)}, [[b""]]), r"is no type of arrays"),
        (mds_shard({"x": ("int", None)}, [[bytes(8)]]), r"int has 8 bytes, not None"),
        (mds_shard({"x": ("str", 3)}, [[bytes(3)]]), r"str has None bytes, not 3"),
        (WHOLE.replace(b'["answer", "question"]', b'["answer", "answer"  ]'), r"one is there twice"),
        (WHOLE.replace(b'{"column', b'["column', 1), r"cannot be read as an MDS shard"),
    ],
)
def test_a_damaged_or_hostile_shard_is_refused_at_once(tmp_path, data, said):
    (tmp_path / "x.mds").write_bytes(data)
    with pytest.raises(UserError, match=said):
        open_source(DataSource(path=str(tmp_path / "x.mds")))


BAD_VALUES = [
    ("str", b"\xff", "is no str"),
    ("str_int", b"x", "is no str_int"),
    ("str_decimal", b"x", "is no str_decimal"),
    ("json", b"[" * 100_000, "is no json"),
    ("pil", struct.pack("<3I", 1 << 31, 1 << 31, 3) + b"RGB", "raw picture of 2147483648 x 2147483648 RGB"),
    ("pil", struct.pack("<3I", 1, 1, 1) + b"P\0", "the mode 'P'"),
    ("list[png]", bytes(4) + b"\xff\xff\xff\xff", "a list of 4,294,967,295 items"),
    ("jpeg_array", of_list(b"ab") + b"c", "whose items end at byte"),
    ("ndarray", b"\x63", "an array of an unknown type"),
    ("ndarray", bytes([8, (1 << 2) | 3]) + b"\xff" * 8, "an array of shape"),
    ("ndarray", bytes([8]), "an array without its shape"),
]


@pytest.mark.parametrize(("encoding", "value", "said"), BAD_VALUES)
def test_a_wrong_value_is_the_samples_error(tmp_path, encoding, value, said):
    columns = {"answer": ("str", None), "x": (encoding, None)}
    (tmp_path / "x.mds").write_bytes(mds_shard(columns, [[b"a", value]]))
    with pytest.raises(SampleError, match=rf"^x.mds:1: 'x' .*{said}|^x.mds:1: 'x' {said}"):
        open_source(DataSource(path=str(tmp_path / "x.mds")))[0]


def test_columns_that_do_not_fill_their_sample_are_refused(tmp_path):
    data = bytearray(mds_shard(TEXTS, texts(0)))
    at = data.index(struct.pack("<2I", 2, 2))
    for lengths in ((2, 3), (0xFFFFFFFF, 2)):
        data[at : at + 8] = struct.pack("<2I", *lengths)
        (tmp_path / "x.mds").write_bytes(data)
        with pytest.raises(SampleError, match=r"^x.mds:1: its columns take [\d,]+ bytes, and it has 12"):
            open_source(DataSource(path=str(tmp_path / "x.mds")))[0]


def bomb(header, suffix="zstd"):
    """A shard that unpacks to 64 MiB more than it says."""
    return PACK[suffix](header + bytes(64 << 20))


@pytest.mark.parametrize("suffix", ["zstd", "gz"])
def test_a_packed_shard_is_unpacked_no_further_than_it_says(tmp_path, suffix):
    raw = mds_shard(TEXTS, texts(0))
    folder = write_mds(tmp_path / "x", [(TEXTS, texts(0))], suffix)
    packed = bomb(raw, suffix)
    (folder / f"shard.00000.mds.{suffix}").write_bytes(packed)
    entry = mds_entry("shard.00000.mds", raw, 1, packed, suffix)
    (folder / "index.json").write_text(json.dumps({"shards": [entry], "version": 2}))
    reader = open_source(DataSource(path=str(folder)))
    with pytest.raises(SampleError, match=rf"its shard shard.00000.mds.{suffix} unpacks to more than"):
        reader[0]


def test_a_packed_shard_that_claims_too_much_is_refused(tmp_path):
    ends = struct.pack("<3I", 1, 14, (1 << 30) + 1)
    (tmp_path / "x.mds.zstd").write_bytes(PACK["zstd"](ends + b"{}"))
    with pytest.raises(UserError, match="describe its columns"):
        open_source(DataSource(path=str(tmp_path / "x.mds.zstd")))
    whole = bytearray(mds_shard(TEXTS, texts(0)))
    whole[8:12] = struct.pack("<I", (1 << 30) + 1)
    (tmp_path / "x.mds.zstd").write_bytes(PACK["zstd"](bytes(whole)))
    with pytest.raises(UserError, match=r"it unpacks to 1,073,741,825 bytes, more than"):
        open_source(DataSource(path=str(tmp_path / "x.mds.zstd")))
    (tmp_path / "x.mds.zstd").write_bytes(PACK["zstd"](b"\xff\xff\xff\xff" + bytes(1 << 20)))
    with pytest.raises(UserError, match="more than it can hold"):
        open_source(DataSource(path=str(tmp_path / "x.mds.zstd")))


def test_a_damaged_packed_shard_is_named_by_its_samples(tmp_path):
    noise = np.random.default_rng(0).bytes(300_000)  # more than is unpacked to find the columns
    folder = write_mds(tmp_path / "x", [(TEXTS | {"x": ("bytes", None)}, [[*texts(0)[0], noise]])], "gz")
    file = folder / "shard.00000.mds.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + bytes(20))
    with pytest.raises(SampleError, match=r"^shard.00000.mds.gz:1: its shard shard.00000.mds.gz"):
        open_source(DataSource(path=str(folder)))[0]
    file.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"shard.00000.mds.gz has [\d,]+ bytes, not"):
        open_source(DataSource(path=str(folder)))


def test_a_packed_shard_of_another_hash_is_refused(tmp_path):
    folder = write_mds(tmp_path / "x", [(TEXTS, texts(0))], "zstd")
    other = mds_shard(TEXTS, texts(1))
    packed = PACK["zstd"](other)
    (folder / "shard.00000.mds.zstd").write_bytes(packed)
    changed(folder / "index.json", lambda tree, shard: shard["zip_data"].update(bytes=len(packed)))
    with pytest.raises(SampleError, match="has another sha1 than"):
        open_source(DataSource(path=str(folder)))[0]
    changed(folder / "index.json", lambda tree, shard: shard["raw_data"].update(hashes={"crc9": "00"}))
    with pytest.raises(UserError, match="its hash 'crc9' is not known here"):
        open_source(DataSource(path=str(folder)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="no mosaicml-streaming: its shards unread")
@pytest.mark.parametrize("compression", [None, "zstd:7", "gz", "bz2:9", "br:1"])
def test_shards_of_mosaicmls_writer_are_read_alike(tmp_path, compression):
    from streaming import MDSWriter
    from streaming.base.format import reader_from_json

    columns = {"answer": "str", "question": "str", "image": "jpeg", "images": "list[png]", "score": "float32",
               "tokens": "ndarray:int32", "grid": "ndarray", "about": "json", "raw": "pil"}  # fmt: skip
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8))
    rows = [
        {
            "answer": f"a{number}",
            "question": "q" * number,
            "image": picture,
            "images": [picture] * (number % 3),
            "score": number / 10,
            "tokens": np.arange(number + 1, dtype=np.int32),
            "grid": np.ones((2, number + 1), np.float64),
            "about": {"n": number},
            "raw": picture,
        }
        for number in range(20)
    ]
    out = str(tmp_path / "x")
    with MDSWriter(out=out, columns=columns, compression=compression, hashes=["sha1", "xxh64"], size_limit=4000) as to:
        for row in rows:
            to.write(row)
    reader = open_source(DataSource(path=out))
    assert len(reader) == 20
    assert len({reader.name_of(at).partition(":")[0] for at in range(20)}) > 2
    if compression is None:
        about = json.loads((tmp_path / "x" / "index.json").read_text())["shards"]
        theirs = [sample for shard in about for sample in reader_from_json(out, "", shard)]
        assert len(theirs) == 20
    for at, row in enumerate(rows):
        fields = reader.records.read(at).fields
        assert [fields[name] for name in ("answer", "question", "about")] == [
            row[name] for name in ("answer", "question", "about")
        ]
        assert fields["tokens"] == row["tokens"].tolist()
        assert fields["grid"] == row["grid"].tolist()
        assert fields["score"] == row["score"]
        assert len(fields["images"]) == at % 3
        with Image.open(io.BytesIO(fields["raw"])) as image:
            assert image.tobytes() == picture.tobytes()
        if compression is None:
            with Image.open(io.BytesIO(fields["image"])) as image:
                assert image.tobytes() == theirs[at]["image"].tobytes()
