"""A plan's layout as flags of other frameworks."""

from __future__ import annotations

import itertools

import pytest

from dilatant.plan.framework_flags import framework_flags
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan


def pipelines(recompute=()) -> Plan:
    """Two replicas of four chunks on two groups of two tensor-parallel ranks, and an encoder on the first rank. Each
    chunk has two of eight blocks, the first also the embedding, the last the head."""
    bounds = itertools.pairwise((0, 3, 5, 7, 10))
    chunks = [(number % 2, span) for number, span in enumerate(bounds)]
    replicas = tuple(
        Replica(tuple(Stage(*span, (first + 2 * group, first + 2 * group + 1), tp=2) for group, span in chunks))
        for first in (0, 4)
    )
    vision = UnitPlan("vision", (Replica((Stage(0, 3, (0,)),)),))
    return Plan((vision, UnitPlan("language", replicas, recompute=recompute)))


def test_megatron_gets_its_degrees_and_hears_what_it_cannot_run():
    found = framework_flags(pipelines(("block",) * 9 + ("none",)), "megatron", "language", 32, 8, "all")
    assert found.flags == {
        "--tensor-model-parallel-size": 2,
        "--pipeline-model-parallel-size": 2,
        "--context-parallel-size": 1,
        "--expert-model-parallel-size": 1,
        "--micro-batch-size": 2,
        "--global-batch-size": 32,
        "--num-virtual-stages-per-pipeline-rank": 2,
        "--sequence-parallel": "",
        "--use-distributed-optimizer": "",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
    }
    assert "--sequence-parallel --use" in found.command()
    assert [lost.split(":")[0] for lost in found.lost] == [
        "stages, replicas or degrees of their own",
        "recomputation of some blocks only",
    ]


@pytest.mark.parametrize(
    ("framework", "flag", "value"),
    [
        ("ms-swift", "--sequence_parallel", "true"),
        ("ms-swift", "--micro_batch_size", 2),
        ("megatron-bridge", "model.tensor_model_parallel_size", 2),
        ("megatron-bridge", "train.micro_batch_size", 2),
        ("megatron-bridge", "model.sequence_parallel", "true"),
        ("automodel", "--distributed.pp_size", 2),
        ("automodel", "--step_scheduler.local_batch_size", 16),
        ("veomni", "--train.accelerator.dp_replicate_size", 8),
        ("torchtitan", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
        ("torchtitan", "--parallelism.data_parallel_replicate_degree", 2),
        ("torchtitan", "--training.local_batch_size", 16),
        ("torchtitan", "--training.seq_len", 4096),
        ("megatron", "--seq-length", 4096),
        ("megatron-bridge", "model.seq_length", 4096),
        ("ms-swift", "--max_length", 4096),
        ("veomni", "--data.max_seq_len", 4096),
    ],
)
def test_flags_are_the_frameworks_own(framework, flag, value):
    assert framework_flags(pipelines(), framework, "language", 32, 8, length=4096).flags[flag] == value


@pytest.mark.parametrize(("zero", "degrees"), [("none", (1, 2)), ("all", (2, 1))])
def test_two_replicas_hold_copies_or_shards(zero, degrees):
    flags = framework_flags(pipelines(), "torchtitan", "language", 32, 8, zero).flags
    kinds = ("shard", "replicate")
    assert tuple(flags[f"--parallelism.data_parallel_{kind}_degree"] for kind in kinds) == degrees


def test_overrides_are_joined_by_equals_signs():
    found = framework_flags(pipelines(), "megatron-bridge", "language", 32, 8, "all")
    assert "model.pipeline_model_parallel_size=2" in found.command().split()
    assert "ddp.use_distributed_optimizer=true" in found.command().split()


def test_veomni_hears_that_it_has_no_pipelines():
    found = framework_flags(pipelines(), "veomni", "language", 32, 8)
    assert any("pipelines" in lost for lost in found.lost)


def test_torchtitan_hears_where_recomputation_is_chosen():
    found = framework_flags(pipelines(("block",) * 10), "torchtitan", "language", 32, 8)
    assert any("activation_checkpoint" in lost for lost in found.lost)


def test_replicas_that_divide_experts_are_counted():
    """Two replicas of two groups, whose encoder divides items in the first stage, have the batches of four replicas."""
    ranks = ((0, 1), (2, 3))
    vision = UnitPlan("vision", tuple(Replica((Stage(0, 3, own, cp=2),)) for own in ranks))
    language = UnitPlan("language", tuple(Replica((Stage(0, 10, own, ep=2),)) for own in ranks))
    found = framework_flags(Plan((vision, language)), "megatron", "language", 32, 4)
    asked = ("--expert-model-parallel-size", "--context-parallel-size", "--micro-batch-size")
    assert [found.flags[flag] for flag in asked] == [2, 1, 2]
    assert found.lost == ()
