"""Groups of unlike devices from config to training: page, simulation and ranks use the same plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from cases.planning.planning_verbs import FEW
from cases.tiny_project import Dilatant
from dilatant.plan import Plan
from dilatant.planning.layout import TrainingPlan
from dilatant.report.plan_report import PlanReport
from harness.refused import refused

GROUPS = (
    "--set",
    "cluster.groups=[{name: fast, hardware: H100, gpus_per_node: 1}, {name: slow, hardware: A40, gpus_per_node: 2}]",
)


def test_a_plan_names_its_groups_everywhere(project: Path, dilatant: Dilatant) -> None:
    asked = "vision: {group: slow}, language: {group: fast}"
    other = "vision: {group: fast}, language: {group: slow}"
    code, out, err = dilatant(
        "plan", project / "config.yaml", *GROUPS, *FEW, "--why-not", asked, "--why-not", other, "--why-not",
        "vision: {group: none}",
    )  # fmt: skip
    assert code == 0, err
    text = " ".join(out.split())
    assert "fast (1 × H100)" in text
    assert "slow (2 × A40)" in text
    assert re.search(r"A device of slow takes vision [\d.]+ and language [\d.]+ times as long as one of fast", text)
    assert "group 'none' is none of cluster.groups; they are fast, slow" in text
    folder = project / "run" / "plan"
    report = PlanReport.from_json((folder / "report.json").read_text())
    assert [(group.name, group.gpus_per_node) for group in report.device_groups] == [("fast", 1), ("slow", 2)]
    assert report.hardware == "fast: 1 node of 1 × H100; slow: 1 node of 2 × A40"
    assert re.search(r"[012] \((fast|slow)\)", (folder / "plan.html").read_text())
    assert sum("chosen is like that" in " ".join(one.answer) for one in report.why_not[:2]) <= 1

    document = json.loads((folder / "plan.json").read_text())
    planned = TrainingPlan.from_json(json.dumps(document))
    assert [group["name"] for group in document["step"]["costs"]["cluster"]["parts"]] == ["fast", "slow"]
    assert planned.costs is not None
    assert json.loads(json.dumps(planned.costs.to_document())) == document["step"]["costs"]
    assert planned.costs.cluster is not None
    assert planned.costs.cluster.at(0).device == "H100"
    assert planned.costs.cluster.at(2).device == "A40"

    code, out, err = dilatant("simulate", folder, "--json")
    assert code == 0, err
    assert fmean(json.loads(out)["step_seconds"]) == pytest.approx(report.step_seconds)
    # On one kind of devices, each of the faster kind, it cannot be slower but for messages: the sum and the gather of
    # each unit's weights wait for one, which takes 20 µs among H100s and 10 µs among A40s. So small a model is bound by
    # its host, which is the same.
    code, out, err = dilatant("simulate", folder, "--cluster", "1x3:H100", "--json")
    assert code == 0, err
    assert fmean(json.loads(out)["step_seconds"]) <= report.step_seconds + 4 * 10e-6


def test_mistakes_in_groups_are_one_line_each(project: Path, dilatant: Dilatant) -> None:
    def refuses(expected: str, *overrides: str) -> None:
        arguments = [part for entry in overrides for part in ("--set", entry)]
        refused(dilatant("plan", project / "config.yaml", *arguments), expected)

    refuses("no hardware 'B999'", "cluster.groups=[{name: a, hardware: B999, gpus_per_node: 1}]")
    refuses("both given", "cluster.groups=[{name: a, hardware: A40, gpus_per_node: 1}]", "cluster.nodes=2")
    file = project / "mine.yaml"
    file.write_text("odd: {bandwidth: 1.0e9}\n")
    odd = "cluster.groups=[{name: a, hardware: odd, gpus_per_node: 1}]"
    refuses("odd.memory is missing", f"cluster.hardware_file={file}", odd)
    refuses("cluster.groups", GROUPS[1], "resilience.enabled=true", "resilience.ranks_per_node=1")
    measured = "profile", project / "config.yaml", *GROUPS, "--group"
    refused(dilatant(*measured, "slow"), "these are A40, of which this machine has none")
    refused(dilatant(*measured, "none"), "--group 'none': cluster.groups has fast, slow")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [(2, 1), (1, 2)])
def test_a_plan_over_groups_trains_and_names_unlike_devices(
    project: Path, dilatant: Dilatant, devices: tuple[int, int]
) -> None:
    fast, slow = devices
    groups = (
        "--set",
        f"cluster.groups=[{{name: fast, hardware: H100, gpus_per_node: {fast}}}, "
        f"{{name: slow, hardware: A40, gpus_per_node: {slow}}}]",
    )
    code, _, err = dilatant("plan", project / "config.yaml", *groups)
    assert code == 0, err
    plan = Plan.from_json((project / "run" / "plan" / "plan.json").read_text())
    layout = "parallel={plan: run/plan/plan.json}"
    # A process of its own: ranks write where the first of their server's did, which here may be another test's.
    command = [sys.executable, "-m", "dilatant", "train", str(project / "config.yaml"), *groups, "--set", layout]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    result = ran.returncode, ran.stdout, ran.stderr
    if plan.ranks[0] > 0:
        refused(result, "have nothing to do, but ranks above them have; plan without these devices")
        return
    code, out, err = result
    assert code == 0, err
    text = " ".join((out + err).split())
    assert "the plan has ranks" in text
    assert "and they are CPU: samples are shared by its seconds until measured ones correct these" in text
