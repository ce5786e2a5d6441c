"""The stats page and table: figures as they are, sentences for what has no shape, and nothing given to them runs."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from dilatant.data.index.sizes import SizesIndex
from dilatant.data.index.stats import BlendSource, describe
from dilatant.data.sample import Example, ExampleSpan
from dilatant.report.pages.page import write_page
from dilatant.report.pages.stats_page import render_stats_page, stats_parts
from dilatant.report.printed_parts import print_parts
from dilatant.report.text.stats_summary import StatsReport, summarize_stats
from dilatant.schedule.assignment.batch_balance import BatchBalance
from harness.browser import Browser, find_chromium

HOSTILE = "</script><img src=x onerror=alert(1)>&"
PIXEL = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xd9"  # enough to be a JPEG by name


def made_report(**changes) -> StatsReport:
    language = np.arange(10, 90)
    tokens = np.stack([language, np.arange(80) % 7 * 100, np.full(80, 49)], axis=1)
    index = SizesIndex(
        ("language", "vision", "audio"), tokens, language // 2, np.zeros(80, int), {3: f"sample-3: {HOSTILE}"}
    )
    stats = describe(index, (BlendSource("first", 30), BlendSource(HOSTILE, 50, 2.0)), max_length=85)
    waits = {"language": 0.31, "vision": 0.4, "audio": 0.0}
    report = StatsReport(
        "Training data of <mine>",
        stats,
        32,
        (BatchBalance(4, "random", waits, 0.421), BatchBalance(4, "balanced", dict.fromkeys(waits, 0.01), 0.017)),
        (
            Example(
                "x.jsonl:1",
                "typical",
                (
                    ExampleSpan(f"<s>{HOSTILE}\n", 12),
                    ExampleSpan(f"{HOSTILE}.png", 49, unit="vision", picture=PIXEL),
                    ExampleSpan("sound", 9, unit="audio", peaks=(0.0, 0.5, 1.0)),
                    ExampleSpan("yes</s>", 4, carries_loss=True),
                ),
            ),
            Example("x.jsonl:2", "the longest", problem="image 'a' is damaged"),
        ),
    )
    return replace(report, **changes)


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_figures_are_shown_in_the_terminal_at_80_columns():
    for width in (80, 140):
        console = Console(file=io.StringIO(), width=width)
        print_parts(console, stats_parts(made_report()))
        text = console.file.getvalue()
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        shown = " ".join(text.split())
        assert "80 samples" in shown
        assert "Training would refuse 5 samples" in shown
        assert "vision: samples 67, mean 345, 5 % 100" in shown
        assert "audio: Each of its 79 samples has 49 tokens" in shown
        assert "devices would wait 42 % of the time for the slowest; placed by the policy balanced, 1.7 %" in shown


def test_nothing_of_the_data_becomes_part_of_the_page():
    page = render_stats_page(made_report(title=HOSTILE))
    elements = Elements(page).found
    images = [attributes["src"] for tag, attributes in elements if tag == "img"]
    assert len(images) == 1
    assert images[0].startswith("data:image/jpeg;base64,")
    assert [tag for tag, _ in elements].count("script") == 2
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'; img-src data:;" in page


def test_each_bar_and_cell_stands_for_its_samples():
    report = made_report()
    page = render_stats_page(report)
    titles = re.findall(r"<title>([\d,]+)(?: to ([\d,]+))? tokens: ([\d,]+) samples?</title>", page)
    language, vision, audio = report.stats.units
    assert sum(int(count) for _, _, count in titles) == language.samples + vision.samples
    assert len(re.findall(r"language tokens, [^<]*vision\s+tokens: ", page)) == sum(
        count > 0 for row in report.stats.joint[0].counts for count in row
    )
    assert f"Each of its {audio.samples} samples has 49 tokens." in page.replace("\u00a0", " ")


def test_a_unit_has_the_colour_that_it_has_in_a_plan():
    """Where encoders come first, as in `example_reports`: the hue of a unit is its number there."""
    page = render_stats_page(made_report())
    found = re.findall(r'<figure class="histogram u(\d)">\s*<figcaption><h3>(\w+)</h3>', page)
    assert {name: int(hue) for hue, name in found} == {"vision": 0, "audio": 1, "language": 2}


def test_loss_is_marked_and_what_cannot_be_shown_says_why():
    page = render_stats_page(made_report())
    assert re.findall(r'<span class="loss" title="4 tokens, carry loss">([^<]*)</span>', page) == ["yes&lt;/s&gt;"]
    assert "74 tokens, of which 4 carry loss" in page
    assert "image &#39;a&#39; is damaged" in page
    long = made_report(examples=(Example("x", "y", (ExampleSpan("a" * 5000, 5000),)),))
    assert "3,400 more characters" in render_stats_page(long)


def test_data_without_media_or_valid_samples_still_get_a_page():
    only_text = describe(SizesIndex(("language",), np.full((4, 1), 5), np.full(4, 2), np.zeros(4, int)))
    assert "Each of its 4 samples has 5 tokens" in render_stats_page(StatsReport("x", only_text, 8))
    nothing = describe(
        SizesIndex(("language", "vision"), np.zeros((1, 2), int), np.zeros(1, int), np.zeros(1, int), {0: "bad"})
    )
    assert "No sample has any work here" in render_stats_page(StatsReport("x", nothing, 8))
    print_parts(Console(file=io.StringIO()), stats_parts(StatsReport("x", nothing, 8)))
    assert summarize_stats(StatsReport("x", nothing, 8))


@pytest.mark.skipif(
    find_chromium() is None,
    reason="chromium and chromedriver are not installed: the stats page was not tried in a browser",
)
@pytest.mark.parametrize("width", [480, 1280])
def test_a_browser_shows_all_of_it_without_errors(tmp_path, width):
    page = write_page(tmp_path / "data.html", render_stats_page(made_report(examples=())))
    browser = Browser(find_chromium(), tmp_path / "profile", width)
    try:
        browser.open(page)
        wide = browser.run(
            """return [...document.querySelectorAll('.scroll')]
            .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.innerText)"""
        )
        assert wide == []  # nothing lies beyond a scroll bar
        browser.click(".theme")
        assert browser.run("return document.documentElement.dataset.theme") == "light"
        assert browser.errors() == []
    finally:
        browser.close()
