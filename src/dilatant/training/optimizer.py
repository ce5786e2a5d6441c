"""AdamW over logical parameter names, with rates per unit, part or pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from dilatant.config import OptimizerConfig, UserError
from dilatant.plan.boxes import parse_key
from dilatant.training.master_weights import MasterAdamW, make_masters
from dilatant.training.offload import OffloadedAdamW

Matcher = Callable[[str], Set[str]]
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps in the form of a parameter; beside them the number of its steps."""


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises UserError where this machine cannot run what the config asks for; takes no device."""
    if config.offload and not torch.cuda.is_available():
        raise UserError(
            "train.optimizer.offload keeps optimizer state out of a GPU's memory, and this run has no GPU: leave it out"
        )


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    matching: Matcher,
    exact: Mapping[str, Tensor] | None = None,
) -> MasterAdamW:
    """AdamW over the masters of the trainable ones of `parameters` (logical name or box key →
    parameter, tied weights once).

    exact: see `make_masters`.

    `matching(pattern)` gives the names that a key of `config.groups` stands for. Norms and biases (fewer than two
    dimensions) take no weight decay. Without a trainable parameter, as on a rank of frozen layers, it does nothing.
    """
    name_of = {key: parse_key(key)[0] for key in parameters}
    rates = _rates(name_of.values(), config, matching)
    groups: dict[tuple[str, float, float], dict[str, nn.Parameter]] = {}
    masters = make_masters(parameters, exact, torch.device("cpu") if config.offload else None)
    for key, master in masters.items():
        label, rate, decay = rates[name_of[key]]
        groups.setdefault((label, rate, decay if master.ndim >= 2 else 0.0), {})[key] = master
    if not groups:
        groups["none", config.learning_rate, 0.0] = {}
    kind = OffloadedAdamW if config.offload else MasterAdamW
    return kind(
        [
            {
                "params": list(members.values()),
                "names": list(members),
                "lr": rate,
                "peak_lr": rate,
                "weight_decay": decay,
            }
            for (_, rate, decay), members in groups.items()
        ],
        parameters,
        masters,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # one pass over memory instead of one an operation, on the CPU as well
    )


def peak_rates(names: Iterable[str], config: OptimizerConfig, matching: Matcher) -> dict[str, float]:
    """The peak learning rate by label (a unit, or the key of `config.groups` that fits) of trainable weights."""
    return {label: rate for label, rate, _ in _rates(names, config, matching).values()}


def _rates(
    names: Iterable[str], config: OptimizerConfig, matching: Matcher
) -> dict[str, tuple[str, float, float]]:
    """Name → label, learning rate, weight decay; of several groups that fit, the last written counts."""
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
    """Set every group to `factor` of its peak rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The moments and the number of steps by name or key; a parameter that never had a gradient has none."""
    return {
        name: {moment: optimizer.state[parameter][moment] for moment in ("step", *MOMENTS)}
        for name, parameter in _members(optimizer)
        if optimizer.state.get(parameter)
    }


def allocate_moments(optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Make room for the moments of the parameters in `names`, so that a checkpoint can be read into them."""
    for name, parameter in _members(optimizer):
        if name in names:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"])
    ]
