"""Pipeline depth: the number of microbatches in flight at each stage, along its own path through the units."""

from __future__ import annotations

from functools import lru_cache

from dilatant.plan.plan import Plan


@lru_cache(maxsize=4)  # many schedules share one plan
def path_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number the number of stages from it to the end of its path, itself included (S - s on a chain).

    For a stage on several paths the longest is used. The result is 1F1B's number of in-flight microbatches (Cornstarch
    v3 4.4: each encoder forms a separate pipeline with the language model).
    """
    behind: dict[str, int] = {}
    for unit in reversed(plan.units):
        after = max((behind[name] for name in unit.feeds), default=0)
        behind[unit.name] = after + max(len(replica.stages) for replica in unit.replicas)
    depths = []
    for placed in plan.stages():
        unit = plan.unit(placed.unit)
        after = max((behind[name] for name in unit.feeds), default=0)
        depths.append(after + len(unit.replicas[placed.replica].stages) - placed.position)
    return tuple(depths)


def eager_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number 2(S - s) - 1 along the stage's own path: the default depth of eager 1F1B."""
    return tuple(2 * depth - 1 for depth in path_depths(plan))


def half_eager_depths(plan: Plan) -> tuple[int, ...]:
    """Return by stage number the mean of the depths of 1F1B and of eager 1F1B, rounded down."""
    return tuple((least + most) // 2 for least, most in zip(path_depths(plan), eager_depths(plan)))
