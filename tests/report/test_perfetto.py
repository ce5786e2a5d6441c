"""The timeline of a measured step."""

from __future__ import annotations

import json
from pathlib import Path

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.report.pages.perfetto import trace_events, write_timeline
from dilatant.schedule.schedule import Action, ActionKind, DataWait, MeasuredAction

F, B = ActionKind.F, ActionKind.B
PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 6, (1,)),)),)),
    )
)
ENCODE, READ, LEARN, LEARN_VISION = Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)
MEASURED = (
    MeasuredAction(0, "vision", ENCODE, (4, 5), 100.0, 0.0, None, 1.0),
    MeasuredAction(0, "vision", LEARN_VISION, (4, 5), 101.0, 4.0, 1, 2.0),
    MeasuredAction(1, "language", READ, (4, 5), 100.0, 1.0, 0, 2.0),
    MeasuredAction(1, "language", LEARN, (4, 5), 103.0, 0.0, None, 2.0),
)
ARROWS = ((ENCODE, READ), (LEARN, LEARN_VISION))


def test_actions_become_slices_and_messages_become_arrows(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", MEASURED, PLAN, ARROWS)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "wait"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices] == [
        ("vision forward", 0, 0.0, 1e6),
        ("vision backward", 0, 5e6, 2e6),
        ("language forward", 1, 1e6, 2e6),
        ("language backward", 1, 3e6, 2e6),
    ]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert tracks == ["rank 0: vision 0.0", "rank 1: language 0.0"]
    for phase, of in (("s", 0), ("f", 1)):
        ends = {e["id"]: e for e in events if e["ph"] == phase}
        for number, arrow in enumerate(ARROWS):
            around = [s for s in slices if s["tid"] == ends[number]["tid"]]
            around = [s for s in around if s["ts"] <= ends[number]["ts"] <= s["ts"] + s["dur"]]
            kinds = {F: "forward", B: "backward"}
            assert around[0]["name"].endswith(kinds[arrow[of].kind])


def test_data_wait_is_a_slice_naming_the_slowest_samples() -> None:
    wait = DataWait(1, 98.0, 1.5, (("big.png", 1.2), ("b.png", 0.3)))
    events = trace_events(MEASURED, PLAN, (), (wait,))["traceEvents"]
    (found,) = (e for e in events if e["name"] == "waiting for data")
    assert (found["tid"], found["ts"], found["dur"]) == (1, 0.0, 1.5e6)
    assert found["args"] == {"slowest samples": {"big.png": 1.2, "b.png": 0.3}}
    assert min(e["ts"] for e in events if e.get("cat") == "vision") == 2e6  # times count from the wait's start


def test_an_arrow_without_its_actions_is_left_out() -> None:
    events = trace_events(MEASURED[:2], PLAN, ARROWS)["traceEvents"]
    assert not [e for e in events if e["ph"] in "sf"]
