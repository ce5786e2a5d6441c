"""Node traces are read as published, one event a moment, and mistakes name their line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.papers.oobleck.node_reactions import mean_nodes, within
from dilatant.config.errors import UserError
from dilatant.plan.replay.node_trace import NodeEvent, load_node_trace

ROOT = Path(__file__).resolve().parents[3]

SHARED = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared")) / "traces"


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_named_events_become_one_event_a_moment(tmp_path):
    trace = load_node_trace(write(tmp_path, "0,add,a\n0,add,b\n0,add,c\n9000,remove,b\n9000,remove,a\n9000,add,d\n"))
    assert trace.events == (NodeEvent(0.0, (0, 1, 2), ()), NodeEvent(9.0, (3,), (0, 1)))
    assert trace.counts() == ((0.0, 3), (9.0, 2))


def test_node_that_comes_and_goes_in_one_moment_is_no_event(tmp_path):
    trace = load_node_trace(write(tmp_path, "0,add,a\n5000,add,b\n5000,remove,b\n8000,add,c\n"))
    assert [event.seconds for event in trace.events] == [0.0, 8.0]


def test_count_files_lose_as_many_nodes_as_the_count_falls(tmp_path):
    trace = load_node_trace(write(tmp_path, "0,0\n10,5\n20,2\n30,4\n40,4\n"))
    assert trace.counts() == ((10.0, 5), (20.0, 2), (30.0, 4))
    assert trace.seconds == 40.0
    lost = set(trace.events[1].lost)
    assert len(lost) == 3
    assert lost <= {0, 1, 2, 3, 4}
    assert trace.events[2].joined == (5, 6)  # new nodes are new: nobody comes back with its state
    assert trace == load_node_trace(write(tmp_path, "0,0\n10,5\n20,2\n30,4\n40,4\n"))
    others = {load_node_trace(tmp_path / "trace.csv", seed=seed).events[1].lost for seed in range(20)}
    assert len(others) > 1


def test_units_of_count_files(tmp_path):
    assert load_node_trace(write(tmp_path, "0,1\n20000000,2\n")).seconds == 20_000.0
    assert load_node_trace(write(tmp_path, "0,1\n2000,2\n")).seconds == 2000.0
    assert load_node_trace(write(tmp_path, "0,1\n2000,2\n"), unit="ms").seconds == 2.0
    assert load_node_trace(write(tmp_path, "0,1\n2,2\n"), unit="h").seconds == 7200.0
    assert load_node_trace(write(tmp_path, "0,1\n0.03,2\n0.03,1\n0.5,3\n")).seconds == 1800.0
    named = load_node_trace(write(tmp_path, "0,add,a\n2,remove,a\n"), unit="s")
    assert (named.seconds, named.unit) == (2.0, "s")
    with pytest.raises(UserError, match="one of ms, s, h, not 'min'"):
        load_node_trace(write(tmp_path, "0,1\n2,2\n"), unit="min")
    with pytest.raises(UserError, match="says its times in full"):
        load_node_trace(write(tmp_path, "2021-12-11, 11:11:30, 2\n"), unit="s")


def test_dated_sampled_and_json_line_formats(tmp_path):
    dated = load_node_trace(
        write(tmp_path, "2021-12-11, 11:11:30, 2\n2021-12-11, 11:13:30, 1\n2021-12-11, 11:12:30, 3\n")
    )
    assert dated.counts() == ((0.0, 2), (60.0, 3), (120.0, 1))
    document = {"metadata": {"gap_seconds": 300}, "data": [0, 2, 2, 1]}
    sampled = load_node_trace(write(tmp_path, json.dumps(document), "s.json"))
    assert sampled.counts() == ((300.0, 2), (900.0, 1))
    lines = [[0, "add", {"nodes": ["x", "y"]}], [1000, "no-op", {"nodes": []}], [2000, "remove", {"nodes": ["x"]}]]
    listed = load_node_trace(write(tmp_path, "\n".join(map(json.dumps, lines)), "l.txt"))
    assert listed.events == (NodeEvent(0.0, (0, 1), ()), NodeEvent(2.0, (), (0,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add,a\n5,gone,a\n", r"line 2: expected milliseconds,add\|remove,node"),
        ("0,add,a\n5,remove,b\n", "line 2: b is not there"),
        ("0,add,a\n5,add,a\n", "line 2: a is already there"),
        ("0,1\nx,2\n", "line 2: 'x' is not a number"),
        ("2021-12-11, 11:11:30, 2\n2021-99-11, 11:11:30, 2\n", "line 2: expected YYYY-MM-DD"),
        ('[0, "add"]\n', "line 1: expected"),
        ('{"data": []}', "line 1: expected"),
        ("", "line 1: the file is empty"),
        ("0,0\n5,0\n", "no node at any time"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_node_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"metadata": {"gap_seconds": 600, "x": 0}, "data": [1, 1e18, 1]}',
            "1,000,000,000,000,000,000 nodes at 600 s",
        ),
        ('{"metadata": {"gap_seconds": 600, "x": 0}, "data": [1, 1e400, 1]}', "without end"),
        ('{"metadata": {"gap_seconds": 1e400, "x": 0}, "data": [1, 2, 1]}', "no finite number"),
        ('{"metadata": {"gap_seconds": 600}, "data": ' + "[" * 9000, "without end"),
        ("0,1\n5,1e400\n", "without end"),
        ("0,1\nnan,2\n", "no finite number"),
        ('[1e400, "add", {"nodes": ["a"]}]', "no finite number"),
    ],
)
def test_numbers_without_end_are_refused_before_nodes_are_made(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_node_trace(write(tmp_path, text))


def test_a_window_begins_with_the_nodes_alive_then(tmp_path):
    trace = load_node_trace(write(tmp_path, "0,add,a\n0,add,b\n10000,remove,a\n20000,add,c\n30000,add,d\n"))
    part = within(trace, 15.0, 25.0)
    assert part.events == (NodeEvent(0.0, (1,), ()), NodeEvent(5.0, (2,), ()))
    assert part.seconds == 10.0


@pytest.mark.skipif(not SHARED.exists(), reason="the public traces are absent: their statistics were not checked")
@pytest.mark.parametrize(
    ("path", "losses", "lost", "most", "mean"),
    [
        ("bamboo/p3-trace.csv", 79, 167, 32, 24.0),
        ("bamboo/g4dn-trace.csv", 48, 74, 24, 12.8),
        ("bamboo/gcloud/a100x1-east1b.txt", 36, 154, 64, 57.3),
        ("oobleck/6h.csv", 15, 15, 30, 23.0),
        ("parcae/p3.csv", 79, 167, 32, 24.0),
        ("parcae/gpt-6.7b/trace_hh_55_65.txt", 9, 19, 32, 27.5),
        ("skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json", 136, 910, 16, 8.8),
    ],
)
def test_public_traces_have_their_published_statistics(path, losses, lost, most, mean):
    trace = load_node_trace(SHARED / path)
    events = [event for event in trace.events if event.lost]
    assert len(events) == losses
    assert sum(len(event.lost) for event in events) == lost
    assert max(count for _, count in trace.counts()) == most
    assert mean_nodes(trace) == pytest.approx(mean, abs=0.051)  # published with one decimal
