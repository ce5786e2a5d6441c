"""Fully sharded data parallelism among the plans of a run: whole replicas whose weights and gradients are sharded."""

from __future__ import annotations

from dataclasses import replace

from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.search.enumeration import least_seconds
from dilatant.plan.search.shapes import textbook_shapes
from dilatant.planning.planning import PlannedRun, planned_as, search_run
from dilatant.planning.problem.searched_settings import may_shard
from dilatant.planning.row_length import with_best_rows, with_long_rows
from dilatant.report.text.wording import seconds_text

NOTABLE = 0.05
"""Share of a step that sharded weights must save: predictions of published steps with them are off by as much."""


def with_best_memory(searched: PlannedRun, all_devices: bool = False) -> PlannedRun:
    """Return the searched run with the best rows (`with_best_rows`), or the fastest layout without pipelines and with
    sharded weights if it is notably faster. The config may forbid to shard. all_devices: as in `plan_run`."""
    planned, problem = with_best_rows(searched, all_devices), searched.problem
    if not may_shard(problem.config, problem.target) or problem.target.rules.shard or problem.target.groups:
        return planned
    before, most = planned.result, (1.0 - NOTABLE) * planned.result.seconds

    def unstaged(space: Space) -> list[PlanCandidate]:
        shapes = textbook_shapes(space) if least_seconds([space]) < most else ()
        return sorted((one for one in shapes if one.options[-1].stages == 1), key=lambda one: one.estimate)

    sharded = problem.sharing(problem.target.rules.zero, {"": "weights"})
    try:
        result = search_run(sharded, all_devices, only=unstaged)
    except PlanError:
        return planned
    saved = (
        f"with whole weights a step would take {seconds_text(before.seconds)}, so weights and gradients are sharded "
        "(train.shard: weights)"
    )
    result = replace(result, proven=False, lower_bound=min(result.lower_bound, before.lower_bound))
    found = with_long_rows(planned_as(sharded, result, (*planned.notes, saved)))
    return found if found.result.seconds <= most else planned
