"""Step costs of a plan, from the costs of its layers, for this model on these devices."""

from __future__ import annotations

from dataclasses import replace

from dilatant.cost.model import CostModel
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.plan import Plan
from dilatant.planning.problem.dense_rows import dense_rows
from dilatant.planning.problem.describe_model import ModelDescription
from dilatant.planning.problem.planned_hardware import Target
from dilatant.schedule.plan_scorer import step_costs


def described_costs(plan: Plan, model: ModelDescription, costs: CostModel, target: Target) -> StepCosts:
    """Return what the steps of `plan` cost; `costs` as training meets them (`costs_in_use`). Raises UserError if they
    lack a layer type or degree."""
    return replace(
        step_costs(plan, model.spec, costs, target.cluster, target.rules),
        item_tokens=model.item_tokens,
        media_pairs=model.media_pairs,
        dense=dense_rows(model, costs),
    )
