"""The answer to "why not data parallelism?", with whole and with sharded weights, unless the plan is so."""

from __future__ import annotations

from collections.abc import Iterator

from dilatant.config.degrees import ONE
from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import DEFAULT_ZERO, Zero, bytes_text
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import FEWEST
from dilatant.plan.model_spec import roles_of
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.shapes import textbook_shapes
from dilatant.planning.planning import PlannedRun, PlanningProblem, planned_as, search_run
from dilatant.planning.problem.searched_settings import may_shard
from dilatant.planning.row_length import with_long_rows
from dilatant.report.search_report import compared_plan
from dilatant.report.text.plan_summary import explain
from dilatant.report.text.wording import counted, percent_text, seconds_text


def why_not_data_parallelism(planned: PlannedRun) -> list[str]:
    """Say why no device holds the whole model, nor shards of all of it, and what a step would take then; nothing if the
    plan is so."""
    problem, result = planned.problem, planned.result
    devices, batch = problem.target.cluster.num_devices, problem.global_batch
    anchor, ranked = problem.model.anchor, (result.winner, *result.runners_up)
    whole = [one for one in ranked if len(one.plan.ranks) == len(one.plan.unit(anchor).replicas)]
    if result.winner in whole or devices == 1 or problem.target.groups or planned.chain:
        return []
    if batch < devices:
        return [
            f"Data parallelism alone would leave devices idle: a step has {counted(batch, 'sample')} for {devices:,}."
        ]
    if roles_of(problem.model.spec).generators:
        return ["Data parallelism alone is not planned: generators run on devices of their own."]
    if any(ONE not in known for known in problem.costs.layers.values()):
        return ["Data parallelism alone is not planned: the costs have no layer on one device."]
    return [*_whole(planned, whole), *_sharded(planned)]


def _whole(planned: PlannedRun, found: list[RankedPlan]) -> Iterator[str]:
    """Say what a step takes if every device holds all weights, or how many bytes they take."""
    problem, result = planned.problem, planned.result
    if problem.config.train.shard not in (None, "none"):
        return
    if found:
        best = min(found, key=lambda one: one.score.seconds)
        chosen = compared_plan(result.winner, problem.target.cluster, chosen=True)
        more = _difference(planned, best.score.seconds)
        why = explain(compared_plan(best, problem.target.cluster), chosen)
        yield f"Data parallelism alone takes {seconds_text(best.score.seconds)}, {more}. {why}"
        return
    held, room = _state(problem, result.winner.zero, "none"), problem.target.cluster.bytes_per_device
    takes = (
        f"weights and their state take {bytes_text(held)} of the {bytes_text(room)} that plans may use of each device"
    )
    if held >= room:
        yield f"Data parallelism alone does not fit: {takes}."
    else:
        yield f"No plan with data parallelism alone was simulated that fits: {takes}, and activations the rest."


def _sharded(planned: PlannedRun) -> Iterator[str]:
    """Say what a step takes if all devices share all weights."""
    problem, name = planned.problem, "Sharded data parallelism (FSDP, train.shard: weights)"
    config = problem.config.train
    if config.shard is None and not may_shard(problem.config, problem.target):
        key = "train.zero: none" if config.zero == "none" else "train.deterministic or resilience.enabled"
        yield f"{name} is ruled out by {key}."
        return
    if config.shard == "none":
        yield f"{name} is ruled out by train.shard: none."
        return
    own = problem.sharing(config.zero or DEFAULT_ZERO, {"": "weights"})
    try:
        found = search_run(own, all_devices=True, only=_alone, finalists=FEWEST)
    except PlanError:
        held, room = _state(problem, "all", "weights"), problem.target.cluster.bytes_per_device
        yield (
            f"{name} does not fit either: its parts of weights and their state take {bytes_text(held)} of the "
            f"{bytes_text(room)} that plans may use of each device, and activations and gathered blocks the rest."
        )
        return
    seconds = with_long_rows(planned_as(own, found, ())).result.seconds
    yield f"{name} takes {seconds_text(seconds)}, {_difference(planned, seconds)}."


def _alone(space: Space) -> list[PlanCandidate]:
    """Return the layouts in which each device is a replica."""
    devices = space.cluster.num_devices
    return sorted((one for one in textbook_shapes(space) if one.replicas == devices), key=lambda one: one.estimate)


def _difference(planned: PlannedRun, seconds: float) -> str:
    more = seconds / planned.result.seconds - 1.0
    return f"{percent_text(abs(more))} {'more' if more >= 0.0 else 'less'}"


def _state(problem: PlanningProblem, zero: Zero, shard: Shard) -> float:
    """Return the bytes of all weights and their state on a device if each is a replica."""
    target, spec = problem.target.sharing(zero, {"": shard}), problem.model.spec
    ranks = range(target.cluster.num_devices)
    units = [
        UnitPlan(unit.name, tuple(Replica((Stage(0, len(unit.layers), (rank,)),)) for rank in ranks))
        for unit in spec.units
    ]
    costs = stage_costs(Plan(tuple(units)), spec, problem.costs, target.rules, target.cluster)
    return float(costs.static_bytes.sum()) / len(ranks)
