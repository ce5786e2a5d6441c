"""Muon updates the matrices that the config names, with one moment, and refuses what it cannot do by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from cases.engine_case import CASE, build_model
from cases.parallel_cases import plan_of
from dilatant.config import OptimizerConfig, UserError
from dilatant.config.train import MuonConfig
from dilatant.cost.memory import FP32
from dilatant.models.core.freeze import choose_orthogonal
from dilatant.plan.plan import Stage
from dilatant.planning.problem.describe_model import describe_model
from dilatant.runtime.layouts import layout_problems
from dilatant.training.optimizers.optimizer import allocate_moments, build_optimizer, optimizer_tensors

NAMES = frozenset({"language.layers.0.up.weight"})


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"language.layers.0.up.weight": (6, 4), "language.layers.0.norm.weight": (6,), "language.head": (5, 6)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad=True)
        for name, shape in shapes.items()
    }


def settings(**changes: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": 0.02, "muon": {"weights": ("language",), **changes}})


def nothing(pattern: str) -> frozenset[str]:
    return frozenset()


@pytest.mark.parametrize("changes", [{}, {"nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}])
def test_an_update_is_that_of_torchs_muon(changes: dict[str, object]) -> None:
    ours, theirs = weights(), weights()
    optimizer = build_optimizer(ours, settings(**changes), nothing, orthogonal=NAMES)
    options = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", **changes}
    muon = torch.optim.Muon([theirs[name] for name in NAMES], lr=0.02, weight_decay=0.01, **options)
    head, norm = theirs["language.head"], theirs["language.layers.0.norm.weight"]
    groups = [{"params": [head], "weight_decay": 0.01}, {"params": [norm], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    for step in range(3):
        for mine, its in zip(ours.values(), theirs.values()):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            its.grad = mine.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for name, weight in ours.items():
        # AdamW is fused here and rounds in another order; Muon's operations are the same.
        torch.testing.assert_close(
            weight, theirs[name], rtol=0 if name in NAMES else 1e-5, atol=0 if name in NAMES else 1e-6
        )


def test_low_precision_weights_have_masters_under_muon() -> None:
    held = weights(torch.bfloat16)
    optimizer = build_optimizer(held, settings(), nothing, orthogonal=NAMES)
    for weight in held.values():
        weight.grad_dtype = torch.float32
        weight.grad = torch.ones(weight.shape)
    optimizer.step()
    for name, weight in held.items():
        assert optimizer.masters[name].dtype == torch.float32
        assert torch.equal(weight, optimizer.masters[name].bfloat16())


def test_a_matrix_has_one_moment_and_gets_it_from_checkpoints() -> None:
    held = weights()
    optimizer = build_optimizer(held, settings(), nothing, orthogonal=NAMES)
    assert optimizer_tensors(optimizer) == {}
    allocate_moments(optimizer, set(held))
    kinds = {name: set(own) for name, own in optimizer_tensors(optimizer).items()}
    assert kinds.pop("language.layers.0.up.weight") == {"momentum_buffer"}
    assert set(map(frozenset, kinds.values())) == {frozenset({"step", "exp_avg", "exp_avg_sq"})}
    (matrix,) = (held[name] for name in NAMES)
    optimizer_tensors(optimizer)["language.layers.0.up.weight"]["momentum_buffer"].fill_(1.0)
    matrix.grad = torch.zeros_like(matrix)
    before = matrix.detach().clone()
    optimizer.step()
    assert not torch.equal(matrix, before * (1 - 0.02 * 0.01))  # the momentum that was read moves it


def test_it_stands_beside_adamw_on_the_device_only() -> None:
    for other in ({"offload": True}, {"name": "adamw_8bit"}):
        with pytest.raises(ValidationError, match="'muon' goes with AdamW on the device only"):
            OptimizerConfig.model_validate({"muon": {"weights": ["language"]}, **other})


def test_it_takes_trained_matrices_within_blocks_only() -> None:
    model = build_model(CASE, "meta")
    model.language.freeze_names(frozenset(n for n, _ in model.language.named_logical_parameters() if ".layers.0." in n))
    choose_orthogonal(model.units, MuonConfig(weights=("language",)))
    sizes = dict(model.language.named_logical_parameters())
    assert model.language.orthogonal
    assert model.language.orthogonal == {
        name for name, weight in sizes.items() if weight.ndim == 2 and weight.requires_grad and ".layers." in name
    }
    for pattern, why in (("language.layers.0", "that trains"), ("language.head.norm", "no matrix in a block")):
        with pytest.raises(UserError, match=rf"muon.weights: '{pattern}' names .*{why}"):
            choose_orthogonal(model.units, MuonConfig(weights=("language", pattern)))


def test_tensor_parallel_ranks_cannot_divide_its_matrices() -> None:
    model = build_model(CASE, "meta")
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (1, 2), tp=2),))
    assert layout_problems(plan, model.units) == []
    choose_orthogonal(model.units, MuonConfig(weights=("language",)))
    (problem,) = layout_problems(plan, model.units)
    assert "Muon updates whole matrices, and 2 ranks would divide 'language.layers.0" in problem
    assert "give the unit tp: 1, or leave it out of train.optimizer.muon.weights" in problem


def test_plans_count_one_moment_of_its_matrices() -> None:
    model = build_model(replace(CASE, tied=False))
    parameters = {name: p for unit in model.units.values() for name, p in unit.named_logical_parameters()}
    choose_orthogonal(model.units, MuonConfig(weights=("language",)))
    orthogonal = model.language.orthogonal
    optimizer = build_optimizer(parameters, settings(), nothing, orthogonal=orthogonal)
    allocate_moments(optimizer, set(parameters))
    held = sum(
        own.nbytes for kinds in optimizer_tensors(optimizer).values() for kind, own in kinds.items() if kind != "step"
    )
    layers = [layer for unit in describe_model(model).spec.units for layer in unit.layers]
    predicted = sum(FP32.optimizer * layer.trained - 4 * layer.orthogonal for layer in layers)
    assert held == predicted
