"""The Assignment of a step from sample costs: one function for both the planner and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.costs.stage_costs import StageCosts
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.workload import Workload
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.schedule.assignment.assign import Policy
from dilatant.schedule.assignment.distribute import assign, served_by
from dilatant.schedule.assignment.pipeline_shape import ScheduleFamily
from dilatant.schedule.assignment.split_batches import split_by_pattern
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment


@dataclass(frozen=True, slots=True)
class Microbatching:
    """Settings for dividing a global batch into microbatches and ordering them on ranks.

    `num_microbatches` is per replica of the anchor (the language model); the token budget may require more.
    `row_tokens` is that budget, the most anchor tokens in one microbatch; a longer sample is alone in its own. `alone`
    puts every sample into a separate microbatch, after grouping samples as usual for balance.
    """

    num_microbatches: int = 1
    family: ScheduleFamily = one_f_one_b
    policy: Policy = "balanced"
    seed: int = 0
    row_tokens: int | None = None
    alone: bool = False


DEPENDS_ON_FAMILY: frozenset[Policy] = frozenset({"disttrain", "entrain", "searched"})
"""The policies that simulate the schedule to group samples; the others give the same groups for every family."""


def assign_step(
    plan: Plan, costs: StepCosts, samples: Workload, how: Microbatching, anchor: str
) -> Assignment:
    """Return the Assignment of a global batch, balanced in the seconds of `costs` under the frozen rule (only forwards
    for a unit without backward), with quadratic attention, fixed costs per microbatch and the token budget. Policies
    that simulate do so under the family that runs.

    Samples stay in their global batch. Raises UserError as `assign` does.
    """
    seconds = sample_seconds(plan, costs.stages, samples)
    placed = plan.stages()
    whole = _batch_seconds(plan, placed, costs.stages, samples)
    profile = {unit.name: _unit_profile(plan, unit.name, costs.stages, samples) for unit in plan.units}
    assignment = assign(
        plan,
        seconds,
        how.num_microbatches,
        how.policy,
        how.seed,
        anchor=anchor,
        speed=_speeds(plan, anchor, placed, whole),
        backward={unit: ratio for unit, (ratio, _) in profile.items()},
        fixed={unit: fixed for unit, (_, fixed) in profile.items()},
        family=how.family,
        weight=None if how.row_tokens is None else samples.tokens[anchor],
        capacity=how.row_tokens,
        pace=_paces(plan, placed, whole),
    )
    count = len(samples.tokens[anchor])
    return split_by_pattern(assignment, dict(enumerate(range(count)))) if how.alone else assignment


def sample_seconds(plan: Plan, costs: StageCosts, samples: Workload) -> dict[str, NDArray[np.float64]]:
    """Return, by unit, forward plus backward seconds of each sample on the mean stage of the unit's first replica,
    [samples]; 0 without tokens."""
    seconds = {}
    for unit in plan.units:
        stages = _first_stages(plan, unit.name)
        square, linear, _ = (costs.seconds[stages, 0] + costs.seconds[stages, 1]).mean(axis=0)
        tokens, squares = _sizes(samples, unit.name)
        # A sample with tokens must get more than 0 seconds: 0 means that it has no work here.
        seconds[unit.name] = np.where(tokens > 0, np.maximum(square * squares + linear * tokens, 1e-12), 0.0)
    return seconds


def _unit_profile(plan: Plan, unit: str, costs: StageCosts, samples: Workload) -> tuple[float, float]:
    """Return backward seconds per forward second of the batch, and a microbatch's fixed seconds per stage."""
    stages = _first_stages(plan, unit)
    tokens, squares = _sizes(samples, unit)
    forward, backward = (
        float((costs.seconds[stages, kind] @ [squares.sum(), tokens.sum(), 0.0]).sum()) for kind in (0, 1)
    )
    fixed = float((costs.seconds[stages, 0, 2] + costs.seconds[stages, 1, 2]).mean())
    return (backward / forward if forward else 2.0), fixed


def _batch_seconds(
    plan: Plan, placed: Sequence[PlacedStage], costs: StageCosts, samples: Workload
) -> NDArray[np.float64]:
    """Return forward plus backward seconds of the whole batch on each stage, without fixed costs per call: [stages]."""
    sizes = {unit.name: _sizes(samples, unit.name) for unit in plan.units}
    batch = {name: (squares.sum(), tokens.sum(), 0.0) for name, (tokens, squares) in sizes.items()}
    return np.einsum(
        "ij,ij->i", costs.seconds[:, 0] + costs.seconds[:, 1], np.array([batch[one.unit] for one in placed])
    )


def _paces(plan: Plan, placed: Sequence[PlacedStage], seconds: NDArray[np.float64]) -> dict[str, list[float]]:
    """Return, by unit and replica, the batch's seconds on its mean stage relative to the unit's first replica."""
    found = {}
    for unit in plan.units:
        mine = [one.index for one in placed if one.unit == unit.name]
        replica = [placed[index].replica for index in mine]
        mean = np.bincount(replica, seconds[mine]) / np.bincount(replica)
        found[unit.name] = (mean / mean[0] if mean[0] > 0.0 else np.ones(len(mean))).tolist()
    return found


def _speeds(
    plan: Plan, anchor: str, placed: Sequence[PlacedStage], seconds: NDArray[np.float64]
) -> list[float]:
    """Return, by anchor replica, global batches per second of its busiest ranks: those of the replica itself (with
    other units' stages there) and those of replicas that serve it elsewhere (see `distribute`)."""
    anchors = len(plan.unit(anchor).replicas)
    busy: list[dict[tuple[int, ...], float]] = [{} for _ in range(anchors)]
    replica_of = {one.stage.ranks: one.replica for one in placed if one.unit == anchor}
    for one, own in zip(placed, seconds.tolist(), strict=True):
        ranks = one.stage.ranks
        if ranks in replica_of:
            served: Sequence[int] = [replica_of[ranks]]
        else:
            count = len(plan.unit(one.unit).replicas)
            own *= anchors / count
            served = served_by(one.replica, count, anchors)
        for number in served:
            busy[number][ranks] = busy[number].get(ranks, 0.0) + own
    return [1.0 / max(own.values()) if max(own.values()) > 0 else 1.0 for own in busy]


def _first_stages(plan: Plan, unit: str) -> list[int]:
    return [placed.index for placed in plan.stages() if placed.unit == unit and placed.replica == 0]


def _sizes(samples: Workload, unit: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each sample's tokens in a unit, and the values used as their squares."""
    tokens = np.asarray(samples.tokens[unit], dtype=np.float64)
    return tokens, np.asarray(samples.squares.get(unit, tokens**2), dtype=np.float64)
