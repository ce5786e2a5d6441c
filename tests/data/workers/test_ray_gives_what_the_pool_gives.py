"""Producers on a Ray cluster give what the caller would make itself, whatever dies meanwhile.

pip install "dilatant[ray]" && pytest -m slow tests/data/workers/test_ray_gives_what_the_pool_gives.py
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases.data_builders import small_encoding
from cases.pool_cases import ALL, Numbered, contents, requests
from dilatant.comm import ray_cluster
from dilatant.comm.ray_cluster import LOCAL, Connection, check_cluster
from dilatant.config import UserError
from dilatant.data.text.encoding import TOKENS
from dilatant.data.workers import ray_source
from dilatant.data.workers.ordered_map import WorkerError
from dilatant.data.workers.pool import InlineSource, SampleRequest
from dilatant.data.workers.ray_source import RaySource

ENCODING = small_encoding()
PLENTY = 1 << 24
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_RAY, reason='Ray is not installed: pip install "dilatant[ray]"'),
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A local one, whose processes find what producers read here."""
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(Path(__file__).parent), *sys.path]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        connection = Connection(LOCAL, cpus=3, store_bytes=1 << 27)
        yield connection
        connection.close()


@pytest.fixture
def source(cluster: Connection):
    opened = []

    def open_source(datasets, budget=PLENTY, most=2, **settings):
        datasets = datasets if isinstance(datasets, dict) else {"train": datasets}
        opened.append(RaySource(datasets, ENCODING, budget, most, **settings))
        return opened[-1]

    yield open_source
    for each in opened:
        each.close()


def process_of(producer: str) -> int:
    return int(producer.split()[1])


@pytest.mark.usefixtures("cluster")
class TestOnACluster:
    pytestmark = needs_ray

    def test_producers_give_what_the_caller_would_make_itself(self, source) -> None:
        datasets = {"train": Numbered(corrupt=frozenset({7})), "eval": Numbered()}
        sources = [source(datasets), InlineSource(datasets, ENCODING)]
        asked = [SampleRequest(n, n, frozenset(parts), name) for n, (parts, name) in enumerate(
            [({TOKENS}, "train"), ({"vision"}, "train"), (set(), "train"), (ALL, "eval")] * 6
        )]  # fmt: skip
        for each in sources:
            each.ask(asked)
        for one in sorted(asked, key=lambda one: (one.draw % 5, one.draw)):
            ours, alone = (each.take(one.dataset, one.draw) for each in sources)
            if isinstance(alone, UserError):
                assert str(ours) == str(alone) == "file:7: is corrupt; mend it"
                continue
            assert contents(ours) == contents(alone)
            assert ours.input_ids.flags.writeable

    def test_killed_producers_neither_lose_nor_repeat_samples(self, source, tmp_path: Path) -> None:
        """One producer after another is killed while at work; what was asked for comes, each draw once, as the caller
        would make it."""
        count = 60
        ours = source(Numbered(seconds=0.1), most=2)
        alone = InlineSource({"train": Numbered()}, ENCODING)
        ours.ask(requests(range(count)))
        alone.ask(requests(range(count)))
        ledger: Counter[int] = Counter()
        killed: set[int] = set()
        for number in range(count):
            taken = ours.take("train", number + 100)
            assert contents(taken) == contents(alone.take("train", number + 100))
            ledger[taken.draw] += 1
            running = sorted({process_of(name) for name in ours.producers} - killed)
            if number % 5 == 0 and running and len(killed) < 4:
                killed.add(running[0])
                os.kill(running[0], signal.SIGKILL)
        assert ledger == Counter({number + 100: 1 for number in range(count)})
        assert len(killed) >= 3
        with pytest.raises(ValueError, match="not asked for, or was taken already"):
            ours.take("train", 100)

    def test_a_sample_that_ends_its_producers_is_named(self, source) -> None:
        ours = source(Numbered(ends=frozenset({3})), most=1)
        ours.ask(requests(range(6)))
        for number in (0, 1, 2, 4, 5):
            assert ours.take("train", number + 100).id == f"file:{number}"
        with pytest.raises(WorkerError, match=r"sample 3 of 'train'.* has ended 3 producers"):
            ours.take("train", 103)

    def test_a_sample_that_hangs_is_refused_and_the_others_come(self, source, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray_source, "LATE_SECONDS", 0.5)
        monkeypatch.setattr(ray_source.RaySource, "tries", 1)
        ours = source(Numbered(hangs=frozenset({1})), most=1, decode_seconds=1.0)
        ours.ask(requests(range(3)))
        assert str(ours.take("train", 101)) == (
            "sample 1 of 'train' (counted from 0 through all sources): decoding took longer than 1 s; look at its "
            "media, or raise 'data.decode_seconds'"
        )
        assert [ours.take("train", number + 100).id for number in (0, 2)] == ["file:0", "file:2"]

    def test_what_is_asked_ahead_is_bounded_by_bytes(self, source, tmp_path: Path) -> None:
        log = tmp_path / "made"
        ours = source(Numbered(log=log), budget=1000, most=1)
        ours.ask(requests(range(20), nbytes=400))
        assert ours.take("train", 100).id == "file:0"
        time.sleep(2)
        assert len(log.read_text().split()) < 8  # two fit at a time, and each that is taken makes room
        assert [ours.take("train", number + 100).id for number in range(1, 20)] == [
            f"file:{number}" for number in range(1, 20)
        ]

    def test_a_rank_that_waits_gets_more_producers_up_to_the_limit(self, source) -> None:
        ours = source(Numbered(seconds=0.4), most=2)
        ours.ask(requests(range(60)))
        for number in range(60):
            ours.take("train", number + 100)
        assert len(ours.producers) == 2


def test_a_cluster_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Ray; pip install \"dilatant\[ray\]\""):
        check_cluster(LOCAL)
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    check_cluster(LOCAL)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(UserError, match="only with token authentication"):
        check_cluster("127.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_cluster(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "nowhere"):
        with pytest.raises(UserError, match=f"no Ray cluster answers at {address}"):
            check_cluster(address)
