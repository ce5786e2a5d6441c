"""Tars, folders, Arrow and JSON files in the forms that other programs and people write."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.data_builders import image_bytes, wav_bytes, write_lines
from dilatant.config import DataSource, UserError
from dilatant.data.media.media_header import media_size
from dilatant.data.readers import arrow_records, json_records, source_files, tar_records
from dilatant.data.readers.reader import open_source
from dilatant.data.readers.source_files import find_files
from dilatant.data.sample import FileSlice, Media

ROW = {"question": "q", "answer": "a"}


def read_all(path, **settings):
    """Samples, or the error of the source or sample as text."""
    try:
        reader = open_source(DataSource(path=str(path), **settings))
    except UserError as error:
        return [str(error)]
    found = []
    for index in range(len(reader)):
        try:
            found.append(reader[index])
        except UserError as error:
            found.append(str(error))
    return found


def tar(path, *members):
    """members: name and bytes, or name, type and the name that a link leads to."""
    with tarfile.open(path, "w") as archive:
        for name, *what in members:
            info = tarfile.TarInfo(name)
            if len(what) == 1:
                info.size = len(what[0])
                archive.addfile(info, io.BytesIO(what[0]))
            else:
                info.type, info.linkname = what
                archive.addfile(info)
    return path


def data_of(sample):
    """The bytes of the sample's media, which lie in a tar."""
    found = []
    for media in sample.unplaced:
        assert isinstance(media.source, FileSlice)
        with open(media.source.path, "rb") as file:
            file.seek(media.source.offset)
            found.append(file.read(media.source.length))
    return found


RED, BLUE = image_bytes(seed=1), image_bytes(seed=2)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("22.01.png", RED), ("22.01.txt", b"red"), ("22.02.png", BLUE), ("22.02.txt", b"blue")],
         r"22: joins members that seem to be several samples, .01.png, .01.txt, .02.png, .02.txt"),
        ([("22.01.png", RED), ("22.01.txt", b"red"), ("22.02.png", BLUE), ("22.02.json", b"{}")], "several samples"),
        ([("22.01.png", RED), ("22.01.txt", b"red"), ("22.02.png", BLUE)], "several samples"),
        ([("0.txt", b"red"), ("0.caption", b"blue")], "several samples"),
        ([("0.png", RED), ("0.txt", b"red"), ("0.png", BLUE)], "has the member .png more than once"),
        ([("0.jpg", RED), ("1.jpg", BLUE), ("0.txt", b"red"), ("1.txt", b"blue")], "members of '0' are not adjacent"),
        ([("0.json", b'{"text": "a"}'), ("0.txt", b"b")], "different things of 'text'"),
        ([("0.png", tarfile.SYMTYPE, "/etc/passwd"), ("0.txt", b"red")], "leads out of it"),
        ([("0.png", tarfile.SYMTYPE, "../up.png"), ("0.txt", b"red")], "leads out of it"),
        ([("0.png", tarfile.FIFOTYPE, ""), ("0.txt", b"red")], "a device or a link"),
        ([("0.bin", b"no known medium")], r"holds only members of the kinds .bin"),
    ],
)  # fmt: skip
def test_a_tar_whose_samples_cannot_be_told_apart_is_refused(tmp_path, members, said):
    (error,) = read_all(tar(tmp_path / "a.tar", *members))[:1]
    assert isinstance(error, str)
    assert said in error


def test_links_lead_to_the_member_that_holds_the_bytes(tmp_path):
    path = tar(
        tmp_path / "a.tar",
        ("d/0.png", RED),
        ("d/0.txt", b"red"),
        ("d/1.png", tarfile.LNKTYPE, "d/0.png"),
        ("d/1.txt", b"red again"),
        ("d/2.png", tarfile.SYMTYPE, "./1.png"),
        ("d/2.txt", b"and again"),
        ("d/3.png", tarfile.SYMTYPE, "../z/9.png"),
        ("d/3.txt", b"blue"),
        ("z/9.png", BLUE),
        ("z/9.txt", b"blue"),
    )
    assert [data_of(sample) for sample in read_all(path)] == [[RED]] * 3 + [[BLUE]] * 2


