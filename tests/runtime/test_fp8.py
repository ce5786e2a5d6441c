"""FP8 linear layers: what is multiplied is what an oracle rounds, whatever the layout; and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases.engine_case import BATCHES, CASE, TEXT, Case, build_model
from cases.generic_steps import GenericCase, generic_cases, opened
from cases.parallel_cases import case_of, plan_of
from dilatant import MultimodalModel
from dilatant.config import ClusterConfig, UserError
from dilatant.config.train import TrainConfig
from dilatant.cost.analytic import analytic_cost, block_shape, head_shape
from dilatant.cost.hardware import load_hardware
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.core.unit import Unit
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Stage
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.runtime.compiled_blocks import gradients_aside
from dilatant.runtime.precision import pick_precision
from dilatant.runtime.state.fp8_products import fp8_linear, multiply_emulated, multiply_scaled, quantize
from dilatant.runtime.state.weight_gradients import WeightGradients, accumulate, replace_linears
from dilatant.schedule.families.families import zero_bubble_h1
from dilatant.schedule.schedule import Assignment
from harness.checked_generic_steps import check_generic_case
from harness.checked_steps import COMMON, check_case
from harness.worker_pool import WorkerPool
from oracles.fp8_linear import rounded_linear

WIDE = {"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 32}
"""Sizes of a language model that two ranks can share in multiples of 16."""
VISION = (Stage(0, 5, (0,)),)


def _rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very unlike sizes; one is 0."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    rows *= torch.logspace(-6, 4, count)[:, None]
    rows[1] = 0
    return rows.to(dtype)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_oracle(dtype: torch.dtype, defers: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16, bias=False)).to(dtype)
    names = [name for name, _ in net.named_parameters()]
    plain = {name: weight.detach().clone().requires_grad_() for name, weight in net.named_parameters()}
    theirs = [_rows(9, 48, dtype).view(3, 3, 48).requires_grad_() for _ in range(2)]
    for weight in (*net.parameters(), *plain.values()):
        weight.grad_dtype = torch.float32
    gradients = WeightGradients()
    replace_linears(net, gradients, (), dict.fromkeys(net, fp8_linear))
    upstream = _rows(9, 16, dtype).view(3, 3, 16)
    ours = net(theirs[0])
    if defers:
        with gradients.deferring():
            ours.backward(upstream)
        accumulate(gradients.take())
    else:
        ours.backward(upstream)
    inner = rounded_linear(theirs[1], plain["0.weight"], plain["0.bias"])
    expected = rounded_linear(inner, plain["1.weight"], None)
    expected.backward(upstream)
    # Sums in other orders, in bf16 each rounded; where that crosses a border of E4M3, a step of 2**-3 of a number:
    # 1 of 16 numbers, two products in a row.
    allowed = 1e-5 if dtype == torch.float32 else 2 * (2 * 2**-9 * 2**-3) ** 0.5
    pairs = [(ours, expected), (theirs[0].grad, theirs[1].grad)]
    pairs += [(net.get_parameter(name).grad, plain[name].grad) for name in names]
    for mine, their in pairs:
        assert mine is not None
        assert their is not None
        assert their.norm() > 0
        assert (mine.float() - their.float()).norm() <= allowed * their.float().norm()


def test_neither_packing_nor_shards_change_a_product() -> None:
    rows, weight = _rows(6, 64), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    whole = fp8_linear(rows, weight, None)
    alone = torch.cat([fp8_linear(row[None], weight, None) for row in rows])
    by_output = torch.cat([fp8_linear(rows, part, None) for part in weight.split(16)], dim=1)
    by_input = sum(fp8_linear(one, other, None) for one, other in zip(rows.split(32, 1), weight.split(32, 1)))
    # Other orders of a sum of 64; numbers below 2**-13 of a row's largest, which few are, lose bits below 2**-17 of it.
    for other in (alone, by_output, by_input):
        assert ((other - whole).norm(dim=1) <= 2**-17 * whole.norm(dim=1)).all()
    assert (whole - rows @ weight.t()).norm() > 0.01 * whole.norm(), "nothing was rounded"


@pytest.mark.parametrize("bias", [None, torch.ones(32, dtype=torch.bfloat16)])
def test_the_kernel_of_hardware_multiplies_what_is_emulated(bias: Tensor | None) -> None:
    factors = quantize(_rows(7, 64, torch.bfloat16)), quantize(torch.randn(32, 64).bfloat16())
    emulated = multiply_emulated(*factors, bias, torch.bfloat16)
    try:
        product = multiply_scaled(*factors, bias, torch.bfloat16)
    except NotImplementedError:
        pytest.skip("this torch multiplies E4M3 on GPUs only")
    assert (product - emulated).float().norm() <= 2**-8 * emulated.float().norm()  # a rounding to bf16


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_not_rounded_away(number: float) -> None:
    rows = _rows(4, 32, torch.bfloat16)
    rows[2, 5] = number
    product = fp8_linear(rows, torch.ones(16, 32, dtype=torch.bfloat16), None)
    assert product.isfinite().all(dim=1).tolist() == [True, True, False, True]


def test_a_frozen_layer_keeps_no_input_for_its_backward() -> None:
    net = nn.Sequential(nn.Linear(32, 16)).requires_grad_(False)
    replace_linears(net, WeightGradients(), (), dict.fromkeys(net, fp8_linear))
    rows, kept = torch.randn(8, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = net(rows)
    output.sum().backward()
    assert not kept
    assert rows.grad is not None
    assert rows.grad.norm() > 0


def _unit(**sizes: Any) -> Unit:
    changes = {"language": "qwen2_moe", "settings": {**WIDE, **sizes}, "encoders": (), "frozen": ()}
    return build_model(replace(CASE, **changes), "meta").units["language"]


def test_narrow_gates_and_experts_are_not_rounded() -> None:
    """The second layer of the family has experts, and a gate of one number."""
    unit = _unit(num_experts=16, mlp_only_layers=[0], shared_expert_intermediate_size=32)
    named = r"these stay in bf16: language\.layers\.\*\.mlp\.experts\.gate_up_proj \(16 x 24 x 16\), "
    with pytest.warns(UserWarning, match=named):
        choose_fp8({"language": unit}, "fp8")
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    layers = (
        (*attention, *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))),
        (*attention, *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))),
    )
    assert unit.fp8 == {f"language.layers.{number}.{name}.weight" for number in (0, 1) for name in layers[number]}


def test_routers_that_are_linear_layers_are_not_rounded() -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    config = parse_config({"model_type": "afmoe", **TEXT, **WIDE, **sizes, "num_hidden_layers": 2}, "language")
    unit = MultimodalModel({}, config, seed=0, device="meta").units["language"]
    with pytest.warns(UserWarning, match="these stay in bf16: .*experts"):
        choose_fp8({"language": unit}, "fp8")
    router = "language.layers.1.mlp.router.gate.weight"
    assert router in dict(unit.named_logical_parameters())
    assert router not in unit.fp8
    assert "language.layers.1.mlp.shared_experts.up_proj.weight" in unit.fp8


def test_adapters_heads_and_embeddings_are_not_rounded() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unit = opened(GenericCase("deepseek_vl", (0,), lora=True, fp8=True), "meta").language
    assert {name.split(".")[-2] for name in unit.fp8} == {*(f"{name}_proj" for name in (*"qkvo", "gate", "up", "down"))}
    assert not any("lora" in str(warning.message) for warning in caught), "nor are adapters what stays in bf16"


def test_layers_of_other_sizes_are_named() -> None:
    unit = _unit(intermediate_size=40, mlp_only_layers=[0, 1])
    named = r"these stay in bf16: language\.layers\.\*\.mlp\.gate_proj\.weight \(40 x 16\)"
    with pytest.warns(UserWarning, match=named):
        choose_fp8({"language": unit}, "fp8")
    assert unit.fp8
    assert not any("mlp" in name for name in unit.fp8)


def test_shards_that_are_no_multiples_are_refused() -> None:
    unit = _unit(intermediate_size=48, mlp_only_layers=[0, 1])
    plan = tensor_plan(unit)
    assert not degree_problems(unit, plan, 2)
    choose_fp8({"language": unit}, "fp8")
    (problem,) = degree_problems(unit, plan, 2)
    assert "2 ranks would cut 'language.layers.0.mlp.gate_proj.weight', [48, 16]" in problem


def test_four_bit_weights_are_refused() -> None:
    unit = _unit()
    unit.four_bit = frozenset(["language.layers.0.self_attn.q_proj.weight"])
    with pytest.raises(UserError, match="4-bit weights, which language has"):
        choose_fp8({"language": unit}, "fp8")


@pytest.mark.parametrize(("capability", "works"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_refused_where_the_device_lacks_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A40")
    device = torch.device("cuda")
    assert pick_precision("auto", device) == torch.bfloat16
    if works:
        assert pick_precision("fp8", device) == torch.bfloat16
        return
    with pytest.raises(UserError, match=r"train\.precision is fp8, which NVIDIA A40 does not have; use bf16 or auto"):
        pick_precision("fp8", device)


@pytest.mark.parametrize("defers", [False, True])
def test_compiled_products_are_those_of_eager_layers(defers: bool) -> None:
    """The first layer is frozen, so that its compiled graph has no weight gradient; the last one multiplies in bf16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16), nn.Linear(16, 16)).to(torch.bfloat16)
    plain[0].requires_grad_(False)
    layers = [plain, copy.deepcopy(plain)]
    found = []
    for net, run in zip(layers, (plain, torch.compile(layers[1], backend="aot_eager", fullgraph=True)), strict=True):
        gradients = WeightGradients()
        replace_linears(net, gradients, (), dict.fromkeys([*net][:2], fp8_linear))
        for weight in net.parameters():
            weight.grad_dtype = torch.float32
        rows = _rows(9, 48, torch.bfloat16).requires_grad_()
        output = run(rows)
        with gradients.deferring() if defers else nullcontext():
            output.sum().backward()
        accumulate(gradients.take())
        with torch.no_grad(), gradients_aside(net.parameters()):
            again = run(rows)
        found.append([output, again, rows.grad, *(weight.grad for weight in net.parameters())])
    for mine, own in zip(*found, strict=True):
        assert (mine is None) == (own is None)
        assert mine is None or torch.equal(mine, own)
    assert sum(each is None for each in found[0]) == 2, "the frozen layer's"


