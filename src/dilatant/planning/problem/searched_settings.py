"""Settings that a search varies: tensor- and context-parallel degrees, and ZeRO variants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dilatant.config import Config, PlanConfig, UserError
from dilatant.config.degrees import AXES, Degrees
from dilatant.cost.memory import DEFAULT_ZERO, Zero
from dilatant.plan.limits import SMALL_CLUSTER
from dilatant.plan.search.why_not import AskedLayout
from dilatant.planning.problem.describe_model import ModelDescription
from dilatant.planning.problem.layer_shards import degrees_by_kind
from dilatant.planning.problem.planned_hardware import Target, is_same_hardware
from dilatant.runtime.layouts import context_problems


def planned_degrees(plan: PlanConfig, model: ModelDescription, target: Target) -> list[Degrees]:
    """Return the degrees that the config names, else, on GPUs, the powers of two that fit a node and that training can
    do for some unit of the model. Processes of a CPU share its memory: there all are 1."""
    node = 1 if is_same_hardware("CPU", target.hardware.name) else target.cluster.gpus_per_node
    powers = [1 << power for power in range(node.bit_length()) if 1 << power <= node]
    splits = not any(context_problems(unit) for unit in {entry.unit: None for entry in model.types})
    takes = {"tp": lambda tp: _divides(model, tp), "cp": lambda cp: splits or cp == 1}
    named = {name: getattr(plan, key) for name, key in AXES.items()}
    tried = [named[name] or [power for power in powers if takes[name](power)] for name in AXES]
    asked, found = None not in named.values(), itertools.starmap(Degrees, itertools.product(*tried))
    return [one for one in found if asked or one.ranks <= max(node, *one)]


def with_requested_degrees(
    config: Config, model: ModelDescription, target: Target, asked: AskedLayout
) -> Config:
    """Return a config whose plans may also have the degrees that a layout asks for; a cost file may still lack them."""
    offered = planned_degrees(config.plan, model, target)
    wanted = {Degrees(*(own.get(name, 1) for name in AXES)) for own in asked.units.values()}
    if wanted <= {*offered}:
        return config
    axes = zip(*(one.axes for one in (*offered, *wanted)))
    degrees = {key: tuple(sorted({*values})) for key, values in zip(AXES.values(), axes)}
    return config.model_copy(update={"plan": config.plan.model_copy(update=degrees)})


def _divides(model: ModelDescription, tp: int) -> bool:
    try:
        degrees_by_kind(model, [Degrees(tp)])
    except UserError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ZeroVariants:
    """ZeRO variants to try, preferred ones first. Plans of all kinds are searched under `searched`; the best is also
    simulated under `rescored`."""

    searched: tuple[Zero, ...]
    rescored: tuple[Zero, ...] = ()


def zero_variants(config: Config, target: Target, fault_tolerance: int = 0) -> ZeroVariants:
    """Return what a search tries if `train.zero` is not set. If nodes may be lost, none may hold the only copy of
    some state; offloaded state must not be held several times on a host."""
    if config.train.zero is not None:
        return ZeroVariants((config.train.zero,))
    tried: list[Zero] = [DEFAULT_ZERO]
    if target.cluster.num_devices > 1:
        tried += [] if config.train.optimizer.offload else ["none"]
        several = target.cluster.num_devices > (target.rules.ranks_per_node or target.cluster.num_devices)
        tried += ["all"] if several and not (config.resilience.enabled or fault_tolerance) else []
    if target.cluster.num_devices <= SMALL_CLUSTER:
        return ZeroVariants(tuple(tried))
    # Search time is limited on many devices; variants that save memory are searched, as they allow other plans.
    searched = tuple(zero for zero in tried if zero != "none")
    return ZeroVariants(searched, tuple(zero for zero in tried if zero not in searched))
