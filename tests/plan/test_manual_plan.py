"""Plans that users write: every rank once, or shared on purpose; every mistake listed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilatant.config.errors import UserError
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan

LAYERS = {"vision": 5, "audio": 4, "language": 10}
FEEDS = {"vision": ("language",), "audio": ("language",)}


def test_parallel_units_have_ranks_of_their_own() -> None:
    specs = {"vision": ParallelSpec(replicas=2), "audio": ParallelSpec(pp=2), "language": ParallelSpec(pp=3, tp=2)}
    plan = plan_from_specs(LAYERS, specs, FEEDS)
    assert Plan.from_json(plan.to_json()) == plan
    ranks = [placed.stage.ranks for placed in plan.stages()]
    assert ranks == [(0,), (1,), (2,), (3,), (4, 5), (6, 7), (8, 9)]
    assert [(p.stage.first, p.stage.end) for p in plan.stages() if p.unit == "language"] == [(0, 3), (3, 6), (6, 10)]
    assert plan.unit("vision").feeds == ("language",)


def test_colocated_units_share_their_host_ranks_by_stage() -> None:
    specs = {
        "vision": ParallelSpec(replicas=2, pp=2, cuts=(0, 4)),
        "audio": ParallelSpec(),
        "language": ParallelSpec(replicas=2, pp=2),
    }
    plan = plan_from_specs(LAYERS, specs, FEEDS, {"vision": "language"})
    assert [p.stage.ranks for p in plan.stages()] == [(1,), (2,), (3,), (4,), (0,), (1,), (2,), (3,), (4,)]
    assert [(s.first, s.end) for s in plan.unit("vision").replicas[1].stages] == [(0, 4), (4, 5)]


def test_chunks_cycle_over_replica_ranks_and_guests_stay_there() -> None:
    specs = {
        "vision": ParallelSpec(replicas=2),
        "audio": ParallelSpec(pp=2, chunks=2),
        "language": ParallelSpec(replicas=2, pp=2, chunks=3, tp=2, cuts=(0, 1, 2, 4, 6, 8)),
    }
    plan = plan_from_specs(LAYERS, specs, FEEDS)
    chains = {u.name: [[s.ranks for s in replica.stages] for replica in u.replicas] for u in plan.units}
    assert chains["audio"] == [[(2,), (3,), (2,), (3,)]]
    assert chains["language"] == [[(4, 5), (6, 7)] * 3, [(8, 9), (10, 11)] * 3]
    assert [(s.first, s.end) for s in plan.unit("audio").replicas[0].stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]

    specs["vision"] = ParallelSpec(replicas=2, pp=2, chunks=2, tp=2)
    plan = plan_from_specs(LAYERS, specs, FEEDS, {"vision": "language"})
    vision, language = plan.unit("vision"), plan.unit("language")
    for guest, host in zip(vision.replicas, language.replicas):
        assert [stage.ranks for stage in guest.stages] == [stage.ranks for stage in host.stages[:4]]


def test_every_mistake_is_listed_at_once() -> None:
    specs = {
        "vision": ParallelSpec(pp=2, cuts=(0, 7)),
        "sound": ParallelSpec(),
        "language": ParallelSpec(pp=4, chunks=3, tp=0),
    }
    with pytest.raises(UserError) as error:
        plan_from_specs(LAYERS, specs, FEEDS, {"vision": "audio", "audio": "language"})
    text = str(error.value)
    for part in (
        "'sound' is no unit of this model",
        "unit 'audio' has no spec",
        "vision: cuts [0, 7] must be 2 rising layer numbers from 0 to below 5",
        "language: tp is 0",
        "language: pp is 4 with 3 chunks, but the unit has only 10 layers",
        "vision: it cannot be colocated with 'audio', which is colocated itself",
    ):
        assert part in text


@pytest.mark.parametrize("key", ["first", "end", "tp", "ranks", "ep"])
@pytest.mark.parametrize("value", ["x", None, True, 1.5, -1, 10**30, [0]])
def test_a_plan_whose_numbers_are_none_is_no_plan(key: str, value: Any) -> None:
    document = json.loads(plan_from_specs({"llm": 2}, {"llm": ParallelSpec()}, {"llm": ()}).to_json())
    document["units"][0]["replicas"][0]["stages"][0][key] = [value] if key == "ranks" else value
    with pytest.raises(ValueError, match=rf"not a Dilatant plan: .*stages\[0\]\.{key}"):
        Plan.from_json(json.dumps(document))


def test_a_plan_nested_too_deep_is_no_plan() -> None:
    with pytest.raises(ValueError, match="not a Dilatant plan"):
        Plan.from_json("[" * 100_000)
