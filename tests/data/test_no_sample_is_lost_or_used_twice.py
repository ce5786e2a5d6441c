"""The sampler: every sample once per pass, resume with the next unseen sample, data sets in their shares."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.config import UserError
from dilatant.data.errors import SampleError
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler, choose_sources
from dilatant.data.permutation import permute
from dilatant.data.readers.records import Blocks
from dilatant.data.sample import Sample

SEEDS = st.integers(0, 2**40)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 5))
def test_a_permutation_reaches_every_place_once(length, seed, stream):
    order = permute(np.arange(length), length, seed, (stream,))
    assert sorted(order.tolist()) == list(range(length))
    some = np.random.default_rng(seed).integers(0, length, 5)
    assert permute(some, length, seed, (stream,)).tolist() == order[some].tolist()


def test_a_permutation_looks_random():
    # Over many seeds every pair (position, value) is equally likely: chi-squared with 49 degrees of freedom
    # stays below 85 with probability 0.999.
    length, trials = 8, 1000
    counts = np.zeros((length, length))
    for seed in range(trials):
        counts[np.arange(length), permute(np.arange(length), length, seed)] += 1
    expected = trials / length
    assert ((counts - expected) ** 2 / expected).sum() < 85
    # Neighbours do not stay neighbours: 2 of 10,000 would by chance.
    order = permute(np.arange(10_000), 10_000, 7)
    assert (np.abs(np.diff(order)) == 1).sum() < 12


@st.composite
def samplers(draw):
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    blocks = []
    for length in lengths:
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
        runs = tuple(int(run) for run in np.diff([0, *cuts, length]) if run)
        new_group = [0, *(draw(st.integers(0, 1)) for _ in runs[1:])]
        groups = draw(st.sampled_from([(), tuple(np.cumsum(new_group).tolist())]))
        blocks.append(draw(st.sampled_from([None, Blocks(runs, draw(st.integers(1, 4)), groups)])))
    weights = draw(st.lists(st.sampled_from([0.1, 1.0, 2.0, 7.0]), min_size=len(lengths), max_size=len(lengths)))
    return Sampler(
        tuple(lengths), tuple(weights), draw(SEEDS), draw(st.integers(1, 40)), draw(st.booleans()), tuple(blocks)
    )


@settings(max_examples=40, deadline=None, print_blob=True)
@given(samplers(), st.integers(0, 12))
def test_every_pass_over_a_source_takes_every_sample_once(sampler, steps):
    indices = [index for batch, _ in islice(sampler.batches(sampler.start()), steps) for index in batch]
    ends = np.cumsum(sampler.lengths)
    for source, length in enumerate(sampler.lengths):
        first = ends[source] - length
        mine = [index - first for index in indices if first <= index < ends[source]]
        for start in range(0, len(mine), length):
            one_pass = mine[start : start + length]
            assert len(set(one_pass)) == len(one_pass)
            assert all(0 <= index < length for index in one_pass)
            if not sampler.shuffle:
                assert one_pass == list(range(len(one_pass)))


@settings(max_examples=40, deadline=None, print_blob=True)
@given(samplers(), st.integers(0, 8), st.integers(0, 8))
def test_a_saved_position_goes_on_with_the_next_unseen_sample(sampler, before, after):
    whole = [batch for batch, _ in islice(sampler.batches(sampler.start()), before + after)]
    states = [sampler.start(), *(state for _, state in islice(sampler.batches(sampler.start()), before))]
    position = SamplerState.from_json(json.loads(json.dumps(states[-1].to_json())))
    rest = [batch for batch, _ in islice(sampler.batches(sampler.resume(position)), after)]
    assert rest == whole[before:]


@settings(max_examples=40, deadline=None, print_blob=True)
@given(samplers(), st.integers(1, 6), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_order_does_not_depend_on_the_batch_size(sampler, steps, sizes):
    total = steps * sampler.global_batch_size
    expected, _ = sampler.take(sampler.start(), total)
    taken, state = [], sampler.start()
    while len(taken) < total:
        more, state = sampler.take(state, sizes[len(taken) % len(sizes)])
        taken += more.tolist()
    assert taken[:total] == expected.tolist()


def test_sources_keep_their_share_at_every_moment():
    sampler = Sampler((100, 10, 1000), (1.0, 2.0, 5.0), 0, 1)
    taken = np.zeros(3)
    for count, (_, state) in enumerate(islice(sampler.batches(sampler.start()), 400), 1):
        taken = np.array(state.drawn)
        assert np.abs(taken - count * np.array([1, 2, 5]) / 8).max() < 1
    assert taken.sum() == 400


def test_shuffling_differs_between_passes_and_seeds():
    def order(seed, start):
        sampler = Sampler((50,), (1.0,), seed, 50)
        return next(islice(sampler.batches(sampler.start()), start, None))[0]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != sorted(order(0, 0))


def test_blocks_are_read_one_window_after_another():
    blocks = Blocks((10,) * 20, 4)
    sampler = Sampler((200,), (1.0,), 3, 200, blocks=(blocks,))
    indices, _ = sampler.take(sampler.start(), 200)
    for window in range(5):
        assert len({index // 10 for index in indices[window * 40 : window * 40 + 40]}) == 4
    inside = [[index % 10 for index in indices[window * 40 : window * 40 + 40]] for window in range(5)]
    assert len({tuple(order) for order in inside}) == 5  # no two windows are mixed alike
    # Inside a window the samples are mixed, and windows take blocks from anywhere.
    assert len({index // 10 for index in indices[:8]}) > 2
    assert [index // 10 for index in indices[::40]] != sorted(index // 10 for index in indices[::40])


def test_runs_of_a_group_are_read_one_after_another():
    lengths, groups = (10,) * 12, (0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 5)
    sampler = Sampler((120,), (1.0,), 3, 120, blocks=(Blocks(lengths, 1, groups),))
    indices, _ = sampler.take(sampler.start(), 120)
    runs = [int(index) // 10 for index in indices[::10]]
    assert [groups[run] for run in runs] != sorted(groups)
    for group in range(6):
        places = [place for place, run in enumerate(runs) if groups[run] == group]
        assert places == list(range(places[0], places[0] + len(places)))
        assert [runs[place] for place in places] == sorted(runs[place] for place in places)


def test_a_batch_costs_the_same_however_many_blocks_there_are(monkeypatch):
    from dilatant.data.order import sampler as module

    asked = []

    def counted(positions, *rest):
        asked.append(len(positions))
        return permute(positions, *rest)

    monkeypatch.setattr(module, "permute", counted)
    sampler = Sampler((50_000,), (1.0,), 0, 8, blocks=(Blocks((10,) * 5000, 4),))
    batches = sampler.batches(sampler.start())
    next(batches)
    assert max(asked) == 5000  # the order of a pass, once
    asked.clear()
    for _ in range(20):
        next(batches)
    assert max(asked) <= 8


def test_shares_are_given_to_the_source_furthest_behind():
    """Computed by hand: the next source has the largest share x (samples so far + 1) minus samples taken from it."""
    assert choose_sources((3.0, 1.0), (0, 0), 8).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert choose_sources((1.0, 2.0), (0, 0), 6).tolist() == [1, 0, 1, 1, 0, 1]


def test_a_position_of_other_data_is_refused():
    sampler = Sampler((10,), (1.0,), 0, 4)
    _, state = next(sampler.batches(sampler.start()))
    assert Sampler((10,), (1.0,), 0, 7).resume(state) == state
    with pytest.raises(UserError, match="its sources had 10 samples, and now have 11"):
        Sampler((11,), (1.0,), 0, 4).resume(state)
    with pytest.raises(UserError, match="'seed' was 0, and now is 1"):
        Sampler((10,), (1.0,), 1, 4).resume(state)
    assert sampler.resume(SamplerState()) == sampler.start()


def test_an_epoch_is_as_many_samples_as_there_are():
    sampler = Sampler((10, 20), (1.0, 1.0), 0, 15)
    states = [state for _, state in islice(sampler.batches(sampler.start()), 3)]
    assert [sampler.epoch(state) for state in states] == [0.5, 1.0, 1.5]


class Numbers:
    """A stream of numbered samples that counts the requests to it."""

    def __init__(self, length, name="numbers"):
        self.length, self.name = length, name

    def read(self, skip):
        for number in range(skip, self.length):
            yield SampleError("x", str(number)) if number % 5 == 3 else Sample(f"{self.name}:{number}", ())


def numbers_in(batches):
    return [
        int(item.problem if isinstance(item, SampleError) else item.id.partition(":")[2])
        for batch, _ in batches
        for item in batch
    ]


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), SEEDS)
def test_a_stream_is_shuffled_in_blocks_and_resumed_exactly(length, block, batch, before, after, seed):
    sampler = StreamSampler((Numbers(length),), (1.0,), seed, batch, block)
    whole = list(islice(sampler.batches(sampler.start()), before + after))
    taken = numbers_in(whole)
    for start in range(0, len(taken), length):
        one_pass = taken[start : start + length]
        assert len(set(one_pass)) == len(one_pass)
        for at in range(0, len(one_pass) - block + 1, block):
            assert sorted(one_pass[at : at + block]) == list(range(at, at + block))[: len(one_pass[at : at + block])]
    position = whole[before - 1][1] if before else sampler.start()
    rest = islice(sampler.batches(sampler.resume(SamplerState.from_json(position.to_json()))), after)
    assert numbers_in(rest) == numbers_in(whole[before:])


def test_a_stream_is_shuffled_anew_in_every_pass():
    sampler = StreamSampler((Numbers(40),), (1.0,), 0, 40, 20)
    first, second = (numbers_in([batch]) for batch in islice(sampler.batches(sampler.start()), 2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert first[:20] != [number - 20 for number in first[20:]]  # and so is every block


def test_streams_are_blended_by_weight():
    sampler = StreamSampler((Numbers(50, "a"), Numbers(9, "b")), (3.0, 1.0), 0, 8, 4)
    batches = list(islice(sampler.batches(sampler.start()), 10))
    names = Counter(item.id[0] for batch, _ in batches for item in batch if isinstance(item, Sample))
    assert batches[-1][1].drawn == (60, 20)
    assert names["a"] > 2 * names["b"]


def test_an_empty_stream_is_an_error():
    sampler = StreamSampler((Numbers(0),), (1.0,), 0, 2)
    with pytest.raises(UserError, match="'numbers' is empty"):
        next(sampler.batches(sampler.start()))
