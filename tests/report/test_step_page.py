"""The page of a measured step: one file, its words from what was measured, and nothing given to it runs."""

from __future__ import annotations

import pytest
from browser import Browser, find_chromium

from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.report.step_page import render_step_page, write_step_page
from dilatant.schedule import Action, ActionKind
from dilatant.schedule.measured import MeasuredAction

PLAN = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 6, (1,)),)),)),
    )
)


def measured(rank: int, unit: str, kind: str, start: float, waited: float, other: int | None, seconds: float):
    action = Action(ActionKind(kind), PLAN.stages()[rank].index, 0)
    return MeasuredAction(rank, unit, action, (0, 1), start, waited, other, seconds)


STEP = [
    measured(0, "vision", "F", 100.0, 0.0, None, 1.0),
    measured(0, "vision", "B", 101.0, 5.0, 1, 2.0),
    measured(1, "language", "F", 101.0, 0.0, 0, 2.0),
    measured(1, "language", "B", 103.0, 0.0, None, 3.0),
]


def test_it_says_who_worked_and_what_the_rest_was_lost_on():
    page = render_step_page(STEP, PLAN, "mine")
    # 8 of 16 rank seconds are work; rank 0 waits 5 s for language; rank 1 begins 1 s late and ends 2 s early.
    assert "8.00 s for 2 samples in 1 microbatch on 2 ranks" in page
    assert "Devices compute 50\u00a0% of the time." in page
    assert "31\u00a0% on waiting for language" in page
    assert "language (layers 0–5) on rank 1 computes 62\u00a0% of the step" in page


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
def test_a_browser_draws_it_without_errors(tmp_path):
    page = write_step_page(tmp_path / "timeline.html", STEP, PLAN, "mine")
    browser = Browser(find_chromium(), tmp_path / "profile")
    try:
        browser.open(page)
        assert browser.run(
            "return [...document.querySelectorAll('.timeline .labels > *')].map(l => l.textContent)"
        ) == [
            "vision · rank 0",
            "language · rank 1",
        ]
        assert float(browser.run("return document.querySelector('.timeline').dataset.to")) == 8.0
        assert browser.errors() == []
    finally:
        browser.close()
