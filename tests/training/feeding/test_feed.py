"""Steps by size first: every rank decodes exactly what its stages use, once, and all leave the same samples out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.order.sampler import Sampler, StreamSampler
from dilatant.data.sample import EncodedSample, Sample, content_digest
from dilatant.data.text.encoding import QUESTION
from dilatant.data.workers.pool import SampleRequest
from dilatant.training.feeding.feed import StepPrefetcher
from dilatant.training.feeding.inputs import HELD_OUT, DecodeRequirements, RankInputs
from dilatant.training.feeding.step_data import IndexedData, StepSamples, StreamedData, draws
from harness.patience import HANG_SECONDS, wait_until

LENGTHS = np.random.default_rng(0).integers(3, 9, 23)


def _tokens(index: int) -> np.ndarray:
    return np.arange(LENGTHS[index]) + 100 * index


class _Names:
    """Of the data set only names, lengths and the one source are asked."""

    lengths = (23,)

    def __len__(self) -> int:
        return 23

    def first(self, limit: int | None) -> np.ndarray:
        return np.arange(23)[:limit]

    def source_of(self, index: int) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"file:{index}"


def _data(refused: dict[int, str] | None = None) -> IndexedData:
    content = np.array([content_digest(_tokens(i), _tokens(i)) for i in range(23)])
    tokens = np.stack([LENGTHS, LENGTHS % 3 * 4], axis=1)
    index = SizesIndex(("language", "vision"), tokens, LENGTHS - 1, content)
    return IndexedData("train", _Names(), index, refused or {})  # type: ignore[arg-type]


@dataclass
class _Source:
    """Decodes in `take`; keeps book of what was asked. changed: samples whose tokens are others now."""

    bad: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    bad_media: frozenset[int] = frozenset()
    asked: list[SampleRequest] = field(default_factory=list)
    open: dict[tuple[str, int], SampleRequest] = field(default_factory=dict)

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests
        for one in requests:
            assert (one.dataset, one.draw) not in self.open, "asked twice at once"
            self.open[one.dataset, one.draw] = one

    def take(self, dataset: str, draw: int) -> EncodedSample | UserError:
        one = self.open.pop((dataset, draw))
        if one.index in self.bad or (one.index in self.bad_media and "vision" in one.parts):
            return UserError(f"file:{one.index}: is cut off")
        sizes = {"language": int(LENGTHS[one.index]), "vision": int(LENGTHS[one.index] % 3 * 4)}
        ids = _tokens(one.index) + (one.index in self.changed) if "tokens" in one.parts else np.zeros(0, np.int64)
        media = {"vision": {"pixels": np.full(2, one.index)}} if "vision" in one.parts else {}
        return EncodedSample(f"file:{one.index}", ids, ids, media, sizes)

    def forget(self, dataset: str) -> None:
        self.open.clear()

    def close(self) -> None: ...


Cut = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


def _plan(samples: Sequence[EncodedSample], step: int) -> Cut:
    """Two vision ranks and two language ranks, shares that hang on the sizes of the whole batch."""
    order = sorted(range(len(samples)), key=lambda at: (samples[at].sizes["language"], at))
    by_images = sorted(range(len(samples)), key=lambda at: (samples[at].sizes["vision"], at))
    has_images = [at for at in by_images if samples[at].sizes["vision"]]
    return (tuple(has_images[0::2]), tuple(has_images[1::2])), (tuple(order[0::2]), tuple(order[1::2]))


def _needs(rank: int):
    def needs(step: Cut) -> dict[int, frozenset[str]]:
        vision, language = step
        part, share = ("vision", vision[rank]) if rank < 2 else ("tokens", language[rank - 2])
        return {number: frozenset({part}) for number in share}

    return needs


SAMPLER = Sampler((23,), (1.0,), seed=3, global_batch_size=6)


def _feed(rank: int, source: _Source, steps: int = 8, **settings) -> StepPrefetcher[Cut]:
    data = _data(settings.pop("refused", None))
    start = settings.pop("start", SAMPLER.start())
    return StepPrefetcher(data, draws(SAMPLER, start, 0, steps), source, _plan, _needs(rank), **settings)


def test_four_ranks_decode_each_part_their_steps_use_once() -> None:
    sources = [_Source() for _ in range(4)]
    feeds = [_feed(rank, source) for rank, source in enumerate(sources)]
    for number, inputs in enumerate(zip(*feeds, strict=True)):
        expected, after = SAMPLER.take(SAMPLER.start(), 6 * (number + 1))
        assert {one.step for one in inputs} == {inputs[0].step}
        for rank, one in enumerate(inputs):
            assert [s.id for s in one.batch.samples] == [f"file:{i}" for i in expected[-6:]]
            assert [s.draw for s in one.batch.samples] == list(range(6 * number, 6 * number + 6))
            assert one.batch.position.samples == after.samples
            needed = _needs(rank)(one.step)
            for at, sample in enumerate(one.batch.samples):
                assert bool(sample.media) == ("vision" in needed.get(at, ()))
                assert len(sample.input_ids) == (sample.sizes["language"] if "tokens" in needed.get(at, ()) else 0)
                assert sample.target_tokens == sample.sizes["language"] - 1
                index = int(expected[-6 + at])
                assert sample.content_digest == content_digest(_tokens(index), _tokens(index))
    for feed in feeds:
        feed.close()
    decoded = Counter((part, one.draw) for source in sources for one in source.asked for part in one.parts)
    assert set(decoded.values()) == {1}
    assert sum(part == "tokens" for part, _ in decoded) == 48
    indices, _ = SAMPLER.take(SAMPLER.start(), 48)
    assert sum(part == "vision" for part, _ in decoded) == int((LENGTHS[indices] % 3 > 0).sum())


def test_refused_samples_are_never_asked_for_and_named() -> None:
    source = _Source()
    refused = {4: "file:4: is too long", 7: "file:7: has no answer"}
    with _feed(2, source, refused=refused, skips=True) as feed:
        seen = [one.batch for one in feed]
    assert not {one.index for one in source.asked} & {4, 7}
    indices, _ = SAMPLER.take(SAMPLER.start(), 48)
    assert Counter(p for b in seen for p in b.problems) == Counter(refused[i] for i in indices if i in refused)
    assert all(b.num_samples + b.skipped == 6 for b in seen)


def _exchange(feeds: list[StepPrefetcher[Cut]]) -> None:
    everything = sorted({tuple(one) for feed in feeds for one in feed.found()})
    for feed in feeds:
        feed.leave_out(everything)


@pytest.mark.parametrize("bad", [{0, 5, 11}, set(range(0, 23, 2))])
def test_all_ranks_skip_a_bad_sample_found_by_one_rank_for_good(bad: set[int]) -> None:
    sources = [_Source(frozenset(bad)) for _ in range(4)]
    feeds = [_feed(rank, source, skips=True) for rank, source in enumerate(sources)]
    steps = []
    for _ in range(8):
        _exchange(feeds)
        inputs = [next(feed) for feed in feeds]
        assert len({one.step for one in inputs}) == 1
        assert len({tuple(s.id for s in one.batch.samples) for one in inputs}) == 1
        for rank, one in enumerate(inputs):  # what is used is there
            for number, parts in _needs(rank)(one.step).items():
                sample = one.batch.samples[number]
                assert bool(sample.media) == ("vision" in parts)
                assert bool(len(sample.input_ids)) == ("tokens" in parts)
        steps.append([s.id for s in inputs[0].batch.samples])
    for feed in feeds:
        assert feed.left_out == feeds[0].left_out
        feed.close()
    # Whatever order it was found in: the batches are those of an undisturbed order without these samples, from the step
    # on in which they were first due. (A bad sample may also be found by a rank that reads ahead, never too late.)
    indices, _ = SAMPLER.take(SAMPLER.start(), 48)
    for number, ids in enumerate(steps):
        due = [i for i in indices[6 * number : 6 * number + 6].tolist() if i not in bad]
        assert ids == [f"file:{i}" for i in due]


@pytest.mark.parametrize("place", range(6))
def test_parts_a_rank_newly_needs_after_skips_are_decoded_once(place: int) -> None:
    def both(step: Cut) -> dict[int, frozenset[str]]:
        first, second = _needs(0)(step), _needs(2)(step)
        return {at: first.get(at, frozenset()) | second.get(at, frozenset()) for at in {**first, **second}}

    source = _Source()
    indices, _ = SAMPLER.take(SAMPLER.start(), 48)
    with StepPrefetcher(_data(), draws(SAMPLER, SAMPLER.start(), 0, 8), source, _plan, both, skips=True) as feed:
        for step in range(8):
            feed.found()  # the coming step is decoded
            feed.leave_out([(int(indices[6 * step + place]), "another rank found it cut off")])
            one = next(feed)
            for number, parts in both(one.step).items():
                sample = one.batch.samples[number]
                assert "vision" not in parts or sample.media
                assert "tokens" not in parts or len(sample.input_ids)
    decoded = Counter((part, one.draw) for one in source.asked for part in one.parts)
    assert set(decoded.values()) == {1}  # and nothing twice


def test_a_resumed_run_makes_the_same_steps() -> None:
    bad = frozenset({2, 9})

    def run(start, steps, left_out):
        # What one rank finds hangs on how far ahead it had planned; what all find together does not.
        feeds = [_feed(rank, _Source(bad), steps, start=start, skips=True, left_out=left_out) for rank in range(4)]
        seen = []
        for _ in range(steps):
            found = [each for feed in feeds for each in feed.found()]
            for feed in feeds:
                feed.leave_out(found)
            one, *_ = [next(feed) for feed in feeds]
            seen.append((one.step, one.batch.position, [s.draw for s in one.batch.samples]))
        for feed in feeds:
            feed.close()
        return seen, feeds[0].left_out

    whole, _ = run(SAMPLER.start(), 6, {})
    head, left_out = run(SAMPLER.start(), 2, {})
    tail, _ = run(head[-1][1], 4, left_out)
    assert head + tail == whole


def test_bad_sample_stops_the_run_only_when_its_step_is_due() -> None:
    indices, _ = SAMPLER.take(SAMPLER.start(), 12)
    wanted = next(int(i) for i in indices[6:] if i not in indices[:6])
    seen, errors = 0, []
    for rank in (2, 3):
        with _feed(rank, _Source(frozenset({wanted}))) as feed:
            next(feed)
            try:
                next(feed)
                seen += 1
            except UserError as error:
                errors.append(str(error))
    assert (seen, errors) == (1, [f"file:{wanted}: is cut off"])


def test_all_corrupt_batch_and_changed_data_are_errors() -> None:
    refused = {i: f"file:{i}: is bad" for i in range(23)}
    with _feed(2, _Source(), refused=refused) as feed, pytest.raises(UserError, match=r"^file:18: is bad$"):
        next(feed)
    index = int(SAMPLER.take(SAMPLER.start(), 1)[0][0])
    raised = 0
    for rank in (2, 3):
        with _feed(rank, _Source(changed=frozenset({index}))) as feed:
            try:
                next(feed)
            except UserError as error:
                raised += f"file:{index} is not what it was" in str(error)
    assert raised == 1


def test_look_ahead_is_bounded_and_close_ends_the_thread() -> None:
    source = _Source()
    before = threading.active_count()
    endless = (StepSamples(k, np.array([k % 23]), k, SAMPLER.start()) for k in range(10**9))
    feed: StepPrefetcher[Cut] = StepPrefetcher(_data(), endless, source, _plan, _needs(2), look_ahead=3)
    next(feed)
    # One step is out, one lies ready, one is being put together, and three are asked for.
    assert max(one.draw for one in source.asked) <= 7
    feed.close()
    assert threading.active_count() == before
    assert not source.open


def test_first_step_waits_for_three_plans_then_feed_runs_8_ahead() -> None:
    source, begun, on_time = _Source(), threading.Event(), []

    def plan(samples: Sequence[EncodedSample], step: int) -> Cut:
        if step == 3:
            on_time.append(begun.wait(HANG_SECONDS))
        return _plan(samples, step)

    with StepPrefetcher(_data(), draws(SAMPLER, SAMPLER.start(), 0, 40), source, plan, _needs(2)) as feed:
        next(feed)
        begun.set()
        for _ in range(15):
            next(feed)
        assert on_time == [True]
        # Step 15 is out, 16 lies ready, 17 is put together, and eight more are asked for.
        wait_until(lambda: max(one.draw for one in source.asked) // 6 >= 25)
        assert max(one.draw for one in source.asked) // 6 == 25


def _held_out(refused: dict[int, str], source: _Source) -> RankInputs:
    """As one rank makes its inputs, with what they need of a run replaced."""
    inputs = RankInputs.__new__(RankInputs)
    inputs._data = {HELD_OUT: _data(refused)}
    inputs._source, inputs._skips = source, False  # type: ignore[assignment]
    inputs._runtime = SimpleNamespace(plan_step=lambda heads, forwards: _plan(heads, 0))  # type: ignore[assignment]
    inputs._requirements = DecodeRequirements.__new__(DecodeRequirements)
    inputs._requirements.of = _needs(2)  # type: ignore[method-assign, assignment]
    return inputs


def test_first_valid_held_out_samples_are_judged_as_questions() -> None:
    source, refused = _Source(), {1: "one is bad", 4: "four is bad", 5: "five is bad"}
    inputs = _held_out(refused, source)
    batches = [[s.id for s in step.batch.samples] for step in inputs.held_out(5, 2)]
    assert batches == [["file:0", "file:2"], ["file:3"]]
    assert {part for one in source.asked for part in one.parts} == {QUESTION}
    assert len({one.draw for one in source.asked}) == len(source.asked)
    assert inputs.refused(5) == ("one is bad", "four is bad")
    assert inputs.refused(None) == tuple(refused.values())
    assert sum(len(step.batch.samples) for step in _held_out(refused, _Source()).held_out(None, 4)) == 20


class _Stream:
    """Endless samples 0, 1, 2, ... of which some cannot be read."""

    def __init__(self, unreadable: frozenset[int] = frozenset()) -> None:
        self.unreadable = unreadable

    name = "stream"

    def read(self, skip: int) -> Iterator[Sample | SampleError]:
        for number in range(skip, 23):
            yield (
                SampleError(f"file:{number}", "no form") if number in self.unreadable else Sample(f"file:{number}", ())
            )


class _StreamSource(_Source):
    """Knows a sample by what is sent with its request."""

    def ask(self, requests: Sequence[SampleRequest]) -> None:
        assert all(one.sample is not None for one in requests)
        super().ask([replace(one, index=int(one.sample.id[5:])) for one in requests if one.sample])


def _streamed(rank: int, source: _Source, stream: _Stream, begin: int = 0, **settings: Any) -> Any:
    sampler = StreamSampler((stream,), (1.0,), 3, 6, 4)
    data = StreamedData("train", sampler, source)
    position = sampler.start()
    if begin:
        position = next(islice(sampler.batches(position), begin - 1, None))[1]
    return StepPrefetcher(data, data.draws(position, begin, 8), source, _plan, _needs(rank), **settings)


@pytest.mark.parametrize("begin", [0, 5])
def test_steps_of_a_stream_are_planned_alike_and_leave_bad_samples_out(begin: int) -> None:
    bad = int(np.flatnonzero(LENGTHS % 3)[0])
    sources = [_StreamSource(bad_media=frozenset({bad})) for _ in range(4)]
    feeds = [_streamed(rank, sources[rank], _Stream(frozenset({4})), begin, skips=True) for rank in range(4)]
    order = StreamSampler((_Stream(frozenset({4})),), (1.0,), 3, 6, 4)
    for number, (drawn, position) in enumerate(islice(order.batches(order.start()), 8)):
        if number < begin:
            continue
        _exchange(feeds)
        inputs = [next(feed) for feed in feeds]
        names = [one.id for one in drawn if isinstance(one, Sample) and one.id != f"file:{bad}"]
        assert {one.batch.position for one in inputs} == {position}
        for rank, one in enumerate(inputs):
            assert one.step == inputs[0].step
            assert [s.id for s in one.batch.samples] == names
            assert one.batch.num_samples + one.batch.skipped == 6
            for at, sample in enumerate(one.batch.samples):
                assert len(sample.input_ids) == sample.sizes["language"]
                assert bool(sample.media) == ("vision" in _needs(rank)(one.step).get(at, ()))
    assert all(len(feed.left_out) <= 2 for feed in feeds)  # only of steps that may still be due
    for feed in feeds:
        feed.close()
    assert not any(source.open for source in sources)


def test_the_last_step_of_a_stream_waits_for_no_batch_behind_it() -> None:
    class Ending(_Stream):
        """Whoever reads beyond the last step waits for ever, in truth."""

        def read(self, skip: int) -> Iterator[Sample | SampleError]:
            yield from islice(super().read(skip), 12)
            raise AssertionError("read beyond the last step")

    sampler = StreamSampler((Ending(),), (1.0,), 3, 6, 1)
    source = _StreamSource()
    data = StreamedData("train", sampler, source)
    drawn = list(data.draws(sampler.start(), 0, 2))
    assert [step.first for step in drawn] == [0, 6]


def test_an_unreadable_sample_of_a_stream_stops_the_run_when_due() -> None:
    order = StreamSampler((_Stream(frozenset({11})),), (1.0,), 3, 6, 4)
    due = next(
        number
        for number, (drawn, _) in enumerate(order.batches(order.start()))
        if any(isinstance(one, SampleError) for one in drawn)
    )
    with _streamed(2, _StreamSource(), _Stream(frozenset({11}))) as feed:
        for _ in range(due):
            next(feed)
        with pytest.raises(UserError, match="file:11: no form"):
            next(feed)


def test_a_feed_that_was_not_closed_keeps_no_process_from_ending() -> None:
    """A source may wait for a rank that is gone, such as in a script that failed: the interpreter must not join it."""
    script = (
        "import threading\n"
        "from dilatant.training.feeding.feed import Prefetcher\n"
        "feed = Prefetcher(number for number in range(9) if number == 0 or threading.Event().wait())\n"
        "assert next(feed) == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
