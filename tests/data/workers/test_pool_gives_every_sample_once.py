"""The data worker pool of a machine: every requested sample arrives at its rank once, in the order of `take`."""

from __future__ import annotations

import platform
import random
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cases.pool_cases import ALL, ENCODING, PLENTY, Numbered, contents, is_alive, requests
from dilatant.config import UserError
from dilatant.data.errors import SampleError
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import TOKENS
from dilatant.data.workers import pool_source
from dilatant.data.workers.ordered_map import WorkerError
from dilatant.data.workers.pool import InlineSource, SampleRequest, Waiting
from dilatant.data.workers.pool_source import PoolSource
from dilatant.data.workers.pool_wire import Arena
from harness.patience import wait_until


def test_a_pool_gives_what_the_caller_would_make_itself(pool) -> None:
    datasets = {"train": Numbered(corrupt=frozenset({7})), "eval": Numbered()}
    _, join_pool = pool(datasets)
    sources = [join_pool(), InlineSource(datasets, ENCODING)]
    asked = [SampleRequest(n, n, frozenset(parts), name) for n, (parts, name) in enumerate(
        [({TOKENS}, "train"), ({"vision"}, "train"), (set(), "train"), (ALL, "eval")] * 6
    )]  # fmt: skip
    streamed = [SampleRequest(n, n, ALL, "train", n % 2, Numbered()[n]) for n in range(50, 60)]
    asked += streamed
    for source in sources:
        source.ask(asked)
    # Taken in another order than asked for.
    for one in sorted(asked, key=lambda one: (one.draw % 5, one.draw)):
        ours, alone = (source.take(one.dataset, one.draw) for source in sources)
        if isinstance(alone, UserError):
            assert one.index == 7
            assert type(ours) is type(alone) is SampleError
            assert str(ours) == str(alone) == "file:7: is corrupt; mend it"
            continue
        assert contents(ours) == contents(alone)
        assert set(alone.media) == one.parts & {n for n, size in alone.sizes.items() if size} - {TOKENS}
        assert bool(len(alone.input_ids)) == (TOKENS in one.parts)
        assert ours.input_ids.flags.writeable  # torch warns of others


def test_a_streamed_sample_waits_for_memory_and_may_be_too_large_for_it(pool) -> None:
    _, join_pool = pool({"train": ()})
    source = join_pool(1 << 20)
    media = [Media("image", bytes(length), "a") for length in (700_000, 700_000, 1 << 21)]
    source.ask(
        [
            SampleRequest(n, n, frozenset({TOKENS}), sample=Sample(f"stream:{n}", (Turn("user", (item,)),)))
            for n, item in enumerate(media)
        ]
    )
    errors = [str(source.take("train", draw)) for draw in range(3)]
    assert ["is no image" in error for error in errors] == [True, True, False]
    assert "stream:2: has 2,097," in errors[2]


def test_parts_of_a_sample_have_the_sizes_of_all_of_it() -> None:
    whole = encode_sample(Numbered()[2], ENCODING)
    assert contents(encode_sample(Numbered()[2], ENCODING, ALL)) == contents(whole)
    for parts in (frozenset[str](), frozenset({"audio"}), frozenset({TOKENS})):
        part = encode_sample(Numbered()[2], ENCODING, parts)
        assert part.sizes == whole.sizes
        assert set(part.media) == parts - {TOKENS}
        assert part.input_ids.tolist() == (whole.input_ids.tolist() if TOKENS in parts else [])
        assert part.labels.tolist() == (whole.labels.tolist() if TOKENS in parts else [])


def test_each_sample_is_made_once_where_nothing_dies(pool, tmp_path: Path) -> None:
    owner, join_pool = pool(Numbered(log=tmp_path / "log"))
    first, second = join_pool(), join_pool()
    first.ask(requests(range(40)))
    second.ask(requests(range(40, 80)))
    for number in range(40):
        assert first.take("train", number + 100).id == f"file:{number}"
        assert second.take("train", number + 140).id == f"file:{number + 40}"
    assert not [death for slot in owner._group.slots for death in slot.deaths]
    assert Counter(map(int, (tmp_path / "log").read_text().split())) == Counter(range(80))


def test_held_samples_stay_in_budget_and_due_ones_still_arrive(pool) -> None:
    _, join_pool = pool(Numbered())
    each = 4000
    source = join_pool(10 * each)
    source.ask(requests(range(100), nbytes=each))

    def taken() -> int:
        return sum(nbytes for _, nbytes in list(source._outcomes.values()))

    wait_until(lambda: taken() > 8 * each)
    held = -1
    while held != len(source._outcomes) or not held:
        held = len(source._outcomes)
        time.sleep(0.2)
    # Of samples that take less than was said there are more than ten.
    assert taken() + each <= source.charged + each <= 11 * each
    assert held < 100
    # The last one has not been sent, and nothing is taken that would make room.
    assert source.take("train", 199).id == "file:99"
    for number in reversed(range(99)):
        assert source.take("train", number + 100).id == f"file:{number}"
    assert source.charged == 0


@pytest.mark.parametrize("nbytes", [1, 10**9])
def test_a_wrong_estimate_of_bytes_costs_only_time(pool, nbytes: int) -> None:
    _, join_pool = pool(Numbered())
    source = join_pool(1 << 12)
    source.ask(requests(range(30), nbytes=nbytes))
    alone = InlineSource({"train": Numbered()}, ENCODING)
    alone.ask(requests(range(30)))
    for number in range(30):
        assert contents(source.take("train", number + 100)) == contents(alone.take("train", number + 100))


