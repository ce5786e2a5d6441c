"""The replay page shows the facts, one scale for all lines, and averages that preserve the sums of the segments."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from dilatant.plan import Plan
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec
from dilatant.plan.replay.node_trace import NodeEvent, NodeTrace
from dilatant.plan.replay.replay import RecoveryCosts, replay
from dilatant.plan.templates.templates import plan_templates
from dilatant.planning.failures import FailureReplay, from_planner, restart_from_checkpoint
from dilatant.report.pages.replay_page import (
    binned,
    render_replay_page,
    replay_parts,
    replays_to_plain,
    summarize_replays,
)
from dilatant.report.printed_parts import print_parts
from dilatant.report.text.gantt_tables import cause_tones
from harness.memberships import planner_like

PROBLEM = SimpleNamespace(
    model=SimpleNamespace(names={"vision": "siglip", "language": "llama <1>"}),
    target=SimpleNamespace(hardware=SimpleNamespace(name="H100"), cluster=SimpleNamespace(num_devices=32)),
    measured=SimpleNamespace(origin="analytic"),
    global_batch=48,
)
PLANNER = SimpleNamespace(
    costs=SimpleNamespace(devices=8, num_microbatches=24, fault_tolerance=1),
    templates=lambda devices, most: dict.fromkeys((2, 3, 4, 7)),
)
FOUND = FailureReplay((), 9, PLANNER, RecoveryCosts())
TITLE, SETTING = FOUND.title(PROBLEM, "mine"), FOUND.sentences(PROBLEM)


@pytest.fixture(scope="module")
def replays():
    templates = plan_templates({1: [0.05] * 12}, range(2, 9), 1, 24)
    events = (
        NodeEvent(0.0, tuple(range(8)), ()),
        NodeEvent(700.0, (), (2,)),
        NodeEvent(1500.0, (), (3, 4)),
        NodeEvent(2500.0, (9,), ()),
    )
    trace = NodeTrace("<three> losses", events, 4000.0)
    costs = RecoveryCosts()
    plan = plan_from_specs({"language": 12}, {"language": ParallelSpec(pp=2)}, {})
    planner = planner_like(plan, 1, 24, {"language": [0.05] * 12}, 7.0)
    return [
        replay("templates", trace, from_planner(planner), 24.0, costs, 2),
        replay("restart", trace, restart_from_checkpoint(templates, 24), 24.0, costs, 2),
    ]


def test_sentences_compare_the_first_replay_with_the_others(replays):
    text = " ".join(summarize_replays(replays))
    assert "changed 3 times" in text
    factor = replays[0].samples_per_second / replays[1].samples_per_second
    assert f"templates trained {factor:.2f} times as many" in text


def test_binned_rates_keep_the_samples(replays):
    for one in replays:
        rates = binned(one, [segment.samples for segment in one.segments])
        trained = sum(segment.samples for segment in one.segments)
        assert sum(rates) / len(rates) * one.seconds == pytest.approx(trained)  # sums of doubles


@pytest.mark.parametrize("columns", [80, 140])
def test_terminal_shows_every_cause_of_lost_time(replays, columns):
    """The terminal shows the names of `simulate --failures` in full."""
    names = ("templates", "restart from checkpoint", "templates at no cost")
    named = [replace(one, name=name) for one, name in zip([*replays, replays[0]], names, strict=True)]
    text = io.StringIO()
    print_parts(Console(file=text, width=columns), replay_parts(named, SETTING))
    shown = " ".join(text.getvalue().split())
    assert "…" not in shown
    assert max(map(len, text.getvalue().splitlines())) <= columns
    for one in named:
        assert one.name in shown
        assert all(word in shown for cause in one.lost for word in cause.split())  # a cell may break a line


def test_json_holds_every_segment(replays):
    plain = json.loads(json.dumps(replays_to_plain(replays, SETTING)))
    assert [entry["name"] for entry in plain["replays"]] == ["templates", "restart"]
    assert len(plain["replays"][0]["segments"]) == len(replays[0].segments)


def test_page_draws_each_replay_to_scale_and_escapes_names(replays):
    page = render_replay_page(replays, TITLE, SETTING)
    assert "&lt;three&gt; losses" in page
    assert "<1>" not in page
    lines = re.findall(r'polyline class="[^"]*" points="([^"]*)"', page)
    assert len(lines) == 2
    highest = min(float(point.split(",")[1]) for line in lines for point in line.split())
    assert highest == pytest.approx(14.0)  # the fastest moment of all touches the top


def test_page_names_model_plan_cluster_and_assumptions(replays):
    page = render_replay_page(replays, TITLE, SETTING)
    heading = re.search("<h1>(.*?)</h1>", page).group(1)
    assert heading == "mine: siglip + llama &lt;1&gt; on up to 9 nodes of 8 × H100"
    assert "not the 4 of the cluster" in page
    assert "pipelines of 2–4, 7 nodes" in page
    assert "24 microbatches of 2 samples. Costs: analytic (not measured)." in page
    assert "Assumed: " in page


def test_causes_of_lost_time_have_colours_of_their_own(replays):
    page = render_replay_page(replays, TITLE, SETTING)
    legend = page.rpartition('<ul class="legend">')[2].partition("</ul>")[0]
    tones = re.findall(r'class="swatch (\w+)"', legend)
    assert len(tones) == len(set(tones)) >= 3
    assert all(f".{tone} {{ background-color" in page for tone in tones)
    idle = cause_tones(Plan(()), ["warm-up", "drain", "communication", "imbalance", "between actions", "?"])
    assert not set(tones) & set(idle.values())
