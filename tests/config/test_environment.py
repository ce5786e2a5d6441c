"""What depends on the machine around a process is read in few places."""

from __future__ import annotations

import re
from pathlib import Path

import dilatant


def test_no_other_file_reads_the_environment() -> None:
    source = Path(dilatant.__file__).parent
    readers = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\benviron\b|\bgetenv\b|\bputenv\b", path.read_text())
    ]
    assert readers == ["config/environment.py"]


def test_no_deadline_follows_the_wall_clock() -> None:
    """A clock that is set, by a person or the network, moves what is shown and nothing else."""
    source = Path(dilatant.__file__).parent
    readers = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\btime\.time\(|\bdatetime\.(now|utcnow)\(", path.read_text())
    }
    of_events = {"resilience/processes/coordinator_process.py", "resilience/launch.py", "report/run_folder.py"}
    of_charts = {"runtime/step/recorder.py", "training/trainer.py"}
    of_days = {"data/text/chat_template.py", "data/text/template_engine.py", "training/checkpoints/starting_point.py"}
    assert readers <= {*of_events, *of_charts, *of_days}
