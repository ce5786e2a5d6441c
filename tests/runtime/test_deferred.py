"""Split backward: I then W gives the weight gradients of one backward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dilatant.models.experts import grouped_experts
from dilatant.models.experts.grouped_experts import add_grouped_products
from dilatant.runtime.state.weight_gradients import (
    WeightGradients,
    accumulate,
    add_in_pieces,
    add_in_product,
    adder_of,
    replace_linears,
    restore_linears,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.runs = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """Embedding, blocks, a head tied to the embedding; blocks are recomputed in the backward pass on demand."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return self.head(hidden)


FROZEN = {
    "nothing": (),
    "first block": ("blocks.0.",),
    "embedding and head": ("embedding.", "head."),
    "weights but not biases": ("blocks.1.up.weight", "blocks.0.up.weight"),
    "biases but not weights": ("blocks.1.up.bias",),
    "all but the last block": ("embedding.", "head.", "blocks.0.", "blocks.1."),
}


def _pair(recompute: bool, frozen: tuple[str, ...]) -> tuple[Net, Net]:
    torch.manual_seed(3)
    net = Net(recompute).double()
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if name.startswith(frozen):
            parameter.requires_grad_(False)
    return net, copy.deepcopy(net)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_two_halves_give_the_gradients_of_one_backward_pass(frozen: str, recompute: bool) -> None:
    plain, split = _pair(recompute, FROZEN[frozen])
    gradients = WeightGradients()
    replace_linears(split, gradients)
    deferred = []
    for seed in range(3):  # several microbatches in flight, some split and one whole
        ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))
        plain(ids).square().sum().backward()
        loss = split(ids).square().sum()
        if seed == 1:
            loss.backward()
        else:
            with gradients.deferring():
                loss.backward()
            deferred.append(gradients.take())
    assert not gradients.take()
    for piece in reversed(deferred):
        accumulate(piece)
    for (name, mine), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    assert [b.runs for b in split.blocks] == [b.runs for b in plain.blocks]  # recomputed once, not once a half


def test_first_backward_half_skips_linear_weight_gradients() -> None:
    _, net = _pair(False, ())
    gradients = WeightGradients()
    replace_linears(net, gradients)
    with gradients.deferring():
        net(torch.arange(6)[None]).sum().backward()
    assert net.blocks[0].up.weight.grad is None
    assert net.blocks[0].norm.weight.grad is not None
    assert len(gradients.take()) == 7


@pytest.mark.parametrize("splits", [False, True])
def test_gradients_of_bf16_weights_are_sums_of_exact_products(splits: bool) -> None:
    """Products of bf16 numbers are exact in fp32, so 64 of them summed are off by fp32 rounding alone; autograd, which
    rounds each microbatch's gradient to bf16, is off by 2^-9."""
    layer = nn.Sequential(nn.Linear(48, 24)).to(torch.bfloat16)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    gradients = WeightGradients()
    gradients.splits = splits
    replace_linears(layer, gradients)
    fired: list[str] = []
    layer[0].weight.register_post_accumulate_grad_hook(lambda weight: fired.append("weight"))
    generator = torch.Generator().manual_seed(7)
    exact = torch.zeros(24, 48, dtype=torch.float64)
    exact_bias = torch.zeros(24, dtype=torch.float64)
    for number in range(64):
        inputs = torch.randn(16, 48, generator=generator).bfloat16()
        slope = torch.randn(16, 24, generator=generator).bfloat16()
        exact += slope.double().t() @ inputs.double()
        exact_bias += slope.double().sum(0)
        output = layer(inputs.requires_grad_())
        if splits and number % 2:
            with gradients.deferring():
                output.backward(slope)
            accumulate(gradients.take())
        else:
            output.backward(slope)
    for parameter, wanted in ((layer[0].weight, exact), (layer[0].bias, exact_bias)):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - wanted).norm() <= 1e-6 * wanted.norm()
    assert fired  # gradient sync starts while others still compute


