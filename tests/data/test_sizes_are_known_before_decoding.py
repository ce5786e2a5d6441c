"""The sizes index is right, kept, and made anew when anything it depends on changes; statistics describe it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from data_builders import image_bytes, small_encoding, wav_bytes, write_lines

from dilatant.config import DataSource, UserError
from dilatant.data.blend import StreamBlend, open_blend
from dilatant.data.encode import encode_sample
from dilatant.data.reader import open_source
from dilatant.data.sizes import SizesIndex, blend_sizes, reader_sizes
from dilatant.data.stats import Source, describe

ENCODING = small_encoding()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sizes"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(20, 30))
    (tmp_path / "b.wav").write_bytes(wav_bytes(0.25))
    records = [
        {"question": "a" * number, "answer": "b", **[{}, {"image": "a.png"}, {"audio": "b.wav"}][number % 3]}
        for number in range(1, 20)
    ]
    records[6]["image"] = "none.png"
    return DataSource(path=str(write_lines(tmp_path / "x.jsonl", records)))


def test_the_index_holds_what_encoding_gives(source):
    reader = open_source(source)
    index = reader_sizes(reader, ENCODING)
    assert index.units == ("language", "vision", "audio")
    assert len(index) == len(reader) == 19
    assert list(index.problems) == [6]
    assert "x.jsonl:7" in index.problems[6]
    for number in set(range(19)) - {6}:
        encoded = encode_sample(reader[number], ENCODING)
        assert {unit: index.of(unit)[number] for unit in index.units} == dict(encoded.sizes)
        assert index.target_tokens[number] == (encoded.labels != -100).sum()


def same(one, other):
    return (
        one.units == other.units
        and (one.tokens == other.tokens).all()
        and (one.target_tokens == other.target_tokens).all()
        and one.problems == other.problems
    )


class Progress:
    """Whether anything was measured."""

    def __init__(self):
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))


def index_of(source, encoding=ENCODING, **settings):
    progress = Progress()
    index = reader_sizes(open_source(source), encoding, progress=progress, **settings)
    return index, progress.calls


def test_the_index_is_kept_in_the_cache_and_read_again(source, tmp_path, cache):
    before = sorted(tmp_path.iterdir())
    first, calls = index_of(source)
    assert calls == [(19, 19)]
    assert len(list(cache.glob("sizes-*.parquet"))) == 1
    assert sorted({*tmp_path.iterdir()} - {cache.parent}) == before  # nothing is written among the data
    second, calls = index_of(source)
    assert calls == []
    assert same(first, second)


def test_the_index_is_made_anew_when_what_it_depends_on_changes(source, tmp_path):
    index_of(source)
    vision, audio = ENCODING.units
    assert index_of(source, replace(ENCODING, train_on="all"))[1]
    assert index_of(source, replace(ENCODING, units=(replace(vision, tokens_per_image=9), audio)))[1]
    assert index_of(source.model_copy(update={"limit": 5}))[1]
    assert index_of(source.model_copy(update={"prompt": "what?"}))[1]
    assert index_of(source)[1] == []  # the first index is still there


def test_a_changed_file_replaces_its_index(source, tmp_path, cache):
    before, _ = index_of(source)
    path = tmp_path / "x.jsonl"
    path.write_text(path.read_text().replace('"b"', '"a longer answer"'))  # as many records
    index, calls = index_of(source)
    assert calls
    assert (index.of("language") > before.of("language")).sum() == 18  # all but the one that cannot be read
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    index, calls = index_of(source)
    assert calls
    assert len(index) == 20
    assert len(list(cache.iterdir())) == 1


def test_data_of_one_name_in_two_folders_have_two_indices(source, tmp_path, cache, monkeypatch):
    for folder, text in (("one", "short"), ("two", "somewhat longer")):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "y.jsonl", [{"text": text}])
    for _ in range(2):
        for folder, tokens in (("one", 7), ("two", 17)):
            monkeypatch.chdir(tmp_path / folder)
            assert index_of(DataSource(path="y.jsonl"))[0].of("language").tolist() == [tokens]
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_index_is_made_anew(source, cache):
    first, _ = index_of(source)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    second, calls = index_of(source)
    assert calls
    assert same(first, second)
    assert not index_of(source)[1]


def test_the_index_goes_to_the_folder_that_is_named_or_the_users_cache(source, tmp_path, monkeypatch):
    monkeypatch.delenv("DILATANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    index_of(source)
    assert len(list((tmp_path / "home" / "dilatant" / "sizes").iterdir())) == 1
    assert not index_of(source)[1]
    (tmp_path / "chosen").mkdir()
    index_of(source, cache_dir=tmp_path / "chosen")
    assert len(list((tmp_path / "chosen").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .*file"):
        index_of(source, replace(ENCODING, train_on="all"), cache_dir=tmp_path / "file")


def test_workers_measure_the_same(tmp_path):
    path = write_lines(
        tmp_path / "x.jsonl", [{"question": "a" * (n % 50), "answer": "b"} for n in range(900)]
    )
    alone, _ = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "one")
    together, calls = index_of(DataSource(path=str(path)), cache_dir=tmp_path / "two", workers=2)
    assert same(alone, together)
    assert calls[-1] == (900, 900)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_blend_is_its_sources_one_after_another(source, tmp_path):
    other = DataSource(path=str(write_lines(tmp_path / "y.jsonl", [{"text": "a"}, {"bad": 1}])))
    blend = open_blend([other, source])
    progress = Progress()
    index = blend_sizes(blend, ENCODING, progress=progress)
    assert len(index) == len(blend) == 21
    assert sorted(index.problems) == [1, 8]
    assert same(
        SizesIndex(index.units, index.tokens[2:], index.target_tokens[2:], {6: index.problems[8]}),
        index_of(source)[0],
    )
    assert progress.calls[-1] == (21, 21)
    for number in (0, 2, 20):
        assert index.of("language")[number] == len(encode_sample(blend[number], ENCODING).input_ids)
    with pytest.raises(UserError, match="do not stream"):
        blend_sizes(StreamBlend((), ()), ENCODING)


def made_index(**tokens):
    units = ("language", *(unit for unit in tokens if unit != "language"))
    return SizesIndex(
        units, np.stack([tokens[unit] for unit in units], axis=1), np.asarray(tokens["language"]) // 2
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
        ("language",), np.array([[5], [90], [0], [7], [80]]), np.array([2, 3, 0, 0, 1]), {2: "is torn"}
    )
    stats = describe(index, (Source("one", 2), Source("two", 3, weight=4.0)), max_length=80)
    assert stats.refused == 3
    assert [(one.source, one.sample, one.problem) for one in stats.refusals] == [
        ("one", 1, "has 90 tokens, more than the 80 allowed"),
        ("two", 0, "is torn"),
        ("two", 1, "has no answer, so nothing to learn"),
    ]
    first, second = stats.sources
    assert (first.samples, first.refused, first.target_tokens, first.tokens) == (2, 1, 5, {"language": 95})
    assert (second.samples, second.refused, second.target_tokens, second.tokens) == (
        3,
        2,
        1,
        {"language": 87},
    )
    assert describe(index).refused == 2


def test_data_without_media_or_without_any_good_sample_has_statistics():
    only_text = describe(SizesIndex(("language",), np.full((4, 1), 5), np.full(4, 2)))
    assert only_text.mixes == {"text": 4}
    assert only_text.ratios == ()
    nothing = describe(
        SizesIndex(("language", "vision"), np.zeros((1, 2), int), np.zeros(1, int), {0: "bad"})
    )
    assert nothing.units[0].samples == 0
