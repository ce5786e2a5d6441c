"""The loader: equal batches for any number of workers, exact resume, errors that name the sample, clean shutdown."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cases.data_builders import image_bytes, small_encoding, wav_bytes, write_lines
from cases.pool_cases import is_alive
from dilatant.config import DataSource, UserError
from dilatant.data.errors import SampleError
from dilatant.data.media.pixels import as_array
from dilatant.data.order.blend import open_blend
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import Sample, Turn
from dilatant.data.workers.ordered_map import WorkerError, WorkerPool, unpickle_job
from harness.loader import Loader
from harness.patience import HANG_SECONDS, wait_until

ENCODING = replace(small_encoding(), max_length=100)


@pytest.fixture
def blend(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes())
    (tmp_path / "b.wav").write_bytes(wav_bytes(0.25))
    for name, count in (("x", 30), ("y", 11)):
        write_lines(
            tmp_path / f"{name}.jsonl",
            [
                {
                    "question": name * (number + 1),
                    "answer": str(number),
                    **[{}, {"image": "a.png"}, {"audio": "b.wav"}][number % 3],
                }
                for number in range(count)
            ],
        )
    return open_blend(
        [DataSource(path=str(tmp_path / "x.jsonl"), weight=2), DataSource(path=str(tmp_path / "y.jsonl"))]
    )


def loader(samples, sampler, **settings):
    return Loader(samples, ENCODING, sampler, **{"steps": 6, **settings})


def contents(batch):
    return [
        (sample.id, sample.input_ids.tolist(), sample.labels.tolist(), dict(sample.sizes),
         {unit: {name: as_array(value).tobytes() for name, value in inputs.items()}
          for unit, inputs in sample.media.items()})
        for sample in batch.samples
    ]  # fmt: skip


def all_of(**settings):
    with loader(**settings) as batches:
        return [(contents(batch), batch.position, batch.problems) for batch in batches]


def test_batches_are_the_same_for_any_number_of_workers(blend):
    sampler = blend.sampler(3, 8)
    alone = all_of(samples=blend, sampler=sampler)
    assert len(alone) == 6
    for workers, prefetch in ((1, 2), (2, 5)):
        assert all_of(samples=blend, sampler=sampler, workers=workers, prefetch=prefetch) == alone


def test_a_batch_holds_what_the_sampler_drew_in_its_order(blend):
    sampler = blend.sampler(0, 8)
    indices, _ = sampler.take(sampler.start(), 48)
    with loader(blend, sampler) as batches:
        for number, batch in enumerate(batches):
            expected = [blend[int(index)].id for index in indices[number * 8 : number * 8 + 8]]
            assert [sample.id for sample in batch.samples] == expected
            assert batch.num_samples == 8
            assert batch.tokens["language"] == sum(len(sample.input_ids) for sample in batch.samples)
            assert batch.target_tokens == sum((sample.labels != -100).sum() for sample in batch.samples)
            assert batch.epoch == pytest.approx((number + 1) * 8 / 41)


def test_the_position_of_any_batch_resumes_with_the_next(blend):
    whole = all_of(samples=blend, sampler=blend.sampler(3, 8))
    for done in (1, 4):
        position = SamplerState.from_json(whole[done - 1][1].to_json())
        rest = all_of(samples=blend, sampler=blend.sampler(3, 8), position=position, steps=6 - done)
        assert rest == whole[done:]


@dataclass(frozen=True)
class Broken:
    """Text samples of which some are corrupt."""

    length: int = 40
    corrupt: frozenset[int] = frozenset()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.corrupt:
            raise SampleError(f"file:{index}", "is corrupt", "mend it")
        return Sample(str(index), (Turn("user", ("q",)), Turn("assistant", (str(index),))))

    def sampler(self, size):
        return Sampler((self.length,), (1.0,), 0, size, shuffle=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_sample_stops_the_run_when_its_batch_is_due(workers):
    samples = Broken(corrupt=frozenset({9}))
    with loader(samples, samples.sampler(4), workers=workers) as batches:
        assert [next(batches).num_samples for _ in range(2)] == [4, 4]
        with pytest.raises(UserError, match=r"^file:9: is corrupt; mend it$"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_samples_are_skipped_counted_and_passed(workers):
    samples = Broken(corrupt=frozenset({1, 2, 9}))
    clean = Broken()
    got = all_of(samples=samples, sampler=samples.sampler(4), workers=workers, on_error="skip")
    whole = all_of(samples=clean, sampler=clean.sampler(4))
    assert [position for _, position, _ in got] == [position for _, position, _ in whole]
    assert [len(problems) for _, _, problems in got] == [2, 0, 1, 0, 0, 0]
    assert got[0][2] == ("file:1: is corrupt; mend it", "file:2: is corrupt; mend it")
    names = Counter(sample[0] for samples, _, _ in got for sample in samples)
    assert names == Counter(str(index) for index in range(24) if index not in (1, 2, 9))


def test_a_batch_of_nothing_but_corrupt_samples_stops_the_run():
    samples = Broken(corrupt=frozenset(range(4)))
    with (
        loader(samples, samples.sampler(4), on_error="skip") as batches,
        pytest.raises(UserError, match="every sample of a batch is corrupt; the first: file:0"),
    ):
        next(batches)


def test_a_sample_longer_than_a_row_is_an_error_of_that_sample():
    samples = Broken()
    with (
        Loader(samples, replace(ENCODING, max_length=4), samples.sampler(4)) as batches,
        pytest.raises(UserError, match=r"^0: has 5 tokens, more than the 4 allowed"),
    ):
        next(batches)


BLOCKED = """
import sys, time
from dilatant.data.workers.ordered_map import WorkerPool

