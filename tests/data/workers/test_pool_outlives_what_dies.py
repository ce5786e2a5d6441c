"""The data worker pool of a machine survives workers, ranks and reads that hang, die or fail."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest

from cases.pool_cases import ALL, ENCODING, IMAGE, PLENTY, Numbered, is_alive, requests
from dilatant.comm.wire.link import FrameReader
from dilatant.data.errors import SampleError
from dilatant.data.media import open_media
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.workers import pool as pool_module
from dilatant.data.workers import pool_owner, pool_source
from dilatant.data.workers.ordered_map import UnreadableFileError, WorkerError
from dilatant.data.workers.pool import InlineSource, SampleRequest
from dilatant.data.workers.pool_source import PoolSource
from dilatant.data.workers.pool_wire import (
    NOTE_BYTES,
    Arena,
    Greeting,
    PoolAsk,
    PoolHello,
    to_frame,
    to_worker,
    write_note,
)
from dilatant.data.workers.request_queue import Awake
from harness.patience import HANG_SECONDS, wait_until


def test_every_rank_gets_ordered_samples_while_workers_die(pool) -> None:
    """Ranks request more samples until three workers have been killed."""
    owner, join_pool = pool(Numbered(seconds=0.01), workers=3)
    chunk, dead, got = 40, set(), {number: [] for number in range(3)}
    sources = [join_pool(1 << 16) for _ in range(3)]

    def rank(number: int) -> None:
        while len(dead) < 3:
            draws = range(len(got[number]), len(got[number]) + chunk)
            sources[number].ask([SampleRequest(n, 1000 * number + n, ALL, nbytes=9000) for n in draws])
            got[number] += [sources[number].take("train", n) for n in draws]

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for each in ranks:
        each.start()
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    draw = random.Random(seed)
    while any(each.is_alive() for each in ranks):
        time.sleep(0.1 + draw.random() * 0.2)
        # No sample may lose two workers: that is another test.
        tried_again = any(entry.losses for source in sources for entry in list(source.entries.values()))
        unheard = any(link.pid in dead or link.in_doubt for source in sources for link in source._links)
        # A worker that dies repeatedly before it is ready ends the pool, rightly: that is another test.
        begun = [slot.process.pid for slot in owner._group.slots if slot.is_ready]
        if begun and len(dead) < 3 and not (tried_again or unheard):
            with suppress(ProcessLookupError):  # it was replaced meanwhile
                pid = draw.choice(begun)
                os.kill(pid, signal.SIGKILL)
                dead.add(pid)
    for number, samples in got.items():
        assert len(samples) >= chunk
        assert [sample.id for sample in samples] == [f"file:{1000 * number + n}" for n in range(len(samples))]
        assert [sample.draw for sample in samples] == list(range(len(samples)))


def test_a_hang_in_c_code_is_refused_and_other_samples_arrive(pool) -> None:
    _, join_pool = pool(Numbered(hangs=frozenset({5})), decode_seconds=2.0)
    source = join_pool()
    source.ask(requests(range(40)))
    for number in range(40):
        sample = source.take("train", number + 100)
        if number == 5:
            assert isinstance(sample, SampleError)
            assert str(sample).startswith("sample 5 of 'train' (counted from 0 through all sources): decoding took ")
            assert "longer than 2 s; look at its media" in str(sample)
        else:
            assert sample.id == f"file:{number}"


def test_a_sample_that_kills_two_workers_is_a_named_error(pool, caplog) -> None:
    """After the first worker dies, a different worker tries the sample."""
    owner, join_pool = pool(Numbered(ends=frozenset({5})))
    before = owner.pids
    source = join_pool()
    source.ask(requests([5]))
    with pytest.raises(WorkerError, match=r"sample 5 of 'train' .* has ended 2 data workers .* SIGKILL.*memory"):
        source.take("train", 105)
    assert not set(before) & set(owner.pids)
    assert caplog.text.count("another one takes its place") == 2
    others = [*range(5), *range(6, 10)]
    source.ask(requests(others))
    assert [source.take("train", 100 + n).id for n in others] == [f"file:{n}" for n in others]


def test_a_dead_worker_is_replaced_after_its_fork_server_died(pool, monkeypatch) -> None:
    """A fork server that was killed seems to run for a moment and refuses connections."""
    owner, join_pool = pool(Numbered(), workers=1)
    source = join_pool()
    source.ask(requests([0, 1]))
    source.take("train", 100)
    connect, refused = forkserver.connect_to_new_process, []

    def dies_once(fds):
        if not refused:
            refused.append(True)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return connect(fds)

    monkeypatch.setattr(forkserver, "connect_to_new_process", dies_once)
    os.kill(owner.pids[0], signal.SIGKILL)
    source.ask(requests([2]))
    assert source.take("train", 102).id == "file:2"
    assert refused


def test_what_a_dead_worker_had_waiting_is_made_in_its_order(pool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner, join_pool = pool(Numbered(seconds=0.3, log=log), workers=1)
    source = join_pool()
    source.ask(requests(range(6)))
    wait_until(log.exists)
    os.kill(owner.pids[0], signal.SIGKILL)
    for number in range(6):
        source.take("train", number + 100)
    made = [int(line) for line in log.read_text().split()]
    assert list(dict.fromkeys(made)) == [*range(6)]
    assert made == sorted(made)  # the interrupted sample is repeated first


def test_a_worker_that_rests_keeps_no_deadline(pool) -> None:
    owner, join_pool = pool(Numbered(), workers=1, decode_seconds=3.0)
    before = owner.pids
    source = join_pool()
    source.ask(requests([0, 1]))
    source.take("train", 100)
    source.take("train", 101)
    time.sleep(2.2)
    source.ask(requests([2]))
    assert source.take("train", 102).id == "file:2"
    assert owner.pids == before


def test_memory_of_a_stuck_worker_is_not_reused(pool, monkeypatch, caplog) -> None:
    monkeypatch.setattr(pool_source, "LATE_SECONDS", 0.3)
    monkeypatch.setattr(pool_owner, "GRACE_SECONDS", 1000.0)  # the owner cannot end it either
    owner, join_pool = pool(Numbered(seconds=0.5))
    source = join_pool()
    source.ask(requests([0], nbytes=1 << 16))
    at_it: list[pool_source._WorkerLink] = []
    while not at_it:
        with source.changed:
            at_it = [link for link in source._links if link.entries and source._begun(link)[0]]
        time.sleep(0.01)
    pid = at_it[0].pid
    os.kill(pid, signal.SIGSTOP)
    at_it[0].decode_seconds = 0.1  # this worker is late now, the other one is not
    assert source.take("train", 100).id == "file:0"  # decoded by the other worker
    assert pid in owner.pids
    assert len(source._arena._taken) == 1
    assert caplog.text.count(f"(process {pid}) was given up: it has been at ") == 1
    join_pool()._log_given_up(pool_source._WorkerLink(0, "", pid=pid), "again")  # in another rank
    assert caplog.text.count("was given up") == 1
    os.kill(pid, signal.SIGCONT)  # the worker finds its connection closed
    wait_until(lambda: not source._arena._taken)


def test_a_worker_with_invalid_replies_keeps_slots_until_exit(pool, caplog) -> None:
    owner, join_pool = pool(Numbered(seconds=0.2), workers=1)
    source = join_pool()
    source.ask(requests([0], nbytes=1 << 16))
    wait_until(lambda: source._arena._taken)
    with source.changed:
        source._links[0].frames = FrameReader(1)
    assert source.take("train", 100).id == "file:0"
    assert "was given up: it answered with what is no message" in caplog.text
    wait_until(lambda: not source._arena._taken)
    assert not [death for slot in owner._group.slots for death in slot.deaths]


def test_who_waits_for_others_work_sees_that_its_worker_goes_on(pool) -> None:
    _, join_pool = pool(Numbered(seconds=0.1), workers=1)
    first, second = join_pool(), join_pool()
    began = time.monotonic()
    first.ask(requests(range(4)))
    first.take("train", 103)
    note = second._begun(second._links[0])[1]
    assert note is not None
    assert note.ticket == -1
    assert began < note.since < time.monotonic()


def test_a_paused_process_does_not_count_waiting_as_late() -> None:
    times = iter([100.0, 101.0, 104.5, 500.0, 501.0])
    awake = Awake(lambda: next(times))
    assert [(awake.now(), awake.since) for _ in range(4)] == [
        (101.0, 100.0), (104.5, 100.0), (500.0, 500.0), (501.0, 500.0),
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_io_errors_are_retried_and_never_blamed_on_the_sample(pool, tmp_path, monkeypatch, workers) -> None:
    monkeypatch.setattr(pool_module, "IO_PAUSE_SECONDS", 0.001)  # only in this process
    datasets = {name: Numbered(log=tmp_path / name, fails=fails) for name, fails in (("twice", 2), ("more", 3))}
    source = pool(datasets, workers)[1]() if workers else InlineSource(datasets, ENCODING)
    for name in datasets:
        source.ask(requests([0], dataset=name))
    assert source.take("twice", 100).id == "file:0"
    with pytest.raises(UnreadableFileError, match=r"sample 0 of 'more' .* cannot be read, 3 times: .*Input/output"):
        source.take("more", 100)
    for name in datasets:
        source.ask(requests([1], dataset=name))
        assert source.take(name, 101).id == "file:1"


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_withheld_media_are_retried_but_bad_media_are_not(tmp_path, monkeypatch, error) -> None:
    monkeypatch.setattr(pool_module, "IO_PAUSE_SECONDS", 0.001)

    class Picture(Numbered):
        def __getitem__(self, index: int) -> Sample:
            picture = Media("image", tmp_path / "a.png", "a.png")
            return Sample(f"file:{index}", (Turn("user", (picture, "q")), Turn("assistant", ("a",))))

    (tmp_path / "a.png").write_bytes(IMAGE)
    opened = []

    def withheld(path, end=None):
        opened.append(path)
        if len(opened) <= 2:
            raise OSError(error, os.strerror(error))
        return open(path, "rb")

    source = InlineSource({"train": Picture()}, ENCODING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_media, "open_data", withheld)
        source.ask(requests([0]))
        assert source.take("train", 100).media["vision"]["pixel_values"].shape == (1, 3, 8, 8)
        assert len(opened) >= 3
    (tmp_path / "a.png").write_bytes(IMAGE[:60])
    source.ask(requests([1]))
    assert "is damaged" in str(source.take("train", 101))


def test_a_stopped_worker_is_replaced_and_named(pool, caplog, monkeypatch) -> None:
    monkeypatch.setattr(pool_owner, "GRACE_SECONDS", 1.0)
    owner, join_pool = pool(Numbered(seconds=0.01))
    owner._group._decode_seconds = 2.0  # ranks keep the default
    source = join_pool()
    source.ask(requests(range(50)))
    assert source.take("train", 100).id == "file:0"
    victim = owner.pids[1]
    os.kill(victim, signal.SIGSTOP)
    assert [source.take("train", 100 + n).id for n in range(1, 50)] == [f"file:{n}" for n in range(1, 50)]
    wait_until(lambda: victim not in owner.pids)  # an idle stopped worker blocks no rank
    assert f"data worker 1 (process {victim}) stood still for 3 s and was ended; another one" in caplog.text


OWNER = """
import os, sys, time
from multiprocessing import util
sys.path[:0] = sys.argv[1:]
from cases.pool_cases import ENCODING, Numbered
from dilatant.data.workers.pool_owner import PoolOwner

