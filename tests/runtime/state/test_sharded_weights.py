"""Sharded gradients and weights: any step gives what one process gives, and what cannot be sharded is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases.drawn_steps import cases
from cases.engine_case import Case, build_model
from cases.generic_steps import GenericCase, generic_cases, opened
from dilatant.comm.comm import Comm
from dilatant.config.memory_modes import Shard
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import MAGNITUDE, adapted_key
from dilatant.models.core.freeze import thaw
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.plan.buckets import BucketShard
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.sharding import shard_by_unit, shard_problems
from dilatant.runtime.build import boxes_to_read
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.state.shared_weights import StateLayout
from harness.checked_generic_steps import check_generic_case
from harness.checked_steps import COMMON, check_case
from harness.worker_pool import Worker, WorkerPool

HOW: Any = st.sampled_from(["weights", "weights_by_step", "gradients"])


def shards(case: Case, how: Shard) -> dict[str, Shard]:
    """Return what is sharded if everything is that can be; nothing of a unit whose weights are all tied to others."""
    trains = {n: any(flags) for n, flags in trainable_layers(build_model(case, "meta").units).items()}
    return shard_by_unit(case.plan, trains, how)


def check(workers: WorkerPool, case: Case, how: Shard, nodes: int) -> None:
    shard = shards(case, how)
    assume(shard)
    # Ranks are dealt out in turn: every node must hold a weight equally often, and more than once.
    is_even = all(
        len({holders.count(node) for node in range(nodes)}) == 1 and holders.count(0) > 1
        for unit in case.plan.units
        if unit.name in shard
        for stages in zip(*(replica.stages for replica in unit.replicas), strict=True)
        for part in range(stages[0].tp)
        for holders in [[rank % nodes for stage in stages for rank in stage.ranks[part :: stage.tp]]]
    )
    check_case(workers, case, "node" if is_even else "all", nodes, shard=shard)


@settings(max_examples=2, **COMMON)
@given(case=cases(most_ranks=3, alike=True), how=HOW, nodes=st.sampled_from([1, 2]))
def test_any_sharded_step_matches_one_process(workers: WorkerPool, case: Case, how: Shard, nodes: int) -> None:
    check(workers, case, how, nodes)


@pytest.mark.slow
@settings(max_examples=10, derandomize=True, **COMMON)  # a part of two numbers may exceed a bound on their norm
@given(case=cases(dtype=torch.bfloat16, most_ranks=4, alike=True), how=HOW, nodes=st.sampled_from([1, 2]))
def test_sharded_steps_in_bf16_match_one_process(workers: WorkerPool, case: Case, how: Shard, nodes: int) -> None:
    check(workers, case, how, nodes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=100, **COMMON)
@given(case=cases(alike=True), how=HOW, nodes=st.sampled_from([1, 2]))
def test_a_hundred_sharded_steps_match_one_process(workers: WorkerPool, case: Case, how: Shard, nodes: int) -> None:
    check(workers, case, how, nodes)


@pytest.mark.slow
@settings(max_examples=6, **COMMON)
@given(case=generic_cases(["deepseek_vl"], 4, torch.float32, lora=True, alike=True), how=HOW, dora=st.booleans())
def test_sharded_steps_of_adapters_match_peft(workers: WorkerPool, case: GenericCase, how: Shard, dora: bool) -> None:
    case = replace(case, dora=dora)
    trains = {name: any(flags) for name, flags in trainable_layers(opened(case, "meta").units).items()}
    shard = shard_by_unit(case.plan, trains, how)
    assume(shard)
    check_generic_case(workers, case, "all", 1, shard)


def _gathered(worker: Worker) -> dict[str, set[str]]:
    """Return kind of action → the first weight of each bucket that it gathers, where only the last block trains."""
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = MultimodalModel({}, {"model_type": "llama", "num_hidden_layers": 3, **shape}, seed=0, device="meta")
    use_row_attention(model)
    model.freeze(("language",))
    thaw(model.units, ["language.layers.2"])
    comm = Comm(worker.store, worker.rank, worker.size)
    both = UnitPlan("language", tuple(Replica((Stage(0, 5, (rank,)),)) for rank in (0, 1)))
    runtime = Runtime(model.train(), Plan((both,)), comm, layout=StateLayout("all", shard={"language": "weights"}))
    (stage,), found = runtime._shared.stages.values(), dict[str, set[str]]()
    for owned in (runtime.owned, runtime.fixed):

        def gather(share: BucketShard, purpose: str, begin: Any = owned.start_gather) -> Any:
            found.setdefault(str(stage._kind), set()).add(share.bucket.names[0].rpartition("layers.")[2][0])
            return begin(share, purpose)

        cast(Any, owned).start_gather = gather
    ids = np.arange(3, 15)
    samples = [EncodedSample(f"{n}", ids, ids.copy(), media={}, sizes={"language": len(ids)}) for n in range(2)]
    runtime.execute(samples)
    runtime.close()
    comm.close()
    return found


def test_blocks_without_a_backward_are_gathered_in_forwards_only(workers: WorkerPool) -> None:
    for found in workers.run(_gathered, 2):
        assert found["F"] - found["B"] == {"0", "1"}
        assert found["B"] > {"2"}  # and what is outside blocks


@pytest.mark.parametrize("dora", [False, True])
def test_ranks_read_half_of_the_frozen_weights_that_two_share(dora: bool) -> None:
    """At most a row more of each, and every row is read. DoRA's magnitudes need whole weights, since they are norms."""
    model = opened(GenericCase("deepseek_vl", (0,), lora=True, dora=dora), "meta")
    layout = StateLayout("all", shard=dict.fromkeys(model.units, "weights"))
    units = {name: len(unit.layers) for name, unit in model.units.items()}
    replicas = {name: tuple(Replica((Stage(0, end, (rank,)),)) for rank in (0, 1)) for name, end in units.items()}
    both = Plan(tuple(UnitPlan(name, replicas[name], model.graph.feeds[name]) for name in units))
    ranks = [cast(Comm, SimpleNamespace(rank=rank, size=2)) for rank in (0, 1)]
    one, other = (boxes_to_read(model, both, rank, layout, torch.bfloat16) for rank in ranks)
    read = total = rows = 0
    for unit in model.units.values():
        adapted = {adapted_key(name) for name, _ in unit.named_logical_parameters() if MAGNITUDE in name}
        for name, weight in unit.named_logical_parameters():
            if name not in unit.frozen or name in adapted:
                assert one[name].is_whole
                assert other[name].is_whole
                continue
            found = [range(*box.intervals[0][0]) for box in (one[name], other[name])]
            assert {*itertools.chain(*found)} == {*range(len(weight))}, name
            read, total = read + one[name].size, total + weight.numel()
            rows += weight[0].numel()
    assert read <= total / 2 + rows


