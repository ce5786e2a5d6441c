"""Row length on GPUs: choose the tokens of a microbatch if the config leaves `train.row_tokens` open.

The host issues as many operations for a short row as for a long one. A GPU computes a row of a few thousand tokens
faster than the host issues its operations, so rows are as long as memory allows. A second search gives such rows to
all plans, also to pipelines, which need microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from dilatant.config import Config
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan
from dilatant.planning.planning import PlannedRun, PlanningProblem, plan_run, scorer_of, typical_step
from dilatant.planning.problem.planned_hardware import Target, is_same_hardware
from dilatant.report.text.wording import listed, seconds_text

LENGTHS = (4096, 8192, 16384)
"""Row lengths to try besides `data.max_length`, in tokens of the language model."""
ROUNDED = 1e-9
"""Relative difference of equal seconds that were summed in another order."""


def is_row_length_open(config: Config, target: Target) -> bool:
    """Return True if no key of the config sets the row length, and the devices are GPUs of one kind."""
    asked = {"microbatch_sizes", "microbatch_tokens"} & config.plan.model_fields_set
    on_gpus = not target.groups and not is_same_hardware("CPU", target.hardware.name)
    return on_gpus and config.train.row_tokens is None and not config.train.deterministic and not asked


def row_length(
    problem: PlanningProblem, plan: Plan, schedule: str | None = None
) -> tuple[PlanningProblem, PlanScore, str] | None:
    """Find the longest rows with which `plan` fits the memory of its GPUs. Return the problem with these rows
    (`row_tokens` of its config), the plan's score with them, and the reason as text. Return None for a plan with
    pipelines, which keeps its microbatches, if the config sets the row length (see `is_row_length_open`), and if the
    shortest rows do not fit, so that the plan keeps the microbatches of its search."""
    groups, replicas = {placed.stage.ranks for placed in plan.stages()}, len(plan.units[-1].replicas)
    is_one_stage = len(groups) == replicas and len(plan.stages()) == replicas * len(plan.units)
    if not is_one_stage or not is_row_length_open(problem.config, problem.target):
        return None
    shortest, count = problem.config.row_tokens, problem.config.parallel.microbatches or 1
    steps = problem.samples.workload.steps(problem.global_batch)
    held = np.array([step.tokens[problem.model.anchor].sum() for step in steps]) / replicas
    known = [shortest, *(length for length in LENGTHS if length > shortest)]
    lengths = [shortest, *(longer for shorter, longer in pairwise(known) if shorter < held.max())]
    why = "longer ones would not fit memory" if len(lengths) > 1 else "a replica has no more in a step"
    if held.max() > lengths[-1]:
        why = "longer ones are not tried"
    for tokens in reversed(lengths):
        longer = problem.with_row_tokens(tokens)
        fullest = steps[np.argmax(held / np.ceil(held / tokens))]  # over all known steps, not only the simulated ones
        crowded = replace(longer, samples=replace(longer.samples, workload=fullest))
        worst = scorer_of(crowded, schedule)(plan, count, tokens)
        if problem.target.cluster.overflow(plan.ranks, worst.peak_bytes) <= 0.0:
            break
    else:
        return None
    if tokens != shortest:
        named = listed([f"{length:,}" for length in lengths])
        why = f"the longest of {named} that fit memory, {problem.memory_text(plan, worst)}"
    score = scorer_of(longer, schedule)(plan, count, tokens)
    return longer, score, f"Rows hold up to {tokens:,} tokens (train.row_tokens is unset): {why}."


def with_long_rows(planned: PlannedRun) -> PlannedRun:
    """Return the planned run with the rows of `row_length` for its winner, or unchanged."""
    if planned.chain is not None:
        return planned  # later memberships keep its microbatches
    winner = planned.result.winner
    found = row_length(planned.problem, winner.plan)
    if found is None:
        return planned
    problem, score, reason = found
    count, tokens = problem.config.parallel.microbatches or 1, problem.config.row_tokens
    size = max(1, round(problem.global_batch / (winner.replicas * count)))
    winner = replace(winner, num_microbatches=count, microbatch_size=size, row_tokens=tokens, score=score)
    before = planned.result
    bound = min(before.lower_bound, score.seconds)  # of plans with the rows of the search
    proven = before.proven and score.seconds > (1.0 - ROUNDED) * before.lower_bound
    result = replace(before, winner=winner, seconds=score.seconds, lower_bound=bound, proven=proven)
    typical = typical_step(problem, winner).timeline
    return replace(planned, problem=problem, result=result, typical=typical, rows=(reason,))


def with_best_rows(planned: PlannedRun, all_devices: bool = False) -> PlannedRun:
    """Return the result of a search with the best rows. If the winner gets longer rows, or has pipelines, a second
    search gives all plans the longest that fit, or the longest of all; it decides unless it is slower. all_devices: as
    in `plan_run`."""
    problem, first = planned.problem, with_long_rows(planned)
    config, shortest, before = problem.config, problem.config.row_tokens, planned.result
    tokens = LENGTHS[-1] if first is planned else first.problem.config.row_tokens
    # With a number of microbatches, or copies for recovery, a second search would compare other plans.
    asked = config.parallel.microbatches is not None or config.resilience.enabled or planned.chain is not None
    if asked or shortest >= tokens or not is_row_length_open(config, problem.target):
        return first
    try:
        again = plan_run(problem.with_row_tokens(tokens), all_devices)
    except PlanError:
        return first
    winner = again.result.winner
    same = replace(again, problem=replace(again.problem, config=config, costs=problem.costs))
    found = with_long_rows(same)
    if found is same:
        reason = (
            f"Rows hold up to {tokens:,} tokens (train.row_tokens is unset): with {shortest:,} the fastest plan takes "
            f"{seconds_text(before.seconds)}."
        )
        winner = replace(winner, row_tokens=winner.row_tokens or tokens)
        found = replace(again, result=replace(again.result, winner=winner), rows=(reason,))
    if found.result.seconds > first.result.seconds or (first is planned and found.result.seconds == before.seconds):
        return first
    bound = min(before.lower_bound, found.result.lower_bound) if first is planned else found.result.lower_bound
    return replace(found, result=replace(found.result, lower_bound=bound))