def main():
    owner = PoolOwner({"train": Numbered(hangs=frozenset({5}), seconds=0.01)}, ENCODING, 2)
    print(owner.address, util.get_temp_dir(), *owner.pids, flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    main()
"""


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """An idle worker and one that hangs in C code (until its deadline) both end, and their folders are removed."""
    (tmp_path / "owner.py").write_text(OWNER.replace("ENCODING, 2)", "ENCODING, 2, 1.0)"))
    tests = str(Path(__file__).parents[2])
    command = subprocess.Popen([sys.executable, tmp_path / "owner.py", tests], stdout=subprocess.PIPE, text=True)
    address, shared, *pids = command.stdout.readline().split()
    source = PoolSource(address, PLENTY)
    try:
        source.ask(requests([3, 5, 6]))
        assert source.take("train", 103).id == "file:3"
        with pytest.raises(WorkerError, match="there are no data workers at"):
            PoolSource(str(tmp_path / "none"), PLENTY)
        command.kill()
        command.wait()
        with pytest.raises(WorkerError, match="no data workers any more: the process that started them has ended"):
            source.take("train", 105)
    finally:
        command.kill()
        command.stdout.close()
        source.close()
    wait_until(lambda: not any(map(is_alive, map(int, pids))))
    assert not Path(address).exists()
    assert not Path(shared).exists()  # the fork server's folder
    with pytest.raises(WorkerError, match="there are no data workers at"):
        PoolSource(address, PLENTY)


def last_workers_of(path: Path) -> None:
    """Be a worker at `path` that begins what it is asked for, and ends when nobody would start another one."""
    with socket.create_server(str(path), family=socket.AF_UNIX) as listener:
        connection, _ = listener.accept()
    path.unlink()
    hello, (memory,), *_ = socket.recv_fds(connection, 1 << 12, 1)
    frames = FrameReader(1 << 20)
    (body,) = frames.feed(hello)
    note = to_worker.decode(body).note
    connection.sendall(to_frame(Greeting(os.getpid(), 60.0, [])))
    (body, *_) = frames.feed(connection.recv(1 << 20))
    with mmap.mmap(memory, 0) as arena, memoryview(arena) as view, view[note : note + NOTE_BYTES] as own:
        write_note(own, to_worker.decode(body).ticket, time.monotonic())
    os.close(memory)
    connection.close()


def test_no_sample_is_blamed_for_the_end_of_all_workers(tmp_path: Path) -> None:
    """The first worker ends while it makes a sample, then the second while it makes the same one."""
    tmp_path.chmod(0o700)
    threads = [threading.Thread(target=last_workers_of, args=(tmp_path / f"{place}.sock",)) for place in range(2)]
    for each in threads:
        each.start()
    wait_until(lambda: len([*tmp_path.glob("*.sock")]) == 2)
    source = PoolSource(str(tmp_path), PLENTY)
    source.ask(requests([5]))
    with pytest.raises(WorkerError, match="no data workers any more: the process that started them has ended"):
        source.take("train", 105)
    source.close()
    for each in threads:
        each.join(HANG_SECONDS)


def asks_for_much(address: str, told) -> None:
    """Run a rank that requests many samples, takes one and then waits."""
    source = PoolSource(address, 1 << 20)
    source.ask(requests(range(10_000)))
    source.take("train", 100)
    told.send("on")
    time.sleep(1000)


def test_ranks_may_die_without_harm_to_others(pool) -> None:
    owner, join_pool = pool(Numbered())
    context = multiprocessing.get_context("forkserver")
    hears, tells = context.Pipe(duplex=False)
    other = context.Process(target=asks_for_much, args=(owner.address, tells), daemon=True)
    other.start()
    tells.close()
    source, pids = join_pool(), owner.pids
    source.ask(requests(range(100)))
    for number in range(100):
        if number == 50:
            assert hears.recv() == "on"
            other.kill()
            other.join()
            hears.close()
        assert source.take("train", number + 100).id == f"file:{number}"
    assert owner.pids == pids


class _Harmful:
    def __reduce__(self):
        return os.kill, (os.getppid(), signal.SIGKILL)


def test_what_is_no_message_of_ours_ends_that_connection_alone(pool) -> None:
    owner, join_pool = pool(Numbered(), workers=1)
    pids = owner.pids
    ask = PoolAsk(0, "train", 0, 0, [], 0, 8)
    hello = to_frame(PoolHello(1 << 12, 0))
    nested = b"\x82\xa4type\xa5hello\xa4more" + b"\x91" * 5000 + b"\xc0"
    with tempfile.TemporaryFile() as empty:
        for message, descriptors in [
            (b"GET / HTTP/1.1\r\n\r\n", []),
            (to_frame(ask), []),  # without an arena
            (hello, []),  # without its memory
            (hello, [empty.fileno()]),  # which is too small
            (to_frame(PoolHello(1 << 12, 1 << 12)), []),  # no room for its notes
            (to_frame(PoolHello(1 << 12, -1)), []),
            (to_frame(PoolHello(1 << 63, 0)), [empty.fileno()]),  # more than an address holds
            (hello[:4] + b"\xff" * 40, []),
            (struct.pack(">I", len(nested)) + nested, []),
            (to_frame(ask)[:4] + b"\x00" * 80, []),
        ]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{owner.address}/0.sock")
                connection.settimeout(HANG_SECONDS)
                socket.send_fds(connection, [message], descriptors)
                with suppress(ConnectionError):
                    assert connection.recv(100) == b""
    arena = Arena(1 << 12)
    harmful = pickle.dumps(_Harmful())
    with arena.view(0, len(harmful)) as slot:
        slot[:] = harmful
    for ticket, offset, space, packed in (
        (0, -1, 5, 0), (0, 0, (1 << 12) + 1, 0), (0, 1 << 12, 1, 0), (0, 5, -1, 0), (1 << 63, 0, 8, 0),
        (0, 0, 8, 9), (0, 2000, 8, 8), (0, 0, 1000, len(harmful)),
    ):  # fmt: skip
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{owner.address}/0.sock")
            connection.settimeout(HANG_SECONDS)
            bad = to_frame(PoolAsk(ticket, "train", 0, 0, [], offset, space, packed))
            socket.send_fds(connection, [hello + bad], [arena.fd])
            assert b"greeting" in connection.recv(1 << 16)
            with suppress(ConnectionError):
                assert connection.recv(100) == b""
    arena.close()
    source = join_pool()
    source.ask(requests([0, 1]))
    assert source.take("train", 101).id == "file:1"
    assert owner.pids == pids
