"""What is shown of a run holds for folders that somebody damaged, too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from dilatant.cli.status import status
from dilatant.config import UserError
from dilatant.plan.replay.replay import COPYING, RECONFIGURING, UNFINISHED
from dilatant.plan.templates.copies import Redundancy
from dilatant.report.pages.generations_page import render_generations_page
from dilatant.report.pages.replay_page import TONES
from dilatant.resilience.launch import of_whole_run, stopped_error
from dilatant.resilience.processes.coordinator_process import EVENTS, STATE
from dilatant.resilience.protocol.values import ASKED, FAILS_AGAIN, FINISHED, GOES_ON, TOO_FEW, Record
from dilatant.resilience.status import (
    KILLED,
    PAGE,
    REBUILDS,
    TRACE,
    RebuildRecord,
    generations,
    read_rebuilds,
    read_status,
    write_history,
)
from dilatant.training.rank import RunResult

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
    assert [(node.name, node.agent, node.is_alive) for node in found.nodes] == [("node0", AGENT["pid"], False)]


@pytest.mark.parametrize("record", ["", "[]", "[" * 100_000, '{"term": "x"}'])
def test_a_record_that_is_none_is_one_line(tmp_path: Path, record: str) -> None:
    write(tmp_path, "", "")
    (tmp_path / "resilience" / STATE).write_text(record)
    with pytest.raises(UserError, match="cannot be read"):
        read_status(tmp_path)


def test_brackets_of_names_and_reasons_are_just_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, json.dumps({**EVENT, "reason": "at [4, 5] [/red]"}), json.dumps({**AGENT, "node": "[/b]"}))
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
    (tmp_path / "resilience" / REBUILDS).write_text("\n".join(map(json.dumps, [*rebuilds, {"generation": 2}])))
    first, second, third = generations(read_status(tmp_path).events, read_rebuilds(tmp_path))
    assert (first.left, first.joined, dict(first.lost)) == ((), (), {})
    assert (second.left, second.joined, dict(second.lost)) == (("b",), (), {})
    assert (third.left, third.joined, third.step, third.members) == (("a",), ("d",), 7, 2)
    assert dict(third.lost) == {RECONFIGURING: 1.25, COPYING: 0.75, UNFINISHED: 0.25}
    write_history(tmp_path, "run")
    text = (tmp_path / PAGE).read_text()
    assert "it was &lt;killed&gt;" in text
    assert all(f'class="{TONES[cause]}"' in text for cause in third.lost)
    assert dict(third.phases) == {"fence": 0.5, "plan": 0.25, "copy": 0.75, "await others": 0.5, "first step": 0.25}
    assert "75% of the step in hand kept: 30 pairs of a layer and a sample; 10 ran again" in text
    assert sum(third.phases.values()) == third.seconds
    slices = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    assert [each["name"] for each in slices if each["ph"] == "i"] == ["lost b", "lost a"]
    of_recovery = [(each["name"], each["ts"]) for each in slices if each.get("cat") == "recovery"]
    assert of_recovery[:2] == [("fence", 10e6), ("plan", 10.5e6)]
    (last,) = (each for each in slices if each["name"] == "generation 3: 2 nodes")
    assert last["args"]["pairs kept"] == 30


def dead_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("lock", "standby", "is_killed"),
    [
        ("process {dead} on {here}", None, True),
        ("process {own} on {here}", None, False),
        ("process {dead} on elsewhere", None, False),
        ("process {dead} on {here}", "other:29400", False),  # it may lead the member that is on another host
        ("", None, False),
    ],
)
def test_a_run_whose_command_was_killed_is_said_to_be_over(
    tmp_path: Path, lock: str, standby: str | None, is_killed: bool
) -> None:
    write(tmp_path, json.dumps(EVENT), json.dumps({**AGENT, "host": "elsewhere"}))
    here = {"dead": dead_process(), "own": os.getpid(), "here": socket.gethostname()}
    (tmp_path / ".lock").write_text(lock.format(**here) + "\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"resilience": {"standby": standby}}))
    found = read_status(tmp_path)
    assert (found.stopped, found.exit_code) == (KILLED if is_killed else "", 75)


def test_a_node_says_which_part_it_has_in_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{**EVENT, "members": ["node0", "node1"]}, {**EVENT, "generation": 2}]
    write(tmp_path, "\n".join(map(json.dumps, events)), json.dumps(AGENT))
    for name, pid in (("node1", 2**22 + 1), ("node2", os.getpid()), ("node3", 2**22 + 1)):
        file = tmp_path / "resilience" / f"{name}.json"
        file.write_text(json.dumps({**AGENT, "node": name, "pid": pid}))
    states = ["member, gone", "left, gone", "waits to join", "never joined, gone"]
    assert [node.state(False) for node in read_status(tmp_path).nodes] == states
    (tmp_path / "resilience" / STATE).write_bytes(msgspec.json.encode(Record(1, 1, ("node0",), stopped=FINISHED)))
    status(tmp_path)
    assert capsys.readouterr().out.count("came too late") == 2


def test_too_few_copies_of_layers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, json.dumps(EVENT), json.dumps(AGENT))
    few = Redundancy({"vision": 2, "language": 1}, wanted=2, before=2)
    plan = "1 of 3 ranks, 2 of 2 ranks"
    record = RebuildRecord(1, 3, {}, copies=dict(few.by_unit), shortage=few.shortage, pipelines=plan)
    (tmp_path / "resilience" / REBUILDS).write_bytes(msgspec.json.encode(record))
    found = read_status(tmp_path)
    assert (found.copies, found.shortage) == ({"vision": 2, "language": 1}, few.shortage)
    status(tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert f"pipelines: {plan} copies on different nodes: 2 of vision, 1 of language; 1 copy of layers" in said
    (one,) = generations(found.events, read_rebuilds(tmp_path))
    page = render_generations_page([one, one], "run")
    assert "may send the run back" in page
    assert plan in page


def test_status_says_how_many_nodes_may_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, json.dumps(EVENT), json.dumps(AGENT))
    record = RebuildRecord(1, 3, {}, copies={"vision": 4, "language": 3}, pipelines="3 of 2 ranks")
    (tmp_path / "resilience" / REBUILDS).write_bytes(msgspec.json.encode(record))
    status(tmp_path)
    assert "3 of language; 2 nodes may be lost at once" in " ".join(capsys.readouterr().out.split())


def test_idle_ranks_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = ["node0", "node1", "node2"]
    write(tmp_path, json.dumps({**EVENT, "members": members}), "")
    for name in members:
        agent = {**AGENT, "node": name, "pid": os.getpid(), "host": socket.gethostname()}
        agent["workers"] = {"0": 1, "1": 2}
        (tmp_path / "resilience" / f"{name}.json").write_text(json.dumps(agent))
    (tmp_path / "resilience" / STATE).write_bytes(msgspec.json.encode(Record(1, 1, tuple(members))))
    record = RebuildRecord(1, 3, {}, idle={"node1": 2, "node2": 1})
    (tmp_path / "resilience" / REBUILDS).write_bytes(msgspec.json.encode(record))
    found = read_status(tmp_path)
    states = ["member", "member, idle", "member, 1 of 2 ranks idle"]
    assert [node.state(False) for node in found.nodes] == states
    status(tmp_path)
    assert "member, idle" in capsys.readouterr().out
    (one,) = generations(found.events, read_rebuilds(tmp_path))
    assert "idle until the next change: node1 and node2" in render_generations_page([one, one], "run")


def test_the_result_of_a_run_counts_all_generations(tmp_path: Path) -> None:
    """From the first step that this start trained to the end, whichever generation returned the result."""
    (tmp_path / "resilience").mkdir()
    times = [("fence", 10.0, 4), ("run", 12.0, 4), ("fence", 15.0, 9), ("run", 16.0, 9), ("stop", 20.5, 12)]
    events = [{**EVENT, "task": task, "time": at, "step": step} for task, at, step in times]
    write_events = "\n".join(map(json.dumps, events))
    (tmp_path / "resilience" / EVENTS).write_text(write_events)
    last = RunResult(tmp_path, 12, 12, 1.5, 0, began_at=9)
    whole = of_whole_run(last, tmp_path / "resilience")
    assert (whole.began_at, whole.seconds, whole.step) == (4, 8.5, 12)


@pytest.mark.parametrize(
    ("stopped", "code"),
    [
        (FINISHED, 0),
        ("", 75),
        (ASKED, 75),
        (f"1 {TOO_FEW} 2", 75),
        ("UserError: bad data", 1),
        (f"{FAILS_AGAIN} with ValueError", 75),
        (f"UserError: {FAILS_AGAIN} with ValueError", 1),
        (f"1 {TOO_FEW} 2 (node1: UserError: no such file)", 75),
        (f"no pipeline fits with UserError: 80 GB; step 4 is saved, and {GOES_ON}", 75),
    ],
)
def test_the_exit_code_says_whether_to_start_again(tmp_path: Path, stopped: str, code: int) -> None:
    write(tmp_path, "", "")
    (tmp_path / "resilience" / STATE).write_bytes(msgspec.json.encode(Record(1, 1, stopped=stopped)))
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as ended:
            status(tmp_path, as_json=as_json, exit_code=True)
        assert ended.value.exit_code == code
    error = stopped_error(Record(1, 1, stopped=stopped))
    if isinstance(error, UserError):
        assert (stopped, code) == (f"UserError: {error}", 1)
    elif stopped not in (FINISHED, "", ASKED):
        assert error.exit_code == code == 75


def test_a_folder_without_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with resilience"):
        read_status(tmp_path)


def test_the_step_is_the_last_one_that_was_logged(tmp_path: Path) -> None:
    write(tmp_path, "", "")
    assert read_status(tmp_path).step is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 5}\n{"loss": 1}\n')
    assert read_status(tmp_path).step == 5
