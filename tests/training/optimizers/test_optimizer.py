"""Every weight gets the rate and the decay that the config gives it, and nothing else moves."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Set

import pytest
import torch
from torch import nn

from dilatant.config import OptimizerConfig
from dilatant.training.optimizers.optimizer import (
    allocate_moments,
    build_optimizer,
    optimizer_tensors,
    peak_rates,
    set_rate_factor,
)

SHAPES = {
    "language.layers.0.weight": (3, 2),
    "language.layers.0.bias": (3,),
    "language.norm.weight": (3,),
    "language.scale": (),
    "vision.model.conv.weight": (2, 1, 2, 2),
    "vision.projector.weight": (3, 2),
    "vision.frozen.weight": (3, 2),
}
RATE, DECAY = 0.1, 0.25


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(shape), requires_grad="frozen" not in name) for name, shape in SHAPES.items()}


def matching(pattern: str) -> Set[str]:
    """As in the config: a unit, a part, or a pattern."""
    return {name for name in SHAPES if name.startswith(pattern + ".") or fnmatch.fnmatch(name, pattern)}


def config(**changes: object) -> OptimizerConfig:
    return OptimizerConfig(**{"learning_rate": RATE, "weight_decay": DECAY, **changes})


def after_a_step(settings: OptimizerConfig, factor: float = 1.0, gradient: float = 0.0) -> dict[str, float]:
    """What a weight of 1 becomes: with gradients of 0, AdamW only decays it, by rate times decay."""
    weights = parameters()
    optimizer = build_optimizer(weights, settings, matching)
    set_rate_factor(optimizer, factor)
    for weight in weights.values():
        if weight.requires_grad:
            weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    for weight in weights.values():
        assert len(weight.unique()) == 1
    return {name: weight.unique().item() for name, weight in weights.items()}


def test_matrices_decay_and_norms_biases_and_scalars_do_not() -> None:
    found = after_a_step(config())
    decayed = {name for name, shape in SHAPES.items() if len(shape) >= 2 and "frozen" not in name}
    for name, value in found.items():
        assert value == pytest.approx(1 - RATE * DECAY if name in decayed else 1.0, abs=1e-7)


def test_a_group_has_its_own_decay_and_the_others_keep_theirs() -> None:
    found = after_a_step(config(groups={"vision": {"weight_decay": 0.5}}))
    assert found["vision.model.conv.weight"] == pytest.approx(1 - RATE * 0.5)
    assert found["language.layers.0.weight"] == pytest.approx(1 - RATE * DECAY)
    assert found["language.norm.weight"] == 1
    none = after_a_step(config(groups={"vision": {"weight_decay": 0.0}}))
    assert none["vision.model.conv.weight"] == 1


def test_a_group_has_its_own_rate() -> None:
    # The first step of Adam moves every weight by its rate, whatever the gradient's size.
    found = after_a_step(config(weight_decay=0, eps=1e-12, groups={"vision": {"learning_rate": 0.01}}), gradient=3.0)
    assert found["vision.model.conv.weight"] == pytest.approx(1 - 0.01)
    assert found["language.layers.0.weight"] == pytest.approx(1 - RATE)
    assert found["vision.frozen.weight"] == 1


def test_of_several_groups_that_fit_the_last_written_counts() -> None:
    groups = {"vision": {"learning_rate": 0.01, "weight_decay": 0.5}, "vision.projector": {"learning_rate": 0.02}}
    weights = parameters()
    for order, expected in ((list(groups), 0.02), (list(groups)[::-1], 0.01)):
        settings = config(groups={name: groups[name] for name in order})
        rates = {
            name: (group["lr"], group["weight_decay"])
            for group in build_optimizer(weights, settings, matching).param_groups
            for name in group["names"]
        }
        # What the last one leaves open is as the one before it said.
        assert rates["vision.projector.weight"] == (expected, 0.5)
        assert rates["vision.model.conv.weight"] == (0.01, 0.5)
        assert peak_rates(SHAPES, settings, matching)[order[1]] == expected


def test_the_factor_is_of_the_peak_and_not_of_the_last_rate() -> None:
    optimizer = build_optimizer(parameters(), config(groups={"vision": {"learning_rate": 0.01}}), matching)
    for factor in (0.5, 0.5, 1.0, 0.25):
        set_rate_factor(optimizer, factor)
        assert {group["lr"] for group in optimizer.param_groups} == {RATE * factor, 0.01 * factor}


def test_weight_without_gradient_stays_and_has_no_moments() -> None:
    weights = parameters()
    optimizer = build_optimizer(weights, config(), matching)
    weights["language.layers.0.weight"].grad = torch.ones(3, 2)
    optimizer.step()
    assert set(optimizer_tensors(optimizer)) == {"language.layers.0.weight"}
    assert all(bool((weight == 1).all()) for name, weight in weights.items() if name != "language.layers.0.weight")


def test_rank_of_frozen_layers_has_an_idle_optimizer() -> None:
    weights = {"vision.frozen.weight": nn.Parameter(torch.ones(3, 2), requires_grad=False)}
    optimizer = build_optimizer(weights, config(), matching)
    set_rate_factor(optimizer, 0.5)
    optimizer.step()
    assert optimizer_tensors(optimizer) == {}


def test_loaded_moments_continue_training_unchanged() -> None:
    settings, drawn = config(), torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items() if "frozen" not in name}
    one, other = parameters(), parameters()
    first, second = (build_optimizer(weights, settings, matching) for weights in (one, other))

    def step(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for name, gradient in gradients.items():
            weights[name].grad = gradient.clone()
        optimizer.step()

    step(one, first)
    allocate_moments(second, set(gradients))
    with torch.no_grad():
        for name, weight in other.items():
            weight.copy_(one[name])
        for name, moments in optimizer_tensors(second).items():
            for kind, tensor in moments.items():
                tensor.copy_(optimizer_tensors(first)[name][kind])
    step(one, first)
    step(other, second)
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    # By hand: two equal gradients g make both bias-corrected moments g and g squared.
    gradient = gradients["language.scale"].item()
    expected = 1 - 2 * RATE * gradient / (math.sqrt(gradient**2) + settings.eps)
    assert one["language.scale"].item() == pytest.approx(expected, rel=1e-6)  # fp32
