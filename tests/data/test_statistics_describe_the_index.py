"""Statistics of a sizes index are those of its numbers, and both views show them."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from dilatant.data.sizes import SizesIndex
from dilatant.data.stats import describe
from dilatant.data.stats_view import bars, html_page, terminal_view


def made_index(**tokens):
    units = ("language", *(unit for unit in tokens if unit != "language"))
    language = np.asarray(tokens["language"])
    return SizesIndex(
        units, np.stack([tokens[unit] for unit in units], axis=1), language // 2, np.zeros_like(language)
    )


def test_statistics_describe_the_index():
    rng = np.random.default_rng(0)
    vision = np.where(rng.random(5000) < 0.7, rng.integers(100, 900, 5000), 0)
    language = vision + rng.integers(20, 200, 5000)
    index = made_index(language=language, vision=vision)
    index = replace(index, problems={3: "broken"})
    stats = describe(index)
    keep = np.arange(5000) != 3
    assert (stats.samples, stats.problems) == (5000, 1)
    assert stats.target_tokens == (language // 2)[keep].sum()
    (text, seen) = stats.units
    some = vision[keep & (vision > 0)]
    assert (seen.samples, seen.total, seen.minimum, seen.maximum) == (
        len(some),
        some.sum(),
        some.min(),
        some.max(),
    )
    assert seen.percentiles[95] == np.percentile(some, 95)
    assert sum(seen.histogram.counts) == len(some)
    assert stats.mixes == {"vision + text": len(some), "text": 4999 - len(some)}
    assert text.total == language[keep].sum()


def test_the_ratio_between_units_has_an_honest_interval():
    rng = np.random.default_rng(1)
    vision = rng.integers(0, 500, 20_000)
    language = vision // 2 + rng.integers(50, 150, 20_000)
    truth = vision.sum() / language.sum()
    inside = 0
    for _ in range(200):
        chosen = rng.integers(0, 20_000, 300)
        (ratio,) = describe(made_index(language=language[chosen], vision=vision[chosen])).ratios
        assert ratio.ratio == pytest.approx(vision[chosen].sum() / language[chosen].sum())
        inside += ratio.low <= truth <= ratio.high
    # 95 % of 200 is 190; fewer than 180 or 200 of 200 would happen by chance once in a thousand.
    assert 180 <= inside < 200


def test_figures_are_shown_in_terminal_and_page():
    stats = describe(made_index(language=np.arange(10, 90), vision=np.arange(80) % 7))
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal_view(stats))
    text = console.file.getvalue()
    assert "80 samples" in text
    assert "vision tokens per sample, from 1 to 6" in text
    page = html_page(stats, "Data <1>")
    HTMLParser().feed(page)
    assert "Data &lt;1&gt;" in page
    assert page.count("<rect") == sum(len(unit.histogram.counts) for unit in stats.units)
    assert "http" not in page
    line = bars(stats.units[0].histogram)
    assert len(line) == 40
    assert set(line) <= set("▁▂▃▄▅▆▇█")


def test_data_without_media_or_without_any_good_sample_has_statistics():
    only_text = describe(made_index(language=np.full(4, 5)))
    assert only_text.mixes == {"text": 4}
    assert only_text.ratios == ()
    zero = np.zeros(1, int)
    nothing = describe(replace(made_index(language=zero, vision=zero), problems={0: "bad"}))
    assert nothing.units[0].samples == 0
    Console(file=io.StringIO()).print(terminal_view(nothing))
    assert html_page(nothing, os.curdir)
