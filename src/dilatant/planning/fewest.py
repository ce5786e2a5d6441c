"""The smallest number of devices on which a run fits: the search is repeated on other numbers of nodes."""

from __future__ import annotations

from dataclasses import replace

from dilatant.config.degrees import ONE
from dilatant.cost.memory import MUON_SAVES
from dilatant.plan.errors import PlanError
from dilatant.planning.planning import PlannedRun, PlanningProblem, plan_run
from dilatant.planning.problem.planned_hardware import target_of_run
from dilatant.planning.sharded_weights import with_best_memory
from dilatant.report.plan_report import FewestDevices

DOUBLINGS = 6
"""How often the devices are doubled in search of a number that fits."""


def on_devices(problem: PlanningProblem, devices: int) -> PlannedRun | None:
    """Plan the problem's global batch on so many equal devices; None if nothing fits."""
    each = min(devices, problem.target.cluster.gpus_per_node)
    size = {"nodes": devices // each, "gpus_per_node": each}
    config = problem.config.model_copy(update={"cluster": problem.config.cluster.model_copy(update=size)})
    try:
        return plan_run(replace(problem, config=config, target=target_of_run(config)))
    except PlanError:
        return None


def least_state(problem: PlanningProblem) -> float:
    """Return the bytes of gradients and optimizer state that all devices of any plan hold together."""
    rules, layers = problem.target.rules, [layer for unit in problem.model.spec.units for layer in unit.layers]
    trained = sum(layer.held_trained(ONE, is_first=True) for layer in layers)
    return trained * (rules.gradients + rules.optimizer) - MUON_SAVES * sum(layer.orthogonal for layer in layers)


def fewest_devices(problem: PlanningProblem, fits: bool) -> FewestDevices | None:
    """Return the fewest devices on which the run fits. The number of the problem's cluster is halved while the run
    fits, doubled otherwise; None if it fits no halved, or no doubled, number."""
    devices = problem.target.cluster.num_devices
    if fits:
        numbers = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    else:
        numbers = [devices << times for times in range(1, DOUBLINGS + 1)]
        room, state = problem.target.cluster.bytes_per_device, least_state(problem)
        numbers = [number for number in numbers if number * room >= state]
    best = None
    while numbers:
        middle = len(numbers) // 2 if fits else 0
        found = on_devices(problem, numbers[middle])
        if found is None:
            numbers = numbers[middle + 1 :]
        else:
            best, numbers = (numbers[middle], found), numbers[:middle]
    return None if best is None else FewestDevices(best[0], with_best_memory(best[1]).result.seconds)
