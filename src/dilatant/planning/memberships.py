"""Plans of runs that survive losses: the costs by which memberships are planned, and the first plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.unit_layers import LEVELS, MeanCosts, UnitLayers
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.search.shapes import textbook_shapes
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.plan.templates.membership import ChainCosts, Membership, MembershipPlanner
from dilatant.plan.templates.templates import LayerMemory
from dilatant.planning.planning import (
    PlannedRun,
    PlanningProblem,
    plan_run,
    planned_as,
    scorer_of,
    search_run,
    searched_sizes,
    time_plan,
)
from dilatant.planning.row_length import with_long_rows
from dilatant.planning.sharded_weights import with_best_memory
from dilatant.report.text.wording import counted

CORRECTIONS = 4
"""Number of times that the memory for templates is lowered: simulated microbatches may exceed templates' mean ones."""


def plan_resiliently(
    problem: PlanningProblem, all_devices: bool = False, fault_tolerance: int | None = None
) -> PlannedRun:
    """Return the plan of a run: with `resilience.enabled`, or a `fault_tolerance` above 0, the plan of its first
    membership, otherwise the fastest (see `plan_run`). Raises PlanError if there is none.

    If the nodes cannot hold fault_tolerance + 1 copies, the plan has fewer, and its notes say so.
    """
    config = problem.config
    if not (fault_tolerance or config.resilience.enabled):
        return plan_run(problem, all_devices)
    wanted = config.resilience.fault_tolerance if fault_tolerance is None else fault_tolerance
    if _shards(problem):
        return _sharded_in_nodes(problem, all_devices)
    cluster = problem.target.cluster
    try:
        devices = node_devices(problem, on_one_machine=True)
        planner, first = plan_memberships(problem, cluster.num_devices // devices, wanted, devices)
    except PlanError as error:
        note = f"pipelines of unlike lengths are not planned: {error}"
        for tolerance in range(wanted, 0, -1) if fault_tolerance is None else ():
            with suppress(PlanError):
                return replace(plan_run(problem, all_devices, tolerance), notes=(note,))
        return replace(plan_run(problem, all_devices, fault_tolerance or 0), notes=(note,))
    run = time_plan(problem, first.plan, first.num_microbatches)
    notes = () if first.tolerance >= wanted else (_too_few(planner, wanted, first.tolerance),)
    return replace(run, notes=notes, chain=planner.costs)


def _shards(problem: PlanningProblem) -> bool:
    return any(word != "none" for _, word in problem.target.rules.shard)


def _sharded_in_nodes(problem: PlanningProblem, all_devices: bool) -> PlannedRun:
    """Return the fastest plan with several equal replicas, or cp, inside each node. Raises PlanError."""
    devices = node_devices(problem, on_one_machine=True)

    def in_nodes(space: Space) -> list[PlanCandidate]:
        found = []
        for one in textbook_shapes(space):
            each, left = divmod(devices, one.options[-1].gpus)
            if not left and each * one.options[-1].chain.degrees.cp > 1:
                found.append(one)
        return sorted(found, key=lambda one: one.estimate)

    return planned_as(problem, search_run(problem, all_devices, only=in_nodes), ())


def best_plan(problem: PlanningProblem, all_devices: bool = False, fault_tolerance: int | None = None) -> PlannedRun:
    """Return `plan_resiliently`'s plan with the best rows and, if no nodes may be lost, with sharded weights where
    that is faster (see `with_best_memory`). Raises PlanError if there is none."""
    found = plan_resiliently(problem, all_devices, fault_tolerance)
    return with_long_rows(found) if fault_tolerance else with_best_memory(found, all_devices)


def seconds_by_fault_tolerance(problem: PlanningProblem, known: Mapping[int, PlannedRun]) -> dict[int, float | None]:
    """Return the seconds of a step if 0 to 3 nodes may be lost at once; None if no plan allows that. known: plans that
    are there already, by this number."""
    devices, found = node_devices(problem, on_one_machine=True), dict[int, float | None]()
    for tolerance in range(4):
        try:
            run = known[tolerance] if tolerance in known else best_plan(problem, fault_tolerance=tolerance)
            enough = tolerance < min(copies_on_nodes(run.result.winner.plan, devices).values())
            found[tolerance] = run.result.seconds if enough else None
        except PlanError:
            found[tolerance] = None
    return found


def node_devices(problem: PlanningProblem, on_one_machine: bool = False) -> int:
    """Return the number of devices that are lost together: those of a node or, on a single node, `ranks_per_node` if
    `resilience.enabled` is set. on_one_machine: on a single node, `ranks_per_node` in any case."""
    cluster, limits = problem.target.cluster, problem.config.resilience
    together = cluster.nodes == 1 and (limits.enabled or on_one_machine)
    return min(limits.ranks_per_node, cluster.gpus_per_node) if together else cluster.gpus_per_node


def plan_memberships(
    problem: PlanningProblem, nodes: int, fault_tolerance: int, devices: int | None = None
) -> tuple[MembershipPlanner, Membership]:
    """Return the planner of memberships of up to `nodes` nodes like the problem's, and its first plan. Microbatch size
    and recomputation are those whose first plan survives the most losses, up to `fault_tolerance`, then has at least
    `parallel.microbatches`, and then is fastest.

    Raises PlanError if the nodes cannot hold the model, for unlike devices and for sharded weights.
    """
    cluster = problem.target.cluster
    if problem.target.groups:
        raise PlanError(
            "templates are made of equal devices; leave out cluster.groups, or name one kind with --cluster"
        )
    if _shards(problem):
        raise PlanError("templates have unlike cuts, and with train.shard replicas have equal ones")
    devices = devices or node_devices(problem)
    units = UnitLayers(
        problem.model.spec, problem.costs, problem.simulated(), cluster.gpus_per_node, problem.target.rules
    )
    names = [unit.name for unit in problem.model.spec.units]
    widths = {one.tp: one for one in units.degrees(names) if one.copies == 1 and one.tp <= devices}
    if not widths:
        raise PlanError("templates need layer costs without context parallelism; the cost file has none")
    least = problem.config.parallel.microbatches or 1
    found: list[tuple[tuple[int, bool, float], MembershipPlanner]] = []
    problems: dict[str, None] = {}
    for size in searched_sizes(problem.config, problem.target):
        count = problem.global_batch // size
        if problem.global_batch % size:
            continue
        for level in units.levels(names):
            again = {name: units.recomputed(name, level) for name in names}
            costs = chain_costs(
                units, cluster, (devices, fault_tolerance), dict.fromkeys(names, widths), again, size, count
            )
            planner = MembershipPlanner(costs)
            try:
                first = planner.first(nodes)
            except PlanError as error:
                problems[str(error)] = None
                continue
            found.append(((-first.tolerance, first.num_microbatches < least, first.seconds), planner))
            if first.tolerance >= fault_tolerance:
                break  # recomputing more is slower
    for _, planner in sorted(found, key=lambda one: one[0]):
        try:
            return _corrected(problem, planner, nodes)
        except PlanError as error:
            problems[str(error)] = None
    raise PlanError("; ".join(problems))


HANDLED_BYTES_PER_SECOND = 6e8
"""Copied state that two ranks handle in a second besides its transfer: one packs and hashes it, then the other checks
and unpacks it (`benchmarks/recovery/recovery_scale.py --only copies`, one core each)."""


def chain_costs(
    units: UnitLayers,
    cluster: Cluster,
    lost_together: tuple[int, int],
    degrees: Mapping[str, Mapping[int, Degrees]],
    recompute: Mapping[str, tuple[Recompute, ...]],
    samples: float,
    num_microbatches: int,
) -> ChainCosts:
    """Return the costs of a chain of all units for microbatches of `samples` samples. lost_together: (devices of a
    node, which sends through at most one port each; nodes that may be lost). The rest is as in `ChainCosts`."""
    spec, rules, (devices, fault_tolerance) = units.model, units.rules, lost_together
    ports, apart = max(1, min(cluster.ports, devices)), cluster.nodes > 1 or devices == cluster.gpus_per_node
    link = cluster.port.bandwidth * ports if apart else cluster.inside.bandwidth
    nodes = cluster.num_devices // devices
    reach = replace(cluster, nodes=nodes, gpus_per_node=devices).reach if cluster.domain else devices
    widths = sorted(set.intersection(*(set(own) for own in degrees.values())))
    whole = {width: _columns(units, degrees, recompute, width, samples) for width in widths}
    state = {width: own[1] + (own[4] if rules.keeps_gradients else 0.0) for width, own in whole.items()}
    return ChainCosts(
        layers={unit.name: len(unit.layers) for unit in spec.units},
        feeds={unit.name: tuple(unit.feeds) for unit in spec.units},
        recompute=dict(recompute),
        degrees={name: {width: own[width] for width in widths} for name, own in degrees.items()},
        seconds={width: own[0].tolist() for width, own in whole.items()},
        memory=LayerMemory(
            {width: column.tolist() for width, column in state.items()},
            {width: own[2].tolist() for width, own in whole.items()},
            cluster.bytes_per_device - max(float(own[3].max()) for own in whole.values()),
            len(spec.units) - 1,  # a stage with layers of two units counts as two
        ),
        layer_bytes=[
            round(rules.held(layer.parameters, layer.trained)) for unit in spec.units for layer in unit.layers
        ],
        devices=devices,
        num_microbatches=num_microbatches,
        fault_tolerance=fault_tolerance,
        bytes_per_second=1.0 / (1.0 / link + 1.0 / (devices * HANDLED_BYTES_PER_SECOND)),
        domains=[node * devices // reach for node in range(nodes)] if reach > devices else [],
    )


def _columns(
    units: UnitLayers,
    degrees: Mapping[str, Mapping[int, Degrees]],
    recompute: Mapping[str, Sequence[Recompute]],
    width: int,
    samples: float,
) -> list[NDArray[np.float64]]:
    """Return seconds, static, kept, transient and gradient of all layers of the chain: [layers] each."""
    names = ("seconds", "static", "kept", "transient", "gradient")
    columns: list[list[NDArray[np.float64]]] = [[] for _ in names]
    for unit in units.model.units:
        levels = recompute[unit.name] or LEVELS[:1] * len(unit.layers)
        tables: dict[Recompute, MeanCosts] = {
            level: units.layers(unit.name, degrees[unit.name][width], samples, level) for level in dict.fromkeys(levels)
        }
        for column, name in zip(columns, names):
            column.append(np.array([getattr(tables[level], name)[k] for k, level in enumerate(levels)]))
    return [np.concatenate(column) for column in columns]


def _corrected(
    problem: PlanningProblem, planner: MembershipPlanner, nodes: int
) -> tuple[MembershipPlanner, Membership]:
    """Return the planner whose first plan also fits memory when simulated on measured batches, and that plan."""
    score, cluster = scorer_of(problem), problem.target.cluster
    for _ in range(CORRECTIONS):
        first = planner.first(nodes)
        if len(first.plan.ranks) > cluster.num_devices:  # a trace has more nodes
            return planner, first
        peaks = score(first.plan, first.num_microbatches).peak_bytes
        excess = cluster.overflow(first.plan.ranks, peaks)
        if excess <= 0.0:
            return planner, first
        memory = planner.costs.memory
        less = replace(memory, capacity_bytes=memory.capacity_bytes - excess)
        planner = MembershipPlanner(replace(planner.costs, memory=less))
    raise PlanError(f"pipelines on {nodes} nodes do not fit memory when simulated")


def _too_few(planner: MembershipPlanner, wanted: int, tolerance: int) -> str:
    devices = planner.costs.devices
    smallest = planner.smallest(devices)
    return f"{wanted} lost at once cannot be survived: " + (
        f"the smallest pipeline takes {counted(smallest, 'node')} of {counted(devices, 'device')}, so "
        f"{(wanted + 1) * smallest} are needed; this plan survives {tolerance}"
        if smallest
        else f"pipelines share nodes of {devices} devices; this plan survives {tolerance}"
    )
