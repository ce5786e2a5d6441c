"""Sharded weights (FSDP) are planned where whole weights leave too little memory for activations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.planning.planned_project import text_config
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.planned_run import training_plan
from dilatant.planning.planning import PlanningProblem, plan_run, planning_problem, scorer_of
from dilatant.planning.sharded_weights import NOTABLE, with_best_memory

GPUS, BATCH = 4, 4
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA = {"model_type": "llama", "num_hidden_layers": 6, **SIZES}


def few_long_rows(folder: Path, gib: float, **train: Any) -> PlanningProblem:
    """One row of 4,000 tokens for each of four GPUs, of which a rank's whole state takes a third of 2 GiB."""
    cluster = {"hardware": "H100", "gpus_per_node": GPUS, "memory_gib": gib}
    asked = text_config(folder, LLAMA, BATCH, (3000, 900), cluster=cluster, train=train)
    return planning_problem(asked, assemble_samples(asked))


def all_layouts(problem: PlanningProblem) -> list[tuple[Plan, int]]:
    """All plans of equal pipelines on one to four GPUs, in all cuts and with all blocks recomputed in one way, with
    their numbers of microbatches."""
    (unit,) = problem.model.spec.units
    blocks, count, found = len(unit.layers) - 2, len(unit.layers), []
    for replicas, tp, pp in itertools.product((1, 2, 4), repeat=3):
        if replicas * tp * pp > GPUS:
            continue
        for inner in itertools.combinations(range(1, count), pp - 1):
            spec = ParallelSpec(replicas=replicas, tp=tp, pp=pp, cuts=(0, *inner))
            (plain,) = plan_from_specs({unit.name: count}, {unit.name: spec}, {unit.name: ()}).units
            for level in ((), ("block_keep_attention",), ("block",)):
                again = ("none", *level * blocks, "none") if level else ()
                plan = Plan((replace(plain, recompute=again),))
                found += [(plan, BATCH // (replicas * size)) for size in (1, 2) if BATCH % (replicas * size) == 0]
    return found


def fastest_of(problem: PlanningProblem, layouts: list[tuple[Plan, int]]) -> float:
    """Seconds of the fastest layout that fits, over who shares optimizer state."""
    best = float("inf")
    shards = dict(problem.target.rules.shard)
    for zero in ("node",) if shards else ("none", "node"):
        score = scorer_of(problem.sharing(zero))
        for plan, count in layouts:
            found = score(plan, count)
            if problem.target.cluster.overflow(plan.ranks, found.peak_bytes) <= 0.0:
                best = min(best, found.seconds)
    return best


def test_few_long_rows_get_sharded_weights(tmp_path: Path) -> None:
    """Whole weights need a pipeline, whose bubbles take longer than gathering weights."""
    problem = few_long_rows(tmp_path, 2.0)
    searched = plan_run(problem)
    found = with_best_memory(searched)
    winner = found.result.winner
    assert len(winner.plan.units[0].replicas) == GPUS
    assert len(searched.result.winner.plan.units[0].replicas) < GPUS
    assert found.result.seconds < (1 - NOTABLE) * searched.result.seconds
    assert training_plan(found.problem, winner).shard == {"language": "weights"}
    assert "train.shard: weights" in found.notes[-1]
    assert not found.result.proven


@pytest.mark.slow
@pytest.mark.parametrize("gib", [1.2, 2.0])
def test_no_layout_beats_the_sharded_plan(tmp_path: Path, gib: float) -> None:
    problem = few_long_rows(tmp_path, gib)
    found = with_best_memory(plan_run(problem)).result.seconds
    layouts = all_layouts(problem)
    assert len(layouts) > 200
    whole, sharded = (fastest_of(each, layouts) for each in (problem, problem.sharing("node", {"": "weights"})))
    assert found <= min(whole, sharded) * (1 + 1e-9)
    assert sharded < whole


@pytest.mark.parametrize(
    ("gib", "train"), [(8.0, {}), (2.0, {"shard": "none"}), (2.0, {"zero": "none"}), (2.0, {"deterministic": True})]
)
def test_whole_weights_stay_where_they_are_as_fast(tmp_path: Path, gib: float, train: dict[str, Any]) -> None:
    """Sharding saves no time where memory is ample, and is not tried where the config forbids it."""
    found = with_best_memory(plan_run(few_long_rows(tmp_path, gib, **train)))
    assert found.problem.target.rules.shard_of("language") == "none"