def test_costs_know_which_products_are_in_fp8() -> None:
    h100, block = load_hardware("H100"), block_shape(4096, 11008, 32)
    low, usual = (analytic_cost(block, h100, dtype) for dtype in ("float8", "bfloat16"))
    for name, share in (("forward", 0.55), ("input_gradient", 0.55)):
        mine, other = (getattr(cost, name) for cost in (low, usual))
        # Of a product's time half is spared; attention, norms and casts take their own.
        assert share < mine.b / other.b < 0.95
        assert mine.c > other.c, "weights are cast in every pass"
    assert low.weight_gradient == usual.weight_gradient
    assert low.activation_bytes == usual.activation_bytes
    head = head_shape(4096, 32000)
    assert analytic_cost(head, h100, "float8") == analytic_cost(head, h100, "bfloat16")
    experts = replace(block, routed_width=8192)
    assert analytic_cost(experts, h100, "float8") == analytic_cost(experts, h100, "bfloat16")
    with pytest.raises(UserError, match="A100 has no peak for float8"):
        analytic_cost(block, load_hardware("A100"), "float8")


@pytest.mark.parametrize("cluster", [{}, {"hardware": "H100", "gpus_per_node": 8}])
def test_a_target_in_fp8_holds_weights_in_bf16(cluster: dict[str, Any]) -> None:
    targets = [plan_target(ClusterConfig(**cluster), TrainConfig(precision=precision)) for precision in ("fp8", "bf16")]
    assert [target.dtype for target in targets] == ["float8", "bfloat16"]
    assert [target.activations for target in targets] == [torch.bfloat16] * 2
    assert targets[0].rules == targets[1].rules