@pytest.mark.parametrize("suffix", ["avif", "jfif", "jp2", "heic", "m4a", "aac", "wma", "mpg"])
def test_members_that_are_media_by_name_are_never_passed_over(tmp_path, suffix):
    (sample,) = read_all(tar(tmp_path / "a.tar", (f"0.{suffix}", b"x"), ("0.txt", b"red")))
    assert data_of(sample) == [b"x"]


def test_members_of_no_known_name_are_told_by_their_content(tmp_path):
    path = tar(
        tmp_path / "a.tar",
        *(("0.bin", RED), ("0.json", json.dumps({"caption": "red", "image": "elsewhere.png"}).encode())),
        *(("1.dat", wav_bytes()), ("1.npy", b"\x93NUMPY"), ("1.txt", b"sound")),
    )
    first, second = read_all(path)
    assert (data_of(first), [media.kind for media in second.unplaced]) == ([RED], ["audio"])
    assert (first.unused, second.unused) == (("image",), (".npy",))


def test_media_are_in_the_order_in_which_their_json_lists_them(tmp_path):
    def shard(*names):
        text = json.dumps({**ROW, "images": list(names)}).encode()
        return read_all(tar(tmp_path / "a.tar", ("0.a.png", RED), ("0.b.png", BLUE), ("0.json", text)))[0]

    assert data_of(shard("0.b.png", "0.a.png")) == [BLUE, RED]
    assert data_of(shard("x/1.png", "x/2.png")) == [RED, BLUE]
    assert "its JSON lists 3 images, of which the shard holds 2" in shard("0.a.png", "0.b.png", "c.png")


def test_a_caption_that_stands_twice_may_end_with_a_blank(tmp_path):
    """As img2dataset writes shards."""
    members = [("0.png", RED), ("0.json", b'{"caption": "a cat "}'), ("0.txt", "\ufeffa cat ".encode())]
    (sample,) = read_all(tar(tmp_path / "a.tar", *members))
    assert sample.turns[-1].content[0].strip() == "a cat"


def test_files_about_a_shard_are_no_samples(tmp_path):
    path = tar(
        tmp_path / "a.tar",
        *(("README.txt", b"about"), ("LICENSE", b"free"), ("./._0.png", b"x"), ("__MACOSX/0.txt", b"x")),
        *((".meta/info.json", b"{}"), ("./0.PNG", RED), ("./0.TXT", b"red")),
    )
    reader = open_source(DataSource(path=str(path)))
    assert (len(reader), data_of(reader[0])) == (1, [RED])
    assert reader.passed_over == ("README.txt", "LICENSE")


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (json.dumps(ROW, indent=2), ["a"]),
        (json.dumps(ROW, indent=1) + "\n" + json.dumps({**ROW, "answer": "b"}, indent=1), ["a", "b"]),
        ('{"question": "q", "answer": "a"\n' + json.dumps(ROW), ["not valid JSON", "a"]),
        (json.dumps(ROW, indent=2)[:-3], ["is wrong or cut off in record 1"]),
        (json.dumps(ROW, indent=2) + json.dumps(ROW)[:-3], ["is wrong or cut off in record 2"]),
        (json.dumps({"data": [ROW, ROW]}, indent=2), ["one object that holds a list of 2 records under 'data'"]),
    ],
)
def test_indented_objects_are_records(tmp_path, text, answers):
    (tmp_path / "a.json").write_text(text)
    found = read_all(tmp_path / "a.json")
    assert len(found) == len(answers)
    for sample, answer in zip(found, answers):
        assert answer in (sample if isinstance(sample, str) else sample.turns[-1].content)


