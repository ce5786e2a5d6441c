"""Advice on a plan: changes that would make its step faster, and what more training would cost, each simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dilatant.plan.costs.score import PlanScore
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.search.finals import RankedPlan
from dilatant.planning.measuring.layer_costs import costs_in_use, layer_costs
from dilatant.planning.planning import PlannedRun, PlanningProblem, scorer_of, searched_counts
from dilatant.planning.problem.describe_model import describe_unfrozen
from dilatant.report.text.wording import counted, listed, percent_text, seconds_text
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.plan_scorer import families_for

FILLING = 0.1
"""Share of a step in which a well-fed pipeline fills and drains."""
NOTABLE = 0.01
"""Share of a step that a change must save to be advised: less is within the accuracy of any prediction."""


def plan_advice(planned: PlannedRun) -> tuple[str, ...]:
    """Advise on changes that the search leaves to the user and that speed up the winner; then on unfreezing."""
    return (
        *_schedules(planned),
        *_recomputation(planned),
        *_microbatches(planned),
        *_batch(planned),
        *_row_tokens(planned),
        *_unfreezing(planned),
    )


def _schedules(planned: PlannedRun) -> Iterator[str]:
    """Advise on schedules that the search would have tried if the config had not named one."""
    winner, named = planned.result.winner, planned.problem.config.parallel.schedule
    others = [name for name in families_for(winner.plan) if name != named] if named else []
    found = compare_schedules(planned.problem, winner, others)
    faster = {name: score for name, score in found.items() if _is_better(planned, score)}
    if faster:
        best = min(faster, key=lambda name: faster[name].seconds)
        others = [f"{name} {seconds_text(faster[name].seconds)}" for name in faster if name != best]
        yield (
            f"Schedule {best} would take {_instead(planned, faster[best])} (parallel.schedule: {best})"
            f"{f'; {listed(others)}' if others else ''}."
        )


def _recomputation(planned: PlannedRun) -> Iterator[str]:
    problem, units = planned.problem, planned.problem.model.spec.units
    if any(unit.recompute not in ("none", None) for unit in units):
        spec = ModelSpec(tuple(replace(unit, recompute="none") for unit in units))
        kept = _score(replace(problem, model=replace(problem.model, spec=spec)), planned.result.winner)
        if _is_better(planned, kept):
            yield (
                "Memory is idle: without recomputation (train.recompute: none) a step would take "
                f"{_instead(planned, kept)}, with {_memory(planned, kept)}."
            )


def _microbatches(planned: PlannedRun) -> Iterator[str]:
    """Advise on twice or half as many microbatches, unless the search tried these."""
    winner = planned.result.winner
    tried = searched_counts(planned.problem, winner.replicas)
    for count in (2 * winner.num_microbatches, winner.num_microbatches // 2):
        size, rest = divmod(planned.problem.global_batch, winner.replicas * max(count, 1))
        if count in tried or not count or rest or not size:
            continue
        problem = planned.problem.sharing(winner.zero)
        score = scorer_of(problem, winner.score.schedule or None)(winner.plan, count)
        if _is_better(planned, score):
            yield (
                f"With {counted(count, 'microbatch')} of {counted(size, 'sample')} a step would take "
                f"{_instead(planned, score)} (add {size} to plan.microbatch_sizes, or set parallel.microbatches)."
            )


def _batch(planned: PlannedRun) -> Iterator[str]:
    """Advise on a batch that keeps pipelines full, if they fill and drain for long. Both last as long with more
    microbatches, whatever their number."""
    winner, batch = planned.result.winner, planned.problem.global_batch
    total = winner.score.seconds * len(winner.plan.ranks)
    lost = sum(winner.score.idle_seconds.get(cause, 0.0) for cause in ("warm-up", "drain")) / total
    if lost > 2 * FILLING:
        larger = batch * math.ceil(lost / (1.0 - lost) * (1.0 - FILLING) / FILLING)
        yield (
            f"The global batch is small for {counted(len(winner.plan.ranks), 'device')}: pipelines fill and drain for "
            f"{percent_text(lost)} of the step, about {percent_text(FILLING)} with train.global_batch_size {larger:,}."
        )


def _row_tokens(planned: PlannedRun) -> Iterator[str]:
    """Advise on twice the token budget, if it cuts microbatches into more than the plan asked for."""
    winner, tokens = planned.result.winner, planned.problem.config.row_tokens
    count, asked = winner.microbatches[0], winner.num_microbatches
    if winner.row_tokens is not None or count == asked:
        return
    score = _score(planned.problem.with_row_tokens(2 * tokens), winner)
    if _is_better(planned, score):
        yield (
            f"Rows of at most {tokens:,} tokens cut a pipeline's {counted(asked, 'microbatch')} into {count:,}: with "
            f"train.row_tokens {2 * tokens:,} a step would take {_instead(planned, score)}, with "
            f"{_memory(planned, score)}."
        )


def _unfreezing(planned: PlannedRun) -> Iterator[str]:
    winner = planned.result.winner
    for unit in planned.problem.model.spec.units:
        score = None if all(unit.trainable) else score_unfrozen(planned.problem, winner, unit.name)
        if score is not None:
            more = score.seconds / winner.score.seconds - 1.0
            fits = "" if _fits(planned, score) else ", too much: it would need another plan"
            yield (
                f"Training all of {unit.name} too would take {percent_text(more)} longer "
                f"({seconds_text(score.seconds)} a step), with {_memory(planned, score)}{fits}."
            )


def _fits(planned: PlannedRun, score: PlanScore) -> bool:
    ranks = planned.result.winner.plan.ranks
    return planned.problem.target.cluster.overflow(ranks, score.peak_bytes) <= 0.0


def _is_better(planned: PlannedRun, score: PlanScore) -> bool:
    saves = planned.result.winner.score.seconds * (1.0 - NOTABLE)
    return score.seconds < saves and _fits(planned, score)


def _instead(planned: PlannedRun, score: PlanScore) -> str:
    return f"{seconds_text(score.seconds)} instead of {seconds_text(planned.result.winner.score.seconds)}"


def _memory(planned: PlannedRun, score: PlanScore) -> str:
    return planned.problem.memory_text(planned.result.winner.plan, score)


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


def _score(problem: PlanningProblem, ranked: RankedPlan, schedule: str | None = None) -> PlanScore:
    """Return the score of the plan under `schedule`, else its own."""
    score = scorer_of(problem.sharing(ranked.zero), schedule or ranked.score.schedule or None)
    return score(ranked.plan, ranked.num_microbatches, ranked.row_tokens)
