"""bf16 weights train as fp32 ones do: updates are made to fp32 masters, and nothing is kept for what is frozen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dilatant.config import OptimizerConfig, UserError
from dilatant.runtime.precision import pick_precision
from dilatant.training.optimizers.optimizer import build_optimizer, optimizer_tensors


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def _held_in_bf16(net: nn.Module) -> nn.Module:
    net = copy.deepcopy(net).to(torch.bfloat16)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    return net


def _optimizer(net: nn.Module, exact: dict[str, torch.Tensor] | None = None, rate: float = 1e-4):
    config = OptimizerConfig(learning_rate=rate)
    return build_optimizer(dict(net.named_parameters()), config, lambda pattern: frozenset(), exact)


def test_master_weights_follow_fp32_training_exactly() -> None:
    net = _net()
    low = _held_in_bf16(net)
    exact = {name: p.detach().clone() for name, p in net.named_parameters()}
    one, other = _optimizer(net), _optimizer(low, exact)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        for mine, theirs in zip(low.parameters(), net.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
    for (name, wanted), rounded in zip(net.named_parameters(), low.parameters(), strict=True):
        assert torch.equal(other.masters[name], wanted)  # the same operations on the same fp32 numbers
        assert torch.equal(rounded, wanted.bfloat16())
        assert rounded.grad is None
        assert other.masters[name].grad is None


def test_updates_below_the_rounding_of_bf16_are_not_lost() -> None:
    low = _held_in_bf16(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        low.weight.fill_(1.0)
    optimizer = _optimizer(low, rate=1e-4)
    for _ in range(100):  # each moves the weight by 1e-4, a fortieth of what bf16 notices at 1
        low.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert low.weight.item() == pytest.approx(0.99, abs=0.004)  # spacing of bf16 below 1


def test_only_what_trains_has_a_master_and_moments() -> None:
    low = _held_in_bf16(_net())
    low[0].requires_grad_(False)
    optimizer = _optimizer(low)
    assert set(optimizer.masters) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert all(master.dtype == torch.float32 for master in optimizer.masters.values())
    low(torch.randn(4, 6).bfloat16()).float().square().sum().backward()
    optimizer.step()
    assert set(optimizer_tensors(optimizer)) == set(optimizer.masters)
    assert low[0].weight.grad is None


def test_an_fp32_weight_is_its_own_master() -> None:
    net = _net()
    optimizer = _optimizer(net)
    assert all(optimizer.masters[name] is parameter for name, parameter in net.named_parameters())


def test_a_gpu_without_bf16_is_told_what_it_can_train_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UserError, match="bf16, which Tesla T4 does not have; use fp32 or auto"):
        pick_precision("bf16", torch.device("cuda"))
    assert pick_precision("auto", torch.device("cuda")) == torch.float32