def write_arrow(path, rows, kind=pa.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_folders_of_save_to_disk_are_read(tmp_path, kind):
    rows = [{**ROW, "answer": str(number), "image": {"bytes": RED, "path": None}} for number in range(5)]
    write_arrow(tmp_path / "saved" / "data-00000-of-00002.arrow", rows[:3], kind)
    write_arrow(tmp_path / "saved" / "data-00001-of-00002.arrow", rows[3:], kind)
    write_arrow(tmp_path / "saved" / "cache-1234.arrow", rows)
    (tmp_path / "saved" / "state.json").write_text('{\n "_data_files": []}')
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    reader = open_source(DataSource(path=str(tmp_path / "saved")))
    assert [reader[at].turns[-1].content for at in range(5)] == [(str(at),) for at in range(5)]
    again = pickle.loads(pickle.dumps(reader))
    assert again[4].unplaced[0].source == RED
    assert again[4].id == "data-00001-of-00002.arrow:2"


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["q"]), pa.array(["yes"]), pa.array(["no"])], ["question", *["answer"] * 2])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert read_all(tmp_path / "a.arrow") == ["a.arrow:1: has two columns of one name; rename one of them"]


def test_columnar_values_that_python_cannot_hold_are_refused(tmp_path):
    for name, values in {
        "text": pa.array([b"\xff"]).view(pa.string()),
        "date": pa.array([1 << 40], pa.timestamp("s")),
        "zone": pa.array([0], pa.timestamp("s", tz="No/Where")),
    }.items():
        pq.write_table(pa.table({"question": ["q"], "answer": ["a"], "more": values}), tmp_path / f"{name}.parquet")
        (error,) = read_all(tmp_path / f"{name}.parquet")
        assert f"{name}.parquet:1: cannot be read: " in error


def test_linked_folders_are_read_once(tmp_path):
    for place in ("data", "far"):
        (tmp_path / place).mkdir()
        write_lines(tmp_path / place / f"{place}.jsonl", [ROW])
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "far")
    for name, place in (("loop", "data"), ("more", "far"), ("up", ".")):
        (tmp_path / "data" / name).symlink_to(tmp_path / place)
    assert names(tmp_path / "data", tmp_path) == (["data/data.jsonl", "data/linked/far.jsonl"], ())
    (tmp_path / "far" / "far.jsonl").unlink()
    for place in ("data", "far"):
        (tmp_path / place / f"{place}.txt").write_text(place)
        (tmp_path / place / f"{place}.png").write_bytes(RED)
    (tmp_path / "data" / "data.jsonl").unlink()
    assert [sample.id for sample in read_all(tmp_path / "data")] == ["data", "linked/far"]


def test_packed_files_beside_data_are_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", [ROW])
    for name in ("b.jsonl.gz", "images.zip", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    assert names(tmp_path, tmp_path) == (["a.jsonl"], ("2 of forms that are not read (b.jsonl.gz, images.zip)",))


def names(path, folder, **how):
    files, passed_over = find_files(str(path), **how)
    return [str(file.relative_to(folder)) for file in files], passed_over


def test_a_folder_of_splits_gives_the_one_that_is_wanted(tmp_path):
    files = ("data/test-0.jsonl", "data/train-0.jsonl", "data/train-1.jsonl", "data/validation-0.jsonl", "more.jsonl")
    (tmp_path / "data").mkdir()
    for file in files:
        write_lines(tmp_path / file, [ROW])
    kept, (said,) = names(tmp_path, tmp_path)
    assert kept == ["data/train-0.jsonl", "data/train-1.jsonl", "more.jsonl"]
    assert said == "the splits test (1 of 5 files), validation (1 of 5 files); only 'train' is read"
    assert names(tmp_path, tmp_path, split="val", held_out=True)[0] == ["data/validation-0.jsonl"]
    with pytest.raises(UserError, match="splits test, train, validation; name the one to use with 'split'"):
        find_files(str(tmp_path), held_out=True)
    with pytest.raises(UserError, match="no file of the split 'challenge'; there are test, train, validation"):
        find_files(str(tmp_path), "challenge")
    assert names(tmp_path / "data" / "test*", tmp_path) == (["data/test-0.jsonl"], ())


@pytest.mark.parametrize(
    "files", [("a.jsonl", "b.jsonl"), ("test-0.jsonl", "test-1.jsonl"), ("train_val.jsonl", "contest.jsonl")]
)
def test_a_folder_without_several_splits_is_read_whole(tmp_path, files):
    for file in files:
        write_lines(tmp_path / file, [ROW])
    assert names(tmp_path, tmp_path, held_out=True) == (sorted(files), ())


def test_media_start_from_their_own_folder(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"image": "0.png", "caption": "red"}])
    (sample,) = read_all(path, media_dir=str(tmp_path / "pictures"))
    assert sample.unplaced[0].source == tmp_path / "pictures" / "0.png"


