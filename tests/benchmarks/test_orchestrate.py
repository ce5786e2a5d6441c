"""Disaggregated orchestration against the enumeration of every layout."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.disttrain.orchestrate import ModuleCost, orchestrate
from dilatant.plan import BatchError, DoesNotFitError, PlanError, TooFewDevicesError
from oracles.orchestrate import best_orchestration


def random_module(draw, name):
    cost = 0.1 + 5 * draw.random()
    seconds = {
        tp: cost / tp * (1 + 0.1 * math.log2(tp)) * (1 + 0.1 * draw.random())
        for tp in draw.sample([1, 2, 4], draw.randint(1, 3))
    }
    return ModuleCost(name, draw.randint(1, 4), seconds, 8 * draw.random(), 8 * draw.random(), 2 * draw.random())


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_layout_of_all_modules_is_faster(seed):
    draw = random.Random(seed)
    encoders = [random_module(draw, f"encoder {k}") for k in range(draw.choice([0, 1, 1, 2]))]
    generators = [random_module(draw, "generator") for _ in range(draw.choice([0, 0, 1]))]
    language = random_module(draw, "language")
    gpus, samples = draw.randint(2, 8), draw.choice([1, 2])
    batch = samples * draw.choice([1, 2, 4, 6, 8])
    capacity = draw.choice([math.inf, 4, 7, 12])
    expected = best_orchestration(encoders, language, generators, gpus, batch, samples, capacity)
    if expected == math.inf:
        with pytest.raises((DoesNotFitError, TooFewDevicesError)):
            orchestrate(encoders, language, generators, gpus, batch, samples, capacity)
        return
    found = orchestrate(encoders, language, generators, gpus, batch, samples, capacity)
    assert found.seconds == pytest.approx(expected, rel=1e-12)  # sums in another order
    assert found.proven
    assert found.gpus <= gpus
    slowest = max(module.stage_seconds for module in found.modules)
    assert found.seconds == pytest.approx(found.warm_up_seconds + (found.num_microbatches - 1) * slowest)
    replicas = found.modules[len(encoders)].replicas
    assert found.num_microbatches * replicas * samples == batch
    assert all(batch // samples % module.replicas == 0 for module in found.modules)


def test_a_light_encoder_serves_several_language_replicas():
    encoder = ModuleCost("vision", 4, {1: 0.25})
    language = ModuleCost("language", 4, {1: 1.0})
    found = orchestrate([encoder], language, [], 5, 40)
    layout = {module.name: module for module in found.modules}
    assert layout["language"].gpus == 4
    assert layout["vision"].gpus == 1
    assert layout["vision"].replicas <= layout["language"].replicas


def test_short_pipeline_wins_when_encoders_hold_few_microbatches():
    # Two stages of one GPU beat one stage of two everywhere, but then three microbatches wait in the encoder.
    encoder = ModuleCost("vision", 1, {1: 0.1}, state_bytes=0.1, activation_bytes=0.4)
    language = ModuleCost("language", 2, {1: 1.0, 2: 1.0}, state_bytes=2.0)
    found = orchestrate([encoder], language, [], 3, 8, capacity_bytes=1.0)
    assert (found.modules[1].tp, found.modules[1].pp) == (2, 1)
    assert found.seconds == pytest.approx(best_orchestration([encoder], language, [], 3, 8, 1, 1.0))


def test_memory_that_is_too_small_names_the_module_and_the_bytes():
    gib = 2.0**30
    language = ModuleCost("language", 2, {1: 1.0}, state_bytes=10 * gib)
    with pytest.raises(DoesNotFitError, match=r"unit 'language'.*3\.00 GiB more"):
        orchestrate([], language, [], 4, 8, capacity_bytes=2 * gib)


def test_impossible_requests_are_refused():
    one = ModuleCost("language", 2, {2: 1.0})
    with pytest.raises(TooFewDevicesError, match="at least 4 devices"):
        orchestrate([ModuleCost("vision", 2, {2: 1.0})], one, [], 3, 8)
    with pytest.raises(BatchError, match="nearest batches that do are 8 and 12"):
        orchestrate([], one, [], 4, 10, microbatch_size=4)
    with pytest.raises(PlanError, match="needs layers and seconds"):
        orchestrate([], ModuleCost("language", 0, {1: 1.0}), [], 4, 8)
