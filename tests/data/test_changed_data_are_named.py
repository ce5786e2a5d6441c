"""A run that goes on with other data says which changed and how; the same data elsewhere are the same."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace

import pytest

from cases.data_builders import small_encoding, write_lines
from dilatant.config import DataSource, UserError
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.media_units.image_unit import ImageUnit, PixelProcessor
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.records import Blocks


def identity(folder, *sources, **settings):
    paths = [write_lines(folder / f"{number}.jsonl", rows) for number, rows in enumerate(sources)]
    blend = open_blend([DataSource(path=str(path)) for path in paths], cache_dir=folder / "cache")
    encoding = small_encoding(**{"units": (), **settings})
    blend = blend.contrasted() if encoding.marks else blend
    return DataIdentity(blend, blend_sizes(blend, encoding, cache_dir=folder / "cache", workers=0), encoding)


def rows(*answers):
    return [{"question": f"{answer}?", "answer": answer} for answer in answers]


@pytest.fixture
def before(tmp_path):
    found = identity(tmp_path, rows("a", "b", "c"), rows("d", "e"))
    return json.loads(json.dumps(found.by_source))


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ((rows("a", "b", "c"), rows("d", "f")), "source '1.jsonl' has 2 samples as before, but other ones"),
        ((rows("b", "a", "c"), rows("d", "e")), "source '0.jsonl' has 3 samples as before, but other ones"),
        ((rows("a", "b", "c", "d"), rows("d", "e")), "had 3 samples and now has 4, of which the first are the same"),
        ((rows("b", "a", "c", "d"), rows("d", "e")), "had 3 samples and now has 4, of which the first are others"),
        ((rows("a", "b"), rows("d", "e")), "source '0.jsonl' had 3 samples and now has 2"),
        ((rows("a", "b", "c"),), "there were 2 sources, and now there are 1"),
    ],
)
def test_what_changed_is_said(tmp_path, before, sources, said):
    (tmp_path / "now").mkdir()
    with pytest.raises(UserError, match="the training data changed since the checkpoint was written") as caught:
        identity(tmp_path / "now", *sources).require(before)
    assert said in str(caught.value)


def test_the_same_data_elsewhere_are_the_same(tmp_path, before):
    (tmp_path / "now").mkdir()
    identity(tmp_path / "now", rows("a", "b", "c"), rows("d", "e")).require(before)
    with pytest.raises(UserError, match="become other tokens"):
        identity(tmp_path / "now", rows("a", "b", "c"), rows("d", "e"), train_on="all").require(before)


def test_an_answer_with_another_mark_is_another_sample(tmp_path):
    def known(*marks):
        records = [{**row, "label": mark} for row, mark in zip(rows("a", "b", "c"), marks, strict=True)]
        return identity(tmp_path, records, pairs=True, marks=True)

    before = json.loads(json.dumps(known(True, False, True).by_source))
    known(True, False, True).require(before)
    with pytest.raises(UserError, match=r"source '0.jsonl' has 3 samples as before, .* or have other marks"):
        known(True, True, True).require(before)


def test_other_row_groups_are_another_order(tmp_path, before):
    known = identity(tmp_path, rows("a", "b", "c"), rows("d", "e"))
    first, second = known.blend.readers
    records = copy(first.records)
    records.blocks = Blocks((2, 1), 1)
    grouped = replace(known, blend=replace(known.blend, readers=(replace(first, records=records), second)))
    with pytest.raises(UserError, match=r"'0.jsonl' has the same samples in other row groups"):
        grouped.require(before)
    grouped.require(grouped.by_source)


def test_media_that_are_processed_otherwise_are_other_data(tmp_path, before):
    unit = ImageUnit("vision", 300, 4, PixelProcessor(8, 8))
    known = identity(tmp_path, rows("a", "b", "c"), rows("d", "e"), units=(unit,))
    with pytest.raises(UserError, match=r"media of source '0.jsonl' are processed in another way"):
        known.require(before)
    known.require([{key: value for key, value in each.items() if key != "processing"} for each in before])


def test_of_a_stream_or_an_older_checkpoint_nothing_is_required(tmp_path, before):
    known = identity(tmp_path, rows("x"))
    replace(known, sizes=None).require(before)
    known.require([])
