"""8-bit moments: near fp32 ones, in a byte each, and in a checkpoint like any others."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from dilatant.config import OptimizerConfig, UserError
from dilatant.cost.memory import EIGHT_BIT_MOMENTS
from dilatant.training.optimizers.optimizer import allocate_moments, build_optimizer, check_optimizer, optimizer_tensors

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
RATE = 1e-2


def _weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    weights = {"large": nn.Parameter(torch.randn(100, 90).to(dtype)), "small": nn.Parameter(torch.randn(40).to(dtype))}
    for weight in weights.values():
        weight.grad_dtype = torch.float32
    return weights


def _optimizer(weights: dict[str, nn.Parameter], name: str):
    return build_optimizer(weights, OptimizerConfig(name=name, learning_rate=RATE), lambda pattern: frozenset())


def _train(weights: dict[str, nn.Parameter], optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator) + 0.5
        optimizer.step()
        optimizer.zero_grad()


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_near_those_of_fp32_moments(dtype: torch.dtype) -> None:
    found, expected = _weights(dtype), _weights(dtype)
    start = expected["large"].detach().float().clone()
    own, plain = _optimizer(found, "adamw_8bit"), _optimizer(expected, "adamw")
    _train(found, own, range(20))
    _train(expected, plain, range(20))
    way = (plain.masters["large"] - start).norm()
    # A byte of a dynamic map is off by a few per cent; quotients of moments hardly more.
    assert (own.masters["large"] - plain.masters["large"]).norm() <= 0.05 * way
    torch.testing.assert_close(own.masters["small"], plain.masters["small"], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(optimizer_tensors(own).values(), optimizer_tensors(plain).values(), strict=True):
        assert mine["step"] == theirs["step"] == 20
        for moment in ("exp_avg", "exp_avg_sq"):
            assert (mine[moment] - theirs[moment]).norm() <= 0.05 * theirs[moment].norm()


@needs_bitsandbytes
def test_moments_take_the_bytes_that_are_planned() -> None:
    weights = _weights(torch.float32)
    own = _optimizer(weights, "adamw_8bit")
    _train(weights, own, range(1))
    state = own.state[weights["large"]]
    taken = sum(state[part].nbytes for part in ("state1", "state2", "absmax1", "absmax2"))
    # The last block of each is not full.
    assert EIGHT_BIT_MOMENTS * 9000 <= taken <= EIGHT_BIT_MOMENTS * 9000 + 2 * 4


@needs_bitsandbytes
def test_resumed_run_with_8bit_moments_matches_an_unbroken_run() -> None:
    through, stopped = _weights(torch.bfloat16), _weights(torch.bfloat16)
    one, other = _optimizer(through, "adamw_8bit"), _optimizer(stopped, "adamw_8bit")
    _train(through, one, range(6))
    _train(stopped, other, range(3))
    again = _optimizer(stopped, "adamw_8bit")
    allocate_moments(again, set(stopped))
    for name, tensors in optimizer_tensors(again).items():
        for kind, tensor in tensors.items():
            tensor.copy_(optimizer_tensors(other)[name][kind])
    with torch.no_grad():
        for name, master in again.masters.items():
            master.copy_(other.masters[name])
    again.loaded()
    _train(stopped, again, range(3, 6))
    for name, weight in through.items():
        assert torch.equal(again.masters[name], one.masters[name])
        assert torch.equal(stopped[name], weight)


def test_what_it_needs_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilatant.training.optimizers.eight_bit.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs bitsandbytes.*pip install 'dilatant\[8bit\]'"):
        check_optimizer(OptimizerConfig(name="adamw_8bit"))
    monkeypatch.setattr("dilatant.training.optimizers.eight_bit.find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="this run has no GPU: leave it out"):
        check_optimizer(OptimizerConfig(name="adamw_8bit"))
    with pytest.raises(ValueError, match="give one"):
        OptimizerConfig(name="adamw_8bit", offload=True)
