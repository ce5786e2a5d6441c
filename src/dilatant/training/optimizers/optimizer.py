"""AdamW and Muon over logical parameter names, with learning rates per unit, part or pattern, and their schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config import OptimizerConfig, RateSchedule, UserError
from dilatant.config.errors import own_code
from dilatant.config.signatures import takes
from dilatant.plan.boxes import parse_key
from dilatant.training.optimizers.eight_bit import eight_bit_adamw, require_bitsandbytes
from dilatant.training.optimizers.master_weights import MasterAdamW, WithMasters, make_masters
from dilatant.training.optimizers.muon import MuonAdamW
from dilatant.training.optimizers.offload import OffloadedAdamW

Matcher = Callable[[str], Set[str]]


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise UserError if this machine cannot run the configured optimizer; takes no device."""
    if config.offload and not torch.cuda.is_available():
        raise UserError(
            "train.optimizer.offload keeps optimizer state out of a GPU's memory, and this run has no GPU: leave it out"
        )
    if config.name == "adamw_8bit":
        require_bitsandbytes()
        if not torch.cuda.is_available():
            raise UserError(
                "train.optimizer.name: adamw_8bit saves a GPU's memory, and this run has no GPU: leave it out"
            )


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    matching: Matcher,
    exact: Mapping[str, Tensor] | None = None,
    orthogonal: Set[str] = frozenset(),
) -> WithMasters:
    """Build AdamW over the masters of the trainable `parameters` (logical name or box key → parameter, tied weights
    once); for those of the `orthogonal` names, Muon.

    exact: see `make_masters`. `matching(pattern)` returns the names that a key of `config.groups` selects. Norms and
    biases (fewer than two dimensions) have no weight decay. Without a trainable parameter, as on a rank of frozen
    layers, the optimizer does nothing.
    """
    name_of = {key: parse_key(key)[0] for key in parameters}
    rates = _rates(name_of.values(), config, matching)
    groups: dict[tuple[str, float, float, bool], dict[str, nn.Parameter]] = {}
    masters = make_masters(parameters, exact, torch.device("cpu") if config.offload else None)
    for key, master in masters.items():
        label, rate, decay = rates[name_of[key]]
        alike = label, rate, decay if master.ndim >= 2 else 0.0, name_of[key] in orthogonal
        groups.setdefault(alike, {})[key] = master
    if not groups:
        groups["none", config.learning_rate, 0.0, False] = {}
    kind: type[WithMasters] = OffloadedAdamW if config.offload else MasterAdamW
    options: dict[str, Any] = {"fused": True}  # one pass over memory, not one per operation, also on the CPU
    if config.name == "adamw_8bit":
        kind, options = eight_bit_adamw(), {}
    if config.muon is not None and any(is_orthogonal for *_, is_orthogonal in groups):
        kind, options = MuonAdamW, {**options, "muon": config.muon}
    return kind(
        [
            {
                "params": list(members.values()),
                "names": list(members),
                "lr": rate,
                "peak_lr": rate,
                "weight_decay": decay,
                "orthogonal": is_orthogonal,
            }
            for (_, rate, decay, is_orthogonal), members in groups.items()
        ],
        parameters,
        masters,
        betas=config.betas,
        eps=config.eps,
        **options,
    )


def peak_rates(names: Iterable[str], config: OptimizerConfig, matching: Matcher) -> dict[str, float]:
    """Return the peak learning rate of trainable weights by label: a unit, or the key of `config.groups` that fits."""
    return {label: rate for label, rate, _ in _rates(names, config, matching).values()}


def _rates(names: Iterable[str], config: OptimizerConfig, matching: Matcher) -> dict[str, tuple[str, float, float]]:
    """Map each name to label, learning rate and weight decay; if several groups fit, the last one written counts."""
    fitting = {pattern: matching(pattern) for pattern in config.groups}
    found = {}
    for name in names:
        label, rate, decay = name.split(".", 1)[0], config.learning_rate, config.weight_decay
        for pattern, matched in fitting.items():
            if name in matched:
                label = pattern
                group = config.groups[pattern]
                rate = rate if group.learning_rate is None else group.learning_rate
                decay = decay if group.weight_decay is None else group.weight_decay
        found[name] = label, rate, decay
    return found


def set_rate_factor(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its peak rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def optimizer_tensors(optimizer: WithMasters) -> dict[str, dict[str, torch.Tensor]]:
    """Return moments and step count by name or key; a parameter that never had a gradient has none."""
    found = {name: optimizer.moments(parameter) for name, parameter in _members(optimizer)}
    return {name: moments for name, moments in found.items() if moments is not None}


def allocate_moments(optimizer: WithMasters, names: set[str]) -> None:
    """Allocate the moments of the parameters in `names`, so that a checkpoint can be read into them; existing moments
    stay. Call the optimizer's `loaded` afterwards."""
    for name, parameter in _members(optimizer):
        if name in names and optimizer.moments(parameter) is None:
            optimizer.allocate(parameter)


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"])
    ]


def rate_factor(schedule: RateSchedule | Callable[..., float], step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate that step `step` (0-based) of `total_steps` uses. It is in [0, 1]
    unless the schedule is the user's own function of the step, or of the step and `total_steps`. Raises UserError.

    Warm-up rises linearly and reaches 1 at the step behind it; `final_ratio` would be reached one step after the last,
    so no step is spent at a rate of zero.
    """
    if not isinstance(schedule, RateSchedule):
        with own_code(f"schedule: it fails for step {step}"):
            factor: Any = schedule(step, total_steps) if takes(schedule, 2) else schedule(step)
            if isinstance(factor, Real) and 0 <= float(factor) < math.inf:
                return float(factor)
        raise UserError(f"schedule: it returned {factor!r} for step {step}; return a number of at least 0")
    warm_up = schedule.warm_up(total_steps)
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
    shape = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * shape