def main():
    pool = WorkerPool(time.sleep, 1)
    print(pool._workers[0].process.pid, flush=True)
    list(pool.map([100_000], 1))

if __name__ == "__main__":
    main()
"""


def test_a_blocked_worker_does_not_outlive_its_command(tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED)
    command = subprocess.Popen([sys.executable, tmp_path / "blocked.py"], stdout=subprocess.PIPE, text=True)
    worker = int(command.stdout.readline())
    time.sleep(0.3)  # it is asleep by now, or about to be
    command.kill()
    command.wait()
    command.stdout.close()
    try:
        wait_until(lambda: not is_alive(worker), lambda: "the worker was left behind")
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def fail_oddly(task):
    if task == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 8:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1 // task


def large(task):
    return np.full(1 << 19, task, np.uint8)


def test_data_that_a_notebook_defines_are_said_to_need_a_file(monkeypatch):
    own = type("Own", (list,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    payload = pickle.dumps(own([1]))
    monkeypatch.delattr(sys.modules["__main__"], "Own")
    with pytest.raises(WorkerError, match=r"'Own'.*put what is defined in a notebook.* into a \.py file"):
        unpickle_job(payload)


@pytest.mark.parametrize(
    ("task", "seconds", "message"),
    [
        (0, HANG_SECONDS, r"fail_oddly(.|\n)*ZeroDivisionError"),
        (9, HANG_SECONDS, r"data worker 0 \(process \d+\) was killed by SIGKILL"),
        (8, 0.5, r"worker 0 \(process \d+\) has been at 8 for 0.5 s"),
    ],
)
def test_a_task_that_fails_ends_or_stops_its_worker_is_named(task, seconds, message):
    pool = WorkerPool(fail_oddly, 1)
    try:
        results = pool.map([1, task, 1], ahead=1)
        assert next(results) == 1
        pool._task_seconds = seconds  # of the next one alone
        with pytest.raises(WorkerError, match=message):
            list(results)
    finally:
        pool.close()


@pytest.mark.slow
def test_large_tasks_and_large_results_do_not_block_each_other():
    pool = WorkerPool(len, 2)
    try:
        sizes = [1 << 20, 3, 1 << 21, 5, 1 << 20, 1 << 20, 7, 1 << 21]
        assert list(pool.map([bytes(size) for size in sizes], ahead=8)) == sizes
    finally:
        pool.close()
    pool = WorkerPool(large, 2)
    try:
        assert [int(array[0]) for array in pool.map(range(20), ahead=6)] == list(range(20))
    finally:
        pool.close()


class Stream:
    name = "stream"

    def read(self, skip):
        for number in range(skip, 20):
            if number == 7:
                yield SampleError("stream:7", "is corrupt")
            else:
                yield Sample(str(number), (Turn("user", ("q",)), Turn("assistant", (str(number),))))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_loaded_like_any_other_data(workers):
    sampler = StreamSampler((Stream(),), (1.0,), 0, 4, 6)
    with loader((), sampler, workers=workers, on_error="skip") as batches:
        names = Counter(sample.id for batch in batches for sample in batch.samples)
    assert names.total() == 24 - 1 - names["7"]
    assert set(names) == {str(number) for number in range(20)} - {"7"}
