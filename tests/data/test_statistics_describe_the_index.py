"""Statistics of a sizes index are those of its numbers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from dilatant.data.index.sizes import SizesIndex
from dilatant.data.index.stats import BlendSource, describe


def made_index(**tokens):
    units = ("language", *(unit for unit in tokens if unit != "language"))
    language = np.asarray(tokens["language"])
    return SizesIndex(units, np.stack([tokens[unit] for unit in units], axis=1), language // 2, np.zeros_like(language))


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
    assert (seen.samples, seen.total, seen.minimum, seen.maximum) == (len(some), some.sum(), some.min(), some.max())
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


def test_bins_are_few_equal_and_round_and_hold_every_sample():
    for low, high in ((5, 5), (10, 89), (0, 39), (0, 40), (999, 100_000), (7, 3_000_017)):
        tokens = np.linspace(max(low, 1), high, 500).astype(int)
        histogram = describe(made_index(language=tokens)).units[0].histogram
        widths = set(np.diff(histogram.edges))
        assert len(widths) == 1
        assert re.fullmatch("[125]0*", f"{widths.pop():.0f}")
        assert len(histogram.counts) <= 40
        assert sum(histogram.counts) == 500
        assert histogram.edges[0] <= tokens[0]
        assert tokens[-1] < histogram.edges[-1]


def test_a_joint_histogram_counts_pairs_of_two_units():
    rng = np.random.default_rng(3)
    vision = rng.integers(0, 400, 1000)
    language = vision + rng.integers(1, 90, 1000)
    (joint,) = describe(made_index(language=language, vision=vision)).joint
    assert np.sum(joint.counts) == 1000
    for (i, left), (j, low) in itertools.product(enumerate(joint.to_edges[:-1]), enumerate(joint.edges[:-1])):
        inside = (language >= left) & (language < joint.to_edges[i + 1])
        inside &= (vision >= low) & (vision < joint.edges[j + 1])
        assert joint.counts[i][j] == inside.sum()
    assert describe(made_index(language=language, vision=np.full(1000, 16))).joint == ()


def test_sources_and_refusals_are_told_apart():
    index = SizesIndex(
        ("language",),
        np.array([[5], [90], [0], [7], [80]]),
        np.array([2, 3, 0, 0, 1]),
        np.zeros(5, int),
        {2: "two:1: is torn", 3: "two:2: has no assistant answer"},
    )
    stats = describe(index, (BlendSource("one", 2), BlendSource("two", 3, weight=4.0)), max_length=80)
    assert stats.refused == 3
    first, *rest = stats.refusals
    assert "has 90 tokens, more than the 80 allowed" in first
    assert rest == ["two:1: is torn", "two:2: has no assistant answer"]
    first, second = stats.sources
    assert (first.samples, first.refused, first.target_tokens, first.tokens) == (2, 1, 5, {"language": 95})
    assert (second.samples, second.refused, second.target_tokens) == (3, 2, 1)
    assert second.tokens == {"language": 80}
    assert describe(index).refused == 2


def test_statistics_exist_without_media_or_usable_samples():
    only_text = describe(made_index(language=np.full(4, 5)))
    assert only_text.mixes == {"text": 4}
    assert only_text.ratios == ()
    zero = np.zeros(1, int)
    nothing = describe(replace(made_index(language=zero, vision=zero), problems={0: "bad"}))
    assert nothing.units[0].samples == 0
