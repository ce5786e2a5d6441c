"""Plans and simulations as a user asks for them."""

from __future__ import annotations

import json
from typing import Any

from cases.tiny_project import Dilatant
from dilatant.report.plan_report import PlanReport

H100 = ("--set", "cluster.hardware=H100")
"""Costs are then modelled, so nothing is measured and the same plan is found on any machine."""
FEW = (
    "--set", "plan.microbatch_sizes=[2]", "--set", "plan.microbatch_tokens=[]", "--set", "debug.planned_steps=2",
)  # fmt: skip
"""Few plans are tried, on two steps, where it does not matter which is found."""


def planned(dilatant: Dilatant, *arguments: object) -> PlanReport:
    code, out, err = dilatant("plan", *arguments, "--json")
    assert code == 0, err
    return PlanReport.from_json(out)


def simulated(dilatant: Dilatant, *arguments: object) -> dict[str, Any]:
    code, out, err = dilatant("simulate", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)
