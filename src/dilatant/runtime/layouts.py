"""Which plans this runtime trains."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.config.errors import list_problems
from dilatant.models.tensor_plan import degree_problems
from dilatant.models.unit import Unit
from dilatant.plan.plan import Plan
from dilatant.runtime.holders import tensor_plans


def require_trainable(plan: Plan, units: Mapping[str, Unit]) -> None:
    """Raises UserError that lists why this runtime cannot train `plan`."""
    problems = layout_problems(plan, units)
    if problems:
        raise list_problems("this plan cannot train:", problems)


def layout_problems(plan: Plan, units: Mapping[str, Unit]) -> list[str]:
    """Everything that `require_trainable` would complain about."""
    problems = []
    degrees: dict[str, set[int]] = {}
    for placed in plan.stages():
        if placed.stage.cp > 1:
            problems.append(
                f"{placed.unit} replica {placed.replica} stage {placed.position} asks for cp {placed.stage.cp}, which "
                "this version plans but does not train; set cp to 1"
            )
        if placed.stage.tp > 1:
            degrees.setdefault(placed.unit, set()).add(placed.stage.tp)
    for name, own in tensor_plans(plan, units).items():
        found = [problem for tp in sorted(degrees[name]) for problem in degree_problems(units[name], own, tp)]
        problems += dict.fromkeys(found)
    return problems
