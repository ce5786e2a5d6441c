"""Muon on ranks that share its state does to every matrix what torch's Muon does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dilatant.comm.comm import Comm
from dilatant.config import OptimizerConfig
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, Holding
from dilatant.runtime.state.shared_weights import StateLayout, bucket_weights
from dilatant.training.optimizers.optimizer import build_optimizer, optimizer_tensors
from harness.worker_pool import Worker, WorkerPool

SHAPES = {f"u.layers.{layer}.{name}": shape for layer in range(2)
          for name, shape in (("wide", (4, 12)), ("tall", (12, 4)), ("square", (6, 6)), ("norm", (6,)))}  # fmt: skip
MATRICES = frozenset(name for name, shape in SHAPES.items() if len(shape) == 2)
STEPS = 3
SETTINGS = {"learning_rate": 0.01, "weight_decay": 0.1, "muon": {"weights": ("u",), "momentum": 0.9}}


def drawn(*key: int) -> dict[str, torch.Tensor]:
    """Draw whole numbers, whose sums are exact in any order, for every weight."""
    generator = torch.Generator().manual_seed(sum(1000**place * part for place, part in enumerate(key)))
    return {name: torch.randint(-8, 9, shape, generator=generator).float() for name, shape in SHAPES.items()}


def _train(worker: Worker, zero: Any, node_of: list[int]) -> dict[str, Any]:
    comm = Comm(worker.store, worker.rank, worker.size)
    weights = {name: nn.Parameter(tensor) for name, tensor in drawn(0).items()}
    held = {name: Holding({rank: Box.of(name, SHAPES[name]) for rank in range(comm.size)}) for name in SHAPES}
    formats = dict.fromkeys(SHAPES, Format("float32", 4))
    layout = StateLayout(zero, node_of, bucket_bytes=40, uncut=MATRICES)
    shared = bucket_weights(comm, weights, dict.fromkeys(SHAPES, (0,)), held, formats, layout)
    owned = shared.owned
    config = OptimizerConfig.model_validate(SETTINGS)
    optimizer = build_optimizer(owned.parameters, config, lambda pattern: frozenset(), orthogonal=MATRICES)
    for step in range(STEPS):
        shared.sync.begin([0])
        shared.sync.entering_last_backward(0)
        for name, gradient in drawn(1, step, comm.rank).items():
            (weights[name] * gradient).sum().backward()
        shared.sync.left_last_backward(0)
        shared.sync.finish()
        optimizer.step()
        owned.gather()
        optimizer.zero_grad()
    state = optimizer_tensors(optimizer)
    shared.require_equal({"moments": {key: own["momentum_buffer"] for key, own in state.items() if len(own) == 1}})
    comm.close()
    return {"weights": weights, "owned": set(owned.parameters), "kinds": {key: set(own) for key, own in state.items()}}


def one_process(ranks: int) -> dict[str, torch.Tensor]:
    weights = {name: nn.Parameter(tensor) for name, tensor in drawn(0).items()}
    muon = torch.optim.Muon(
        [weights[name] for name in weights if name in MATRICES],
        lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    others = [weight for name, weight in weights.items() if name not in MATRICES]
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        gradients = [drawn(1, step, rank) for rank in range(ranks)]
        for name, weight in weights.items():
            weight.grad = torch.stack([each[name] for each in gradients]).sum(0)
        muon.step()
        adamw.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("zero", "node_of"), [("none", [0, 0, 0]), ("all", [0, 0, 0]), ("node", [0, 0, 1]), ("node", [0, 1, 0, 1])]
)
def test_matrices_are_updated_whole_on_one_owner(workers: WorkerPool, zero: str, node_of: list[int]) -> None:
    expected = one_process(len(node_of))
    found = workers.run(_train, len(node_of), zero, node_of)
    for rank in found:
        for name, weight in rank["weights"].items():
            # The gradients are equal to the bit, and so are the products, up to how rows are aligned in memory.
            torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-5, atol=1e-6)
        assert {key for key in rank["owned"] if key.startswith(tuple(MATRICES))} <= MATRICES
        for key, kinds in rank["kinds"].items():
            assert kinds == ({"momentum_buffer"} if key in MATRICES else {"step", "exp_avg", "exp_avg_sq"})
    owners = [name for rank in found for name in rank["owned"] & MATRICES]
    copies = {"none": len(node_of), "all": 1, "node": 2}[zero]
    assert sorted(owners) == sorted([*MATRICES] * copies)
