"""The data index is built once for all processes, opened without work, and never trusted unchecked."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.data_builders import small_encoding, wav_bytes, write_lines, write_tar
from cases.often import often
from dilatant.config import DataSource, UserError
from dilatant.data import cache as cache_module
from dilatant.data.cache import HEAD, MAGIC, Arrays, read_arrays, write_arrays
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.order.blend import open_blend
from dilatant.data.readers import json_records
from dilatant.data.readers.reader import open_source
from harness.fork_server import start_fork_server
from harness.patience import HANG_SECONDS, wait_until

ENCODING = small_encoding()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sizes"


def write_samples(folder, form, count):
    folder.mkdir(exist_ok=True)
    texts = [f"number {number}" for number in range(count)]
    if form == "jsonl":
        write_lines(folder / "x.jsonl", [{"text": text} for text in texts])
    elif form == "json":
        (folder / "x.json").write_text("[" + ", ".join(f'{{"text": "{text}"}}' for text in texts) + "]")
    elif form == "csv":
        (folder / "x.csv").write_text("\n".join(["text", *texts]))
    elif form == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "x.parquet")
    else:
        write_tar(folder / "x.tar", {f"{number}.txt": text.encode() for number, text in enumerate(texts)})
    return DataSource(path=str(folder))


def opened(*sources):
    blend = open_blend(sources)
    return blend, blend_sizes(blend, ENCODING)


def values(index):
    return (index.tokens.tolist(), index.target_tokens.tolist(), index.content.tolist(), dict(index.problems.items()))


def settle(cache):
    """Set the files of the cache to an older time."""
    cache_module.SETTLED_NS, before = 0, cache_module.SETTLED_NS
    try:
        for path in cache.glob("*.arrays"):
            assert read_arrays(path) is not None
            assert path.with_suffix(".checked").exists()
    finally:
        cache_module.SETTLED_NS = before
    time.sleep(0.05)  # clocks of files tick in milliseconds


FORMS = ["jsonl", "json", "csv", "parquet", "tar"]


@pytest.mark.parametrize("form", FORMS)
def test_opening_again_reads_nothing_of_the_data(tmp_path, form):
    source = write_samples(tmp_path / "data", form, 50)
    blend, index = opened(source)
    names, expected = [blend.name(at) for at in range(50)], values(index)
    for path in (tmp_path / "data").iterdir():
        state = path.stat()
        path.write_bytes(bytes(state.st_size))  # what would be read is zeros now
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    blend, index = opened(source)
    assert values(index) == expected
    assert [blend.name(at) for at in range(50)] == names
    assert len(set(names)) == 50


@pytest.mark.parametrize("form", often(FORMS, "jsonl", "parquet", "tar"))
def test_opening_again_costs_the_same_for_any_number_of_samples(tmp_path, monkeypatch, cache, form):
    small = write_samples(tmp_path / "small", form, 20)
    large = write_samples(tmp_path / "large", form, 500)
    for source in (small, large):
        opened(source, source)
    settle(cache)
    work = {"hashed": 0, "read": 0}
    sha256 = cache_module.hashlib.sha256

    def hashing(data=b""):
        work["hashed"] += len(data)
        return sha256(data)

    def reading(path):
        stream = open_regular(path)
        read = stream.read

        class Counted:
            def __getattr__(self, name):
                return getattr(stream, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                stream.close()

            def read(self, size=-1):
                data = read(size)
                work["read"] += len(data)
                return data

        return Counted()

    open_regular = cache_module.open_regular
    monkeypatch.setattr(cache_module, "open_regular", reading)
    monkeypatch.setattr(cache_module.hashlib, "sha256", hashing)
    done = []
    for source in (small, large):
        work.update(hashed=0, read=0)
        blend, index = opened(source, source)
        assert len(index) == len(blend)
        assert index.tokens.shape[1] == 3
        assert len(pickle.dumps(blend)) < 8000
        done.append(dict(work))
    assert done[0]["read"] > 1000  # three headers
    # Only longer numbers in headers may differ: 64 bytes in each. The entries of 480 samples take 24 kB.
    for kind, amount in done[0].items():
        assert abs(done[1][kind] - amount) < 1000, kind


def open_together(data, go, seconds, told):
    """Open the data as another process; send "ready", "measuring" per call, then counts of scans and calls and sums."""
    scans, calls = [], []
    find = json_records._record_spans

    def scan(*args):
        scans.append(args)
        time.sleep(0.3)
        return find(*args)

    def progress(done, total):
        calls.append(done)
        told.send("measuring")
        time.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILATANT_CACHE", str(data.parent / "cache"))
        patch.setattr(json_records, "_record_spans", scan)
        told.send("ready")
        wait_until(go.exists)
        blend = open_blend([DataSource(path=str(data))])
        index = blend_sizes(blend, small_encoding(), workers=0, progress=progress)
    told.send((len(scans), len(calls) - 1, index.tokens.sum(), index.content.sum()))


@pytest.fixture
def children(tmp_path):
    """Function that starts processes which open the data once the file `go` exists; they are killed after the test."""
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    started = []

    def start(count, go, seconds=0.05):
        for _ in range(count):
            hears, tells = context.Pipe(duplex=False)
            process = context.Process(target=open_together, args=(tmp_path / "data", go, seconds, tells))
            process.start()
            tells.close()
            started.append((process, hears))
        return started

    yield start
    for process, hears in started:
        process.kill()
        process.join()
        hears.close()


def test_of_processes_that_start_together_one_scans_and_measures(tmp_path, children):
    write_samples(tmp_path / "data", "jsonl", 300)
    go = tmp_path / "go"
    told = [hears for _, hears in children(3, go)]
    assert [hears.recv() for hears in told] == ["ready"] * 3
    go.touch()
    ends = [next(said for said in iter(hears.recv, None) if said != "measuring") for hears in told]
    assert sorted(scans for scans, *_ in ends) == [0, 0, 1]
    assert sorted(measured for _, measured, *_ in ends) == [0, 0, 5]
    assert len({tuple(result) for _, _, *result in ends}) == 1


def test_a_process_killed_while_it_measures_holds_nobody_up(tmp_path, cache, children):
    source = write_samples(tmp_path / "data", "jsonl", 300)
    go = tmp_path / "go"
    go.touch()
    ((process, hears),) = children(1, go, seconds=100)
    assert [hears.recv(), hears.recv()] == ["ready", "measuring"]
    process.kill()
    process.join()
    assert list(cache.glob("sizes-*.lock"))
    assert len(opened(source)[1]) == 300


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_every_damage_of_every_file_is_noticed_and_made_good(tmp_path, cache):
    source = write_samples(tmp_path / "data", "jsonl", 40)
    with (tmp_path / "data/x.jsonl").open("a") as file:
        file.write('{"cut\n{"bad": 1}\n')
    other = write_samples(tmp_path / "other", "tar", 9)
    expected = values(opened(source, other)[1])
    settle(cache)
    files = sorted(cache.glob("*.arrays"))
    assert len(files) == 5  # records and sizes of both, and the two together
    for path in [*files, *(file.with_suffix(".checked") for file in files)]:
        whole = path.read_bytes()
        places = np.unique(np.linspace(0, len(whole) - 1, 4).astype(int)).tolist()
        damages = [flipped(whole, at) for at in places]
        damages += [whole[:at] for at in places] + [whole + b"\0", bytes(len(whole)), b"[1]\n"]
        for damage in damages:
            path.write_bytes(damage)
            assert values(opened(source, other)[1]) == expected
        path.unlink()
        assert values(opened(source, other)[1]) == expected
        settle(cache)


def test_a_folder_or_fifo_in_place_of_the_cache_is_bypassed(tmp_path, cache):
    source = write_samples(tmp_path / "data", "jsonl", 5)
    expected = values(opened(source)[1])
    files = list(cache.glob("*.arrays"))
    for path in files:
        path.unlink()
        path.mkdir()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert values(opened(source)[1]) == expected
    for path in files:
        path.rmdir()
        os.mkfifo(path)
    assert values(opened(source)[1]) == expected


def test_an_unwritable_cache_warns_unless_configured(tmp_path, monkeypatch):
    source = write_samples(tmp_path / "data", "jsonl", 30)
    expected = values(opened(source)[1])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        blend, index = opened(source)
        assert values(index) == expected
        assert pickle.loads(pickle.dumps(blend))[7] == blend[7]
    assert len(caught) == 1
    assert "data.cache_dir" in str(caught[0].message)
    with pytest.raises(UserError, match=r"cannot be written to .*file.*data.cache_dir"):
        open_source(source, cache_dir=tmp_path / "file")


def test_only_files_that_changed_are_scanned_again(tmp_path, monkeypatch):
    for number in range(3):
        write_lines(tmp_path / f"{number}.jsonl", [{"text": f"{number} {line}"} for line in range(4)])
    (tmp_path / "empty.jsonl").write_text("")
    scanned = []
    source = DataSource(path=str(tmp_path / "*.jsonl"))

    def texts():
        reader = open_source(source)
        return [reader[at].turns[0].content[0] for at in range(len(reader))]

    find = json_records._record_spans
    monkeypatch.setattr(json_records, "_record_spans", lambda path, name: scanned.append(name) or find(path, name))
    assert texts() == [f"{number} {line}" for number in range(3) for line in range(4)]
    assert scanned == ["0.jsonl", "1.jsonl", "2.jsonl"]
    scanned.clear()
    write_lines(tmp_path / "1.jsonl", [{"text": "new"}])
    assert texts() == [*(f"0 {line}" for line in range(4)), "new", *(f"2 {line}" for line in range(4))]
    assert scanned == ["1.jsonl"]


def test_measurements_that_proved_wrong_are_made_again(tmp_path):
    """Media that a data file names are not watched: a picture of another size shows when it is decoded."""
    write_lines(tmp_path / "x.jsonl", [{"text": "number"}])
    write_lines(tmp_path / "y.jsonl", [{"text": "sound", "audio": "y.wav"}])
    (tmp_path / "y.wav").write_bytes(wav_bytes(0.1))
    sources = [DataSource(path=str(tmp_path / f"{name}.jsonl")) for name in "xy"]
    _, index = opened(*sources)
    (tmp_path / "y.wav").write_bytes(wav_bytes(0.3))
    _, again = opened(*sources)
    assert again.of("audio").tolist() == index.of("audio").tolist() == [0, 5]
    pickle.loads(pickle.dumps(again)).forget(1)
    assert opened(*sources)[1].of("audio").tolist() == [0, 15]


def test_a_file_that_changes_while_it_is_scanned_is_refused(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}])
    find = json_records._record_spans

    def growing(path, name):
        found = find(path, name)
        with path.open("a") as file:
            file.write('{"text": "b"}\n')
        return found

    monkeypatch.setattr(json_records, "_record_spans", growing)
    with pytest.raises(UserError, match=r"x\.jsonl was changed while it was read"):
        open_source(DataSource(path=str(path)))


def test_arrays_come_back_as_they_were_written(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "empty": np.zeros((3, 0), np.int64),
        "numbers": rng.integers(-9, 9, (4, 7)),
        "bytes": rng.integers(0, 256, 13).astype(np.uint8),
        "none": np.zeros(0, np.uint8),
    }
    write_arrays(tmp_path / "x", "key", Arrays(arrays, {"é": [1, None]}))
    found = read_arrays(tmp_path / "x", "key")
    assert found.about == {"é": [1, None]}
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array)
        assert not found.arrays[name].flags.writeable
    assert read_arrays(tmp_path / "x", "other") is None
    assert [path.name for path in tmp_path.iterdir()] == ["x"]  # nothing half-written is left


@pytest.mark.parametrize(
    "wrong",
    [[], {}, {"key": 1}, {"about": 1.5}, {"arrays": []}, {"digest": None}, {"arrays": {"a": 1}},
     {"arrays": {"a": ["../x", [3]]}}, {"arrays": {"a": ["|O", [3]]}}, {"arrays": {"a": ["<i8", [-3]]}},
     {"arrays": {"a": ["<i8", [3.0]]}}, {"arrays": {"a": ["<i8", [10**30]]}}, {"arrays": {"a": ["<i8", 3]}}],
)  # fmt: skip
def test_a_header_of_another_form_is_as_good_as_none(tmp_path, wrong):
    """A header with a correct checksum, written by another version, is ignored."""
    path = tmp_path / "x"
    write_arrays(path, "key", Arrays({"a": np.arange(3)}))
    data = path.read_bytes()
    _, length, _ = HEAD.unpack_from(data)
    header = json.loads(data[HEAD.size : HEAD.size + length])
    text = json.dumps({**header, **wrong} if isinstance(wrong, dict) and wrong else wrong).encode()
    text += b" " * (-(HEAD.size + len(text)) % 64)
    head = HEAD.pack(MAGIC, len(text), hashlib.sha256(text).digest())
    path.write_bytes(head + text + data[HEAD.size + length :])
    assert read_arrays(path) is None
    assert read_arrays(path, "key") is None


def test_many_files_are_scanned_by_all_cores(tmp_path, monkeypatch):
    from dilatant.data import parallel_map as pieces

    for number in range(12):
        write_tar(tmp_path / f"{number:02}.tar", {f"{number}-{at}.txt": b"text" for at in range(number % 3 + 1)})
    names = [f"{number:02}.tar:{number}-{at}" for number in range(12) for at in range(number % 3 + 1)]
    monkeypatch.setattr(pieces, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(pieces, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(pieces.os, "sched_getaffinity", lambda process: {0, 1})
    started = []
    pool = pieces.WorkerPool
    monkeypatch.setattr(
        pieces, "WorkerPool", lambda job, workers, **more: started.append(workers) or pool(job, workers, **more)
    )  # fmt: skip
    reader = open_source(DataSource(path=str(tmp_path)))
    assert started == [2]
    assert [reader.name_of(at) for at in range(len(reader))] == names
    assert [reader[at].id for at in range(len(reader))] == names


UNGUARDED = """
import sys
from dilatant.config import DataSource
from dilatant.data import parallel_map as pieces
from dilatant.data.order.blend import open_blend
pieces.TRIAL_SECONDS = pieces.WORTH_SECONDS = 0.0
pieces.os.sched_getaffinity = lambda process: {0, 1}
open_blend([DataSource(path=sys.argv[1])])
"""


def test_a_script_without_main_guard_fails_without_hanging(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(12):
        write_lines(tmp_path / f"data/{number}.jsonl", [{"text": "a"}])
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode != 0
    assert "__name__ == '__main__'" in done.stderr
