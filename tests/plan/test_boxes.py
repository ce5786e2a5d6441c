"""Boxes, atoms, buckets and shares, by brute force over the numbers of small weights."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.made_up_holdings import SHAPES, WEIGHTS, plan_of, split
from dilatant.plan.boxes import Box, BoxIntervals, atoms, parse_key
from dilatant.plan.buckets import Bucket, Format, HeldWeight, Holding, cut_shards, holdings, make_buckets, shard_of
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan

FP32 = Format("float32", 4)


def points(box: Box) -> set[tuple[int, ...]]:
    """The numbers of a box, by their place in the whole weight."""
    return set(itertools.product(*([i for span in spans for i in range(*span)] for spans in box.intervals)))


@st.composite
def intervals(draw: st.DrawFn, length: int) -> tuple[tuple[int, int], ...]:
    borders = draw(st.lists(st.integers(0, length), min_size=2, max_size=4, unique=True))
    borders = sorted(borders)[: len(borders) // 2 * 2]
    return tuple(zip(borders[::2], borders[1::2]))


@st.composite
def boxes_of_one_weight(draw: st.DrawFn) -> list[Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    some = st.builds(lambda spans: Box("w", shape, spans), st.tuples(*map(intervals, shape)))
    return draw(st.lists(st.one_of(some, st.just(Box.of("w", shape))), min_size=1, max_size=4))


@settings(max_examples=40, deadline=None)
@given(boxes_of_one_weight())
def test_atoms_cover_each_number_once_with_its_exact_ranks(held: list[Box]) -> None:
    boxes = dict(enumerate(held))
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for atom in atoms(boxes):
        for point in points(atom.box):
            assert point not in seen
            seen[point] = atom.ranks
    everything = set().union(*map(points, held))
    assert seen == {point: tuple(rank for rank, box in boxes.items() if point in points(box)) for point in everything}


@settings(max_examples=40, deadline=None)
@given(boxes_of_one_weight())
def test_what_two_boxes_share_is_what_both_have(held: list[Box]) -> None:
    for one, other in itertools.product(held, held):
        meeting = one.meet(other)
        assert (points(meeting) if meeting else set()) == points(one) & points(other)
        if meeting is not None:
            assert meeting.size == len(points(meeting)) == math.prod(meeting.shape)


@settings(max_examples=40, deadline=None)
@given(boxes_of_one_weight())
def test_a_cell_lies_in_the_tensor_where_its_numbers_are(held: list[Box]) -> None:
    for box in held:
        local = [[i for span in spans for i in range(*span)] for spans in box.intervals]
        cells = list(box.cells())
        assert set().union(*map(points, cells)) == points(box)
        for cell in cells:
            place = box.place(cell)
            chosen = itertools.product(*(indices[cut] for indices, cut in zip(local, place)))
            assert set(chosen) == points(cell)


@settings(max_examples=40, deadline=None)
@given(boxes_of_one_weight())
def test_a_key_says_which_part_it_is(held: list[Box]) -> None:
    for box in held:
        name, found = parse_key(box.key)
        assert name == "w"
        assert Box.of("w", box.whole) == box if found is None else found == box.intervals


@pytest.mark.parametrize(
    "intervals", [(((0, 2),), ((0, 5),)), (((0, 2), (2, 3)), ((0, 4),)), (((2, 1),), ((0, 4),)), (((0, 3),),)]
)
def test_intervals_that_are_no_part_of_the_weight_are_refused(intervals: BoxIntervals) -> None:
    with pytest.raises(ValueError, match="weight"):
        Box("w", (3, 4), intervals)


@pytest.mark.parametrize("degrees", [(1,), (2,), (1, 1), (2, 1), (1, 2, 4), (4, 4), (2, 2, 1, 1)])
@pytest.mark.parametrize("zero", ["none", "node", "all"])
@pytest.mark.parametrize("uncut", [frozenset[str](), frozenset({"u.0.rows", "u.0.columns", "u.0.kv"})])
def test_every_number_has_one_owner_and_shared_ones_are_divided(
    degrees: tuple[int, ...], zero: str, uncut: frozenset[str]
) -> None:
    held = holdings(plan_of(*degrees), {"u": ["u.0"]}, WEIGHTS, split)
    ranks = sum(degrees)
    node_of = [rank // 3 for rank in range(ranks)]  # unlike numbers of holders on a node
    buckets = make_buckets(held, {weight.name: FP32 for weight in WEIGHTS}, held, 100, uncut=uncut)
    summed = [point for b in buckets for box in b.boxes for point in zip([box.name] * box.size, points(box))]
    assert len(summed) == len(set(summed)) == sum(math.prod(shape) for shape in SHAPES.values())
    spoken: list[tuple[str, tuple[int, ...]]] = []
    for bucket in buckets:
        for rank in bucket.ranks:
            own = shard_of(bucket, rank, zero, node_of)  # type: ignore[arg-type]
            assert rank in own.sharing
            assert rank in own.alike
            for other in own.alike:
                assert shard_of(bucket, other, zero, node_of).own == own.own  # type: ignore[arg-type]
            together = [shard_of(bucket, other, zero, node_of).own for other in own.sharing]  # type: ignore[arg-type]
            assert tuple(sum(box.size for box in share) for share in together) == own.sizes
            assert [bucket.boxes[cell].meet(box) for cell, box in zip(own.cells, own.own)] == list(own.own)
            divided = [(box.name, point) for share in together for box in share for point in points(box)]
            whole = {(box.name, point) for box in bucket.boxes for point in points(box)}
            assert len(divided) == len(set(divided))
            assert set(divided) == whole
            if bucket.uncut:
                assert set(own.own) | set(own.pieces) <= set(bucket.boxes)
            if own.is_primary:
                spoken += [(box.name, point) for box in own.own for point in points(box)]
    assert sorted(spoken) == sorted(summed)


def test_equal_gradients_in_a_stage_count_at_the_first_rank() -> None:
    held = holdings(plan_of(2, 1, 4), {"u": ["u.0"]}, WEIGHTS, split)
    assert held["u.0.whole"].duplicates == {1, 4, 5, 6}
    assert held["u.0.partial"].duplicates == frozenset()
    assert held["u.0.kv"].duplicates == frozenset()
    assert [len({box.key for box in held[f"u.0.{n}"].boxes.values()}) for n in ("kv", "rows")] == [3, 7]


def test_context_parallel_ranks_hold_gradients_of_their_tokens() -> None:
    stage = Stage(0, 1, (0, 1, 2, 3), tp=2, cp=2)
    held = holdings(Plan((UnitPlan("u", (Replica((stage,)),)),)), {"u": ["u.0"]}, WEIGHTS, split)
    assert held["u.0.whole"].duplicates == {1, 3}  # tensor-parallel index 1 of either part of the tokens
    assert held["u.0.partial"].duplicates == frozenset()


def test_a_tied_weight_with_unlike_boxes_on_a_rank_is_refused() -> None:
    stages = (Stage(0, 1, (0, 1), tp=2), Stage(1, 2, (0, 1), tp=1, cp=2))
    tied = HeldWeight("u.0.rows", frozenset({"u.0", "u.1"}), (4, 2))
    with pytest.raises(ValueError, match=r"rank 0 holds u.0.rows"):
        holdings(Plan((UnitPlan("u", (Replica(stages),)),)), {"u": ["u.0", "u.1"]}, [tied], split)


@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=5), st.integers(1, 7))
def test_shares_are_consecutive_and_off_by_less_than_a_row(shapes: list[list[int]], count: int) -> None:
    boxes = [Box.of(f"w{i}", shape) for i, shape in enumerate(shapes)]
    shares = cut_shards(Bucket(tuple(boxes), ()), count)
    order = {(box.name, point): (i, n) for i, box in enumerate(boxes) for n, point in enumerate(sorted(points(box)))}
    flat = [(box.name, point) for share in shares for box in share for point in sorted(points(box))]
    assert flat == sorted(order, key=lambda entry: order[entry])
    total, longest_row = len(flat), max(box.size // (box.shape[0] if box.whole else 1) for box in boxes)
    for share in shares:
        assert abs(sum(box.size for box in share) - total / count) <= longest_row + 1


@pytest.mark.parametrize("holders", [2, 3, 4, 8])
def test_uncut_matrices_are_spread_over_all_their_holders(holders: int) -> None:
    """Of seven matrices of a block, no rank of eight blocks' owners has more than twice its part."""
    shapes = [(8, 8), (8, 2), (8, 2), (8, 8), (24, 8), (24, 8), (8, 24)]
    sizes = {f"u.layers.{n}.{i}": shape for n in range(8) for i, shape in enumerate(shapes)}
    held = {name: Holding(dict.fromkeys(range(holders), Box.of(name, shape))) for name, shape in sizes.items()}
    buckets = make_buckets(held, dict.fromkeys(sizes, FP32), sizes, bucket_bytes=4, uncut=sizes.keys())
    each = [
        sum(box.size for bucket in buckets for box in shard_of(bucket, rank, "all", [0] * holders).own)
        for rank in range(holders)
    ]
    assert sum(each) == sum(map(math.prod, sizes.values()))
    assert max(each) < 2 * sum(each) / holders


def test_buckets_hold_one_rank_set_and_format_in_backward_order() -> None:
    ranks = {"a": (0, 1), "b": (0, 1), "c": (0, 2), "d": (0, 2), "e": (0, 2), "f": (0, 2)}
    held = {name: Holding({rank: Box.of(name, (10,)) for rank in holders}) for name, holders in ranks.items()}
    formats = {name: Format("bfloat16", 2) if name == "e" else FP32 for name in ranks}
    buckets = make_buckets(held, formats, ["a", "b", "c", "d", "e"], bucket_bytes=80)
    assert [(bucket.names, bucket.ranks) for bucket in buckets] == [
        (("e",), (0, 2)),
        (("d", "c"), (0, 2)),
        (("b", "a"), (0, 1)),
    ]
    assert len(make_buckets(held, formats, list(ranks), bucket_bytes=1)) == 6
    assert isinstance(buckets[0], Bucket)
