"""Ranks without media take their batches from one that reads: the same batches, the same errors, the same end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dilatant.comm.comm import Comm
from dilatant.config.errors import UserError
from dilatant.data.order.sampler import SamplerState
from dilatant.data.sample import EncodedSample
from dilatant.data.workers.loader import GlobalBatch
from dilatant.training.feeding.shared_batches import SharedBatches, source_of
from harness.worker_pool import Worker, WorkerPool


def _batch(number: int) -> GlobalBatch:
    samples = tuple(
        EncodedSample(
            f"s{number}-{k}é",
            np.arange(k + 2),
            np.array([-100, *range(k + 1)]),
            {"vision": {"pixels": np.ones((1, 2))}},
            {"language": k + 2, "vision": 4},
        )
        for k in range(number + 1)
    )
    return GlobalBatch(samples, SamplerState((number,), (9,), 5), number / 9, ("a bad one",))


class _Batches:
    """A loader of three batches, and an error or the end."""

    def __init__(self, fails: bool) -> None:
        self._batches = self._make(fails)

    def _make(self, fails: bool) -> Iterator[GlobalBatch]:
        yield from (_batch(number) for number in range(3))
        if fails:
            raise UserError("sample 's9' cannot be read")

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        return next(self._batches)

    def __enter__(self) -> _Batches:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _read(worker: Worker, fails: bool, most: int = 9) -> tuple[list[Any], int]:
    comm = Comm(worker.store, worker.rank, worker.size)
    shared = SharedBatches(comm, feeds_media=worker.rank == 1)
    opened = []

    def open_loader() -> Any:
        opened.append(1)
        return _Batches(fails)

    seen = []
    with shared.open(open_loader) as batches:
        try:
            for batch in batches:
                comm.world.barrier()  # a step, in which all take part
                ids = [(s.id, s.input_ids.tolist(), s.labels.tolist(), dict(s.sizes)) for s in batch.samples]
                seen.append((ids, batch.position, batch.epoch, batch.problems, batch.tokens))
                if len(seen) == most:
                    break
        except UserError as error:
            seen.append(str(error))
    comm.world.barrier()
    comm.close()
    return seen, len(opened)


@pytest.mark.parametrize("fails", [False, True])
def test_one_rank_reads_and_all_see_the_same_batches(workers: WorkerPool, fails: bool) -> None:
    results = workers.run(_read, 3, fails)
    assert [opened for _, opened in results] == [0, 1, 0]
    expected = [
        (
            [(s.id, s.input_ids.tolist(), s.labels.tolist(), dict(s.sizes)) for s in batch.samples],
            *(batch.position, batch.epoch, batch.problems, batch.tokens),
        )
        for batch in map(_batch, range(3))
    ] + (["sample 's9' cannot be read"] if fails else [])
    assert [seen for seen, _ in results] == [expected] * 3


def test_all_may_leave_before_the_last_batch(workers: WorkerPool) -> None:
    results = workers.run(_read, 3, False, 1)
    first = [(s.id, s.input_ids.tolist(), s.labels.tolist(), dict(s.sizes)) for s in _batch(0).samples]
    assert [[ids for ids, *_ in seen] for seen, _ in results] == [[first]] * 3


def test_rank_takes_media_from_the_first_feeder_on_its_machine() -> None:
    places = [("a", False), ("a", True), ("a", True), ("b", False), ("b", False)]
    assert [source_of(places, rank) for rank in range(5)] == [1, 1, 2, 3, 3]
