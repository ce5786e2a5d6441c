"""Plans and simulations by the commands that a user gives."""

from __future__ import annotations

import json
from typing import Any

from cases.tiny_project import Dilatant
from dilatant.report.plan_report import PlanReport

H100 = ("--set", "cluster.hardware=H100")
"""Options for modelled costs: nothing is measured, and the search finds the same plan on any machine."""
FEW = (
    "--set", "plan.microbatch_sizes=[2]", "--set", "plan.microbatch_tokens=[]", "--set", "debug.planned_steps=2",
)  # fmt: skip
"""Options for tests that accept any plan: the search tries few plans on two steps."""


def planned(dilatant: Dilatant, *arguments: object) -> PlanReport:
    code, out, err = dilatant("plan", *arguments, "--json")
    assert code == 0, err
    return PlanReport.from_json(out)


def simulated(dilatant: Dilatant, *arguments: object) -> dict[str, Any]:
    code, out, err = dilatant("simulate", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)
