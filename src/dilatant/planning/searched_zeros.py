"""Who may share optimizer state under the plans of a run."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.config import Config
from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.plan.layouts.space import FEW
from dilatant.plan.modes import Mode
from dilatant.planning.problem.planned_hardware import Target


@dataclass(frozen=True, slots=True)
class SearchedZeros:
    """Who may share optimizer state under a plan, those preferred first: plans of all kinds are looked for under
    `searched`, the best of which is simulated under `glanced`, too."""

    searched: tuple[Zero, ...]
    glanced: tuple[Zero, ...] = ()


def searched_zeros(config: Config, target: Target, fault_tolerance: int = 0) -> SearchedZeros:
    """What a search tries where `train.zero` says nothing. Published systems' plans are compared as they share by
    default. Where nodes may be lost none may take state along, and state on the host is not to be there several times.
    """
    if config.train.zero is not None:
        return SearchedZeros((config.train.zero,))
    tried: list[Zero] = [DEFAULT_ZERO]
    if config.plan.mode == Mode.BEST and target.cluster.num_devices > 1:
        tried += [] if config.train.optimizer.offload else ["none"]
        several = target.cluster.num_devices > (target.rules.ranks_per_node or target.cluster.num_devices)
        tried += ["all"] if several and not (config.resilience.enabled or fault_tolerance) else []
    if target.cluster.num_devices <= FEW:
        return SearchedZeros(tuple(tried))
    # A search on so many devices may take only so long, and what spares memory makes other plans possible.
    searched = tuple(zero for zero in tried if zero != "none")
    return SearchedZeros(searched, tuple(zero for zero in tried if zero not in searched))
