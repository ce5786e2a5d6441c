"""Which plans this runtime trains."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.config.errors import list_problems
from dilatant.models.tensor_plan import degree_problems, dropout_problems
from dilatant.models.unit import Unit
from dilatant.plan.plan import Plan
from dilatant.plan.runnable import training_problems
from dilatant.runtime.holders import tensor_plans


def require_trainable(plan: Plan, units: Mapping[str, Unit]) -> None:
    """Raises UserError that lists why this runtime cannot train `plan`."""
    problems = layout_problems(plan, units)
    if problems:
        raise list_problems("this plan cannot train:", problems)


def layout_problems(plan: Plan, units: Mapping[str, Unit]) -> list[str]:
    """Everything that `require_trainable` would complain about."""
    problems = training_problems(plan) or [
        f"{p.unit} replica {p.replica} stage {p.position} has ranks {list(p.stage.ranks)}, but tp is {p.stage.tp}"
        for p in plan.stages()
        if len(p.stage.ranks) != p.stage.tp
    ]
    degrees: dict[str, set[int]] = {}
    for placed in plan.stages():
        if placed.stage.tp > 1:
            degrees.setdefault(placed.unit, set()).add(placed.stage.tp)
    for name, own in tensor_plans(plan, units).items():
        found = [problem for tp in sorted(degrees[name]) for problem in degree_problems(units[name], own, tp)]
        problems += dict.fromkeys(found)
        problems += dropout_problems(units[name], own)
    return problems
