"""The smallest number of devices on which a run fits: the search is repeated on other numbers of nodes."""

from __future__ import annotations

from dataclasses import replace

from dilatant.plan.errors import PlanError
from dilatant.planning.planning import PlanningProblem, plan_run
from dilatant.planning.problem.planned_hardware import target_of_run
from dilatant.report.plan_report import FewestDevices

DOUBLINGS = 6
"""How often the devices are doubled in search of a number that fits."""


def on_devices(problem: PlanningProblem, devices: int) -> FewestDevices | None:
    """Plan the problem's global batch on so many equal devices; None if nothing fits."""
    each = min(devices, problem.target.cluster.gpus_per_node)
    size = {"nodes": devices // each, "gpus_per_node": each}
    config = problem.config.model_copy(update={"cluster": problem.config.cluster.model_copy(update=size)})
    try:
        found = plan_run(replace(problem, config=config, target=target_of_run(config)))
    except PlanError:
        return None
    return FewestDevices(devices, found.result.seconds)


def fewest_devices(problem: PlanningProblem, fits: bool) -> FewestDevices | None:
    """Return the fewest devices on which the run fits. The number of the problem's cluster is halved while the run
    fits, doubled otherwise; None if it fits no halved, or no doubled, number."""
    devices, best = problem.target.cluster.num_devices, None
    if not fits:
        larger = (on_devices(problem, devices << times) for times in range(1, DOUBLINGS + 1))
        return next((one for one in larger if one is not None), None)
    smaller = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    first, end = 0, len(smaller)
    while first < end:
        middle = (first + end) // 2
        found = on_devices(problem, smaller[middle])
        best, first, end = (best, middle + 1, end) if found is None else (found, first, middle)
    return best
