"""Device groups: check that the ranks of a run are on the devices that its plan assumed."""

from __future__ import annotations

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.planning.problem.planned_hardware import is_same_hardware
from dilatant.report.text.wording import ranks_text


def unlike_devices(comm: Comm, costs: StepCosts | None) -> str | None:
    """Return one line that names ranks on other devices than planned, in a plan for groups of unlike devices; None if
    all are as planned or the plan has no groups. Called by all ranks."""
    cluster = None if costs is None else costs.cluster
    if cluster is None or not cluster.parts:
        return None
    name = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "CPU"
    others: dict[tuple[str, str, str], list[int]] = {}
    for rank, there in all_gather_object(comm, [comm.rank, name]):
        group = cluster.at(rank)
        if not is_same_hardware(there, group.device):
            others.setdefault((group.name, group.device, there), []).append(rank)
    if not others:
        return None
    listed = "; ".join(
        f"ranks {ranks_text(ranks)} as {group} ({device}), and they are {there}"
        for (group, device, there), ranks in others.items()
    )
    return (
        f"the plan has {listed}: samples are shared by its seconds until measured ones correct these "
        "(plan.correct_costs)"
    )
