"""The report as a value, in sentences, as a table and as a page's text."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cases.planning.example_reports import large_report, small_report
from dilatant.plan import Plan
from dilatant.plan.plan import Replica, Stage, UnitPlan
from dilatant.planning.planned_run import fixed_plan_report
from dilatant.report.pages import page
from dilatant.report.pages.model_graph import model_graph
from dilatant.report.pages.plan_page import print_plan, render_plan_page
from dilatant.report.plan_report import ComparedPlan, PlanReport
from dilatant.report.text.gantt_tables import cause_tones
from dilatant.report.text.plan_summary import explain, short_answer, suggest, summarize
from dilatant.report.text.search_reasons import recomputation_text
from dilatant.report.text.wording import bytes_text, count_text, percent_text, ranks_text, seconds_text

HOSTILE = '</script><img src=x onerror="document.title=1">&\u2028"\''


def test_json_round_trip_keeps_every_fact():
    report = small_report()
    report = dataclasses.replace(report, measured=report.timeline, remodelled=report.timeline, warnings=("one", "two"))
    assert PlanReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda tree: tree.pop("hardware"), "hardware"),
        (lambda tree: tree.update(extra=1), "extra"),
        (lambda tree: tree["timeline"]["rows"][3].pop(), r"timeline.rows\[3\]"),
        (lambda tree: tree["plan"]["units"][1].update(feeds="x"), r"plan.units\[1\].feeds"),
        (lambda tree: tree.update(global_batch="many"), "global_batch"),
    ],
)
def test_json_that_does_not_fit_names_the_place(change, place):
    tree = json.loads(small_report().to_json())
    change(tree)
    with pytest.raises(ValueError, match=place):
        PlanReport.from_json(json.dumps(tree))


def test_summary_says_speed_losses_memory_and_rival():
    text = " ".join(summarize(small_report()))
    report = small_report()
    assert seconds_text(report.step_seconds) in text
    assert f"{report.global_batch} samples" in text
    assert f"compute {percent_text(report.timeline.busy_fraction())} of the time" in text
    assert "rank 1, the fullest, needs 25.0 GiB of 48.0 GiB" in text
    assert "The runner-up (colocated: vision inside language's first stage) is 8.0 % slower" in text


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_no_cell_of_a_terminals_tables_is_cut_off(columns):
    console = Console(width=columns, record=True, file=io.StringIO())
    print_plan(small_report(), console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


def test_busy_and_idle_account_for_all_device_time():
    for report in (small_report(), large_report(replicas=4)):
        timeline = report.timeline
        total = timeline.busy_fraction() + sum(timeline.idle_fractions().values())
        assert total == pytest.approx(1.0, abs=1e-9)  # sums of doubles


def test_a_plan_that_does_not_fit_is_said_with_by_how_much():
    report = small_report()
    use = dataclasses.replace(report.memory[2], bytes_by_use={"parameters": 50 * 1024**3})
    report = dataclasses.replace(report, memory=(*report.memory[:2], use, *report.memory[3:]))
    text = " ".join(summarize(report))
    assert "does not fit: rank 1 needs 50.0 GiB of 48.0 GiB, 2.00 GiB too much" in text
    assert 'class="bar over"' in render_plan_page(report)


def test_first_suggestion_addresses_the_largest_loss():
    report = small_report()
    largest = next(iter(report.timeline.idle_fractions().values()))
    first = suggest(report)[0]
    assert percent_text(largest) in first
    assert suggest(dataclasses.replace(report, advice=("Buy a fifth device.",)))[0] == "Buy a fifth device."


def test_a_plan_that_was_compared_with_no_other_takes_its_mean_step():
    """With the sync of gradients and the update, which the chart of one step lacks."""
    report = small_report()
    alone = fixed_plan_report(report)
    assert not alone.candidates
    assert alone.step_seconds == report.step_seconds
    assert dataclasses.replace(alone, mean_seconds=None).step_seconds == report.timeline.seconds


def test_devices_of_one_machine_are_not_told_to_be_on_one_machine():
    report = small_report()
    idle = tuple({"communication": sum(own.values())} for own in report.timeline.idle)
    timeline = dataclasses.replace(report.timeline, idle=idle)
    for devices, said in ((len(report.plan.ranks), False), (1, True)):
        found = suggest(dataclasses.replace(report, timeline=timeline, gpus_per_node=devices))
        assert any("faster links" in line.lower() for line in found)
        assert any("on one machine" in line for line in found) is said


def test_explanations_follow_the_figures():
    chosen = ComparedPlan("a", "", 8, 1.0, 0.5, {"imbalance": 0.1}, True)
    assert "120 %" in explain(ComparedPlan("b", "", 8, 1.1, 1.2, {}), chosen)
    assert "20 % more" in explain(ComparedPlan("b", "", 8, 1.1, 0.5, {"imbalance": 0.3}), chosen)
    waits = ComparedPlan("b", "", 8, 1.001, 0.5, {"imbalance": 0.1}, sync_seconds=0.9)
    assert "As fast, within the accuracy" in explain(waits, chosen)
    assert "2 devices unused" in explain(ComparedPlan("b", "", 6, 1.1, 0.5, {"imbalance": 0.1}), chosen)
    assert explain(ComparedPlan("b", "", 8, 1.1, 0.5, {}, why="Said so."), chosen) == "Said so."
    assert "100 ms longer" in explain(ComparedPlan("b", "", 8, 1.1, 0.5, {}, sync_seconds=0.1), chosen)


def test_computing_forwards_again_is_said_of_plans_and_rivals():
    plan = small_report().plan
    how = ("block", "block_keep_attention", "none", "block")
    units = [dataclasses.replace(unit, recompute=how if unit.name == "language" else ()) for unit in plan.units]
    text = recomputation_text(dataclasses.replace(plan, units=tuple(units)))
    assert text.startswith("language 2 of 4 layers")
    assert "1 of 4 layers" in text
    assert recomputation_text(plan) == ""
    chosen = ComparedPlan("a", "", 8, 1.0, 0.5, {}, True)
    rival = ComparedPlan("b", "", 8, 1.3, 0.5, {"imbalance": 0.4}, recomputed=text)
    assert explain(rival, chosen) == f"To fit memory it computes forwards again: {text}."


def test_page_needs_nothing_from_outside():
    page = render_plan_page(small_report())
    assert not re.findall(r"""(?:src|href)\s*=|url\((?!#)|@import|https?://(?!www\.w3\.org)""", page)
    assert "default-src 'none'" in page


def test_the_page_says_why_a_model_is_neither_cut_nor_packed():
    report = dataclasses.replace(small_report(), limits=("rung 2 of 3: vision stays one stage: a reason",))
    assert "Rung 2 of 3: vision stays one stage: a reason." in render_plan_page(report)


def test_replicas_that_divide_experts_differently_are_drawn_apart():
    replicas = [Replica((Stage(0, 1, (first, first + 1), 2, 1, ep),)) for first, ep in ((0, 2), (2, 1))]
    plan = Plan((UnitPlan("language", tuple(replicas)),))
    (card,) = model_graph(dataclasses.replace(small_report(), plan=plan))["cards"]
    assert card["layout"] == "2 replicas, 1 stage, tp 2, ep 1–2, 4 ranks"
    assert [text for _, _, text in card["badges"]] == ["× 1", "× 1"]


def test_page_escapes_what_users_write():
    report = dataclasses.replace(small_report(HOSTILE), warnings=(HOSTILE,), hardware=HOSTILE)
    units = list(report.plan.units)
    names = {"vision": HOSTILE, "language": "language"}
    renamed = [
        dataclasses.replace(unit, name=names[unit.name], feeds=tuple(names[feed] for feed in unit.feeds))
        for unit in units
    ]
    report = dataclasses.replace(report, plan=dataclasses.replace(report.plan, units=tuple(renamed)))
    report = dataclasses.replace(report, ratio=None, sizes=(dataclasses.replace(report.sizes[0], unit=HOSTILE),))
    found = []

    class Tags(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append(tag)
            assert not any(name.startswith("on") for name, _ in attributes)

    page = render_plan_page(report)
    Tags().feed(page)
    assert "img" not in found
    assert found.count("script") == 2
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert not set(text) & set("<>&\u2028")
    data = json.loads(text)
    assert data["timelines"][0]["units"][0] == HOSTILE


def test_thousand_ranks_stay_a_small_page():
    half, whole = (len(render_plan_page(large_report(replicas))) for replicas in (8, 16))
    assert half + (1024 - 64) * (whole - half) / 64 < 3_000_000  # each rank adds the same


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds_text(1.8449), "1.84 s"),
        (seconds_text(0.9996), "1.00 s"),
        (seconds_text(0.0124), "12.4 ms"),
        (seconds_text(8.2e-4), "820 µs"),
        (seconds_text(0.0), "0.00 µs"),
        (seconds_text(125), "2 min 05 s"),
        (seconds_text(12000), "3 h 20 min"),
        (bytes_text(512 * 2**20), "512 MiB"),
        (bytes_text(41 * 2**30), "41.0 GiB"),
        (bytes_text(17), "17 B"),
        (count_text(7_240_000_000), "7.24 B"),
        (count_text(48_100), "48.1 k"),
        (count_text(1_440), "1,440"),
        (count_text(37.4), "37.4"),
        (percent_text(0.814), "81 %"),
        (percent_text(0.029), "2.9 %"),
        (percent_text(0.0), "0 %"),
        (ranks_text([3, 1, 2, 7]), "1–3, 7"),
    ],
)
def test_numbers_are_written_for_readers(text, expected):
    assert text == expected