def _pipeline() -> Case:
    plan = plan_of(VISION, (Stage(0, 2, (0,)), Stage(2, 4, (1,))))
    return case_of(plan, zero_bubble_h1, recompute="block", fp8=True, settings=WIDE, attention="causal")


def _shards() -> Case:
    plan = plan_of(VISION, (Stage(0, 4, (0, 1), tp=2),), (Stage(0, 4, (2,)),))
    halves = Assignment({"vision": (BATCHES,), "language": (BATCHES[::2], BATCHES[1::2])})
    return case_of(plan, assignment=halves, fp8=True, settings=WIDE, attention="causal")


@pytest.mark.parametrize("case", [_pipeline, _shards])
def test_steps_in_fp8_match_one_process(workers: WorkerPool, case: Callable[[], Case]) -> None:
    check_case(workers, case(), "node", 1)


@pytest.mark.slow
def test_compiled_steps_in_fp8_match_one_process(workers: WorkerPool) -> None:
    check_case(workers, replace(_pipeline(), compiler="aot_eager"), "node", 1)


@pytest.mark.slow
@settings(max_examples=4, **COMMON)
@given(data=st.data())
def test_steps_in_fp8_with_adapters_match_peft(workers: WorkerPool, data: Any) -> None:
    """Not under context parallelism, whose attention differs by some 3e-6 of a number: in the oracle itself, noise of
    that size moves 5 to 10 of 343,000 numbers across borders, and these small gradients by up to 5 %."""
    case = data.draw(generic_cases(["deepseek_vl"], 3, torch.float32, lora=True))
    assume(all(placed.stage.tp == placed.stage.cp == 1 for placed in case.plan.stages()))
    check_generic_case(workers, replace(case, fp8=True), "node", 1)
