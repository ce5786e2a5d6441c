"""Degrees say which of a stage's ranks have which part of a row, and which hold the same weights."""

from __future__ import annotations

import itertools

import pytest

from dilatant.config.degrees import Degrees


@pytest.mark.parametrize(("tp", "cp"), itertools.product((1, 2, 3), repeat=2))
def test_each_rank_has_one_part_of_a_row_and_one_of_the_weights(tp: int, cp: int) -> None:
    degrees, ranks = Degrees(tp, cp), tuple(range(10, 10 + tp * cp))
    parts = [degrees.ranks_of(ranks, part) for part in range(degrees.row_parts)]
    assert tuple(itertools.chain(*parts)) == ranks
    for place, rank in enumerate(ranks):
        alike = degrees.ranks_with(ranks, place)
        assert {*parts[degrees.row_part(place)]} & {*alike} == {rank}
        assert len(alike) == degrees.copies
    assert Degrees.from_key(degrees.to_key()) == degrees
    assert degrees.problems(ranks) == []


def test_texts_leave_out_what_is_one() -> None:
    assert [Degrees(2, 1, 2).text(), str(Degrees(2, 1, 2)), str(Degrees())] == [
        "tp 2 ep 2",
        "tp 2, cp 1, ep 2",
        "tp 1, cp 1",
    ]