def test_report_imports_no_torch():
    code = "import sys, dilatant.report.pages.plan_page, dilatant.report.pages.plan_page;"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("factor", "words"), [(2.0, "100 % longer"), (0.5, "50 % less")])
def test_measured_step_reports_where_the_prediction_erred(factor, words):
    """Actions of a lane count once for each of its ranks."""
    report = small_report()
    lane = next(i for i, stage in enumerate(report.plan.stages()) if stage.unit == "language")
    rows = tuple(row._replace(seconds=row.seconds * (3.0 if row.lane == lane else 1.0)) for row in report.timeline.rows)
    lanes = list(report.timeline.lanes)
    lanes[lane] = dataclasses.replace(lanes[lane], ranks=(1, 7, 8, 9))
    timeline = dataclasses.replace(report.timeline, lanes=tuple(lanes))
    measured = dataclasses.replace(timeline, seconds=timeline.seconds * factor, rows=rows)
    text = " ".join(summarize(dataclasses.replace(report, remodelled=timeline, measured=measured)))
    assert f", {words} than the" in text
    work = {
        i: seconds * len(lanes[i].ranks)
        for i, seconds in enumerate(timeline.busy_seconds())
        if report.plan.stages()[i].unit == "language"
    }
    assert f"those of language took {percent_text(2.0 * work[lane] / sum(work.values()))} longer" in text


