"""Sharded gradients and weights in plans: which units can be sharded, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import Zero
from dilatant.plan.plan import Plan, UnitPlan


def shard_by_unit(
    plan: Plan, trains: Mapping[str, bool], wanted: Shard | Mapping[str, Shard] | None
) -> dict[str, Shard]:
    """Return unit → what is sharded, without units of which nothing is. A word means all units that can be sharded.

    trains: unit → True if any of its weights trains.
    """
    if wanted is None or isinstance(wanted, str):
        how: Shard = wanted or "none"
        wanted = {unit.name: how for unit in plan.units if not _why_not(unit, trains[unit.name], how)}
    return {name: how for name, how in wanted.items() if how != "none"}


def shard_problems(
    plan: Plan,
    trains: Mapping[str, bool],
    zero: Zero,
    shard: Mapping[str, Shard],
    wanted: Shard | Mapping[str, Shard] | None = None,
) -> list[str]:
    """Return why the units in `shard` cannot be sharded under `plan`; each text names the key and the remedy.

    wanted: what the user wrote, of which `shard` was made by `shard_by_unit`.
    """
    problems = []
    if shard and zero == "none":
        problems.append(
            "train.shard shards among the ranks that share optimizer state, and train.zero is none; set train.zero: "
            "node or all"
        )
    units = {unit.name: unit for unit in plan.units}
    for name, how in shard.items():
        if name not in units:
            problems.append(f"train.shard: no unit {name!r}; there are {', '.join(units)}")
        elif reason := _why_not(units[name], trains[name], how):
            problems.append(f"train.shard: {reason}")
    if isinstance(wanted, str) and wanted != "none" and not shard:
        reasons = [_why_not(unit, trains[unit.name], wanted) for unit in plan.units]
        problems += [f"train.shard: {reason}" for reason in reasons if reason]
    return problems


def _why_not(unit: UnitPlan, trains: bool, how: Shard) -> str:
    """Return why a unit cannot be sharded like this, or an empty text."""
    replicas = unit.replicas
    if not trains and how == "gradients":
        return f"nothing of {unit.name} trains, so it has no gradients to shard; write weights, or leave it out"
    if len({replica.shape for replica in replicas}) > 1:
        return (
            f"the replicas of {unit.name} differ in cuts or degrees, so their ranks hold unlike weights; give all of "
            "them the same, or leave it out"
        )
    if len(replicas) * min(stage.degrees.row_parts for stage in replicas[0].stages) == 1:
        return f"every weight of {unit.name} is held by one rank; give it replicas or cp, or leave it out"
    return ""
