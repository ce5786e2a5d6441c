"""Sharded gradients and weights among the plans of a run, chosen for each unit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from dilatant.config.degrees import ONE
from dilatant.config.memory_modes import SHARDS, Shard
from dilatant.cost.memory import DEFAULT_ZERO
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import FEWEST, LARGE_CLUSTER, SMALL_CLUSTER
from dilatant.plan.search.enumeration import enumerate_candidates, least_seconds
from dilatant.plan.search.shapes import textbook_shapes
from dilatant.planning.planning import PlannedRun, PlanningProblem, planned_as, search_problem, search_run
from dilatant.planning.problem.searched_settings import may_shard
from dilatant.planning.row_length import with_best_rows, with_long_rows
from dilatant.report.text.wording import seconds_text

NOTABLE = 0.05
"""Share of a step that sharded weights must save: predictions of published steps with them are off by as much."""
SMALL = 0.05
"""Units with a smaller share of all that can be sharded are sharded like the largest unit, as are all but two."""


def with_best_memory(searched: PlannedRun, all_devices: bool = False) -> PlannedRun:
    """Return the searched run with the best rows (`with_best_rows`), or the fastest plan whose units shard gradients or
    weights, each as suits it, if it is notably faster. The config may forbid to shard. all_devices: as in `plan_run`.

    Units get unlike words only if one word for all saves anything.
    """
    planned, problem = with_best_rows(searched, all_devices), searched.problem
    if not may_shard(problem.config, problem.target) or problem.target.groups:
        return planned
    shards = bool(problem.target.rules.shard)  # no plan with whole weights fits
    before, best, least = planned.result, planned, math.inf
    most = (1.0 if shards else 1.0 - NOTABLE) * before.seconds
    zero = problem.config.train.zero or DEFAULT_ZERO
    (space,) = search_problem(problem.sharing(zero, {"": "weights"}), all_devices).spaces()
    others = _promising(space, searched.result.seconds)
    for choice in shard_choices(problem) if least_seconds([space]) < most else ():
        if len({*choice.values()}) > 1 and least >= before.seconds and not shards:
            continue
        own = problem.sharing(zero, choice)
        try:
            result = search_run(own, all_devices, only=lambda space: [*_unstaged(space), *others], finalists=FEWEST)
        except PlanError:
            continue
        result = replace(result, proven=False, lower_bound=min(result.lower_bound, before.lower_bound))
        found = with_long_rows(planned_as(own, result, planned.notes))
        least = min(least, found.result.seconds)
        if found.result.seconds < most:
            best, most = found, found.result.seconds
    if best is planned:
        return planned
    rules = best.problem.target.rules
    words = {unit.name: rules.shard_of(unit.name) for unit in best.problem.model.spec.units}
    chosen = ", ".join(f"{unit}: {how}" for unit, how in words.items())
    chosen = {*words.values()}.pop() if len({*words.values()}) == 1 else f"{{{chosen}}}"
    saved = (
        f"with {'all weights sharded' if shards else 'whole weights'} a step would take "
        f"{seconds_text(before.seconds)}, so ranks share what train.shard: {chosen} says"
    )
    return replace(best, notes=(*best.notes, saved))


def _unstaged(space: Space) -> list[PlanCandidate]:
    """Return the layouts of a textbook without pipelines, lowest estimate first."""
    found = (one for one in textbook_shapes(space) if one.options[-1].stages == 1)
    return sorted(found, key=lambda one: one.estimate)


def _promising(space: Space, longest: float) -> list[PlanCandidate]:
    """Return the few layouts with the lowest estimates below `longest` seconds, of all up to SMALL_CLUSTER devices, of
    those of a textbook up to LARGE_CLUSTER."""
    devices, known = space.cluster.num_devices, list[PlanCandidate]()
    if devices <= SMALL_CLUSTER:
        known = enumerate_candidates(space)
    elif devices <= LARGE_CLUSTER:
        known = sorted(textbook_shapes(space), key=lambda one: one.estimate)
    return [one for one in known[:FEWEST] if one.estimate < longest]


def shard_choices(problem: PlanningProblem) -> list[dict[str, Shard]]:
    """Return the mappings from unit ("": all others) to what is sharded that are searched for a problem, one word for
    all units first. Gradients alone are only sharded where weights have no masters: else `weights_by_step` takes no
    more bytes and less time."""
    rules, units = problem.target.rules, problem.model.spec.units
    words = [how for how in SHARDS if how != "gradients" or not rules.has_masters]
    whole = replace(rules, shard=(("", "weights"),))
    size = {
        unit.name: sum(
            whole.shared(layer.held_trained(ONE, True), True) + whole.shared(layer.held_frozen(ONE, True), False)
            for layer in unit.layers
        )
        for unit in units
    }
    least = SMALL * sum(size.values())
    large = sorted((name for name, count in size.items() if count > least), key=lambda name: -size[name])
    names = ["", *large[1:2]] if problem.target.cluster.num_devices <= LARGE_CLUSTER else [""]
    choices = [dict(zip(names, each)) for each in itertools.product(words, repeat=len(names))]
    choices.sort(key=lambda choice: len({*choice.values()}))
    return [choice for choice in choices if {*choice.values()} != {"none"}]