def test_headline_and_table_say_the_same_seconds():
    """The timeline is one step, the comparison the mean over several: they differ a little."""
    report = small_report()
    chosen, *others = report.candidates
    mean = 1.004 * report.timeline.seconds
    report = dataclasses.replace(
        report, candidates=(dataclasses.replace(chosen, step_seconds=mean), *others), lower_bound_seconds=None
    )
    page = render_plan_page(report)
    assert f"<b>{seconds_text(mean)}</b><span>a step of" in page
    assert f'data-label="step">{seconds_text(mean)}</td>' in page
    assert seconds_text(mean) in summarize(report)[0]


def test_the_gap_to_the_bound_is_relative_to_the_bound():
    report = small_report()
    report = dataclasses.replace(report, proven=False, lower_bound_seconds=report.step_seconds / 1.6)
    assert "this one is within 60 % of that" in " ".join(summarize(report))


def test_a_cause_of_idle_time_has_one_colour_on_every_page():
    report = small_report()
    causes = ["warm-up", "drain", "communication", "imbalance", "between actions", "waiting for vision"]
    alone = {cause: cause_tones(report.plan, [cause])[cause] for cause in causes}
    assert cause_tones(report.plan, causes[::-1]) == alone
    assert len(set(alone.values())) == len(causes)
    # And no page or script has colours of its own: all are classes of the one style.
    assets = Path(page.__file__).parent / "assets"
    for asset in assets.iterdir():
        literals = re.findall(r"#[0-9a-f]{3,8}\b|\b(?:rgb|hsl|oklch)\(", asset.read_text(encoding="utf-8"), re.I)
        assert asset.name == "page.css" or not literals, (asset.name, literals)


def test_markup_in_what_users_write_is_shown_and_not_read():
    name = "[red]a[/]"
    report = small_report(name)
    units = tuple(dataclasses.replace(unit, name=f"{name}{unit.name}", feeds=()) for unit in report.plan.units)
    report = dataclasses.replace(
        report,
        plan=Plan(units),
        warnings=(name,),
        candidates=tuple(dataclasses.replace(one, name=name, layout=name) for one in report.candidates),
    )
    for columns in (80, 160):
        console = Console(width=columns, record=True, file=io.StringIO())
        print_plan(report, console)
        text = console.export_text()
        assert text.startswith(name)
        assert f"warning: {name}" in text
        assert f"{name}vision 0" in text
        assert text.count(name) > 2 + 2 * len(report.candidates)


def test_the_short_answer_says_how_memory_is_saved():
    report = small_report()
    assert "train." not in short_answer(report).split("cluster.reserve")[-1]
    chosen = dataclasses.replace(report.chosen, recomputed="language 3 of 9 layers")
    others = tuple(one for one in report.candidates if one != report.chosen)
    saving = dataclasses.replace(report, shard={"language": "weights_by_step"}, candidates=(chosen, *others))
    assert short_answer(saving).endswith(
        "Ranks share weights by step of language (train.shard) and the backward computes language 3 of 9 layers again "
        "(train.recompute)."
    )