def test_forgotten_draws_are_dropped_and_can_be_requested_again(pool) -> None:
    _, join_pool = pool(Numbered(seconds=0.01))
    source = join_pool()
    for again in range(3):
        source.ask(requests(range(50)))
        with pytest.raises(ValueError, match=r"draw 100 of 'train' is asked for already|lies ready"):
            source.ask(requests([0]))
        assert source.take("train", 100 + again).id == f"file:{again}"
        source.forget("train")
        with pytest.raises(ValueError, match="draw 101 of 'train' was not asked for"):
            source.take("train", 101)
    source.ask(requests([3]))
    assert source.take("train", 103).id == "file:3"
    free = source._arena._free
    wait_until(lambda: not source.charged and len(free) == 1)  # of those that were in hand
    assert source.charged == 0
    assert [end for _, end in free] == [source._arena.nbytes]


def test_who_waits_is_told_for_what(pool, monkeypatch) -> None:
    monkeypatch.setattr("dilatant.data.workers.request_queue.REPORT_SECONDS", 0.1)
    reports = []
    _, join_pool = pool(Numbered(seconds=0.8), workers=1)
    source = join_pool(on_wait=reports.append)
    source.ask(requests([4, 5]))
    source.take("train", 105)
    assert len(reports) >= 3
    assert all(report.seconds >= 0.1 * n for n, report in enumerate(reports, 1))
    last = str(reports[-1])
    # By its place, or by its name once the record was read.
    assert last.split(" s for ")[1].startswith(("sample 5 of 'train'", "file:5 "))
    assert "(data worker 0 (process " in last
    assert str(Waiting("charts.parquet:881", 12.2, 2)) == "12 s for charts.parquet:881 (try 2)"


def test_a_rank_that_asks_for_much_does_not_hold_up_another(pool) -> None:
    _, join_pool = pool(Numbered(seconds=0.02), workers=1)
    greedy, modest = join_pool(), join_pool()
    greedy.ask(requests(range(300)))
    greedy.take("train", 100)
    modest.ask(requests(range(5)))
    for number in range(5):
        modest.take("train", number + 100)
    # In turn; a few more were waiting when it came.
    assert len(greedy._outcomes) <= 5 + 2 * pool_source.TASKS_PER_WORKER + 5


def test_more_samples_are_made_while_none_is_taken(pool) -> None:
    _, join_pool = pool(Numbered(), workers=1)
    source = join_pool()
    source.ask(requests(range(50)))
    wait_until(lambda: len(source._outcomes) >= 50)
    assert len(source._outcomes) == 50


@dataclass(frozen=True)
class Faults:
    """Samples named after their page faults: each allocates and frees a few megabytes, as a decoder does."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [np.ones(12 << 17) for _ in range(3)]  # 12 MiB each; together more than glibc keeps by itself
        del held
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return Sample(str(faults), (Turn("user", ("q",)), Turn("assistant", ("a",))))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told to keep memory")
def test_a_worker_decodes_into_memory_freed_by_the_last_sample(pool) -> None:
    source = pool(Faults())[1]()
    source.ask([SampleRequest(n, n, frozenset({TOKENS})) for n in range(3)])
    faults = [int(source.take("train", n).id) for n in range(3)]
    assert faults[2] < 200, faults  # of 9,216 pages, 1,500 of them where the system gives huge ones


def test_a_closed_pool_has_no_workers_and_no_folder(pool) -> None:
    """Workers end whatever they are doing, even if a reference to the closed pool remains."""
    owner, join_pool = pool(Numbered(hangs=frozenset({0})))
    join_pool().ask(requests([0, 1]))
    pids = owner.pids
    assert all(map(is_alive, pids))
    owner.close()
    assert not any(map(is_alive, pids))
    assert not Path(owner.address).exists()


def test_a_folder_that_others_may_write_to_is_not_joined(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(WorkerError, match="is no folder of this user alone"):
        PoolSource(str(tmp_path), PLENTY)


@pytest.mark.parametrize("seed", range(5))
def test_slots_of_an_arena_never_overlap_and_all_room_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    arena = Arena(1 << 16)
    slots: dict[int, int] = {}
    for _ in range(2000):
        if slots and draw.random() < 0.5:
            offset = draw.choice(list(slots))
            assert bytes(arena.view(offset, slots[offset])) == offset.to_bytes(4, "big") * (slots[offset] // 4)
            del slots[offset]
            arena.release(offset)
            continue
        nbytes = 4 * draw.randint(1, 1500)
        offset = arena.allocate(nbytes)
        if offset is None:
            gaps = np.ones(arena.nbytes, bool)
            for start, length in slots.items():
                gaps[start : start + length] = False
            longest = max(map(len, "".join("x" if free else " " for free in gaps).split()), default=0)
            assert longest < nbytes + 64  # slots begin at multiples of 64
            continue
        assert offset + nbytes <= arena.nbytes
        slots[offset] = nbytes
        arena.view(offset, nbytes)[:] = offset.to_bytes(4, "big") * (nbytes // 4)
    for offset in slots:
        arena.release(offset)
    assert arena.allocate(1 << 16) == 0
    arena.close()
    arena.close()
