"""Replicas of unlike tensor parallelism: gradients, norms, sharded updates and optimizer state equal one process's."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cases.made_up_holdings import SHAPES, WEIGHTS, plan_of, split
from dilatant.comm.comm import Comm
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, HeldWeight, Holdings, holdings
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.state.shared_weights import StateLayout, bucket_weights
from harness.worker_pool import Worker, WorkerPool

STEPS = 3
NAMES = [f"u.0.{name}" for name in SHAPES]


def drawn(*key: int) -> dict[str, torch.Tensor]:
    """Draw all weights, or all gradients of one step and replica, whole."""
    generator = np.random.default_rng(key)
    return {
        name: torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
        for name, shape in zip(NAMES, SHAPES.values())
    }


def indices(box: Box) -> list[list[int]]:
    return [[i for span in spans for i in range(*span)] for spans in box.intervals]


def taken(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return torch.from_numpy(whole.numpy()[np.ix_(*indices(box))].copy())


def is_used(name: str, step: int) -> bool:
    """Return False for one weight in the first step: no rank uses it."""
    return not (step == 0 and name == "u.0.columns")


def contribution(name: str, held: Holdings, degrees: tuple[int, ...], rank: int, step: int) -> torch.Tensor | None:
    """Return the gradient of `rank` before any sum: the replica's, split into summands if several ranks hold it."""
    if not is_used(name, step):
        return None
    replica = next(i for i, end in enumerate(itertools.accumulate(degrees)) if rank < end)
    members = range(sum(degrees[:replica]), sum(degrees[: replica + 1]))
    gradient = drawn(1, step, replica)[name]
    if name == "u.0.whole":  # the same on all ranks of the stage
        return taken(gradient, held[name].boxes[rank])
    # Each rank that holds a number has another part of its gradient: of two ranks one third and two thirds.
    parts = np.zeros((len(members), *gradient.shape), dtype=np.float32)
    for i, member in enumerate(members):
        parts[(i, *np.ix_(*indices(held[name].boxes[member])))] = i + 1
    share = parts[members.index(rank)] / parts.sum(0)
    return taken(gradient * torch.from_numpy(share), held[name].boxes[rank])


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.01, eps=1e-3)


def _train(worker: Worker, degrees: tuple[int, ...], zero: Any, node_of: list[int]) -> dict[str, Any]:
    comm = Comm(worker.store, worker.rank, worker.size)
    held = holdings(plan_of(*degrees), {"u": ["u.0"]}, WEIGHTS, split)
    start = drawn(0)
    weights = {name: nn.Parameter(taken(start[name], held[name].boxes[comm.rank])) for name in NAMES}
    formats = dict.fromkeys(NAMES, Format("float32", 4))
    layout = StateLayout(zero, node_of, bucket_bytes=100)
    shared = bucket_weights(comm, weights, dict.fromkeys(NAMES, (0,)), held, formats, layout)
    shared.require_equal()
    owned, sync = shared.owned, shared.sync
    optimizer = adamw(owned.parameters.values())
    norms = []
    for step in range(STEPS):
        for _ in range(2):  # the second batch is added to the first
            sync.begin([0])
            sync.entering_last_backward(0)
            for name, weight in weights.items():
                gradient = contribution(name, held, degrees, comm.rank, step)
                if gradient is not None:
                    (weight * gradient).sum().backward()
            sync.left_last_backward(0)
            sync.finish()
        norms.append(owned.squared_norm())
        optimizer.step()
        owned.gather()
        optimizer.zero_grad()
    state = {
        key: optimizer.state[parameter]["exp_avg"]
        for key, parameter in owned.parameters.items()
        if parameter in optimizer.state
    }
    shared.require_equal({"moments": state})
    written = [(box.key, part.clone()) for box, part in owned.primary_parts(state)]
    numbers = sum(moment.numel() for moment in state.values())
    sync.close()
    comm.close()
    return {
        "weights": {name: weight.detach() for name, weight in weights.items()},
        "norms": norms,
        "written": written,
        "numbers": numbers,
        "held": sum(weight.numel() for weight in weights.values()),
    }


