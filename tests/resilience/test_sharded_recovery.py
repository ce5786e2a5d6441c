"""With sharded gradients, weights and experts, too, a run continues after losses with the losses of one process."""

from __future__ import annotations

import itertools
import json
import random
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.planning.planned_project import text_config
from cases.tiny_project import tiny_config, write_images
from dilatant.comm.launch import Worker
from dilatant.config import UserError, load_config
from dilatant.plan.errors import PlanError
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan, Replica, Stage, UnitPlan
from dilatant.plan.templates.membership import MembershipPlanner
from dilatant.plan.templates.node_groups import equal_groups, unrecoverable_shards
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.memberships import plan_resiliently
from dilatant.planning.planned_run import training_plan
from dilatant.planning.planning import planning_problem
from dilatant.resilience.partial_step.exchange import inherit_state
from dilatant.resilience.worker.generation_plan import next_plan
from dilatant.training.commit import RunMembership
from dilatant.training.prepare import prepare
from dilatant.training.run import train
from dilatant.training.trainer import Trainer
from harness.faults.chaos import Ended, Fault, losses, run_with_faults
from harness.memberships import planner_like
from harness.refusing_gate import Gate, Refused
from harness.worker_pool import Worker as PooledRank
from harness.worker_pool import WorkerPool

STEPS = 8
TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""


