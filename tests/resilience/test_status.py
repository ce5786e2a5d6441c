"""What is shown of a run holds for folders that somebody damaged, too."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dilatant.cli.status import status
from dilatant.config import UserError
from dilatant.resilience.coordinator_process import EVENTS, STATE
from dilatant.resilience.protocol.values import Record
from dilatant.resilience.status import read_status

EVENT = {"time": 5.0, "task": "run", "generation": 1, "step": 3, "members": ["node0"], "reason": ""}
AGENT = {"node": "node0", "pid": 2**22 + 1, "workers": {"0": 2**22 + 2}}


def write(run: Path, events: str, agent: str) -> None:
    folder = run / "resilience"
    folder.mkdir()
    (folder / STATE).write_bytes(msgspec.json.encode(Record(1, 1, ("node0",))))
    (folder / EVENTS).write_bytes(events.encode("utf-8", "surrogateescape"))
    (folder / "node0.json").write_bytes(agent.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "null", "\udcff", "[" * 100_000, "9" * 6000, json.dumps({**EVENT, "time": 1e300}),
     json.dumps({**EVENT, "members": 5}), json.dumps({**AGENT, "workers": [1]}), json.dumps({**AGENT, "pid": "x"})],
)  # fmt: skip
def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path, line: str) -> None:
    write(tmp_path, f"{line}\n{json.dumps(EVENT)}\n", f"{line}\n{json.dumps(AGENT)}\n")
    found = read_status(tmp_path)
    assert [dict(event) for event in found.events] == [EVENT]
    assert [(node.name, node.agent, node.is_alive) for node in found.nodes] == [
        ("node0", AGENT["pid"], False)
    ]


@pytest.mark.parametrize("record", ["", "[]", "[" * 100_000, '{"term": "x"}'])
def test_a_record_that_is_none_is_one_line(tmp_path: Path, record: str) -> None:
    write(tmp_path, "", "")
    (tmp_path / "resilience" / STATE).write_text(record)
    with pytest.raises(UserError, match="cannot be read"):
        read_status(tmp_path)


def test_brackets_of_names_and_reasons_are_just_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path, json.dumps({**EVENT, "reason": "at [4, 5] [/red]"}), json.dumps({**AGENT, "node": "[/b]"})
    )
    status(tmp_path)
    shown = capsys.readouterr().out
    assert "[4, 5] [/red]" in shown
    assert "[/b]" in shown


def test_a_folder_without_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with resilience"):
        read_status(tmp_path)


def test_the_step_is_the_last_one_that_was_logged(tmp_path: Path) -> None:
    write(tmp_path, "", "")
    assert read_status(tmp_path).step is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 5}\n{"loss": 1}\n')
    assert read_status(tmp_path).step == 5
