"""Layer times by the costs that a run uses, from which pipeline templates are planned."""

from __future__ import annotations

import numpy as np

from dilatant.config import Config
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.training.prepare import PreparedRun
from dilatant.training.run_costs import costs_of_run


def layer_seconds(config: Config, prepared: PreparedRun, plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return unit → seconds of each layer, forward plus backward, for a typical microbatch of `plan` on one rank."""
    layers = {unit.name: unit.replicas[0].stages[-1].end for unit in plan.units}
    feeds = {unit.name: unit.feeds for unit in plan.units}
    apart = plan_from_specs(layers, {name: ParallelSpec(pp=count) for name, count in layers.items()}, feeds)
    costs = costs_of_run(config, prepared.model, apart)
    found: dict[str, list[float]] = {name: [] for name in layers}
    for number, placed in enumerate(apart.stages()):
        tokens = _tokens(config, prepared, placed.unit, len(plan.unit(placed.unit).replicas))
        powers = np.array([tokens * tokens, tokens, 1.0])
        found[placed.unit].append(float((costs.stages.seconds[number, :2] @ powers).sum()))
    return {name: tuple(seconds) for name, seconds in found.items()}


def _tokens(config: Config, prepared: PreparedRun, unit: str, replicas: int) -> float:
    """Return the mean tokens of one replica's microbatch; the token budget of a row where sizes are unknown."""
    sizes = prepared.samples.train_sizes
    if sizes is None or unit not in sizes.units or not len(sizes.of(unit)):
        return float(config.row_tokens)
    samples = config.train.global_batch_size / (prepared.planned.num_microbatches * replicas)
    return max(1.0, float(sizes.of(unit).mean()) * samples)
