"""Modelled layer costs of a planning problem under other assumptions."""

from __future__ import annotations

from dataclasses import replace

from dilatant.cost.analytic import DILATANT, Runner
from dilatant.cost.hardware import Hardware
from dilatant.planning.measuring.layer_costs import costs_in_use, modelled_costs
from dilatant.planning.planning import PlanningProblem


def remodelled(
    problem: PlanningProblem, hardware: Hardware | None = None, runner: Runner = DILATANT
) -> PlanningProblem:
    """Return the problem with its layers as another program computes them, or as they run on other hardware. Measured
    layers stay as they are: then the problem itself is returned."""
    config, target = problem.config, problem.target
    if problem.measured.origin != "analytic" or config.plan.costs is not None or target.groups:
        return problem
    on = target if hardware is None else replace(target, hardware=hardware)
    measured = modelled_costs(config, problem.model, on, runner)
    rows = config.row_tokens, config.train.loss_chunk
    return replace(
        problem, measured=measured, costs=costs_in_use(measured, problem.model, problem.samples.targets, *rows)
    )
