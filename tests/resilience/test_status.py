"""What is shown of a run holds for folders that somebody damaged, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from dilatant.cli.status import status
from dilatant.config import UserError
from dilatant.plan.replay.replay import COPYING, RECONFIGURING, UNFINISHED
from dilatant.report.pages.replay_page import TONES
from dilatant.resilience.processes.coordinator_process import EVENTS, STATE
from dilatant.resilience.protocol.values import ASKED, FINISHED, TOO_FEW, Record
from dilatant.resilience.status import (
    PAGE,
    REBUILDS,
    TRACE,
    generations,
    read_rebuilds,
    read_status,
    write_history,
)

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
    assert msgspec.json.decode(msgspec.json.encode(found.events)) == [EVENT]
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


def test_history_says_who_left_and_came_and_what_it_cost(tmp_path: Path) -> None:
    def event(task: str, generation: int, at: float, step: int, members: str) -> dict[str, Any]:
        return {"time": at, "task": task, "generation": generation, "step": step, "members": members.split(),
                "reason": "it was <killed>"}  # fmt: skip

    events = [
        *(event(task, 1, 1.0, 0, "a b c") for task in ("fence", "rebuild", "run", "commit")),
        event("fence", 2, 10.0, 7, "a c"),
        event("rebuild", 2, 10.5, 7, "a c"),
        event("fence", 3, 11.0, 7, "c d"),  # another loss during recovery, and somebody comes
        event("rebuild", 3, 11.5, 7, "c d"),
        event("run", 3, 13.0, 7, "c d"),
        event("commit", 3, 13.25, 8, "c d"),
        event("stop", 3, 14.0, 9, "c d"),
    ]
    rebuilds = [{"generation": 3, "step": 7, "seconds": {"plan": 0.25, "copy": 0.75}, "salvaged_pairs": 30,
                 "missing_pairs": 10}]  # fmt: skip
    write(tmp_path, "\n".join(map(json.dumps, events)), json.dumps(AGENT))
    (tmp_path / "resilience" / REBUILDS).write_text(
        "\n".join(map(json.dumps, [*rebuilds, {"generation": 2}]))
    )
    first, second, third = generations(read_status(tmp_path).events, read_rebuilds(tmp_path))
    assert (first.left, first.joined, dict(first.lost)) == ((), (), {})
    assert (second.left, second.joined, dict(second.lost)) == (("b",), (), {})
    assert (third.left, third.joined, third.step, third.members) == (("a",), ("d",), 7, 2)
    assert dict(third.lost) == {RECONFIGURING: 1.25, COPYING: 0.75, UNFINISHED: 0.25}
    write_history(tmp_path, "run")
    text = (tmp_path / PAGE).read_text()
    assert "it was &lt;killed&gt;" in text
    assert all(f'class="{TONES[cause]}"' in text for cause in third.lost)
    assert dict(third.phases) == {
        "fence": 0.5,
        "plan": 0.25,
        "copy": 0.75,
        "await others": 0.5,
        "first step": 0.25,
    }
    assert "75% of the step in hand kept: 30 pairs of a layer and a sample; 10 ran again" in text
    assert sum(third.phases.values()) == third.seconds
    slices = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    assert [each["name"] for each in slices if each["ph"] == "i"] == ["lost b", "lost a"]
    of_recovery = [(each["name"], each["ts"]) for each in slices if each.get("cat") == "recovery"]
    assert of_recovery[:2] == [("fence", 10e6), ("plan", 10.5e6)]
    (last,) = (each for each in slices if each["name"] == "generation 3: 2 nodes")
    assert last["args"]["pairs kept"] == 30


@pytest.mark.parametrize(
    ("stopped", "code"),
    [(FINISHED, 0), ("", 75), (ASKED, 75), (f"1 {TOO_FEW} 2", 75), ("UserError: bad data", 1)],
)
def test_the_exit_code_says_whether_to_start_again(tmp_path: Path, stopped: str, code: int) -> None:
    write(tmp_path, "", "")
    (tmp_path / "resilience" / STATE).write_bytes(msgspec.json.encode(Record(1, 1, stopped=stopped)))
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as ended:
            status(tmp_path, as_json=as_json, exit_code=True)
        assert ended.value.exit_code == code


def test_a_folder_without_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with resilience"):
        read_status(tmp_path)


def test_the_step_is_the_last_one_that_was_logged(tmp_path: Path) -> None:
    write(tmp_path, "", "")
    assert read_status(tmp_path).step is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 5}\n{"loss": 1}\n')
    assert read_status(tmp_path).step == 5