def test_a_gpu_adds_16_bit_products_in_one_kernel() -> None:
    """The kernel exists on GPUs alone; on the device "meta" only its shapes and dtypes are checked."""
    assert adder_of("cuda", False) is add_in_product
    assert adder_of("cpu", False) is add_in_pieces
    assert adder_of("cuda", True) is adder_of("cpu", True) is add_in_pieces
    kernels: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(str(func))
            return func(*args, **(kwargs or {}))

    total = torch.zeros(24, 48, device="meta")
    with Seen():
        add_in_product(total, *(torch.zeros(16, width, device="meta", dtype=torch.bfloat16) for width in (24, 48)))
    assert [kernel for kernel in kernels if "addmm" in kernel] == ["aten.addmm.dtype_out"]
    assert not any("copy" in kernel for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_a_gpu_adds_up_are_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    total, exact = torch.zeros(24, 48, device="cuda"), torch.zeros(24, 48, dtype=torch.float64)
    for rows in (16, 0, 1, 300):
        gradient, inputs = (torch.randn(rows, n, generator=generator).to(dtype) for n in (24, 48))
        exact += gradient.double().t() @ inputs.double()
        add_in_product(total, gradient.cuda(), inputs.cuda())
    assert (total.cpu() - exact).norm() <= 1e-6 * exact.norm()


def _experts(dtype: torch.dtype, frozen: bool = False) -> nn.Module:
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(5)
    experts = MixtralExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
        parameter.requires_grad_(not frozen)
        parameter.grad_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    return nn.Sequential(experts)


def _tokens(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of seven tokens none chooses the second expert."""
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(7, 8, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(7, 2, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.tensor([[0, 2], [2, 0]] * 3 + [[2, 0]]), weights


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_experts_defer_gradients_and_match_transformers(splits: bool, frozen: bool) -> None:
    plain, own = _experts(torch.float64, frozen), _experts(torch.float64, frozen)
    gradients = WeightGradients()
    replaced = replace_linears(own, gradients)
    ours, theirs = _tokens(torch.float64), _tokens(torch.float64)
    expected, found = plain[0](*theirs), own[0](*ours)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    if splits:
        with gradients.deferring():
            found.square().sum().backward()
        assert own[0].down_proj.grad is None
        accumulate(gradients.take())
    else:
        found.square().sum().backward()
    for name, parameter in plain.named_parameters():
        mine = own.get_parameter(name).grad
        torch.testing.assert_close(mine, parameter.grad)
    for mine, other in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        torch.testing.assert_close(mine.grad, other.grad)
    restore_linears(replaced)
    assert type(own[0]) is MixtralExperts
    assert torch.equal(own[0](*_tokens(torch.float64)), expected)


def test_gradients_of_bf16_experts_are_sums_of_exact_products() -> None:
    """As those of linear layers: here of the outer matrix, whose inputs and slopes are taken down."""
    own = _experts(torch.bfloat16)
    gradients = WeightGradients()
    replace_linears(own, gradients)
    exact = torch.zeros(3, 8, 8, dtype=torch.float64)
    for number in range(32):
        hidden, chosen, weights = _tokens(torch.bfloat16)
        with gradients.deferring():
            own[0](hidden * (1 + number / 32), chosen, weights).sum().backward()
        piece = gradients.take()
        for weight, _, inputs, slope, counts in piece:
            if weight is own[0].down_proj:
                split = zip(slope.double().split(list(counts)), inputs.double().split(list(counts)))
                exact += torch.stack([out.t() @ into for out, into in split])
        accumulate(piece)
    found = own[0].down_proj.grad
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 1e-6 * exact.norm()


def test_restoring_linear_layers_leaves_the_model_unchanged() -> None:
    _, net = _pair(False, ())
    before = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    names = list(net.state_dict())
    replaced = replace_linears(net, WeightGradients())
    assert list(net.state_dict()) == names
    assert net.head.weight is net.embedding.weight
    net.head.weight = net.embedding.weight = nn.Parameter(torch.zeros(11, 6))
    restore_linears(replaced)
    after = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    assert after == before
    assert net.head.weight is net.embedding.weight


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
        ),
    ],
)
def test_kernels_add_the_products_of_many_experts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Unequal and empty experts, three at once; some GPUs leave anything in place of an empty expert's product."""
    counts, calls = [0, 5, 0, 1, 9, 0, 17, 0, 0, 0], []
    kernel = functional.grouped_mm

    def with_garbage(one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        products = kernel(one, other, offs=offs)
        products[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        calls.append(len(products))
        return products

    monkeypatch.setattr(functional, "grouped_mm", with_garbage)
    monkeypatch.setattr(grouped_experts, "_PRODUCT", 3 * 24 * 16 + 1)
    draw = torch.Generator().manual_seed(3)
    gradient, inputs = (torch.randn(sum(counts), width, generator=draw).bfloat16() for width in (24, 16))
    before = torch.randn(len(counts), 24, 16, generator=draw)
    split = zip(gradient.double().split(counts), inputs.double().split(counts), strict=True)
    exact = torch.stack([out.t() @ into for out, into in split])
    totals = before.clone().to(device)
    add_grouped_products(totals, gradient.to(device), inputs.to(device), counts)
    assert calls == [3, 3, 3], "the last expert has no rows"
    # Each product is rounded to bf16, and its sum to fp32.
    assert ((totals.cpu() - before - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