def plan(*replicas: tuple[int, ...], cp: int = 1) -> Plan:
    """Return a plan of one unit of four layers; each replica's stages begin at its numbers."""
    made, rank = [], 0
    for cuts in replicas:
        stages = []
        for first, end in zip(cuts, (*cuts[1:], 4)):
            stages.append(Stage(first, end, tuple(range(rank, rank + cp)), cp=cp))
            rank += cp
        made.append(Replica(tuple(stages)))
    return Plan((UnitPlan("language", tuple(made)),))


@pytest.mark.parametrize(
    ("layout", "trains", "zero", "shard", "says"),
    [
        (plan((0,), (0,)), True, "none", {"language": "weights"}, "train.zero is none"),
        (plan((0,)), True, "node", {"language": "weights"}, "held by one rank; give it replicas or cp"),
        (plan((0, 2), (0, 1)), True, "all", {"language": "gradients"}, "differ in cuts or degrees"),
        (
            plan((0,), (0,)),
            False,
            "all",
            {"language": "gradients"},
            "nothing of language trains, so it has no gradients",
        ),
        (plan((0,), (0,)), True, "all", {"sound": "weights"}, "no unit 'sound'"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_one_line(
    layout: Plan, trains: bool, zero: Any, shard: dict[str, Shard], says: str
) -> None:
    (problem,) = shard_problems(layout, {"language": trains}, zero, shard)
    assert problem.startswith("train.shard")
    assert says in problem


def test_a_word_means_all_units_that_can_be_sharded() -> None:
    assert shard_by_unit(plan((0,), (0,)), {"language": True}, "weights") == {"language": "weights"}
    assert shard_by_unit(plan((0,), cp=2), {"language": True}, "gradients") == {"language": "gradients"}
    assert shard_by_unit(plan((0,)), {"language": True}, "weights") == {}
    assert shard_by_unit(plan((0,), (0,)), {"language": False}, "weights") == {"language": "weights"}
    assert shard_by_unit(plan((0,), (0,)), {"language": False}, "gradients") == {}
    (problem,) = shard_problems(plan((0,)), {"language": True}, "node", {}, "weights")
    assert "held by one rank" in problem
    assert shard_problems(plan((0,)), {"language": True}, "node", {}, "none") == []