ENCODED = base64.b64encode(RED).decode()


@pytest.mark.parametrize(
    "text",
    [
        f"data:image/png;base64,{ENCODED}",
        "data:image/png;base64," + base64.encodebytes(RED).decode(),
        "data:image/png;base64," + base64.urlsafe_b64encode(RED).decode(),
        "data:image/png;base64," + ENCODED.rstrip("="),
        ENCODED,
        base64.encodebytes(RED).decode(),
    ],
)
def test_base64_is_read_in_all_its_forms(tmp_path, text):
    (sample,) = read_all(write_lines(tmp_path / "a.jsonl", [{"image": text, "caption": "x"}]))
    assert sample.unplaced[0].source == RED


@pytest.mark.parametrize("value", [None, [], [None], [""], "", [{"bytes": None, "path": None}], {"bytes": None}])
def test_nothing_in_a_column_of_images_is_no_image(tmp_path, value):
    (sample,) = read_all(write_lines(tmp_path / "a.jsonl", [{**ROW, "images": value}]))
    assert sample.unplaced == ()


def test_oversized_records_are_refused_before_reading(tmp_path, monkeypatch):
    for module in (json_records, source_files):
        monkeypatch.setattr(module, "MOST_BYTES", 100)
    monkeypatch.setattr(tar_records, "MOST_TEXT_BYTES", 100)
    monkeypatch.setattr(arrow_records, "MOST_CHARACTERS", 25)
    monkeypatch.setattr(arrow_records, "MOST_ROW_BYTES", 1000)
    long = {"question": "q", "answer": "a" * 200}
    (_, error) = read_all(write_lines(tmp_path / "a.jsonl", [ROW, long]))
    assert "a.jsonl:2: has 231 bytes, more than the 100 allowed" in error
    (error,) = read_all(tar(tmp_path / "a.tar", ("0.png", RED), ("0.txt", b"a" * 200)))
    assert "a.tar:0: its member .txt has 200 bytes, more than the 100 allowed" in error
    pq.write_table(pa.Table.from_pylist([ROW, long]), tmp_path / "a.parquet")
    (_, error) = read_all(tmp_path / "a.parquet")
    assert "a.parquet:2: 'answer' has" in error
    pq.write_table(pa.Table.from_pylist([{**ROW, "image": b"0" * 1001}]), tmp_path / "b.parquet")
    (error,) = read_all(tmp_path / "b.parquet")
    assert "'image' has" in error


def test_pointers_of_git_lfs_and_text_in_utf_16_are_told(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for content, said in ((pointer, "git lfs pull"), ('{"answer": "a"}'.encode("utf-16"), "UTF-16")):
        (tmp_path / "x.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=said):
            open_source(DataSource(path=str(tmp_path / "x.jsonl")))
    (tmp_path / "x.png").write_bytes(pointer)
    with pytest.raises(UserError, match=r"image 'x\.png' is a pointer of Git LFS.*git lfs pull"):
        media_size(Media("image", tmp_path / "x.png", "x.png"))
