"""Check that this runtime can train a plan."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.attention.hook import why_not
from dilatant.config.errors import list_problems
from dilatant.models.core.unit import Unit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.parallel.tensor_plan import degree_problems, expert_problems
from dilatant.plan.plan import Plan
from dilatant.runtime.state.holders import tensor_plans


def require_trainable(plan: Plan, units: Mapping[str, Unit]) -> None:
    """Raise UserError with all reasons why this runtime cannot train `plan`."""
    problems = layout_problems(plan, units)
    if problems:
        raise list_problems("this plan cannot train:", problems)


def layout_problems(plan: Plan, units: Mapping[str, Unit]) -> list[str]:
    """Return the problems that `require_trainable` reports."""
    problems = [
        f"{p.unit} replica {p.replica} stage {p.position} has ranks {list(p.stage.ranks)}, but "
        + p.stage.degrees.grid(" and ")
        for p in plan.stages()
        if len(p.stage.ranks) != p.stage.degrees.ranks
    ]
    problems += [
        problem
        for name in dict.fromkeys(p.unit for p in plan.stages() if p.stage.cp > 1)
        for problem in context_problems(units[name])
    ]
    for name in dict.fromkeys(p.unit for p in plan.stages() if not (p.is_first and p.is_last)):
        cut = units[name]
        if cut.uncut is not None:
            problems.append(
                f"{name}: cut into stages, it would train another model (on a small copy, {cut.uncut}); give it pp: 1, "
                "and more replicas or tp"
            )
    problems += [
        f"{name}: ep above tp x cp divides samples among ranks, which only those of a language model do; give it less"
        for name in dict.fromkeys(p.unit for p in plan.stages() if p.stage.degrees.groups > 1)
        if not isinstance(units[name], LanguageUnit)
    ]
    for name, own in tensor_plans(plan, units).items():
        each = sorted({p.stage.degrees for p in plan.stages() if p.unit == name})
        wide = dict.fromkeys(degrees.tp for degrees in each if degrees.tp > 1)
        found = [problem for tp in wide for problem in degree_problems(units[name], own, tp)]
        found += [problem for degrees in each for problem in expert_problems(units[name], own, degrees)]
        problems += dict.fromkeys(found)
    return problems


def context_problems(unit: Unit) -> list[str]:
    """Return why context parallelism cannot split a unit's tokens; items of encoders and generators always split."""
    remedy = "give it cp: 1 and more stages, replicas or tp"
    if not isinstance(unit, LanguageUnit):
        return []
    problems = []
    if unit.row_attention is None:
        reason = unit.without_plans or why_not(unit.model) or "nobody asked for them (`choose_attention`)"
        problems.append(f"{unit.unit}: context parallelism needs attention over block tables: {reason}; {remedy}")
    elif unit.unsplit is not None:
        problems.append(f"{unit.unit}: context parallelism would train another model ({unit.unsplit}); {remedy}")
    if unit.before_language_model is not None:
        problems.append(f"{unit.unit}: before_language_model is given whole rows, which no rank has; {remedy}")
    return problems
