"""The plan page in a real browser: it draws, answers the mouse and the keys, and groups what is too much."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cases.planning.example_reports import large_report, small_report
from dilatant.report.pages.plan_page import write_plan_page
from dilatant.report.text.wording import percent_text, seconds_text
from harness.browser import Browser, find_chromium

PROGRAMS = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAMS is None, reason="chromium and chromedriver are not installed: the plan page was not tried in a browser"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(PROGRAMS, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def small():
    return small_report()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("pages")
    return {
        "small": write_plan_page(small, folder / "small.html"),
        "large": write_plan_page(large_report(), folder / "large.html"),
        "hostile": write_plan_page(
            small_report("</script><img src=x onerror=document.title='owned'>"), folder / "hostile.html"
        ),
        "measured": write_plan_page(
            dataclasses.replace(small, measured=small.timeline, remodelled=small.timeline), folder / "measured.html"
        ),
    }


@pytest.fixture
def open_page(browser, pages):
    def open_named(name):
        browser.open(pages[name])
        browser.run("document.querySelector('.timeline .rows').scrollIntoView({block: 'center'})")
        return browser

    yield open_named
    assert browser.errors() == []


def place_of(browser, report, row):
    """Window coordinates of the middle of an action's bar."""
    label = browser.run(
        "return [...document.querySelectorAll('.labels div')].map(l => [l.textContent, l.offsetTop, l.offsetHeight])"
    )
    rank = report.timeline.lanes[row.lane].ranks[0]
    _, top, height = next(entry for entry in label if entry[0].endswith(f"rank {rank}"))
    box = browser.run("const b = document.querySelector('.chart').getBoundingClientRect(); return [b.x, b.y, b.width]")
    start, end = view(browser)
    gutter, margin = 208, 8
    middle = row.start + row.seconds / 2
    return box[0] + gutter + (middle - start) / (end - start) * (box[2] - gutter - margin), box[1] + top + height / 2


def view(browser):
    return tuple(
        float(browser.run(f"return document.querySelector('.timeline').dataset.{end}")) for end in ("from", "to")
    )


def tip(browser):
    return browser.run(
        """const tip = document.querySelector('.tip');
        return getComputedStyle(tip).visibility === 'visible' ? tip.innerText : ''"""
    )


def pixels(browser, x, y, width=1, height=1):
    """Red, green and blue of the chart's pixels from a place in the window, row by row."""
    flat = browser.run(
        """const [x, y, width, height] = arguments;
        const chart = document.querySelector('.chart'), box = chart.getBoundingClientRect();
        const copy = document.createElement('canvas');
        [copy.width, copy.height] = [width, height];
        const pen = copy.getContext('2d', {willReadFrequently: true});
        pen.drawImage(chart, Math.round(x - box.x), Math.round(y - box.y), width, height, 0, 0, width, height);
        return [...pen.getImageData(0, 0, width, height).data]""",
        x,
        y,
        width,
        height,
    )
    return [tuple(flat[i : i + 3]) for i in range(0, len(flat), 4)]


def colour(browser, x, y):
    return pixels(browser, x, y)[0]


def test_facts_are_on_the_page(open_page, small):
    browser = open_page("small")
    text = browser.run("return document.body.innerText").replace("\u00a0", " ")
    assert seconds_text(small.step_seconds) in text
    assert percent_text(small.timeline.busy_fraction()) in text
    assert "25.0 GiB" in text
    assert "Does not fit: 120 %" in text
    assert "from 512 samples" in text
    stages = browser.run("return [...document.querySelectorAll('.stage title')].map(title => title.textContent)")
    assert len(stages) == 4
    assert any("language stage 1: layers 3–5, rank" in title for title in stages)


def test_bar_tooltip_shows_action_unit_microbatch_and_samples(open_page, small):
    browser = open_page("small")
    for row in small.timeline.rows[::5]:
        browser.point(*place_of(browser, small, row))
        text = tip(browser)
        stage = small.plan.stages()[row.stage]
        assert text.startswith({"F": "F forward", "B": "B backward"}[row.kind])
        assert f"{stage.unit}, replica {stage.replica}, stage {stage.position}" in text
        assert f"microbatch {row.microbatch}" in text
        assert ", ".join(map(str, row.samples)) in text
        assert f"{float(f'{row.seconds * 1000:.3g}'):g} ms" in text


def test_pointing_at_a_gap_tells_what_is_waited_for(open_page, small):
    browser = open_page("small")
    lane = 2
    rows = [row for row in small.timeline.rows if row.lane == lane]
    before = rows[0]._replace(start=0.0, seconds=rows[0].start)
    browser.point(*place_of(browser, small, before))
    assert "idle here" in tip(browser)
    assert "warm-up" in tip(browser)


