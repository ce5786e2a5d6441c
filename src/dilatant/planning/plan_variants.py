"""Variants of a plan: one change, and the score of its step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dilatant.plan.costs.score import PlanScore
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.search.finals import RankedPlan
from dilatant.planning.measuring.layer_costs import costs_in_use, layer_costs
from dilatant.planning.planning import PlanningProblem, scorer_of
from dilatant.planning.problem.describe_model import describe_unfrozen
from dilatant.schedule.families import FAMILIES


def compare_schedules(
    problem: PlanningProblem, ranked: RankedPlan, names: Iterable[str] = FAMILIES
) -> dict[str, PlanScore]:
    """Return the score of the plan under each of these schedule families. A family that cannot run it is left out."""
    found = {}
    for name in names:
        try:
            found[name] = _score(problem, ranked, name)
        except ValueError:
            continue
    return found


def without_recomputation(problem: PlanningProblem, ranked: RankedPlan) -> PlanScore | None:
    """Return the score of the plan if activations are kept; None if none are recomputed."""
    units = problem.model.spec.units
    if all(unit.recompute in ("none", None) for unit in units):
        return None
    spec = ModelSpec(tuple(replace(unit, recompute="none") for unit in units))
    kept = replace(problem, model=replace(problem.model, spec=spec))
    return _score(kept, ranked)


def score_unfrozen(problem: PlanningProblem, ranked: RankedPlan, name: str) -> PlanScore | None:
    """Return the score of the plan if every weight of the unit `name` trained.

    Costs that were measured or read with adapters lack the weight gradients of the base: then None.
    """
    config, measured = problem.config, problem.measured
    model = describe_unfrozen(problem.model, name)
    if any(layer.trainable and layer.fixed for layer in problem.model.spec.unit(name).layers):
        if any(costs.origin != "analytic" for costs in measured.groups.values() or [measured]):
            return None
        measured = layer_costs(config, model, problem.target)
    costs = costs_in_use(measured, model, problem.samples.targets, config.row_tokens, config.train.loss_chunk)
    return _score(replace(problem, model=model, measured=measured, costs=costs), ranked)


def score_with_microbatches(problem: PlanningProblem, ranked: RankedPlan, count: int) -> PlanScore:
    """Return the score of the plan with `count` microbatches per step, where `train.row_tokens` allows."""
    return scorer_of(problem.sharing(ranked.zero), ranked.score.schedule or None)(ranked.plan, count)


def score_with_row_tokens(problem: PlanningProblem, ranked: RankedPlan, tokens: int) -> PlanScore:
    """Return the score of the plan if a row of the language model may have `tokens` tokens (`train.row_tokens`)."""
    train = problem.config.train.model_copy(update={"row_tokens": tokens})
    return _score(replace(problem, config=problem.config.model_copy(update={"train": train})), ranked)


def _score(problem: PlanningProblem, ranked: RankedPlan, schedule: str | None = None) -> PlanScore:
    """Return the score of the plan under `schedule`, else its own."""
    score = scorer_of(problem.sharing(ranked.zero), schedule or ranked.score.schedule or None)
    return score(ranked.plan, ranked.num_microbatches, ranked.row_tokens)
