"""The page of a measured step: one file, its words from what was measured, and nothing given to it runs."""

from __future__ import annotations

import json
import re

import pytest

from cases.planning.example_step import PLAN, STEP
from dilatant.report.gantt import GanttChart, GanttRow, Lane, measured_chart, predicted_chart
from dilatant.report.pages.page import write_page
from dilatant.report.pages.plan_page import render_step_page
from dilatant.report.step_comparison import Prediction, compare_steps
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.simulate import simulate
from harness.browser import Browser, find_chromium


def test_it_says_who_worked_and_what_the_rest_was_lost_on():
    page = render_step_page(STEP, PLAN, "mine")
    # 8 of 16 rank seconds are work; rank 0 waits 5 s for language; rank 1 begins 1 s late and ends 2 s early.
    assert "8.00 s for 2 samples in 1 microbatch on 2 ranks" in page
    assert "Devices compute 50\u00a0% of the time." in page
    assert "31\u00a0% on waiting for language" in page
    assert "language (layers 0–5) on rank 1 computes 62\u00a0% of the step" in page


@pytest.fixture(scope="module")
def prediction():
    """The same actions, each as long as predicted: vision 0.5 and 1, language 2 and 4 seconds."""
    assignment = Assignment({"vision": (((0, 1),),), "language": (((0, 1),),)})
    seconds = {(0, "F"): 0.5, (0, "B"): 1.0, (1, "F"): 2.0, (1, "B"): 4.0}
    timeline = simulate(
        one_f_one_b(PLAN, assignment), PLAN, assignment, lambda action: seconds[action.stage, action.kind]
    )
    return Prediction(timeline, "measured <here>")


def test_every_second_of_both_steps_is_compared_once(prediction):
    predicted, measured = predicted_chart(prediction.timeline), measured_chart(STEP, PLAN)
    found = {one.name: one for one in compare_steps(predicted, measured, PLAN)}
    # Means over two devices. Vision: 0.5 + 1 s predicted, 1 + 2 s measured; language: 2 + 4 s, 2 + 3 s.
    assert (found["vision"].predicted_seconds, found["vision"].measured_seconds) == (0.75, 1.5)
    assert (found["language"].predicted_seconds, found["language"].measured_seconds) == (3.0, 2.5)
    assert sum(one.predicted_seconds for one in found.values()) == pytest.approx(predicted.seconds)
    assert sum(one.measured_seconds for one in found.values()) == pytest.approx(measured.seconds)


def test_a_lane_of_several_ranks_counts_as_many_devices():
    lanes = (Lane((0,), (0,)), Lane((1, 2, 3), (1,)))
    rows = (GanttRow(0, 0, "F", 0, (0,), 0.0, 8.0), GanttRow(1, 1, "F", 0, (0,), 6.0, 4.0))
    chart = GanttChart(10.0, lanes, rows, ({"drain": 2.0}, {"warm-up": 6.0}))
    found = {one.name: one.predicted_seconds for one in compare_steps(chart, chart, PLAN)}
    expected = {"vision": 8 / 4, "language": 3 * 4 / 4, "warm-up": 3 * 6 / 4, "drain": 2 / 4}
    assert found == pytest.approx(expected)


def test_the_page_shows_the_prediction_beside_the_measurement(prediction):
    page = render_step_page(STEP, PLAN, "mine", prediction).replace("\u00a0", " ")
    assert "A measured step took 8.00 s, 6.7 % longer than the 7.50 s predicted." in page
    assert "measured &lt;here&gt;" in page
    line = page.partition("vision computes</th>")[2].partition("</tr>")[0]
    assert re.findall(r">([^<]+)</td>", line) == ["750 ms", "1.50 s", "+750 ms", "+100.0 %"]
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))["timelines"]
    assert [chart["seconds"] for chart in charts] == [7.5, 8.0]
    assert {chart["span"] for chart in charts} == {8.0}  # one scale


def test_a_hostile_title_stays_text():
    page = render_step_page(STEP, PLAN, "</script><img src=x>")
    assert "<img" not in page


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="nothing was measured"):
        render_step_page([], PLAN, "mine")


@pytest.mark.skipif(
    find_chromium() is None,
    reason="chromium and chromedriver are not installed: the step page was not tried in a browser",
)
def test_browser_draws_page_and_moves_both_charts_together(tmp_path, prediction):
    page = write_page(tmp_path / "timeline.html", render_step_page(STEP, PLAN, "mine"))
    both = write_page(tmp_path / "both.html", render_step_page(STEP, PLAN, "mine", prediction))
    browser = Browser(find_chromium(), tmp_path / "profile")
    try:
        browser.open(page)
        assert browser.run(
            "return [...document.querySelectorAll('.timeline .labels > *')].map(l => l.textContent)"
        ) == ["vision · rank 0", "language · rank 1"]
        assert float(browser.run("return document.querySelector('.timeline').dataset.to")) == 8.0
        browser.open(both)
        browser.click("[data-tool=in]")
        ends = browser.run(
            "return [...document.querySelectorAll('.timeline')].map(t => [t.dataset.from, t.dataset.to])"
        )
        assert ends == [["2", "6"], ["2", "6"]]
        assert browser.errors() == []
    finally:
        browser.close()
