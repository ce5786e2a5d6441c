"""Optimizer state on the host updates as state on the device does, and is nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases.engine_case import CASE, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.config import OptimizerConfig, UserError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.training.optimizers.master_weights import MasterAdamW, make_masters
from dilatant.training.optimizers.offload import OffloadedAdamW
from dilatant.training.optimizers.optimizer import build_optimizer, check_optimizer
from harness.worker_pool import Worker, WorkerPool

CPU = torch.device("cpu")


def _net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    return net


@pytest.mark.parametrize("chunk_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_masters_on_the_device(dtype: torch.dtype, chunk_bytes: int) -> None:
    net, own = _net(dtype), _net(dtype)
    weights, other = dict(net.named_parameters()), dict(own.named_parameters())
    masters, away = make_masters(weights), make_masters(other, device=CPU)
    options = {"lr": 1e-2, "fused": True}
    here = MasterAdamW([{"params": list(masters.values())}], weights, masters, **options)
    there = OffloadedAdamW([{"params": list(away.values())}], other, away, chunk_bytes=chunk_bytes, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for number, name in enumerate(weights):
            if number != step % 4:  # some are not used in every step
                weights[name].grad = torch.randn(weights[name].shape, generator=generator)
                other[name].grad = weights[name].grad.clone()
        for optimizer in (here, there):
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in weights.items():
        assert torch.equal(other[name], weight)
        assert torch.equal(away[name], masters[name])
        assert away[name].data_ptr() != other[name].data_ptr()
        assert other[name].grad is away[name].grad is None
    with torch.no_grad():
        next(iter(away.values())).zero_()
    there.write_weights()
    assert not next(own.parameters()).any()


REPLICAS = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 5, (0,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 4, (0,)),)), Replica((Stage(0, 4, (1, 2), tp=2),)))),
    )
)


def _trained(worker: Worker, offload: bool) -> tuple[dict[str, torch.Tensor], set[torch.dtype], float]:
    """Weights after three steps, formats of what this rank owns, and the norm of the last gradient."""
    comm = Comm(worker.store, worker.rank, worker.size, generation=int(offload))
    runtime = Runtime(
        build_model(CASE, "meta"), REPLICAS, comm, seed=3, execution=Execution(precision=torch.bfloat16),
        layout=StateLayout("all", keeps_masters=not offload, bucket_bytes=500),
    )  # fmt: skip
    config = OptimizerConfig(learning_rate=1e-2, offload=offload)
    optimizer = build_optimizer(runtime.owned.parameters, config, lambda pattern: frozenset())
    norm = 0.0
    for _ in range(3):
        norm = runtime.execute(build_samples(CASE)).grad_norm
        runtime.clip_grad_norm_(0.1, norm)
        optimizer.step()
        runtime.owned.gather()
        optimizer.zero_grad()
    runtime.require_equal(optimizer.masters, {})
    weights = {name: p.detach().clone() for name, p in runtime.parameters.items()}
    formats = {p.dtype for p in runtime.owned.parameters.values()}
    runtime.close()
    comm.close()
    return weights, formats, norm


def test_ranks_that_share_state_offload_their_shares(workers: WorkerPool) -> None:
    plain, away = workers.run(_trained, 3, False), workers.run(_trained, 3, True)
    for (weights, _, norm), (others, formats, other_norm) in zip(plain, away, strict=True):
        assert norm == other_norm
        assert all(torch.equal(others[name], weight) for name, weight in weights.items())
        assert formats == {torch.bfloat16}  # no master stays


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="this run has no GPU: leave it out"):
        check_optimizer(OptimizerConfig(offload=True))
    check_optimizer(OptimizerConfig())
