"""`train.profile` writes one trace per rank and step, with a named range of every action."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import yaml

from cases.tiny_project import Dilatant, tiny_config
from dilatant.schedule.schedule import MeasuredStep

PIPELINE = {"units": {"vision": {}, "language": {"pp": 2}}, "colocated": {"vision": "language"}, "microbatches": 2}


def ranges(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the ranges of actions and of steps in a trace, in order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = sorted((one["ts"], one["name"]) for one in events if one.get("cat") == "user_annotation")
    names = [name for _, name in named]
    return (
        [name for name in names if " microbatch " in name and not name.startswith("rows for ")],
        [name for name in names if name.startswith("step ")],
    )


def test_traces_hold_the_actions_of_the_profiled_steps(project: Path, dilatant: Dilatant) -> None:
    tree = tiny_config(save_steps=2, steps=3, profile={"steps": [2, 3]})
    (project / "config.yaml").write_text(yaml.safe_dump(tree | {"parallel": PIPELINE}), encoding="utf-8")
    code, out, err = dilatant("train", project / "config.yaml")
    assert code == 0, err
    run = project / "run"
    traces = run / "traces"
    assert "run/traces " in out
    both = ["rank-0-of-2.json.gz", "rank-1-of-2.json.gz"]
    found = {folder.name: sorted(file.name for file in folder.iterdir()) for folder in traces.iterdir()}
    assert found == {"step-00000002": both, "step-00000003": both}
    last = MeasuredStep.from_json((run / "step.json").read_text())
    for rank, name in enumerate(both):
        expected = [
            f"{row.unit} stage {row.action.stage} {row.action.kind} microbatch {row.action.microbatch}"
            for row in last.actions
            if row.rank == rank
        ]
        assert ranges(traces / "step-00000003" / name) == (expected, ["step 3"])
        assert ranges(traces / "step-00000002" / name) == (expected, ["step 2"])  # a fixed number of microbatches

    (run / "checkpoints" / "step-00000003").rename(project / "gone")
    changes = ("parallel=single", "train.steps=5", "train.profile={steps: [3, 4]}")
    code, out, err = dilatant("resume", run, *(part for change in changes for part in ("--set", change)))
    assert code == 0, err
    assert f"step 4 was profiled; the trace of each rank is in {traces / 'step-00000004'}" in out
    one = "rank-0-of-1.json.gz"
    found = {folder.name: sorted(file.name for file in folder.iterdir()) for folder in traces.iterdir()}
    assert found == {"step-00000002": both, "step-00000003": [one, *both], "step-00000004": [one]}
    assert ranges(traces / "step-00000004" / one)[1] == ["step 4"]