def one_process(replicas: int) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], list[float]]:
    weights = {name: nn.Parameter(tensor) for name, tensor in drawn(0).items()}
    optimizer = adamw(weights.values())
    norms = []
    for step in range(STEPS):
        gradients = [drawn(1, step, replica) for replica in range(replicas)]
        for name, weight in weights.items():
            if is_used(name, step):
                weight.grad = 2 * torch.stack([gradient[name] for gradient in gradients]).sum(0)
        norms.append(sum(float(w.grad.double().square().sum()) for w in weights.values() if w.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return weights, {name: optimizer.state[weight]["exp_avg"] for name, weight in weights.items()}, norms


def assembled(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Assemble the tensors that all ranks wrote, and check that each number was written once."""
    written: dict[str, torch.Tensor] = {
        name: torch.full(shape, torch.nan) for name, shape in zip(NAMES, SHAPES.values())
    }
    for found in ranks:
        for key, part in found["written"]:
            name, _, spans = key.partition("@")
            place = tuple(slice(*map(int, span.split(":"))) for span in spans.split(",")) if spans else ...
            assert written[name][place].isnan().all()
            written[name][place] = part
    assert not any(bool(tensor.isnan().any()) for tensor in written.values())
    return written


@pytest.mark.parametrize(
    ("degrees", "zero", "node_of"),
    [
        ((2, 1), "none", [0, 0, 0]),
        pytest.param((2, 1), "all", [0, 0, 0], marks=pytest.mark.slow),
        ((2, 1), "node", [0, 0, 1]),
        pytest.param((1, 2, 4), "none", [0] * 7, marks=pytest.mark.slow),
        pytest.param((1, 2, 4), "all", [0] * 7, marks=pytest.mark.slow),
        ((1, 2, 4), "node", [0, 0, 0, 1, 1, 1, 1]),
        pytest.param((1, 1, 1, 1), "none", [0, 0, 1, 1], marks=pytest.mark.slow),
        ((1, 1, 1, 1), "node", [0, 0, 1, 1]),
        ((1, 1, 1), "node", [0, 0, 1]),
        ((1, 1, 1, 1), "all", [0, 0, 1, 1]),
    ],
)
def test_any_mix_of_replicas_updates_as_one_process_does(
    workers: WorkerPool, degrees: tuple[int, ...], zero: str, node_of: list[int]
) -> None:
    ranks = workers.run(_train, sum(degrees), degrees, zero, node_of)
    weights, moments, norms = one_process(len(degrees))
    held = holdings(plan_of(*degrees), {"u": ["u.0"]}, WEIGHTS, split)
    # Up to 7 summands in another order, each of 2^-24 relative; AdamW keeps relative errors about as they are.
    close = {"rtol": 1e-6, "atol": 1e-6}
    for rank, found in enumerate(ranks):
        for name, weight in found["weights"].items():
            expected = taken(weights[name].detach(), held[name].boxes[rank])
            torch.testing.assert_close(weight, expected, **close)
    for step, norm in enumerate(norms):
        assert sum(found["norms"][step] for found in ranks) == pytest.approx(norm, rel=1e-6)
    written = assembled(ranks)
    for name, moment in moments.items():
        torch.testing.assert_close(written[name], moment, **close)
    if degrees == (1, 1, 1, 1):
        check_shares(ranks, {"none": 4, "node": 2, "all": 1}[zero])


def check_shares(ranks: list[dict[str, Any]], copies: int) -> None:
    """Check that ZeRO shards optimizer state evenly within each sharing group."""
    assert sum(found["numbers"] for found in ranks) == copies * ranks[0]["held"]
    most = max(found["numbers"] for found in ranks)
    assert most <= ranks[0]["held"] * copies / 4 + 18  # one row of each bucket


@pytest.mark.parametrize("node_of", [[0, 0, 0], [0, 1, 2], [0, 0, 1]])
def test_sharing_changes_no_bit_where_sums_have_the_same_order(workers: WorkerPool, node_of: list[int]) -> None:
    """Two ranks have only one order of summation; three ranks on three nodes shard nothing."""
    size = len(set(node_of)) if len(set(node_of)) == 3 else 2
    plain = workers.run(_train, size, (1,) * size, "none", node_of)
    shared = workers.run(_train, size, (1,) * size, "node", node_of)
    for one, other in zip(plain, shared):
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in NAMES)


def _sums_of_unlike_groups(worker: Worker) -> dict[str, torch.Tensor]:
    """Sum, on two nodes of two ranks, two weights of all ranks and one of the first rank of each node. One rank of the
    first node is late, so its peer has no sum of the node to pass on when it begins the last bucket."""
    comm = Comm(worker.store, worker.rank, worker.size)
    first = UnitPlan("v", tuple(Replica((Stage(0, 1, (rank,)),)) for rank in (0, 1)))
    plan = Plan((first, replace(plan_of(1, 1, 1, 1).units[0], name="u")))
    made = [
        HeldWeight(f"{unit}.0.{name}", frozenset({f"{unit}.0"}), (4,))
        for unit, name in (("v", "one"), ("u", "two"), ("u", "three"))
    ]
    held = holdings(plan, {"u": ["u.0"], "v": ["v.0"]}, made)
    weights = {w.name: nn.Parameter(torch.ones(4)) for w in made if comm.rank in held[w.name].boxes}
    formats = {w.name: Format("float32", 4) for w in made}
    node_of = [0, 1, 0, 1]
    layout = StateLayout("node", node_of, bucket_bytes=16)
    shared = bucket_weights(comm, weights, dict.fromkeys(weights, (0,)), held, formats, layout)
    shared.sync.begin([0])
    shared.sync.entering_last_backward(0)
    time.sleep(0.6 if comm.rank == 2 else 0.0)
    for number, weight in enumerate(reversed(weights.values())):
        (weight.sum() * (comm.rank + 1) * 10**number).backward()
        time.sleep(0.2 if comm.rank == 1 else 0.0)
    shared.sync.left_last_backward(0)
    shared.sync.finish()
    found = {key: p.grad for key, p in shared.owned.parameters.items() if p.grad is not None}
    shared.sync.close()
    comm.close()
    return found


def test_groups_sum_in_one_order_whoever_is_late(workers: WorkerPool) -> None:
    for rank, found in enumerate(workers.run(_sums_of_unlike_groups, 4)):
        expected = {"u.0.three": 10.0, "u.0.two": 100.0} | ({"v.0.one": 300.0} if rank < 2 else {})
        for key, gradient in found.items():
            assert gradient.tolist() == [expected.pop(key.partition("@")[0])] * len(gradient)
        assert not expected


def _train_bf16(worker: Worker) -> dict[str, Any]:
    """Train three replicas that shard all optimizer state of bf16 weights with fp32 gradients."""
    comm = Comm(worker.store, worker.rank, worker.size)
    held = holdings(plan_of(1, 1, 1), {"u": ["u.0"]}, WEIGHTS, split)
    start = drawn(0)
    weights = {name: nn.Parameter(start[name].bfloat16()) for name in NAMES}
    for weight in weights.values():
        weight.grad_dtype = torch.float32
    formats = dict.fromkeys(NAMES, Format("bfloat16", 2))
    layout = StateLayout("all", bucket_bytes=50)
    shared = bucket_weights(comm, weights, dict.fromkeys(NAMES, (0,)), held, formats, layout, exact=start)
    owned, sync = shared.owned, shared.sync
    optimizer = adamw(owned.parameters.values())
    for step in range(STEPS):
        for _ in range(2):
            sync.begin([0])
            for name, weight in weights.items():
                weight.grad = contribution(name, held, (1, 1, 1), comm.rank, step)
            sync.left_last_backward(0)
            sync.finish()
        optimizer.step()
        owned.gather()
        optimizer.zero_grad()
    masters = {key: master.detach() for key, master in owned.parameters.items()}
    written = [(box.key, part) for box, part in owned.primary_parts(masters)]
    sync.close()
    comm.close()
    return {"weights": {name: weight.detach() for name, weight in weights.items()}, "written": written}


def test_bf16_weights_are_rounded_from_fp32_master_weights(workers: WorkerPool) -> None:
    ranks = workers.run(_train_bf16, 3)
    expected, *_ = one_process(3)
    masters = assembled(ranks)
    for name, weight in expected.items():
        # As above: other orders of summation.
        torch.testing.assert_close(masters[name], weight.detach(), rtol=1e-6, atol=1e-6)
        for found in ranks:
            assert torch.equal(found["weights"][name], masters[name].bfloat16())