def test_bars_are_drawn_where_their_actions_are(open_page, small):
    browser = open_page("small")
    seen = {}
    for row in small.timeline.rows:
        x, y = place_of(browser, small, row)
        seen.setdefault((small.plan.stages()[row.stage].unit, row.kind), set()).add(colour(browser, x - 8, y))
    assert all(len(colours) == 1 for colours in seen.values()), seen
    assert len({next(iter(colours)) for colours in seen.values()}) == 4


def test_pointing_dims_what_works_on_other_samples(open_page, small):
    browser = open_page("small")
    row = next(row for row in small.timeline.rows if row.samples == (6,))
    other = next(row for row in small.timeline.rows if 6 not in row.samples)
    x, y = place_of(browser, small, other)
    before = colour(browser, x - 8, y)
    browser.point(*place_of(browser, small, row))
    browser.settle()
    assert colour(browser, x - 8, y) != before


def test_keys_buttons_wheel_and_drag_move_the_view(open_page, small):
    browser = open_page("small")
    whole = view(browser)
    assert whole == pytest.approx((0.0, small.step_seconds))
    browser.press(".timeline .rows", "+")
    near = view(browser)
    assert near[1] - near[0] == pytest.approx(0.6 * small.step_seconds)
    browser.press(".timeline .rows", "\ue014")  # arrow right
    assert view(browser)[0] > near[0]
    browser.press(".timeline .rows", "0")
    assert view(browser) == whole

    box = browser.run(
        "const b = document.querySelector('.chart').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    )
    x, y = box[0] + 208 + (box[2] - 216) / 4, box[1] + box[3] / 2
    browser.wheel(x, y, -300)
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] < 0.9 * small.step_seconds
    quarter = small.step_seconds / 4  # what lies under the mouse stays there
    assert (quarter - zoomed[0]) / (zoomed[1] - zoomed[0]) == pytest.approx(0.25, abs=0.01)  # mouse moves in pixels
    browser.drag((x, y), (x - 60, y))
    assert view(browser)[0] > zoomed[0]
    browser.click("[data-tool=fit]")
    assert view(browser) == whole

    strip = browser.run(
        "const b = document.querySelector('.strip').getBoundingClientRect(); return [b.x, b.y, b.width]"
    )
    browser.drag((strip[0] + strip[2] * 0.25, strip[1] + 20), (strip[0] + strip[2] * 0.5, strip[1] + 20))
    assert view(browser) == pytest.approx(
        (0.25 * small.step_seconds, 0.5 * small.step_seconds), rel=0.02
    )  # whole pixels


