"""Every row of every message travels once, tensor-parallel ranks gather what was sent to each, and both ends of an edge
expect the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.drawn_steps import cases
from cases.engine_case import Case, build_model, build_samples
from dilatant.models.core.random_draws import draws_of
from dilatant.models.core.stage import StepData
from dilatant.runtime.build import derive_boundaries
from dilatant.runtime.routes import derive_routes, divide_rows, transfer_pairs
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.step.row_owners import RowOwners
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.trainability import trainability_of
from harness.checked_steps import COMMON


def check_rows(case: Case) -> None:
    model, samples = build_model(case, "meta"), build_samples(case)
    placed = case.plan.stages()
    boundaries = derive_boundaries(model, case.plan)
    backward = trainability_of(case.plan, trainable_layers(model.units)).backward
    graph = build(case.plan, case.assignment, case.schedule)
    data = StepData.of(samples, model.graph.losses, draws=draws_of(samples, 0))
    taken: Counter = Counter()
    messages, sent, received = set(), {}, {}
    for rank in case.plan.ranks:
        routes = derive_routes(graph, rank, {index for index, has in enumerate(backward) if has})
        owners = RowOwners(model.units, placed, boundaries, routes, data)
        for links, ends in ((routes.outgoing, sent), (routes.incoming, received)):
            ends |= {
                link: [(m, p.rows, p.width, p.dtype) for m in on for p in [owners.parcel(m, link)]]
                for link, on in links.items()
            }
        for link, on in routes.incoming.items():
            for message in on:
                messages.add(message)
                parcel = owners.parcel(message, link)
                taken[message] += parcel.rows if link[2] != link[3] else 0
                assert parcel.at_target is None or len(parcel.at_target) == parcel.rows
        for action, ours in routes.received.items():
            # What a rank and those beside it are given of a message is what it expects to have of these samples.
            stage = placed[action.stage]
            for message in ours:
                links = [link for link, on in routes.incoming.items() if message in on]
                unit = placed[message.producer.stage].unit
                counts = owners.counts(stage.index, rank, routes.samples[action], unit, owners.boundary(message))
                of_sample = dict(zip(routes.samples[action], counts, strict=True))
                expected = sum(of_sample[sample] for sample in message.samples)
                given_rows = sum(owners.parcel(message, link).rows for link in links)
                shares = owners.shares(message, rank)
                if shares is None:
                    assert given_rows == expected
                else:
                    own = stage.stage.ranks.index(rank) % stage.stage.tp
                    assert given_rows == len(shares[own])
                    assert {*np.concatenate(shares).tolist()} == {*range(expected)}
    assert sent == received
    for message in messages:
        ends = [placed[end.stage].stage.ranks for end in (message.producer, message.consumer)]
        rows = sum(owners.boundary(message).rows_of(samples[sample]) for sample in message.samples)
        if {*ends[0]}.isdisjoint(ends[1]):
            assert taken[message] == rows
        else:
            assert taken[message] <= rows


@settings(max_examples=5, **COMMON)
@given(case=cases())
def test_rows_travel_once_to_whoever_needs_them(case: Case) -> None:
    check_rows(case)


@pytest.mark.slow
@settings(max_examples=200, **COMMON)
@given(case=cases())
def test_rows_of_many_cases_travel_once(case: Case) -> None:
    check_rows(case)


@given(
    rows=st.integers(0, 20),
    having=st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]),
    first=st.integers(0, 5),
    takers=st.integers(1, 4),
)
def test_rows_are_divided_evenly_and_only_along_crossings(
    rows: int, having: tuple[int, ...], first: int, takers: int
) -> None:
    taking = tuple(range(first, first + takers))
    divided = divide_rows(np.arange(rows), having, taking)
    both = {*having} & {*taking}
    assert [*divided] == [*transfer_pairs(having, taking)]
    if both == {*taking}:
        assert all(len(one) == rows for one in divided.values())
        return
    assert sorted(np.concatenate([*divided.values()]).tolist()) == [*range(rows)]
    for end, ranks in enumerate((both or having, both or taking)):
        loads = [sum(len(one) for pair, one in divided.items() if pair[end] == rank) for rank in ranks]
        assert max(loads) - min(loads) <= 1
