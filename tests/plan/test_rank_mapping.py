"""Placing chains on ranks: tensor groups inside nodes, colocated units on the same ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import cluster
from dilatant.config.degrees import Degrees
from dilatant.plan import PlanError
from dilatant.plan.rank_mapping import Chain, RankOrder, map_ranks

LAYERS = {"vision": 4, "language": 6}
FEEDS = {"vision": ("language",)}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 4), (4, 2)]),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)]),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_powers_of_two_pack_into_nodes_without_a_gap(replicas, vision, language, before, after):
    chains = [
        Chain(replicas, Degrees(*vision), {"vision": tuple(range(before))}),
        Chain(replicas, Degrees(*language), {"language": tuple(range(after))}),
    ]
    needed = sum(chain.gpus for chain in chains)
    plan = map_ranks(chains, LAYERS, FEEDS, cluster(-(-needed // 4), 4))
    assert plan.ranks == tuple(range(needed))
    for placed in plan.stages():
        stage = placed.stage
        assert len(stage.ranks) == stage.tp * stage.cp
        for group in range(0, len(stage.ranks), stage.tp):
            assert len({rank // 4 for rank in stage.ranks[group : group + stage.tp]}) == 1


def test_units_of_one_chain_share_the_ranks_of_their_stages():
    chain = Chain(2, Degrees(2, 1), {"vision": (0,), "language": (0, 2)})
    plan = map_ranks([chain], LAYERS, FEEDS, cluster(1, 8))
    for replica in range(2):
        vision = plan.unit("vision").replicas[replica].stages
        language = plan.unit("language").replicas[replica].stages
        assert vision[0].ranks == language[0].ranks
        assert (vision[0].first, vision[0].end) == (0, 4)
        assert [(stage.first, stage.end) for stage in language] == [(0, 2), (2, 6)]


def test_the_stages_of_a_pipeline_lie_side_by_side():
    chains = [Chain(2, Degrees(1, 1), {"vision": (0,)}), Chain(2, Degrees(1, 1), {"language": (0, 3)})]
    plan = map_ranks(chains, LAYERS, FEEDS, cluster(2, 3))
    for replica in range(2):
        ranks = [*plan.unit("vision").replicas[replica].stages, *plan.unit("language").replicas[replica].stages]
        assert {stage.ranks[0] // 3 for stage in ranks} == {replica}


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(PlanError, match="there are 4"):
        map_ranks(
            [Chain(1, Degrees(2, 1), {"vision": (0,)}), Chain(1, Degrees(2, 1), {"language": (0, 3)})],
            LAYERS,
            FEEDS,
            cluster(1, 4),
        )
    with pytest.raises(PlanError, match="cannot stay inside nodes of 4"):
        map_ranks([Chain(1, Degrees(3, 3), {"vision": (0,), "language": (0,)})], LAYERS, FEEDS, cluster(3, 4))


def test_fewer_replicas_are_spread_over_the_pipelines():
    chains = [Chain(2, Degrees(1, 1), {"vision": (0,)}), Chain(4, Degrees(1, 1), {"language": (0,)})]
    plan = map_ranks(chains, LAYERS, FEEDS, cluster(2, 3))
    # Each encoder in the node of the two language replicas that it serves.
    assert [replica.stages[0].ranks for replica in plan.unit("vision").replicas] == [(0,), (3,)]


def test_a_chain_of_several_chunks_goes_round_its_groups():
    chain = Chain(2, Degrees(2, 1), {"language": (0, 1, 3, 5)}, chunks=2)
    plan = map_ranks([chain], {"language": 6}, {}, cluster(1, 8))
    assert chain.gpus == 8
    for number, replica in enumerate(plan.unit("language").replicas):
        first, second = (4 * number, 4 * number + 1), (4 * number + 2, 4 * number + 3)
        assert [stage.ranks for stage in replica.stages] == [first, second, first, second]
        assert [(stage.first, stage.end) for stage in replica.stages] == [(0, 1), (1, 3), (3, 5), (5, 6)]


def test_rank_orders_place_the_named_ranks_side_by_side():
    """Two pipelines: an encoder on one device each, and a language model on two stages of two."""
    chains = [Chain(2, Degrees(1, 1), {"vision": (0,)}), Chain(2, Degrees(2, 1), {"language": (0, 3)})]
    machine = cluster(3, 5)
    placed = {
        order: {
            (entry.unit, entry.replica, entry.position): entry.stage.ranks
            for entry in map_ranks(chains, LAYERS, FEEDS, machine, order).stages()
        }
        for order in RankOrder
    }
    near = placed[RankOrder.PIPELINES]
    assert [near["vision", 0, 0], near["language", 0, 0], near["language", 0, 1]] == [(0,), (1, 2), (3, 4)]
    assert [near["vision", 1, 0], near["language", 1, 0], near["language", 1, 1]] == [(5,), (6, 7), (8, 9)]
    stages = placed[RankOrder.STAGES]
    assert [stages["language", 0, 0], stages["language", 0, 1]] == [(0, 1), (2, 3)]
    replicas = placed[RankOrder.REPLICAS]
    assert [replicas["language", 0, 0], replicas["language", 1, 0]] == [(0, 1), (2, 3)]