def test_wheel_scrolls_the_page_until_the_chart_was_clicked(open_page, small):
    browser = open_page("small")
    browser.run("document.activeElement.blur()")
    box = browser.run(
        "const b = document.querySelector('.chart').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    )
    browser.wheel(box[0] + 400, box[1] + 40, -60)
    assert view(browser) == pytest.approx((0.0, small.step_seconds))


def test_keyboard_walks_through_the_actions_and_speaks_them(open_page):
    browser = open_page("small")
    browser.press(".timeline .rows", "n")
    first = browser.run("return document.querySelector('.spoken').textContent")
    browser.press(".timeline .rows", "n")
    second = browser.run("return document.querySelector('.spoken').textContent")
    assert "F forward; vision, replica 0, stage 0; microbatch 0; samples 0, 4; " in first
    assert "microbatch 1" in second


def test_thousand_ranks_start_grouped_and_groups_toggle(open_page):
    browser = open_page("large")
    count = "return document.querySelectorAll('.timeline .labels > *').length"
    assert 8 <= browser.run(count) <= 26
    names = browser.run("return [...document.querySelectorAll('.labels button')].map(label => label.textContent)")
    assert "vision (128 replicas)" in names
    assert "language (128 replicas)" in names
    before = browser.run(count)
    browser.run(
        "[...document.querySelectorAll('.labels button')].find(l => l.textContent === 'replicas 1–127').click()"
    )
    assert browser.run(count) == before + 8
    browser.click("[data-tool=close]")
    assert browser.run(count) == 2
    browser.click("[data-tool=open]")
    assert browser.run(count) >= 1024 + 2
    browser.run("document.querySelector('.timeline .rows').scrollTop = 12000")
    box = browser.run("const b = document.querySelector('.chart').getBoundingClientRect(); return [b.x, b.y]")
    assert len(set(pixels(browser, box[0] + 220, box[1] + 30, 400, 100))) > 2


def test_a_group_shows_what_part_of_its_lanes_is_busy(open_page, small):
    """Heights in a group's line equal the share of its ranks that compute at that moment."""
    browser = open_page("small")
    label = browser.run(
        "const l = document.querySelector('.labels button'); return [l.textContent, l.offsetTop, l.offsetHeight]"
    )
    assert label[0] == "vision (2 replicas)"
    box = browser.run("const b = document.querySelector('.chart').getBoundingClientRect(); return [b.x, b.y, b.width]")
    vision = [row for row in small.timeline.rows if small.plan.stages()[row.stage].unit == "vision"]
    idle = colour(browser, *place_of(browser, small, _gap(small)))
    for moment in (0.1, 0.3, 0.45, 0.8):
        seconds = moment * small.step_seconds
        busy = sum(row.start < seconds < row.start + row.seconds for row in vision) / 2
        x = box[0] + 208 + moment * (box[2] - 216)
        column = pixels(browser, x, box[1] + label[1] + 4, 1, label[2] - 8)
        painted = sum(found != idle for found in column) / len(column)
        assert painted == pytest.approx(busy, abs=0.1)  # two of some twenty pixels


def _gap(report):
    rows = [row for row in report.timeline.rows if row.lane == 2]
    return rows[0]._replace(start=0.0, seconds=rows[0].start)


def test_themes_change_the_colours(browser, open_page):
    open_page("small")
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.emulate(prefers_color_scheme="dark")
    dark = browser.run(paper)
    browser.emulate(prefers_color_scheme="light")
    light = browser.run(paper)
    assert dark != light
    browser.click(".theme")
    browser.click(".theme")
    assert browser.run(paper) == dark
    browser.run("localStorage.clear()")


def test_printing_redraws_at_once_in_light_colours_for_paper(browser, open_page):
    open_page("small")
    browser.emulate(prefers_color_scheme="dark")
    before, during, after = browser.run(
        """const chart = document.querySelector('.chart'), copy = document.createElement('canvas');
        const look = () => {
          [copy.width, copy.height] = [chart.width, chart.height];
          const pen = copy.getContext('2d', {willReadFrequently: true});
          pen.drawImage(chart, 0, 0);
          const data = pen.getImageData(230, 30, 200, 100).data;
          const colours = new Set();
          for (let i = 0; i < data.length; i += 4) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
          return [chart.width, colours.size, getComputedStyle(document.body).backgroundColor];
        };
        const seen = [look()];
        dispatchEvent(new Event('beforeprint'));
        seen.push(look());
        dispatchEvent(new Event('afterprint'));
        return [...seen, look()];"""
    )
    browser.emulate(prefers_color_scheme="light")
    assert during[0] < 700 < before[0]  # pixels: the body is 700 wide while printing
    assert during[1] > 3
    assert during[2] == "rgb(255, 255, 255)"
    assert after == before


def test_hostile_names_stay_text(open_page):
    browser = open_page("hostile")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.title").startswith("</script><img")


def test_measured_timeline_is_drawn_by_the_same_code(open_page):
    browser = open_page("measured")
    assert browser.run("return document.querySelectorAll('.timeline').length") == 2
    assert browser.run("return [...document.querySelectorAll('.timeline')].map(t => t.dataset.to)")[0] is not None


def test_narrow_windows_do_not_scroll_sideways(browser, open_page):
    browser.resize(420, 900)
    open_page("small")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.resize(1280, 900)


def test_every_control_and_picture_has_a_name(open_page):
    browser = open_page("small")
    nameless = browser.run(
        """return [...document.querySelectorAll('button, input, [tabindex], [role=img]')]
        .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')?.textContent.trim()))
        .map(e => e.outerHTML)"""
    )
    assert nameless == []
    headings = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))


@pytest.mark.parametrize("width", [480, 1280])
def test_tables_are_read_without_scrolling_sideways(open_page, width):
    browser = open_page("measured")
    browser.resize(width, 900)
    try:
        cut = browser.run(
            """return [...document.querySelectorAll('.scroll')]
            .filter(one => one.querySelector('table') && one.scrollWidth > one.clientWidth + 1)
            .map(one => one.innerText)"""
        )
        assert cut == []
        right = browser.run(
            "return [...document.querySelectorAll('.plans td.text')].map(td => td.getBoundingClientRect().right)"
        )
        assert right
        assert max(right) <= width
    finally:
        browser.resize(1280, 900)
