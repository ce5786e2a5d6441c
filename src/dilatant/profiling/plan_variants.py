"""A plan changed in one way, and what that would make of its step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dilatant.plan.finals import RankedPlan
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.score import PlanScore
from dilatant.profiling.planning import PlanningProblem, scorer_of
from dilatant.schedule import FAMILIES


def compare_schedules(
    problem: PlanningProblem, ranked: RankedPlan, names: Iterable[str] = FAMILIES
) -> dict[str, PlanScore]:
    """The score of the plan under each of these schedule families. A family that cannot run it is left out."""
    found = {}
    for name in names:
        try:
            found[name] = _score(problem, ranked, name)
        except ValueError:
            continue
    return found


def without_recomputation(problem: PlanningProblem, ranked: RankedPlan) -> PlanScore | None:
    """The score of the plan if activations are kept; None where none are recomputed."""
    units = problem.model.spec.units
    if all(unit.recompute in ("none", None) for unit in units):
        return None
    spec = ModelSpec(tuple(replace(unit, recompute="none") for unit in units))
    kept = replace(problem, model=replace(problem.model, spec=spec))
    return _score(kept, ranked)


def score_unfrozen(problem: PlanningProblem, ranked: RankedPlan, name: str) -> PlanScore:
    """The score of the plan if all of the unit `name` trained."""
    units = tuple(
        replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
        if unit.name == name
        else unit
        for unit in problem.model.spec.units
    )
    thawed = replace(problem, model=replace(problem.model, spec=ModelSpec(units)))
    return _score(thawed, ranked)


def score_with_microbatches(problem: PlanningProblem, ranked: RankedPlan, count: int) -> PlanScore:
    """The score of the plan with so many microbatches in a step, where `train.row_tokens` allows."""
    return scorer_of(problem.sharing(ranked.zero), ranked.score.schedule or None)(ranked.plan, count)


def _score(problem: PlanningProblem, ranked: RankedPlan, schedule: str | None = None) -> PlanScore:
    """The score of the plan under `schedule`, else its own."""
    score = scorer_of(problem.sharing(ranked.zero), schedule or ranked.score.schedule or None)
    return score(ranked.plan, ranked.num_microbatches, ranked.row_tokens)
