"""Every rank ends up with what it wants, cell by cell, and nothing travels that is there already."""

from __future__ import annotations

import itertools
import random

import pytest

from dilatant.plan.boxes import Box
from dilatant.resilience.transfer import Lost, plan_copies

SHAPE = (6, 5)


def numbers(box: Box) -> set[tuple[int, ...]]:
    spans = [[i for start, end in dim for i in range(start, end)] for dim in box.intervals]
    return set(itertools.product(*spans))


def random_box(draw: random.Random, name: str) -> Box:
    def dim(length: int) -> tuple[tuple[int, int], ...]:
        cuts = sorted(draw.sample(range(length + 1), draw.choice((2, 4))))
        return tuple(zip(cuts[::2], cuts[1::2]))

    if draw.random() < 0.3:
        return Box.of(name, SHAPE)
    return Box(name, SHAPE, (dim(SHAPE[0]), dim(SHAPE[1])))


@pytest.mark.parametrize("seed", range(60))
def test_every_wanted_number_comes_once_from_one_who_has_it(seed: int) -> None:
    draw = random.Random(seed)
    names = ["a", "b"]
    held = [[random_box(draw, name) for name in names if draw.random() < 0.8] for _ in range(4)]
    wanted = [[random_box(draw, name) for name in names] for _ in range(4)]
    everywhere = {
        name: set().union(*(numbers(b) for own in held for b in own if b.name == name)) for name in names
    }
    gone = any(not numbers(box) <= everywhere[box.name] for own in wanted for box in own)
    if gone:
        with pytest.raises(Lost):
            plan_copies(held, wanted)
        return
    copies = plan_copies(held, wanted)
    for rank, own in enumerate(wanted):
        for box in own:
            cells = [copy for copy in copies if copy.target == rank and copy.cell.name == box.name]
            arrived = [number for copy in cells for number in numbers(copy.cell)]
            assert sorted(arrived) == sorted(numbers(box))
            here = set().union(*(numbers(b) for b in held[rank] if b.name == box.name), set())
            for copy in cells:
                theirs = [b for b in held[copy.source] if b.name == box.name]
                assert any(numbers(copy.cell) <= numbers(b) for b in theirs)
                assert copy.source == rank or not numbers(copy.cell) & here


def test_several_holders_share_the_sending() -> None:
    boxes = [Box.of(f"w{i}", (4,)) for i in range(6)]
    copies = plan_copies([boxes, boxes, []], [[], [], boxes])
    assert sorted(copy.source for copy in copies) == [0, 0, 0, 1, 1, 1]


def test_numbers_without_dimensions_travel_too() -> None:
    step = Box.of("optimizer.w.step", ())
    (copy,) = plan_copies([[step], []], [[], [step]])
    assert (copy.source, copy.target, copy.cell) == (0, 1, step)
