"""Every row of every message goes once to each rank that needs it, and both ends of an edge expect the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from test_numerics import COMMON

from dilatant.models.random_draws import draws_of
from dilatant.models.stage import StepData
from dilatant.runtime.build import derive_boundaries
from dilatant.runtime.holders import trainable_layers
from dilatant.runtime.routes import derive_routes
from dilatant.runtime.row_owners import RowOwners
from dilatant.schedule.graph import build
from dilatant.schedule.trainability import trainability_of
from drawn_steps import cases
from engine_case import Case, build_model, build_samples


@settings(max_examples=40, **COMMON)
@given(case=cases())
def test_rows_travel_once_to_whoever_needs_them(case: Case) -> None:
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
                taken[message] += parcel.rows
                assert parcel.at_target is None or len(parcel.at_target) == parcel.rows
        for action, ours in routes.received.items():
            # What a rank is given of a message is what it expects to have of these samples.
            stage = placed[action.stage]
            for message in ours:
                links = [link for link, on in routes.incoming.items() if message in on]
                unit = placed[message.producer.stage].unit
                counts = owners.counts(
                    stage.index, rank, routes.samples[action], unit, owners.boundary(message)
                )
                of_sample = dict(zip(routes.samples[action], counts, strict=True))
                given_rows = sum(owners.parcel(message, link).rows for link in links)
                assert given_rows == sum(of_sample[sample] for sample in message.samples)
    assert sent == received
    for message in messages:
        rows = sum(owners.boundary(message).rows_of(samples[sample]) for sample in message.samples)
        assert taken[message] == rows * placed[message.consumer.stage].stage.tp