def project(folder: Path, parallel: dict[str, Any] | None = None, devices: int = 2, **keys: Any) -> Path:
    """Write a project for nodes of `devices` ranks, or for one process. keys: others of `train`, or `lora` and
    `language`, of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder, 24)
    lora, language = keys.pop("lora", None), keys.pop("language", {})
    usual = {"steps": STEPS, "global_batch_size": 8, "save_steps": None, "schedule": {"kind": "constant"}}
    tree = tiny_config(**{**usual, **keys})
    tree["model"]["language_model"]["config"] |= {
        "num_hidden_layers": 4, "tie_word_embeddings": False, **language
    }  # fmt: skip
    tree["model"] |= {} if lora is None else {"lora": lora}
    if parallel is not None:
        tree["parallel"] = parallel
        tree["resilience"] = {"enabled": True, "ranks_per_node": devices, "lease_seconds": 10.0, "fence_seconds": 60.0}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


def replicas(count: int, pp: int = 1) -> dict[str, Any]:
    units = {"language": {"replicas": count, "pp": pp}}
    return {"units": units, "colocated": {"vision": "language"}, "microbatches": 2}


def of_one_process(folder: Path, **keys: Any) -> list[float]:
    made = project(folder, **keys)
    train(load_config(made / "config.yaml"))
    return losses(made / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return of_one_process(tmp_path_factory.mktemp("alone"))


def require_equal(ended: Ended, alone: list[float], *members: str, tolerance: float = TOLERANCE) -> None:
    assert ended.exit_code == 0, ended.output
    assert ended.losses == pytest.approx(alone, rel=tolerance), ended.events
    ran = [event["step"] for event in ended.events if event["task"] == "run"]
    assert ran == sorted(ran)  # no finished step is lost, so no checkpoint was read
    assert ended.events[-1]["members"] == [*members]


def _without_a_node(rank: PooledRank, folder: Path) -> list[float]:
    """Train on two nodes of two ranks; without the first one, whose step 4 nobody applied, the second goes on. Returns
    the losses that a rank saw."""
    config = load_config(folder / "config.yaml")
    prepared, saw = prepare(config), list[float]()

    def trainer(planned: TrainingPlan, number: int, gate: Gate, before: Trainer | None = None) -> Trainer:
        size = len(planned.plan.ranks)
        here = Worker(number, size, number, torch.device("cpu"), rank.store)
        model = prepared.model if before is None else before.runtime.model
        generation, nodes = 1 + (before is not None), tuple(each // 2 for each in range(size))
        membership = RunMembership(generation, nodes, before is not None, gate)
        return Trainer(config, prepared.samples, model, planned, here, folder / "run", membership, before)

    def train_in(one: Trainer) -> None:
        with suppress(Refused), closing(one):
            one.run(lambda metrics: saw.append(metrics.loss))

    planned = prepared.planned
    assert planned.chain is not None
    first = trainer(planned, rank.rank, Gate(refuses=3))
    train_in(first)
    if rank.rank >= 2:
        document = {"plan": planned.to_json(), "members": ["a", "b"], "workers": [2, 2]}
        left = next_plan(MembershipPlanner(planned.chain), planned, json.dumps(document), ["b"], [2])
        second = trainer(left, rank.rank - 2, Gate(refuses=99), first)
        assert second.state.stays
        assert inherit_state(second, first, folder / "run") == 0
        second.runtime.clear_gradients()
        train_in(second)
    return saw


def test_ranks_go_on_with_the_shards_they_have(tmp_path: Path, workers: WorkerPool, alone: list[float]) -> None:
    found = workers.run(_without_a_node, 4, project(tmp_path, replicas(4), shard="weights"))
    assert [len(losses) for losses in found] == [3, 3, STEPS, STEPS]
    for saw in found:
        assert saw == pytest.approx(alone[: len(saw)], rel=TOLERANCE)


@pytest.mark.slow
def test_a_lost_node_leaves_all_shards_to_another(tmp_path: Path, alone: list[float]) -> None:
    ended = run_with_faults(project(tmp_path, replicas(4), shard="weights"), Fault(4, "agent:0"))
    require_equal(ended, alone, "node1")
    record = json.loads((tmp_path / "run/resilience/rebuilds.jsonl").read_text().splitlines()[-1])
    assert (record["stays"], record["bytes_to_first_rank"]) == (True, 0)


MIXTURE = {"model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(4, "agent:0"), Fault(4, "worker:1", share=0.5)], ids=["agent", "worker"])
def test_experts_of_a_lost_node_are_those_of_another(tmp_path: Path, fault: Fault) -> None:
    """The two replicas of a node divide experts; those of the other node have them all."""
    own = replicas(4)
    own["units"]["language"]["ep"] = 2
    alone = of_one_process(tmp_path / "alone", language=MIXTURE)
    ended = run_with_faults(project(tmp_path, own, language=MIXTURE), fault)
    require_equal(ended, alone, "node1" if fault.victim == "agent:0" else "node0")


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["weights", "gradients"])
def test_a_checkpoint_after_a_loss_continues_unsharded(tmp_path: Path, alone: list[float], shard: str) -> None:
    made = project(tmp_path, replicas(4), shard=shard)
    require_equal(run_with_faults(made, Fault(4, "worker:1", share=0.5)), alone, "node0")
    changes = "parallel=single", "resilience.enabled=false", "train.shard=null", "train.resume=auto", "train.steps=12"
    train(load_config(made / "config.yaml", changes))
    longer = of_one_process(tmp_path / "longer", steps=12)
    assert losses(made / "run") == pytest.approx(longer, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"shard": "weights"},
        {"shard": {"language": "gradients"}},
        {"shard": {"language": "weights"}, "lora": {"r": 4, "train": ["vision.projector"]}},
        {"shard": "weights", "precision": "bf16"},
    ],
    ids=str,
)
def test_pipelines_inside_nodes_survive_with_adapters_too(tmp_path: Path, keys: dict[str, Any]) -> None:
    alone = of_one_process(tmp_path / "alone", **{name: each for name, each in keys.items() if name != "shard"})
    ended = run_with_faults(project(tmp_path / "run", replicas(4, pp=2), 4, **keys), Fault(4, "worker:1"))
    # In bf16, rows are packed and so rounded otherwise on fewer ranks: 2^-8 for each number.
    require_equal(ended, alone, "node0", tolerance=1e-2 if "precision" in keys else TOLERANCE)


@pytest.mark.slow
def test_sharded_run_survives_a_loss_during_recovery(tmp_path: Path, alone: list[float]) -> None:
    """Of three nodes and the coordinator one is left; a lost node is restarted and holds shards again."""
    made = project(tmp_path, {**replicas(6), "microbatches": 1}, shard="weights")
    ended = run_with_faults(made, Fault(3, "agent:0"), Fault(5, "worker:1"), Fault(5, "coordinator", later=0.1))
    require_equal(ended, alone, "node2")


@pytest.mark.slow
def test_a_node_that_comes_back_holds_shards_again(tmp_path: Path) -> None:
    made = project(tmp_path / "run", replicas(4), shard="weights", steps=100)
    alone = of_one_process(tmp_path / "alone", steps=100)
    ended = run_with_faults(made, Fault(4, "worker:1"), arguments=("--set", "resilience.restarts=1"))
    assert ended.exit_code == 0, ended.output
    # Differences of sums grow with the steps.
    assert ended.losses == pytest.approx(alone, rel=1e-3)
    assert any("node1." in event["reason"] and "joins" in event["reason"] for event in ended.events), ended.events
    plan = json.loads((tmp_path / "run/run/plan.json").read_text())
    assert [len(unit["replicas"]) for unit in plan["units"]] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0,), (0, 3)])
def test_two_nodes_that_lost_their_partners_become_a_group(
    tmp_path: Path, alone: list[float], lost: tuple[int, ...]
) -> None:
    """Pipelines over pairs of nodes: one pair loses its first half, and at the same time the other its second."""
    made = project(tmp_path, replicas(4, pp=2))
    planned = prepare(load_config(made / "config.yaml")).planned
    crossed = {0: 0, 1: 2, 2: 1, 3: 3, 4: 4, 5: 6, 6: 5, 7: 7}
    units = [
        replace(unit, replicas=tuple(one.renamed(crossed) for one in unit.replicas)) for unit in planned.plan.units
    ]
    (made / "plan.json").write_text(replace(planned, plan=Plan(tuple(units)), chain=None).to_json())
    project(tmp_path, {"plan": "plan.json"}, shard="weights")
    ended = run_with_faults(made, *(Fault(3, f"agent:{node}") for node in lost))
    require_equal(ended, alone, *(f"node{node}" for node in range(4) if node not in lost))
    idle = "idle until the next change: node1, since weights are sharded within groups of nodes"
    assert (idle in ended.output) == (len(lost) == 1)


def specs(**language: int) -> Plan:
    return plan_from_specs({"language": 4}, {"language": ParallelSpec(**language)}, {"language": ()})


@pytest.mark.parametrize(
    ("plan", "zero", "devices", "says"),
    [
        (specs(replicas=4), "all", 2, "train.zero: all spreads a weight's parts over nodes"),
        (specs(replicas=4), "node", 1, "of the 1 (resilience.ranks_per_node) ranks of a node no two hold the same"),
        (specs(replicas=4, pp=2), "node", 2, "no two hold the same weights of language"),
        (specs(replicas=3), "node", 2, "or not equally many; lay out several replicas, or cp, inside each node"),
        (specs(replicas=2), "node", 2, "without a lost node of 2 (resilience.ranks_per_node) ranks the others"),
        (specs(replicas=2, tp=2, cp=2), "node", 4, ""),
        (specs(replicas=2, cp=4), "node", 2, ""),
        (specs(cp=4), "node", 2, "the others hold no whole replica of language; give other nodes replicas"),
    ],
)
def test_shards_that_a_loss_would_take_are_refused(plan: Plan, zero: Any, devices: int, says: str) -> None:
    problem = unrecoverable_shards(plan, {"language": "weights"}, zero, devices)
    assert says in problem
    assert bool(problem) == bool(says)
    assert unrecoverable_shards(plan, {}, zero, devices) == ""


def test_a_layout_that_loses_shards_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config = load_config(project(tmp_path, replicas(2), shard="weights") / "config.yaml")
    with pytest.raises(UserError, match=r"^train.shard and resilience.enabled: without a lost node of 2 .*$"):
        prepare(config)


def group(size: int, devices: int) -> Plan:
    """Pipelines of `size` stages over as many nodes, on each of which all ranks hold the same stage."""
    chains = [Replica(tuple(Stage(k, k + 1, (k * devices + rank,)) for k in range(size))) for rank in range(devices)]
    return Plan((UnitPlan("language", tuple(chains)),))


def test_a_searched_plan_with_shards_survives_a_loss(tmp_path: Path) -> None:
    """Templates, whose cuts differ, are no choice then, nor are replicas of which a node has only one."""
    llama = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    cluster = {"hardware": "H100", "nodes": 2, "gpus_per_node": 2}
    sections = {"cluster": cluster, "train": {"shard": "weights"}, "resilience": {"enabled": True}}
    asked = text_config(tmp_path, llama, 8, (300, 90), **sections)
    run = plan_resiliently(planning_problem(asked, assemble_samples(asked)))
    planned = training_plan(run.problem, run.result.winner, run.chain)
    assert planned.chain is None
    assert planned.shard == {"language": "weights"}
    assert unrecoverable_shards(planned.plan, planned.shard, planned.zero, 2) == ""


def test_a_sharded_run_without_memory_has_no_other_plan() -> None:
    plan = specs(replicas=4)
    planner = planner_like(plan, devices=2, capacity=10.0)
    initial = TrainingPlan(plan, 4, "eager", "balanced", chain=planner.costs, shard={"language": "weights"})
    members, workers = ["n0", "n1"], [2, 2]
    assert next_plan(planner, initial, None, members, workers).plan == plan
    with pytest.raises(PlanError, match="a rank ran out of memory"):
        next_plan(planner.below(plan, 0), initial, None, members, workers)


def chains(plan: Plan, members: list[str], devices: int) -> list[list[tuple[str, int]]]:
    """The seats of each replica, stage by stage."""
    replicas = plan.units[0].replicas
    ranks = [[stage.ranks[0] for stage in replica.stages] for replica in replicas]
    return [[(members[rank // devices], rank % devices) for rank in own] for own in ranks]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_as_many_groups_train_as_the_nodes_can_form(seed: int) -> None:
    """For random groups and histories: every group is like the first, one without a loss stays, and nodes whose
    partners were lost keep their stage where they can."""
    draw = random.Random(seed)
    size, count, devices = draw.choice((1, 2, 3)), draw.randint(1, 4), draw.choice((2, 4))
    pattern = group(size, devices)
    parts = [pattern.shifted(number * size * devices).units[0].replicas for number in range(count)]
    plan = Plan((replace(pattern.units[0], replicas=tuple(itertools.chain(*parts))),))
    initial = TrainingPlan(plan, 4, "eager", "balanced", chain=planner_like(plan, devices=devices).costs)
    initial = replace(initial, shard={"language": "weights"})
    assert equal_groups(plan, devices) == (pattern, count)
    members, following = [f"n{n}" for n in range(size * count)], itertools.count(size * count)
    before = initial
    for _ in range(draw.randint(1, 6)):
        document = {"plan": before.to_json(), "members": members, "workers": [devices] * len(members)}
        was = chains(before.plan, members, devices)
        lost = set(draw.sample(members, draw.randint(0, min(2, len(members) - 1))))
        joined = [f"n{next(following)}" for _ in range(draw.choice((0, 0, 1, 2)))]
        members = [*(node for node in members if node not in lost), *joined]
        assert initial.chain is not None
        planner, workers = MembershipPlanner(initial.chain), [devices] * len(members)
        whole = [own for own in was if lost.isdisjoint(node for node, _ in own)]
        assert len(whole) % devices == 0
        loose = len(members) - size * len(whole) // devices
        groups = len(whole) // devices + loose // size
        if not groups:
            with pytest.raises(PlanError, match="train in groups of"):
                next_plan(planner, initial, json.dumps(document), members, workers)
            return
        before = next_plan(planner, initial, json.dumps(document), members, workers)
        now = chains(before.plan, members, devices)
        assert len(now) == groups * devices
        assert before.num_microbatches * groups >= 4 * count
        assert before.shard == initial.shard
        assert all(own in now for own in whole)
        of_node: dict[str, set[tuple[str, ...]]] = {}
        for own in now:
            for node, index in own:
                assert index == own[0][1]
                of_node.setdefault(node, set()).add(tuple(name for name, _ in own))
        assert all(len(partners) == 1 for partners in of_node.values())
        stage = {node: own.index((node, k)) for own in was for node, k in own}
        left = [node for node in members if node in stage and not any((node, 0) in own for own in whole)]
        if len({stage[node] for node in left}) == len(left) and len(left) <= size:
            assert all(own.index((node, 0)) == stage[node] for own in now for node in left if (node, 0) in own)
