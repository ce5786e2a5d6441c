"""Small plans, and membership planners for them with invented costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilatant.config.degrees import Degrees
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner
from dilatant.plan.templates.templates import LayerMemory

LAYERS = {"vision": 3, "language": 6}
FEEDS = {"vision": ("language",), "language": ()}


def plan_of(vision: ParallelSpec, language: ParallelSpec, colocated: bool = False) -> Plan:
    specs = {"vision": vision, "language": language}
    return plan_from_specs(LAYERS, specs, FEEDS, {"vision": "language"} if colocated else {})


PLANS = {
    "apart": plan_of(ParallelSpec(replicas=2), ParallelSpec(replicas=2, pp=2)),
    "colocated": plan_of(ParallelSpec(replicas=3), ParallelSpec(replicas=3, pp=2), colocated=True),
    "chain": plan_of(ParallelSpec(), ParallelSpec(pp=3)),
    "tensor": plan_of(ParallelSpec(tp=2), ParallelSpec(replicas=2, tp=2)),
    "copies": plan_of(ParallelSpec(replicas=4), ParallelSpec(replicas=4), colocated=True),
    "interleaved": plan_of(ParallelSpec(), ParallelSpec(replicas=2, pp=2, chunks=2)),
}


def planner_like(
    plan: Plan,
    fault_tolerance: int = 1,
    num_microbatches: int = 8,
    seconds: Mapping[str, Sequence[float]] | None = None,
    capacity: float = float("inf"),
    devices: int = 1,
    bytes_per_second: float = float("inf"),
) -> MembershipPlanner:
    """Return a planner for a plan's units, at the plan's degrees and on single devices. A layer takes one second (or as
    in `seconds`), one unit of `capacity`, and a tenth of one for each microbatch."""
    layers = {unit.name: unit.replicas[0].stages[-1].end for unit in plan.units}
    own = {name: {1: Degrees()} for name in layers}
    for placed in plan.stages():
        own[placed.unit][len(placed.stage.ranks)] = placed.stage.degrees
    widths: dict[int, Degrees] = {}
    for width, one in sorted((pair for each in own.values() for pair in each.items()), key=lambda pair: pair[1].tp):
        widths[width] = one.of_guests
        if one.tp == 1 < width and width not in own["language"]:
            del widths[width]  # whole items for each rank, which a language model has none of
    own = {name: {width: one for width, one in each.items() if width in widths} for name, each in own.items()}
    chain = [second for name, count in layers.items() for second in (seconds or {}).get(name, [1.0] * count)]
    state = {width: [1.0 / width] * len(chain) for width in widths}
    kept = {width: [0.1 / width] * len(chain) for width in widths}
    costs = ChainCosts(
        layers=layers,
        feeds={unit.name: unit.feeds for unit in plan.units},
        recompute={unit.name: unit.recompute for unit in plan.units},
        degrees={name: {**widths, **each} for name, each in own.items()},
        seconds={width: [second / width for second in chain] for width in widths},
        memory=LayerMemory(state, kept, capacity, len(layers) - 1),
        layer_bytes=[1] * len(chain),
        devices=devices,
        num_microbatches=num_microbatches,
        fault_tolerance=fault_tolerance,
        bytes_per_second=bytes_per_second,
    )
    return MembershipPlanner(costs)


def require_fit(plan: Plan, planner: MembershipPlanner) -> None:
    """Check that the layers of every rank, counted one by one, fit memory."""
    held: dict[int, float] = {}
    for placed in plan.stages():
        for rank in placed.stage.ranks:
            layers = placed.stage.end - placed.stage.first
            held[rank] = held.get(rank, 0.0) + layers * (1.0 + 0.1) / len(placed.stage.ranks)
    assert max(held.values()) <= planner.costs.memory.capacity_bytes * (1 + 1e-12)  # sums of tenths are rounded
