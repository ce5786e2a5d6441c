"""ZeRO variants of a search: which ranks may share optimizer state under the plans of a run."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.config import Config
from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.plan.layouts.space import SMALL_CLUSTER
from dilatant.plan.modes import Mode
from dilatant.planning.problem.planned_hardware import Target


@dataclass(frozen=True, slots=True)
class ZeroVariants:
    """ZeRO variants to try, preferred ones first. Plans of all kinds are searched under `searched`; the best is also
    simulated under `glanced`."""

    searched: tuple[Zero, ...]
    glanced: tuple[Zero, ...] = ()


def zero_variants(config: Config, target: Target, fault_tolerance: int = 0) -> ZeroVariants:
    """Return what a search tries if `train.zero` is not set. Plans of published systems are compared with the default.
    If nodes may be lost, none may hold the only copy of some state; offloaded state must not be held several times on a
    host."""
    if config.train.zero is not None:
        return ZeroVariants((config.train.zero,))
    tried: list[Zero] = [DEFAULT_ZERO]
    if config.plan.mode == Mode.BEST and target.cluster.num_devices > 1:
        tried += [] if config.train.optimizer.offload else ["none"]
        several = target.cluster.num_devices > (target.rules.ranks_per_node or target.cluster.num_devices)
        tried += ["all"] if several and not (config.resilience.enabled or fault_tolerance) else []
    if target.cluster.num_devices <= SMALL_CLUSTER:
        return ZeroVariants(tuple(tried))
    # Search time is limited on many devices; variants that save memory are searched, as they allow other plans.
    searched = tuple(zero for zero in tried if zero != "none")
    return ZeroVariants(searched, tuple(zero for zero in tried if zero not in searched))
